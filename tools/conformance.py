#!/usr/bin/env python3
"""Compare train_gpt.py with numbers that published scripts compute: is a configuration that record?

    python tools/conformance.py                # one line per group of quantities of every file
    python tools/conformance.py 2135 --all     # one file, a line per quantity

tools/golden/<pull request>.json has the golden numbers of a published script, computed in fp32
on tiny models: losses, logits, gradients, five optimizer steps, schedules, codes, and low-rank
test-time training. Weights, tokens, gradients and probes follow from seeds. "equal" is within the
file's tolerance. "by design" differs for the reason given. "DIFFERS" is a fault: exit status 1.
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import program
import train_gpt as script
from train_gpt import require

# isort: split
import numpy as np
import torch
from torch import Tensor

FOLDER = Path(__file__).resolve().parent / "golden"
EQUAL, DIFFERS, BY_DESIGN = "equal", "DIFFERS", "by design"


class Finding(NamedTuple):
    """One compared quantity."""

    case: str
    quantity: str
    expected: float
    found: float
    difference: float  # relative
    verdict: str
    why: str = ""

    def line(self) -> str:
        numbers = f"{self.expected:14.8g} {self.found:14.8g} {self.difference:9.1e}"
        why = f": {self.why}" if self.why else ""
        return f"{self.case[:40]:40} {self.quantity[:30]:30} {numbers}  {self.verdict}{why}"


def normal(seed: int, shape: list[int]) -> np.ndarray:
    return np.asarray(np.random.RandomState(seed).standard_normal(tuple(shape)))


def float32(values) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32))


class Golden:
    """The numbers of one published script, and our script at its tiny model."""

    def __init__(self, name: str):
        path = FOLDER / f"{name}.json"
        require(path.is_file(), f"{path} does not exist: choose one of {', '.join(files())}")
        self.facts = json.loads(path.read_text())
        self.limits = self.facts["tolerances"]
        self.entries = self.facts["parameters"]["list"]

    def knobs(self, *more: dict[str, str]) -> script.Hyperparameters:
        parts = (self.facts["knobs"], *more)
        return script.Hyperparameters.from_env({k: v for part in parts for k, v in part.items()})

    def model(self, hp: script.Hyperparameters, fixed: dict) -> script.GPT:
        """Our model with the file's weights; `fixed` has constants for some parameters."""
        model = script.GPT(hp, script.load_attention("math"), torch.float32)
        parameters = dict(model.named_parameters())
        weights = {
            name: float32(np.broadcast_to(value, parameters[name].shape).copy())
            for name, value in fixed.items()
        }
        seed = self.facts["parameters"]["seed"]
        for index, entry in enumerate(self.entries):
            if entry["name"] in parameters and entry["name"] not in weights:
                values = normal(seed + index, entry["shape"]) * entry["std"] + entry["mean"]
                weights[entry["name"]] = float32(values) / self.scale(entry["name"], model)
        model.load_state_dict(weights)
        return model

    def scale(self, name: str, model: script.GPT) -> Tensor | float:
        """What the file's value of a parameter is of ours: 1, or the scale of its layer."""
        return model.layer_scale if name in self.facts.get("scaled", ()) else 1.0

    def ids(self, case: dict, vocabulary: int) -> Tensor:
        """The tokens (rows, length + 1) of a case."""
        shape = (case["rows"], case["length"] + 1)
        ids = np.random.RandomState(case["ids_seed"]).randint(2, vocabulary, size=shape)
        for row, place in case["bos"]:
            ids[row, place] = script.BOS
        return torch.from_numpy(ids.astype(np.int64))

    def compare(
        self, case: str, what: str, tensors: dict[str, Tensor], expected: dict, limit: float
    ) -> Iterator[Finding]:
        """Norms, and products with the file's probes, of tensors by the name of their parameter."""
        seed = self.facts["parameters"]["probe_seed"]
        for index, entry in enumerate(self.entries):
            name = entry["name"]
            if name not in expected or name not in tensors:
                continue
            values = tensors[name].detach().double().numpy().reshape(entry["shape"])
            norm, product = expected[name]
            probe = normal(seed + index, entry["shape"])
            found = {"norm": (norm, np.linalg.norm(values))}
            found["probe"] = (product, (values * probe).sum())
            for label, (want, got) in found.items():
                if want is not None:  # some sources have norms only
                    difference = abs(got - want) / max(norm, 1e-30)
                    yield finding(case, f"{what} {name} {label}", want, got, limit, difference)


def finding(
    case: str,
    quantity: str,
    expected: float,
    found: float,
    limit: float,
    difference: float | None = None,
    why: str = "",
) -> Finding:
    """The difference is relative unless it is given. With a reason it is by design."""
    expected, found = float(expected), float(found)
    if difference is None:
        difference = abs(found - expected) / max(abs(expected), 1e-30)
    within = difference <= limit  # False for nan
    verdict = EQUAL if within else BY_DESIGN if why else DIFFERS
    why = "" if within else why
    return Finding(case, quantity, expected, found, float(difference), verdict, why)


def check_forward(golden: Golden) -> Iterator[Finding]:
    """Loss, logits and gradients."""
    limits = golden.limits
    for case in golden.facts.get("cases", []):
        name, fixed = case["name"], case.get("fixed", {})
        hp = golden.knobs(case["knobs"])
        model = golden.model(hp, fixed)
        config = script.ForwardConfig(hp.layer_order(case.get("looping", True)), doc_len=hp.doc_len)
        ids = golden.ids(case, hp.vocab_size)
        logits = model(ids[:, :-1], config=config).detach()
        loss = model(ids[:, :-1], ids[:, 1:], config=config)
        loss.backward()
        found = float(loss.detach())
        yield finding(name, "loss", case["loss"], found, limits["loss"])
        size = float(np.sqrt(np.mean(np.square(case["logits"]))))
        for place, want in zip(case["places"], case["logits"], strict=True):
            got = float(logits[tuple(place)])
            off = abs(got - want) / size
            yield finding(name, f"logit {place}", want, got, limits["logits"], off)
        gradients = {
            parameter: p.grad / golden.scale(parameter, model)
            for parameter, p in model.named_parameters()
            if p.grad is not None and parameter not in fixed
        }
        expected = case["gradients"]
        yield from golden.compare(name, "gradient", gradients, expected, limits["gradients"])
        if across := case.get("across_documents"):
            what, why = "loss across documents", across["why"]
            yield finding(name, what, across["loss"], found, 0.0, why=why)


def check_optimizer(golden: Golden) -> Iterator[Finding]:
    """How far weights and their average move in five steps with given gradients."""
    facts, limits = golden.facts.get("optimizer"), golden.limits
    if facts is None:
        return
    hp = golden.knobs(facts.get("knobs", {}))
    model = golden.model(hp, {})
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    copies = {name: weight.clone() for name, weight in start.items()}
    optimizer = script.ParallelMuon(model, copies, hp, script.Comm())
    average = script.WeightAverage(optimizer.owned, hp)
    parameters = dict(model.named_parameters())

    def moved(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: (w - start[n]) * golden.scale(n, model) for n, w in weights.items()}

    for step, std in enumerate(facts["gradient_std"]):
        for index, entry in enumerate(golden.entries):
            name = entry["name"]
            factor = std * facts["gradient_factor"].get(name, 1.0)
            seed = facts["gradient_seed"] + 100 * step + index
            gradient = float32(normal(seed, entry["shape"]) * factor)
            parameters[name].grad.copy_(gradient * golden.scale(name, model))
        optimizer.step(facts["lr_scale"][step], facts["momentum"][step])
        average.update(step, facts["lr_scale"][step])
        if expected := facts.get(f"moved_after_{step + 1}"):
            found, what = moved(optimizer.weights()), f"step {step + 1}"
            yield from golden.compare("optimizer", what, found, expected, limits["optimizer"])
    found, expected = moved(average.mean), facts["ema_moved_after_5"]
    yield from golden.compare("optimizer", "average", found, expected, limits["ema"])


def check_schedule(golden: Golden) -> Iterator[Finding]:
    """Learning rate, momentum and loop at given steps and seconds."""
    facts = golden.facts.get("schedule")
    if facts is None:
        return
    hp, other = golden.knobs(), facts.get("otherwise", {"points": [], "why": ""})
    for points, why in ((facts["points"], ""), (other["points"], other["why"])):
        for step, seconds, *expected in points:
            found = script.schedule(hp, step, seconds, facts["end"])
            values = (found.lr_scale, found.momentum, found.looping)
            for what, want, got in zip(("rate", "momentum", "loop"), expected, values, strict=True):
                what, limit = f"{what}, step {step}", golden.limits["schedule"]
                yield finding("schedule", what, want, got, limit, abs(got - want), why)


def compare_codes(
    name: str, case: dict, codes: np.ndarray, seed: int, limit: float
) -> Iterator[Finding]:
    """Their sum, and their product with a probe."""
    product = (codes * normal(seed, case["shape"])).sum()
    pairs = {"sum": (case["codes_sum"], codes.sum()), "probe": (case["codes_inner"], product)}
    for what, (want, got) in pairs.items():
        off = abs(got - want) / case["codes_norm"]
        yield finding(name, f"codes, {what}", want, got, limit, off)


def check_rounding(golden: Golden) -> Iterator[Finding]:
    """Steps of rows by #399's rule, and codes at the published steps."""
    for case in golden.facts.get("rounding", []):
        name, limits, bits = case["name"], golden.limits, case["bits"]
        values = normal(case["seed"], case["shape"]).astype(np.float32)
        rows = float32(values * np.float32(case["std"]))
        limit_of_codes = 2 ** (bits - 1) - 1
        rule = script.RULES[golden.knobs().rounding][0]._replace(limit=limit_of_codes)
        steps = rule.default_steps(rows)[:, 0].tolist()
        for row, (want, got) in enumerate(zip(case["steps"], steps, strict=True)):
            what, why = f"step of row {row}", case.get("why", "")
            yield finding(name, what, want, got, limits["steps"], why=why)
        steps_of_codes = float32(case["steps_of_codes"])[:, None]
        codes = script.to_codes(rows, steps_of_codes, limit_of_codes)
        codes, stored = codes.double().numpy(), np.asarray(case["steps"])[:, None]
        error = float(np.sqrt(np.mean((codes * stored - rows.double().numpy()) ** 2)))
        yield from compare_codes(name, case, codes, case["probe_seed"], limits["codes"])
        yield finding(name, "codes, error", case["rms_error"], error, limits["codes"])


def check_steps(golden: Golden) -> Iterator[Finding]:
    """Steps of the kinds of matrices in deviations of a row, in QAT."""
    got = script.RULES[golden.knobs().rounding][0].default_steps(float32(np.ones((1, 1)))).item()
    for case in golden.facts.get("steps", []):
        for name in case["matrices"]:
            want, limit = case["step_in_row_deviations"], golden.limits["steps"]
            yield finding("steps", name, want, got, limit, why=case["why"])


def check_gptq(golden: Golden) -> Iterator[Finding]:
    """GPTQ's codes of a matrix at given steps."""
    case = golden.facts.get("gptq")
    if case is None:
        return
    seed, width = case["seed"], case["shape"][1]
    values = normal(seed, case["shape"]).astype(np.float32)
    weights = float32(values * np.float32(case["std"]))
    mixed = np.eye(width) + normal(seed + 1, [width, width]) * case["mix_std"]
    inputs = normal(seed + 2, case["inputs"]) @ mixed
    hessian = float32(inputs.T @ inputs)
    steps = float32(case["steps"])[:, None]
    factor = script.inverse_factor(script.damped(hessian[None], 0.01))
    limit_of_codes = 2 ** (case["bits"] - 1) - 1
    to_codes = lambda column: script.to_codes(column, steps, limit_of_codes)  # noqa: E731
    codes = script.gptq(weights[None], *factor, steps[None], to_codes)[0].double()
    error = codes * steps.double() - weights.double()
    cost = float(((error @ hessian.double()) * error).sum())
    limit = golden.limits["gptq"]
    yield from compare_codes("GPTQ", case, codes.numpy(), seed + 3, limit)
    yield finding("GPTQ", "weighted error", case["weighted_error"], cost, limit)


def given_adapter(facts: dict, case: dict, hp: script.Hyperparameters) -> script.Adapter:
    """The file's low-rank factors of a case."""
    adapter = script.lora_adapter(hp, torch.device("cpu"))
    for index, target in enumerate(case["all_targets"]):
        if f"{target}.a" not in adapter:
            continue
        factors = [adapter[f"{target}.a"], adapter[f"{target}.b"]]  # (1, visits, ., .) each
        for visit in range(factors[0].size(1)):
            random = np.random.RandomState(facts["seed"] + 100 * index + visit)
            for factor, std in zip(factors, (facts["a_std"], facts["b_std"]), strict=True):
                values = random.standard_normal(tuple(factor.shape[2:])) * std
                factor[0, visit] = float32(values)
    return adapter


def lora_losses(golden: Golden, case: dict) -> tuple[list[float], float]:
    """(mean nats of two chunks of a document with given factors; of the second after a step)."""
    facts = golden.facts["lora"]
    hp = golden.knobs(case["knobs"], {} if case["looping"] else {"LOOP_VISITS": "1"})
    # The parameters of a loop that is off: as many skips as with it.
    model = golden.model(golden.knobs(case["knobs"]), case["fixed"])
    ids = golden.ids(case, hp.vocab_size)
    device, length, chunk = torch.device("cpu"), case["length"], facts["chunk"]
    text = script.Validation(ids[0].numpy(), np.ones(length), device)
    facts_of_run = {"device": device, "comm": script.Comm(), "compiled": False}
    runtime = SimpleNamespace(micro_batch_tokens=length, **facts_of_run)
    config = script.ForwardConfig(hp.layer_order())
    scorer = script.Evaluator(model, text, hp, runtime, config, hp.eval_stride)
    adapter = given_adapter(facts, case, hp)

    def score(begin: int, state: script.LoraState) -> float:
        stop = begin + chunk
        script.lora_step(scorer, state, begin, stop)
        return float(scorer.nats[begin:stop].mean())

    # A document learns from a chunk only if it goes on behind it.
    ends = [script.LoraState(np.array([[0, stop]]), adapter) for stop in (chunk, 2 * chunk)]
    given = [score(begin, state) for begin, state in zip((0, chunk), ends, strict=True)]
    learner = script.LoraState(np.array([[0, length]]), adapter)
    score(0, learner)
    return given, score(chunk, learner)


def check_lora(golden: Golden) -> Iterator[Finding]:
    """Low-rank test-time training: the losses of `lora_losses`."""
    limits = golden.limits
    for case in golden.facts.get("lora", {"cases": []})["cases"]:
        name = case["name"]
        given, after = lora_losses(golden, case)
        for number, (want, got) in enumerate(zip(case["given_factors"], given, strict=True)):
            yield finding(name, f"loss of chunk {number + 1}", want, got, limits["lora_loss"])
        want = case["after_one_step"]
        off = abs(after - want) / abs(want - case["given_factors"][1])
        yield finding(name, "after a step", want, after, limits["lora_step"], off)


def check_tilt(golden: Golden) -> Iterator[Finding]:
    """#2135's n-gram tilt: the hints of a stream, and losses with them (tilt.json)."""
    if golden.facts["pull_request"] != 2135:
        return
    facts = json.loads((FOLDER / "tilt.json").read_text())
    targets = np.array(facts["targets"], dtype=np.int32)
    expected = np.full_like(targets, -1)
    for begin, end in facts["runs"]:
        expected[begin:end] = targets[begin:end]
    for place, token in facts["others"]:
        expected[place] = token
    found = script.ngram_hints(targets)
    for what, places in (("hints", expected >= 0), ("none expected", expected < 0)):
        yield finding("tilt", what, places.sum(), (found == expected)[places].sum(), 0.0)
    loss = facts["loss"]
    for number, (chance, right, before, after) in enumerate(zip(*loss.values(), strict=True)):
        # Of three tokens: the hint, another one, and what is left
        other = 0.0 if right else math.exp(-before)
        logits = torch.tensor([[[chance, other, 1 - chance - other]]], dtype=torch.float64).log()
        target, hint = torch.tensor([[0 if right else 1]]), torch.tensor([[0]])
        got = script.token_losses(logits, target, "none", hint).item()
        yield finding("tilt", f"loss {number + 1}", after, got, golden.limits["loss"])


CHECKS = (check_forward, check_optimizer, check_schedule, check_rounding)
CHECKS += (check_steps, check_gptq, check_lora, check_tilt)


def files() -> list[str]:
    """The pull requests that have golden numbers."""
    return sorted(path.stem for path in FOLDER.glob("[0-9]*.json"))


def check(name: str) -> list[Finding]:
    """All findings of one file."""
    golden = Golden(name)
    return [found for one in CHECKS for found in one(golden)]


def worst(findings: list[Finding]) -> Iterator[Finding]:
    """Of each case, kind of quantity and verdict the largest difference."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for found in findings:
        kind = found.quantity.split()[0].rstrip(",")
        groups.setdefault((found.case, kind, found.verdict), []).append(found)
    for group in groups.values():
        found = max(group, key=lambda one: np.nan_to_num(one.difference, nan=math.inf))
        count = f" of {len(group)}" if len(group) > 1 else ""
        yield found._replace(quantity=f"{found.quantity}{count}")


def main() -> None:
    parser = program.parser(__doc__)
    parser.add_argument("pull_requests", nargs="*", help=f"{', '.join(files())}; all by default")
    parser.add_argument("--all", action="store_true", help="a line for every quantity")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    differs = 0
    for name in arguments.pull_requests or files():
        findings = check(name)
        head = f"{'expected':>14} {'found':>14} {'rel.':>9}  verdict"
        print(f"\n#{name}\n{'case':40} {'quantity':30} {head}")
        for found in findings if arguments.all else worst(findings):
            print(found.line())
        verdicts = [found.verdict for found in findings]
        differs += verdicts.count(DIFFERS)
        kinds = (EQUAL, BY_DESIGN, DIFFERS)
        print(", ".join(f"{verdicts.count(kind)} {kind}" for kind in kinds))
    sys.exit(1 if differs else 0)


if __name__ == "__main__":
    program.run_program(main)

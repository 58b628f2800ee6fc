#!/usr/bin/env python3
"""The challenge's four conditions as black-box probes of an evaluation.

    python tools/legality.py train_gpt.py                     # with the knobs of the environment
    TTT_ENABLED=1 python tools/legality.py train_gpt.py       # half a minute, exit status 1 for a fault

An evaluator is a function: tokens (n + 1,) int32 -> nats (n,) float64, where nats[t] is the loss of
tokens[t + 1]. Each probe returns a sentence that names the first fault, or "".

    C1  strictly causal: nats[t] depends on tokens[: t + 2] alone            future, truncation
    C2  a normalised distribution over the vocabulary at every position      distribution
    C3  a target is scored before any update that saw it                     order
    C4  one pass from left to right, every target scored exactly once        order and complete

`suite` applies all probes to all kinds of evaluation of a run, on a small model.
"""

import copy
import math
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from unittest import mock

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]

import program
import pack_code
from train_gpt import require

# isort: split
import numpy as np
import torch

Evaluate = Callable[[torch.Tensor], torch.Tensor]
TOLERANCE = 1e-4  # of a sum of probabilities


def future(
    evaluate: Evaluate, tokens: torch.Tensor, vocab_size: int, cuts: Iterable[int], bos: int = 1
) -> str:
    """C1: if all tokens after target t are replaced by others, nats[: t + 1] stay equal bit for
    bit. Boundaries of documents move as well: none is left after t, or some are elsewhere."""
    before = evaluate(tokens)
    generator = torch.Generator().manual_seed(0)
    for cut in cuts:
        changed = tokens.clone()
        rest = changed[cut + 2 :]  # a view
        other = torch.randint(1, vocab_size, rest.shape, generator=generator, dtype=torch.int32)
        rest.copy_((rest + other) % vocab_size)
        rest[rest == bos] = bos + 1
        for places in ([], [0, 3, 19]):
            rest[[place for place in places if place < len(rest)]] = bos
            wrong = (evaluate(changed)[: cut + 1] != before[: cut + 1]).nonzero()
            if len(wrong):
                what = f"the loss of target {int(wrong[0])}"
                return f"C1: {what} changes with tokens after target {cut}"
    return ""


def truncation(evaluate: Evaluate, tokens: torch.Tensor, cuts: Iterable[int]) -> str:
    """C1: a stream that ends at target t gives the same nats[: t + 1]."""
    before = evaluate(tokens)
    for cut in cuts:
        wrong = (evaluate(tokens[: cut + 2].clone()) != before[: cut + 1]).nonzero()
        if len(wrong):
            what = f"the loss of target {int(wrong[0])}"
            return f"C1: {what} changes when the stream ends after target {cut}"
    return ""


def distribution(
    evaluate: Evaluate, tokens: torch.Tensor, vocab_size: int, targets: Iterable[int]
) -> str:
    """C2: the probabilities of all tokens at a target's position are positive and sum to 1."""
    for target in targets:
        stream = tokens.clone()
        probabilities = []
        for token in range(vocab_size):
            stream[target + 1] = token
            probabilities.append(math.exp(-evaluate(stream)[target].item()))
        total, least = math.fsum(probabilities), min(probabilities)
        if least <= 0 or abs(total - 1) > TOLERANCE:
            found = f"sum to {total:.4f}, the smallest is {least:.2g}"
            return f"C2: the probabilities of target {target} {found}"
    return ""


def complete(evaluate: Evaluate, tokens: torch.Tensor) -> str:
    """C4: every target has one finite loss."""
    nats = evaluate(tokens)
    if len(nats) != len(tokens) - 1:
        return f"C4: {len(nats)} losses for {len(tokens) - 1} targets"
    wrong = (~nats.isfinite()).nonzero()
    return f"C4: target {int(wrong[0])} has no loss" if len(wrong) else ""


def order(events: list[tuple[str, list[int]]], targets: int) -> str:
    """C3 and C4 for events ("score", targets) and ("learn", targets whose losses an update saw): no
    target is scored after an update that saw it or a later one."""
    seen: set[int] = set()
    learned = 0  # last scored target at the latest update
    for kind, numbers in events:
        if kind == "score":
            for target in numbers:
                if target in seen:
                    return f"C4: target {target} is scored twice"
                if target < learned:
                    return f"C4: target {target} is scored after an update that followed later ones"
                seen.add(target)
        else:
            unseen = sorted(set(numbers) - seen)
            if unseen:
                return f"C3: target {unseen[0]} is learned from before it is scored"
            if numbers:
                learned = max(seen)
    missing = set(range(targets)) - seen
    return f"C4: target {min(missing)} is never scored" if missing else ""


class Text:
    """Tokens (n,) in place of a script's TokenStream."""

    def __init__(self, tokens: np.ndarray):
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, count: int) -> np.ndarray:
        return self.tokens[start : start + count]


def evaluator_of(script: ModuleType, hp, runtime, model, together: bool = False) -> Evaluate:
    """The script's evaluation with these hyperparameters, on a copy of the model each time. It reads
    the tokens as those of its shards, so what it decides from a text is probed as well.

    Low-rank training takes one document after the other, so that a short stream shows a leak
    between them; `together`: its documents share forwards, as in a run. A second argument is what
    tests of the probes do to (model, evaluator) before it scores."""

    def evaluate(tokens: torch.Tensor, leak: Callable | None = None) -> torch.Tensor:
        data = {
            "TokenStream": lambda *_: Text(tokens.numpy()),
            "count_bytes": lambda hp, tokens, log: np.ones(len(tokens) - 1, dtype=np.int16),
            "check_manifest": lambda *_: {},
            "refused_pairs": lambda *_: random_mask(hp.vocab_size, script.BOS).numpy(),
        }
        with mock.patch.multiple(script, **data):
            stream = script.read_validation(hp, torch.device("cpu"))
        own = copy.deepcopy(model)
        *_, (config, stride, score, _) = script.final_passes(hp).values()
        evaluator = script.Evaluator(own, stream, hp, runtime, config, stride)
        if leak:
            leak(own, evaluator)
        with mock.patch.object(script, "LORA_BATCH", script.LORA_BATCH if together else 1):
            score(evaluator)
        return evaluator.nats[:-1].double()

    return evaluate


def load(source: bytes, path: Path) -> ModuleType:
    """The module of a script's readable source."""
    module = sys.modules["submitted"] = ModuleType("submitted")  # dataclasses look it up
    module.__file__ = str(path)
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    return module


def fits(script: ModuleType) -> bool:
    """Whether these probes know how the script evaluates. Records keep the script of their day."""
    return all(hasattr(script, name) for name in ("Pass", "sgd_gradients", "lora_update"))


def spied(
    script: ModuleType, evaluate: Evaluate, tokens: torch.Tensor
) -> list[tuple[str, list[int]]]:
    """The events of an evaluation, for `order`."""
    events: list[tuple[str, list[int]]] = []
    last: list[int] = []
    batch, gradients, update = script.Evaluator.batch, script.sgd_gradients, script.lora_update

    def seen(self, position, n, *rest):
        nats, counts = batch(self, position, n, *rest)
        last[:] = position[:, -n:][counts].tolist()
        events.append(("score", list(last)))
        return nats, counts

    def learned(scorer, begin):
        stop = min(begin + scorer.hp.ttt_chunk_tokens, len(tokens) - 1)
        events.append(("learn", list(range(begin, stop))))
        return gradients(scorer, begin)

    def stepped(*arguments):
        events.append(("learn", list(last)))
        return update(*arguments)

    updates = {"sgd_gradients": learned, "lora_update": stepped}
    with mock.patch.object(script.Evaluator, "batch", seen), mock.patch.multiple(script, **updates):
        evaluate(tokens)
    return events


# A model that answers in milliseconds, with learning rates at which a leak shows.
# fmt: off
SMALL = {
    "VOCAB_SIZE": "64", "NUM_LAYERS": "3", "MODEL_DIM": "32", "NUM_HEADS": "4", "NUM_KV_HEADS": "2", "ROPE_DIMS": "4",
    "XSA_LAST_N": "2", "BIGRAM_VOCAB_SIZE": "64", "BIGRAM_DIM": "8", "TRAIN_SEQ_LEN": "32", "SHORT_SEQ_PARTS": "1",
    "TRAIN_BATCH_TOKENS": "768", "EVAL_SEQ_LEN": "32", "EVAL_STRIDE": "8", "VAL_BATCH_SIZE": "256", "COMPILE": "0",
    "COMPUTE_DTYPE": "float32", "DEVICE": "cpu", "ATTENTION": "auto", "TTT_CHUNK_TOKENS": "40", "TTT_LR": "0.05",
    "TTT_LORA_CHUNK": "24", "TTT_LORA_LR": "0.05", "EVAL_MAX_SECONDS": "0", "EVAL_ONLY": "",
    "EVAL_MODE": "sliding",
}
# fmt: on
CUTS = (40, 63, 64, 137, 250)
TARGETS = 300  # of the stream that is probed


def suite(script: ModuleType, settings: dict[str, str], leak: Callable | None = None) -> str:
    """The first fault in the kinds of evaluation of a run with these knobs, or ""."""
    fields = script.Hyperparameters.__dataclass_fields__
    knobs = {name: value for name, value in settings.items() if name.lower() in fields}
    if knobs.get("ATTN_WINDOW", "0") != "0":
        knobs["ATTN_WINDOW"] = "5"  # shorter than the sequences of SMALL
    kinds = [{"EVAL_STRIDE": stride, "TTT_ENABLED": "0"} for stride in ("32", "8")]
    if knobs.get("EVAL_MODE") == "banded":
        # Blocks of 80 that score 16
        band = {"EVAL_SEQ_LEN": "16", "EVAL_STRIDE": "16", "MICRO_BATCH_TOKENS": "80"}
        kinds.append({"EVAL_MODE": "banded", **band, "TTT_ENABLED": "0"})
    if knobs.get("TTT_ENABLED") == "True":
        kinds.append({"EVAL_STRIDE": "8", "TTT_ENABLED": "1"})
    for kind in kinds:
        hp = script.Hyperparameters.from_env({**knobs, **SMALL, **kind})
        with script.Runtime.start(hp) as runtime:
            model = random_model(script, hp, runtime)
            evaluate, together = (
                evaluator_of(script, hp, runtime, model, shared) for shared in (False, True)
            )
            fault = probe_all(script, hp, lambda tokens, evaluate=evaluate: evaluate(tokens, leak))
            if not fault and hp.ttt_enabled and hp.ttt_mode == "lora":
                stream = random_stream(TARGETS, hp.vocab_size, script.BOS)
                fault = future(together, stream, hp.vocab_size, CUTS, script.BOS)
            if fault:
                return f"{fault} ({' '.join(f'{name}={value}' for name, value in kind.items())})"
    return ""


def random_model(script: ModuleType, hp, runtime):
    """A model whose weights are all random; the initial ones contain zeros, which hide leaks."""
    model = script.GPT(hp, runtime.attend, torch.float32)
    model.initialise(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def random_stream(
    targets: int, vocab_size: int, bos: int, begins: Iterable[int] = (0, 9, 25, 288)
) -> torch.Tensor:
    """Random tokens (targets + 1,) with documents that begin at these places; one of them has over
    256 targets. Contexts of 15 tokens occur again: in a run of three tokens, and before another one."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(2, vocab_size, (targets + 1,), generator=generator, dtype=torch.int32)
    tokens[26:60] = tokens[26:29].repeat(12)[:34]
    tokens[200:215] = tokens[100:115]
    tokens[list(begins)] = bos
    return tokens


def random_mask(vocab_size: int, bos: int) -> torch.Tensor:
    """Pairs (V, V) of tokens that a tokenizer would not emit: a fifth, none of `random_stream`, so
    that only what `future` writes behind a target is refused."""
    generator = torch.Generator().manual_seed(3)
    refused = torch.rand(vocab_size, vocab_size, generator=generator) < 0.2
    tokens = random_stream(TARGETS, vocab_size, bos)
    refused[tokens[:-1], tokens[1:]] = False
    return refused


def probe_all(script: ModuleType, hp, evaluate: Evaluate) -> str:
    """The first fault in one kind of evaluation, or ""."""
    tokens = random_stream(TARGETS, hp.vocab_size, script.BOS)
    cuts = CUTS
    if hp.ttt_enabled and hp.ttt_mode == "sgd":
        # Its rates follow from the number of chunks (docs/score.md), which these cuts keep.
        last = TARGETS - 1
        cuts = range(last - last % hp.ttt_chunk_tokens, last, 6)
    few, positions = (tokens[:48], (44,)) if hp.ttt_enabled else (tokens[:60], (3, 50))
    probes = [
        lambda: future(evaluate, tokens, hp.vocab_size, CUTS, script.BOS),
        lambda: truncation(evaluate, tokens, cuts),
        lambda: distribution(evaluate, few, hp.vocab_size, positions),
        lambda: complete(evaluate, tokens),
        # Documents hand something on, so the whole stream is one pass.
        lambda: order(spied(script, evaluate, tokens), TARGETS),
    ]
    return next((fault for probe in probes if (fault := probe())), "")


def main() -> None:
    parser = program.parser(__doc__)
    parser.add_argument("script", type=Path, help="train_gpt.py or a changed one, packed or not")
    path = parser.parse_args().script
    source = pack_code.readable_source(path.read_bytes())
    script = load(source, path) if b"class Evaluator" in source else None
    other = f"{path} is not built like this repository's train_gpt.py: no probe fits it"
    require(script and fits(script), other)
    knobs = vars(script.Hyperparameters.from_env(os.environ))
    fault = suite(script, {name.upper(): str(value) for name, value in knobs.items()})
    require(not fault, f"{path}: {fault}")
    print(f"{path}: C1 to C4 hold on a small model with random weights")


if __name__ == "__main__":
    program.run_program(main)

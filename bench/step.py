#!/usr/bin/env python3
"""Time one training step and its parts: eager and compiled, with several micro-batch sizes.

    python bench/step.py                       # a small model on a CPU; on a GPU one of 8 ranks of the record
    python bench/step.py --micro 2048 16384 --modes compiled --rounds 9
    python bench/step.py --modes compiled --trace step.json    # opens in ui.perfetto.dev

The model is that of the environment's knobs; tokens are random, which costs what real ones cost.
With --of W this process owns the rows of one of W ranks and does its part of the optimizer's work,
without collectives (bench/scaling.py models them). Prints medians in milliseconds; `ratio` is the
median over rounds of the first row's forward and backward over this row's. `step` also contains
what belongs to no part, such as zeroing the gradients. With --trace, torch's profiler writes one
more step of the first row. The last line is JSON.

    python bench/step.py --against OTHER_TRAIN_GPT_PY --rounds 20

Whole steps of another version of the script and of this one take turns (loader, forward, backward,
update, average), with random shards. A `ratio` below 1: this one is faster.

    python bench/step.py --separate
    DATA_PATH=... python bench/step.py --orthogonal 50

--separate compares F.linear on slices of the banks with an nn.Linear for each matrix: losses and
gradients, and time in turns. --orthogonal trains N steps and prints for both sets of coefficients
|X - UV^T| / |UV^T|, where Newton-Schulz makes X of the last step's momentum, and UV^T is exact.
"""

import collections
import functools
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("", "bench", "data")]

import program
import shards
import train_gpt
from common import Table, compare, finish, knobs, print_machine, report, take_turns
from flops import flops_per_token, peak_flops

# isort: split
import numpy as np
import torch

PHASES = {  # functions of ParallelMuon, and the parts that they belong to
    "reduce_gradients": "comm.",
    "gradient_norm": "clip",
    "muon_update": "NS",
    "update_small": "small",
}
PARTS = ("forward", "backward", *PHASES.values(), "average", "step")


class OneOf(train_gpt.Comm):
    """The first of W ranks without its peers: a collective moves only this rank's part."""

    def start(
        self, collective: Callable, out: torch.Tensor, *source: torch.Tensor
    ) -> Callable[[], None]:
        for tensor in source:
            if out.numel() < tensor.numel():
                # Reduce-scatter; in an all-gather the own rows are in place already
                out.copy_(tensor[: out.size(0)])
        return lambda: None


class Variant:
    """A model and its optimizer, in `mode` eager or compiled, with `micro` tokens per forward."""

    def __init__(self, mode: str, micro: int, hp, runtime, batch: torch.Tensor, ranks: int):
        self.name, self.runtime = f"{mode}, {micro} tokens", runtime
        self.parts = batch.split(max(1, micro // hp.train_seq_len))
        compiled, several = mode == "compiled", len(self.parts) > 1
        model = train_gpt.GPT(hp, runtime.attend, runtime.dtype, runtime.fused_mlp)
        weights = model.initialise(hp.seed)
        self.forward = train_gpt.compile_blocks(model.to(runtime.device), compiled)
        rank = OneOf(0, ranks)
        self.optimizer = train_gpt.ParallelMuon(model, weights, hp, rank, several, compiled)
        for method, part in PHASES.items():
            phase = functools.partial(self.timed, part, getattr(self.optimizer, method))
            setattr(self.optimizer, method, phase)
        self.average = train_gpt.WeightAverage(self.optimizer.owned, hp)
        self.spent: collections.Counter = collections.Counter()

    def timed(self, part: str, function: Callable, *arguments):
        """Call a function, and add its milliseconds to a part of the step."""
        self.runtime.synchronize()
        began = time.perf_counter()
        result = function(*arguments)
        self.runtime.synchronize()
        self.spent[part] += 1000 * (time.perf_counter() - began)
        return result

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.optimizer.accumulate()

    def whole(self) -> None:
        for ids in self.parts:
            loss = self.timed("forward", self.forward, ids[:, :-1], ids[:, 1:])
            self.timed("backward", self.backward, loss / len(self.parts))
        self.optimizer.step(1.0, 0.9)
        self.timed("average", self.average.update, 0, 1.0)

    def step(self) -> dict[str, float]:
        """Milliseconds of the parts of one step, and of all of it."""
        self.spent.clear()
        self.timed("step", self.whole)
        self.spent["fwd+bwd"] = self.spent["forward"] + self.spent["backward"]
        return dict(self.spent)


def time_parts(hp, runtime: train_gpt.Runtime, arguments) -> None:
    """Time the parts of a step and print the table."""
    rows = hp.train_batch_tokens // hp.train_seq_len
    batch = torch.randint(hp.vocab_size, (rows, hp.train_seq_len + 1), device=runtime.device)
    variants = [
        Variant(mode, micro, hp, runtime, batch, arguments.of)
        for mode in arguments.modes
        for micro in arguments.micro
    ]
    for variant in variants:
        print(f"preparing {variant.name} per forward", file=sys.stderr, flush=True)
        variant.step()
        variant.step()
    rounds = [[variant.step() for variant in variants] for _ in range(arguments.rounds)]
    flops, peak = flops_per_token(hp, hp.train_seq_len), peak_flops(runtime.device)
    work = f"{hp.train_batch_tokens} tokens, {flops / 1e6:.2f} MFLOP per token"
    print(f"one of {arguments.of} ranks, {work}")
    columns = [*PARTS, "fwd+bwd", "ktok/s", "GFLOP/s", *["mfu"] * bool(peak), "ratio"]
    table = Table("ms", **dict.fromkeys(columns, "9.2f"))
    times = [list(steps) for steps in zip(*rounds, strict=True)]
    for variant, steps in zip(variants, times, strict=True):
        found = {part: statistics.median(step[part] for step in steps) for part in steps[0]}
        found["ktok/s"] = hp.train_batch_tokens / found["step"]
        found["GFLOP/s"] = found["ktok/s"] * flops / 1e6
        if peak:
            found["mfu"] = 1e9 * found["GFLOP/s"] / peak
        pairs = zip(times[0], steps, strict=True)
        found["ratio"] = statistics.median(a["fwd+bwd"] / b["fwd+bwd"] for a, b in pairs)
        table.row(variant.name, **found)
    finish("step", rounds=arguments.rounds, rows=table.rows)
    if arguments.trace:
        with torch.profiler.profile() as profile:
            variants[0].step()
        profile.export_chrome_trace(str(arguments.trace))


def compare_steps(other: Path, rounds: int) -> None:
    """Time whole steps of the script at `other` and of this one in turns."""
    hp = train_gpt.Hyperparameters.from_env(knobs())
    count = max(1 << 20, 2 * hp.train_batch_tokens)
    tokens = np.random.default_rng(0).integers(1, hp.vocab_size, count)
    with tempfile.TemporaryDirectory() as folder:
        shards.write_shard(Path(folder, "fineweb_train_000000.bin"), tokens)
        rows = compare("whole step", other, whole_step, rounds, DATA_PATH=folder)
    finish("step", rounds=rounds, against=rows)


def whole_step(script: ModuleType, hp, runtime) -> Callable[[], None]:
    """A function that does the next step of a training with this script."""
    log = script.Log(hp, script.Comm(1, 2))  # rank 1 writes none
    run = script.Run(hp, runtime, log, None)
    steps = itertools.count()
    settings = script.StepSettings(1.0, 0.9, False, hp.train_seq_len)
    return lambda: run.train_step(next(steps), settings)


class Separate(train_gpt.GPT):
    """The model with a parameter of its own for each matrix (out, in), as nn.Linear has."""

    def __init__(self, banked: train_gpt.GPT):
        super().__init__(banked.hp, banked.attend, banked.dtype)
        self.load_state_dict(banked.state_dict())
        self.apart = {}
        for kind in train_gpt.MATRICES:
            part = train_gpt.bank_part(getattr(self, kind.bank).detach(), kind)
            self.apart[kind.name] = [torch.nn.Parameter(matrix.clone()) for matrix in part]

    def matrices(self, qat: bool = False) -> dict[str, torch.Tensor]:
        tables = [kind.name for kind in train_gpt.TABLES if kind.hessian]
        found = {name: getattr(self, name).to(self.dtype)[None] for name in tables}
        for kind in train_gpt.MATRICES:
            factors = getattr(self, kind.gain)[..., None] if kind.gain else self.layer_scale
            pairs = zip(self.apart[kind.name], factors, strict=True)
            parts = [(weight * factor).to(self.dtype) for weight, factor in pairs]
            found[kind.name] = torch.stack(parts)
        return found


def compare_separate(hp, runtime: train_gpt.Runtime, rounds: int) -> tuple[float, float]:
    """Time both in turns. Returns the relative differences of losses and of gradients (largest)."""
    rows = hp.train_batch_tokens // hp.train_seq_len
    ids = torch.randint(hp.vocab_size, (rows, hp.train_seq_len + 1), device=runtime.device)
    banked = train_gpt.GPT(hp, runtime.attend, runtime.dtype).to(runtime.device)
    banked.load_state_dict(banked.initialise(hp.seed))
    for bank in train_gpt.BANKS:  # initially zero projections have no gradient behind them
        getattr(banked, bank).data.add_(0.01)
    models, losses = {"banks": banked, "separate": Separate(banked).to(runtime.device)}, {}

    def both(name: str, forward: Callable) -> None:
        losses[name] = forward(ids[:, :-1], ids[:, 1:])
        losses[name].backward()

    ways = {}
    for name, model in models.items():
        forward = train_gpt.compile_blocks(model, runtime.compiled)
        ways[name] = functools.partial(both, name, forward)
    report("forward and backward", take_turns(ways, rounds, runtime.synchronize))
    first, second = (loss.item() for loss in losses.values())
    worst = 0.0  # gradients are sums over the same number of turns
    for kind in train_gpt.MATRICES:
        slices = train_gpt.bank_part(getattr(banked, kind.bank).grad, kind)
        others = torch.stack([weight.grad for weight in models["separate"].apart[kind.name]])
        worst = max(worst, float((slices - others).abs().max() / others.abs().max()))
    print(f"losses {first:.8f} and {second:.8f}; gradients differ by {worst:.1e} at most")
    return abs(first / second - 1), worst


def measure_orthogonality(hp, runtime: train_gpt.Runtime, steps: int) -> dict[str, list[float]]:
    """The errors of Newton-Schulz by its coefficients, of all matrices in the last of `steps` steps
    of a training. Prints their mean and maximum."""
    step = whole_step(train_gpt, hp, runtime)
    plain, given, found = train_gpt.newton_schulz, [], {}
    noted = lambda g, *rest: (given.append(g.clone()), plain(g, *rest))[1]  # noqa: E731
    with mock.patch.object(train_gpt, "newton_schulz", noted):
        for _ in range(steps):
            given.clear()
            step()
    for name in train_gpt.NEWTON_SCHULZ:
        found[name] = []
        for g in given:
            u, _, v = torch.linalg.svd(g.double(), full_matrices=False)
            x = plain(g, runtime.dtype, hp.muon_backend_steps, name)
            errors = (x - u @ v).norm(dim=(-2, -1)) / (u @ v).norm(dim=(-2, -1))
            found[name] += errors.tolist()
        print(f"{name:14}mean {statistics.mean(found[name]):.4f} max {max(found[name]):.4f}")
    return found


def main() -> None:
    gpu = torch.cuda.is_available()
    micro = [98304] if gpu else [2048, 4096, 8192, 16384]
    parser = program.parser(__doc__)
    add, modes = parser.add_argument, ["eager", "compiled"]
    add("--modes", nargs="+", choices=modes, default=modes)
    add("--micro", nargs="+", type=program.count, default=micro, help="tokens per forward")
    add("--rounds", type=program.count, default=5)
    text = "the optimizer's work of one of so many ranks"
    add("--of", type=program.count, default=8 if gpu else 1, help=text)
    add("--against", type=Path, help="another train_gpt.py: compare whole steps with it")
    add("--trace", type=program.output_file, help="file for torch.profiler's trace of a step")
    add("--separate", action="store_true", help="time banks and separate matrices")
    add("--orthogonal", type=program.count, help="errors of Newton-Schulz after N steps")
    arguments = parser.parse_args()
    if arguments.against:
        return compare_steps(arguments.against, arguments.rounds)
    environ = knobs() | ({"COMPILE": "0"} if arguments.orthogonal else {})
    hp = train_gpt.Hyperparameters.from_env(environ)
    with train_gpt.Runtime.start(hp) as runtime:
        print_machine(runtime, rounds=arguments.rounds)
        if arguments.separate:
            compare_separate(hp, runtime, arguments.rounds)
        if arguments.orthogonal:
            measure_orthogonality(hp, runtime, arguments.orthogonal)
        if not (arguments.separate or arguments.orthogonal):
            time_parts(hp, runtime, arguments)


if __name__ == "__main__":
    program.run_program(main)

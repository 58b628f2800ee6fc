#!/usr/bin/env python3
"""Time the evaluations beside #399's.

    python bench/eval.py                       # a small model on a CPU, the record's model on a GPU
    python bench/eval.py --windows 1024 --rounds 3

The modes are non-overlapping windows, sliding windows by #399's loop, ours, and the banded pass.
#399 takes windows in a Python loop, copies each to the device, sends all positions through the
head, and sums the scored positions window by window. All are compiled if the machine compiles. All
score the same targets, as many as --windows sliding windows have. Weights and tokens are random,
which cost what real ones cost.

With --against OTHER_TRAIN_GPT_PY the evaluations of another version of the script and of this one
take turns on one random text. `ratio` is the median over rounds of this one's time over the
other's: below 1, this one is faster.

The last line is JSON.
"""

import contextlib
import functools
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]

import program
import train_gpt
from common import SMALL, Table, finish, load_script, report, score_of, take_turns
from flops import peak_flops, window_flops

# isort: split
import numpy as np
import torch


def loop_399(forward: Callable, val: SimpleNamespace, hp, rows: int) -> float:
    """Mean nats per target by #399's loop, with `rows` windows per batch."""
    window, stride, device = hp.eval_seq_len, hp.eval_stride, val.tokens.device
    starts = [0, *range(stride, val.targets - window + 1, stride)]
    tokens, total, count = val.tokens.cpu(), 0.0, 0
    with torch.no_grad():
        for first in range(0, len(starts), rows):
            batch = starts[first : first + rows]
            x, y = torch.zeros(2, len(batch), window, dtype=torch.int64, device=device)
            for i, start in enumerate(batch):
                chunk = tokens[start : start + window + 1].to(torch.int64).to(device)
                x[i], y[i] = chunk[:-1], chunk[1:]
            nats = forward(x, y, reduction="none")
            for i, start in enumerate(batch):
                scored = nats[i, 0 if start == 0 else window - stride :]
                total += scored.to(torch.float64).sum().item()
                count += scored.numel()
    return total / count


def random_text(windows: int, hp, device: torch.device) -> SimpleNamespace:
    """Random tokens for this many sliding windows, with the attributes of a Validation."""
    targets = hp.eval_seq_len + (windows - 1) * hp.eval_stride
    return SimpleNamespace(
        tokens=torch.randint(2, hp.vocab_size, (targets + 1,), dtype=torch.int32, device=device),
        targets=targets,
        nbytes=torch.ones(targets, dtype=torch.int16, device=device),
        total_bytes=targets,
        refused=None,
        hints=None,
    )


def forward_of(script: ModuleType, hp, runtime) -> Callable:
    """The forward of a model of random weights, compiled if the machine compiles."""
    model = script.GPT(hp, runtime.attend, runtime.dtype, runtime.fused_mlp)
    model.initialise(0)
    return script.compile_blocks(model.to(runtime.device), runtime.compiled)


def modes(windows: int, rounds: int) -> None:
    """Time all modes and print the table."""
    hp = train_gpt.Hyperparameters.from_env(knobs() | {"EVAL_MODE": "banded"})
    with train_gpt.Runtime.start(hp) as runtime:
        rows = train_gpt.eval_rows(hp, runtime, hp.eval_seq_len)
        val = random_text(windows or 8 * rows, hp, runtime.device)
        forward = forward_of(train_gpt, hp, runtime)

        def ours(stride: int) -> Callable[[], float]:
            return lambda: score_of(train_gpt, forward, val, hp, runtime, stride).val_loss

        variants = {
            "plain": ours(hp.eval_seq_len),
            "sliding, #399": lambda: loop_399(forward, val, hp, rows),
            "sliding": ours(hp.eval_stride),
            "banded": ours(0),
        }
        nats = {name: variant() for name, variant in variants.items()}  # compiles
        times = take_turns(variants, rounds, runtime.synchronize, warm=0)
        print(f"torch {torch.__version__} {runtime.describe()}")
        print(f"window:{hp.eval_seq_len} stride:{hp.eval_stride} rounds:{rounds}")
        report_modes(times, nats, hp, val.targets, peak_flops(runtime.device))


def knobs() -> dict[str, str]:
    """The environment; on a CPU, with the small model where it sets nothing else."""
    return {**({} if torch.cuda.is_available() else SMALL), **os.environ}


def compare(other: Path, windows: int, rounds: int) -> None:
    """Time the evaluation of the script at `other` and of this one in turns, on the same text."""
    scripts = {str(other): load_script(other), "this train_gpt.py": train_gpt}
    with contextlib.ExitStack() as stack:
        variants = {}
        hp = train_gpt.Hyperparameters.from_env(knobs())
        here = stack.enter_context(train_gpt.Runtime.start(hp))
        windows = windows or 8 * train_gpt.eval_rows(hp, here, hp.eval_seq_len)
        val = random_text(windows, hp, here.device)
        for name, script in scripts.items():
            own = script.Hyperparameters.from_env(knobs())
            runtime = stack.enter_context(script.Runtime.start(own))
            arguments = forward_of(script, own, runtime), val, own, runtime, own.eval_stride
            variants[name] = functools.partial(score_of, script, *arguments)
        print(f"torch {torch.__version__} {here.describe()}")
        text = f"windows:{windows} targets:{val.targets}"
        print(f"window:{hp.eval_seq_len} stride:{hp.eval_stride} {text} rounds:{rounds}")
        nats = {name: variant()[0] for name, variant in variants.items()}  # compiles
        rows = report("sliding windows", take_turns(variants, rounds, here.synchronize, warm=0))
    print("  nats: " + ", ".join(f"{value:.9f}" for value in nats.values()))
    rows = [row | {"nats": nats[row["variant"]]} for row in rows]
    finish("eval", windows=windows, rounds=rounds, against=rows)


def operations(mode: str, hp: train_gpt.Hyperparameters, targets: int) -> float:
    """Forward operations of one row of the table."""
    only_read, stride, band = hp.eval_seq_len - hp.eval_stride, hp.eval_stride, 0
    if mode == "plain":
        only_read, stride = 0, hp.eval_seq_len
    elif mode == "banded":
        (only_read, stride), band = train_gpt.band_block(hp), hp.eval_seq_len
    windows = train_gpt.plan_windows(np.array([[0, targets]]), only_read + stride, stride)
    total = 0.0
    for start, scored, stop, *_ in windows.T.tolist():
        first = start if mode == "sliding, #399" else scored  # of the head
        total += window_flops(hp, stop - start, stop - first, band)
    return total


def report_modes(
    times: dict[str, list[float]], nats: dict[str, float], hp, targets: int, peak: float | None
) -> None:
    """Print the table of `modes`. `speed` is in those of #399's loop, `mfu` the share of the peak."""
    forms = {"ms": "10.1f", "targets/s": "11.0f", "GFLOP/s": "10.0f"}
    forms |= {"speed": "8.3f", "nats": "11.6f"} | ({"mfu": "8.3f"} if peak else {})
    table = Table(f"{targets} targets", **forms)
    for name, own in times.items():
        seconds = statistics.median(own)
        rate = operations(name, hp, targets) / seconds
        speed = statistics.median(a / b for a, b in zip(times["sliding, #399"], own, strict=True))
        found = {"ms": 1000 * seconds, "targets/s": targets / seconds, "GFLOP/s": rate / 1e9}
        found |= {"mfu": rate / peak} if peak else {}
        table.row(name, **found, speed=speed, nats=nats[name])
    finish("eval", targets=targets, rows=table.rows)


def main() -> None:
    parser = program.parser(__doc__)
    add = parser.add_argument
    add("--windows", type=program.count, default=0, help="how many; default: 8 batches")
    add("--rounds", type=program.count, default=5)
    add("--against", type=Path, help="another version of train_gpt.py: compare evaluations with it")
    arguments = parser.parse_args()
    if arguments.against:
        compare(arguments.against, arguments.windows, arguments.rounds)
    else:
        modes(arguments.windows, arguments.rounds)


if __name__ == "__main__":
    program.run_program(main)

#!/usr/bin/env python3
"""Time the evaluations beside #399's.

    python bench/eval.py                       # a small model on a CPU, the record's model on a GPU
    python bench/eval.py --windows 1024 --rounds 3

The modes are non-overlapping windows, sliding windows by #399's loop, ours, and the banded pass.
#399 takes windows in a Python loop, copies each to the device, sends all positions through the
head, and sums the scored positions window by window. All are compiled if the machine compiles. All
score the same targets, as many as --windows sliding windows have. Weights and tokens are random,
which cost what real ones cost.

With --against OTHER_TRAIN_GPT_PY the sliding windows of another version of the script and of this
one take turns on one random text. A `ratio` below 1: this one is faster.

The last line is JSON.
"""

import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]

import program
import train_gpt
from common import Table, compare, finish, knobs, print_machine, take_turns

# isort: split
import numpy as np
import torch


def loop_399(forward: Callable, val: train_gpt.Validation, hp, rows: int) -> float:
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


def random_text(script: ModuleType, windows: int, hp, runtime):
    """A Validation of random tokens for this many sliding windows; 0: for 8 batches. All versions of
    the script get the same."""
    windows = windows or 8 * train_gpt.eval_rows(hp, runtime, hp.eval_seq_len)
    targets = hp.eval_seq_len + (windows - 1) * hp.eval_stride
    tokens = np.random.default_rng(0).integers(2, hp.vocab_size, targets + 1)
    return script.Validation(tokens, np.ones(targets), runtime.device)


def random_model(script: ModuleType, hp, runtime) -> Callable:
    """A model of random weights, compiled if the machine compiles."""
    model = script.GPT(hp, runtime.attend, runtime.dtype, runtime.fused_mlp)
    model.initialise(0)
    return script.compile_blocks(model.to(runtime.device), runtime.compiled)


def loss(script: ModuleType, model: Callable, val, hp, runtime, stride: int) -> float:
    """Mean nats of all targets in windows `stride` apart; 0: in a banded pass."""
    config = script.ForwardConfig(hp.layer_order(), band=0 if stride else hp.eval_seq_len)
    step = stride or script.band_block(hp)[1]
    scorer = script.Evaluator(model, val, hp, runtime, config, step)
    scorer.score(scorer.windows())
    return scorer.result().val_loss


def compare_modes(windows: int, rounds: int) -> None:
    """Time all modes and print the table. `speed` is in those of #399's loop."""
    hp = train_gpt.Hyperparameters.from_env(knobs() | {"EVAL_MODE": "banded"})
    with train_gpt.Runtime.start(hp) as runtime:
        val = random_text(train_gpt, windows, hp, runtime)
        model = random_model(train_gpt, hp, runtime)
        rows = train_gpt.eval_rows(hp, runtime, hp.eval_seq_len)
        ours = {"plain": hp.eval_seq_len, "sliding": hp.eval_stride, "banded": 0}  # strides
        variants = {"sliding, #399": lambda: loop_399(model, val, hp, rows)}
        for name, stride in ours.items():
            variants[name] = functools.partial(loss, train_gpt, model, val, hp, runtime, stride)
        nats = {name: variant() for name, variant in variants.items()}  # compiles
        times = take_turns(variants, rounds, runtime.synchronize, warm=0)
        print_machine(runtime, window=hp.eval_seq_len, stride=hp.eval_stride, rounds=rounds)
    forms = {"ms": "10.1f", "targets/s": "11.0f", "speed": "8.3f", "nats": "11.6f"}
    table = Table(f"{val.targets} targets", **forms)
    for name, own in times.items():
        seconds = statistics.median(own)
        speed = statistics.median(a / b for a, b in zip(times["sliding, #399"], own, strict=True))
        found = {"ms": 1000 * seconds, "targets/s": val.targets / seconds}
        table.row(name, **found, speed=speed, nats=nats[name])
    finish("eval", targets=val.targets, rows=table.rows)


def compare_scripts(other: Path, windows: int, rounds: int) -> None:
    """Time the sliding windows of the script at `other` and of this one in turns."""
    nats = []

    def prepare(script, hp, runtime):
        model, val = random_model(script, hp, runtime), random_text(script, windows, hp, runtime)
        evaluate = functools.partial(loss, script, model, val, hp, runtime, hp.eval_stride)
        nats.append(evaluate())  # compiles
        return evaluate

    rows = compare("sliding windows", other, prepare, rounds, warm=0)
    print("  nats: " + ", ".join(f"{value:.9f}" for value in nats))
    rows = [row | {"nats": value} for row, value in zip(rows, nats, strict=True)]
    finish("eval", rounds=rounds, against=rows)


def main() -> None:
    parser = program.parser(__doc__)
    add = parser.add_argument
    add("--windows", type=program.count, default=0, help="how many; default: 8 batches")
    add("--rounds", type=program.count, default=5)
    add("--against", type=Path, help="another version of train_gpt.py: compare evaluations with it")
    arguments = parser.parse_args()
    if arguments.against:
        compare_scripts(arguments.against, arguments.windows, arguments.rounds)
    else:
        compare_modes(arguments.windows, arguments.rounds)


if __name__ == "__main__":
    program.run_program(main)

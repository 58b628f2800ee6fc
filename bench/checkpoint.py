#!/usr/bin/env python3
"""Time what a checkpoint costs the training: the copy that the step waits for, and the slowdown
while it is written.

    python bench/checkpoint.py                           # a small model
    python bench/checkpoint.py --record --rounds 5       # the record's model with a small batch

Groups of steps with and without a checkpoint at their start take turns; the cost is the difference
of their medians. Tokens are random, which costs what real ones cost. The last line is JSON.
"""

import contextlib
import itertools
import os
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("", "bench", "data")]

import program
import shards
import train_gpt
from common import SMALL, Table, finish, take_turns

# isort: split
import numpy as np

KNOBS = {
    "TRAIN_BATCH_TOKENS": "4096",
    "RUN_ID": "bench",
    "CHECKPOINT_EVERY": "1",
    "COMPILE": "0",
    "EVAL_SEQ_LEN": "512",
}
RECORD = {"TRAIN_SEQ_LEN": "1024"}


def steps(training: train_gpt.Run, count: int) -> None:
    settings = train_gpt.StepSettings(1.0, 0.9, False, training.hp.train_seq_len)
    for step in range(count):
        training.train_step(step, settings)


def measure(training: train_gpt.Run, count: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of `count` steps without and with a checkpoint, of the copy, and of what is left of
    the writing after these steps."""
    numbers = itertools.count(1)
    variants = {
        "without": lambda: steps(training, count),
        "copy": lambda: training.save(next(numbers)),
        "with": lambda: steps(training, count),
        "rest": lambda: training.checkpoints.written.result(),
    }
    times = take_turns(variants, rounds, training.runtime.synchronize)
    times["with"] = [sum(pair) for pair in zip(times["copy"], times["with"], strict=True)]
    return times


def main() -> None:
    parser = program.parser(__doc__)
    parser.add_argument("--record", action="store_true", help="the record's model")
    parser.add_argument("--steps", type=program.count, default=8, help="steps per group")
    parser.add_argument("--rounds", type=program.count, default=5)
    arguments = parser.parse_args()
    knobs = {**(RECORD if arguments.record else SMALL), **KNOBS}
    with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        hp = train_gpt.Hyperparameters.from_env({**knobs, **os.environ, "DATA_PATH": temporary})
        tokens = np.random.default_rng(0).integers(1, hp.vocab_size, size=1 << 20)
        shards.write_shard(Path("fineweb_train_000000.bin"), tokens)
        with train_gpt.Runtime.start(hp) as runtime:
            log = train_gpt.Log(hp, train_gpt.Comm(1, 2))
            training = train_gpt.Run(hp, runtime, log, None)
            found = measure(training, arguments.steps, arguments.rounds)
            print(f"{runtime.describe()}\n{hp.num_layers} layers of {hp.model_dim}")
        files = (train_gpt.CHECKPOINTS / hp.run_id).glob(train_gpt.CHECKPOINT_FILES)
        nbytes = max(path.stat().st_size for path in files)
    medians = {kind: 1000 * statistics.median(values) for kind, values in found.items()}
    cost = medians["with"] - medians["without"]
    if medians["rest"] > 1:
        print("note: a checkpoint took longer than the steps: set more --steps", file=sys.stderr)
    table = Table(f"{nbytes:,} bytes", ms="10.1f")
    table.row("a step", ms=medians["without"] / arguments.steps)
    table.row("copy, which the step waits for", ms=medians["copy"])
    table.row(f"added to {arguments.steps} steps", ms=cost)
    print(f"{cost / 600:.2f} % of the time at one checkpoint a minute")
    finish("checkpoint", bytes=nbytes, share_at_one_a_minute=cost / 60_000, rows=table.rows)


if __name__ == "__main__":
    program.run_program(main)

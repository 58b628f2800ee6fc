#!/usr/bin/env python3
"""Time what a checkpoint costs the training: the copy that the step waits for, and the slowdown
while it is written.

    python bench/checkpoint.py                           # a small model
    python bench/checkpoint.py --record --rounds 5       # the record's model with a small batch

Groups of steps with and without a checkpoint at their start take turns; the cost is the difference
of their medians. Tokens are random, which costs what real ones cost. The last line is JSON.
"""

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("", "bench", "data")]

import program
import shards
import train_gpt
from common import SMALL

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


def prepare(
    folder: Path, runtime: train_gpt.Runtime, hp: train_gpt.Hyperparameters
) -> train_gpt.Run:
    """A training on random tokens after two warm-up steps."""
    tokens = np.random.default_rng(0).integers(1, hp.vocab_size, size=1 << 20)
    shards.write_shard(folder / "fineweb_train_000000.bin", tokens)
    training = train_gpt.Run(hp, runtime, train_gpt.Log(hp, train_gpt.Comm(1, 2)), None)
    steps(training, 2)
    return training


def steps(training: train_gpt.Run, count: int) -> None:
    """Do this many steps and wait for the device."""
    for step in range(count):
        training.train_step(
            step, train_gpt.StepSettings(1.0, 0.9, False, training.hp.train_seq_len)
        )
    training.runtime.synchronize()


def measure(training: train_gpt.Run, count: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of `count` steps without and with a checkpoint, and of the copy."""
    found: dict[str, list[float]] = {"without": [], "with": [], "copy": []}
    training.runtime.synchronize()
    for number in range(1, rounds + 1):
        began = time.perf_counter()
        steps(training, count)
        found["without"].append(time.perf_counter() - began)
        began = time.perf_counter()
        training.save(number)
        training.runtime.synchronize()
        found["copy"].append(time.perf_counter() - began)
        steps(training, count)
        found["with"].append(time.perf_counter() - began)
        if not training.checkpoints.written.done():
            print(
                f"note: the checkpoint took longer than {count} steps: set more --steps",
                file=sys.stderr,
            )
        training.checkpoints.written.result()
    return found


def main() -> None:
    parser = program.parser(__doc__)
    parser.add_argument("--record", action="store_true", help="the record's model")
    parser.add_argument("--steps", type=program.count, default=8, help="steps per group")
    parser.add_argument("--rounds", type=program.count, default=5)
    arguments = parser.parse_args()
    knobs = {**(RECORD if arguments.record else SMALL), **KNOBS}
    with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        hp = train_gpt.Hyperparameters.from_env({**knobs, **os.environ, "DATA_PATH": temporary})
        with train_gpt.Runtime.start(hp) as runtime:
            training = prepare(Path(temporary), runtime, hp)
            found = measure(training, arguments.steps, arguments.rounds)
            where = runtime.describe()
        nbytes = training.checkpoints.written.result().stat().st_size
    medians = {kind: statistics.median(values) for kind, values in found.items()}
    cost = medians["with"] - medians["without"]
    step_ms = 1000 * medians["without"] / arguments.steps
    print(
        f"{where}\n{hp.num_layers} layers of {hp.model_dim}, step {step_ms:.0f} ms, checkpoint {nbytes:,} bytes"
    )
    print(f"  {'copy, which the step waits for':32}{1000 * medians['copy']:10.1f} ms")
    print(f"  {f'added to {arguments.steps} steps':32}{1000 * cost:10.1f} ms")
    print(f"  {'share of the time, at 1 per minute':32}{100 * cost / 60:10.2f} %")
    result = {
        "steps": arguments.steps,
        "bytes": nbytes,
        "share_at_one_a_minute": cost / 60,
        "seconds": found,
    }
    print(json.dumps({"bench": "checkpoint", **result}))


if __name__ == "__main__":
    program.run_program(main)

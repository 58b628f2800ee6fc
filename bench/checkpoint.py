#!/usr/bin/env python3
"""What a checkpoint costs the training: the copy that the step waits for, and how much the writing slows the next steps.

    python bench/checkpoint.py --record --rounds 5       # the record's model, a small batch
    python bench/checkpoint.py                           # a CPU-sized model

Groups of steps with and without a checkpoint at their beginning take turns; the cost of one is the difference of their
medians. Prints a table and, last, one JSON line. Tokens are random, which costs what real ones cost.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt

SMALL = {
    "NUM_LAYERS": "6",
    "MODEL_DIM": "256",
    "NUM_HEADS": "4",
    "NUM_KV_HEADS": "2",
    "TRAIN_SEQ_LEN": "512",
    "TRAIN_BATCH_TOKENS": "4096",
}
RECORD = {"TRAIN_SEQ_LEN": "1024", "TRAIN_BATCH_TOKENS": "4096"}


def prepare(folder: Path, runtime: train_gpt.Runtime, hp: train_gpt.Hyperparameters) -> train_gpt.Training:
    """A training on random tokens, warmed by two steps."""
    tokens = np.random.default_rng(0).integers(1, hp.vocab_size, size=1 << 20).astype("<u2")
    header = np.zeros(train_gpt.SHARD_HEADER_INTS, dtype="<i4")
    header[:3] = train_gpt.SHARD_MAGIC, train_gpt.SHARD_VERSION, len(tokens)
    (folder / "fineweb_train_000000.bin").write_bytes(header.tobytes() + tokens.tobytes())
    training = train_gpt.Training(hp, runtime, train_gpt.Log(hp, train_gpt.Ranks(1, 2)), None)
    for step in range(2):
        training.train_step(step, train_gpt.Moment(1.0, 0.9, False, training.hp.train_seq_len))
    return training


def measure(training: train_gpt.Training, steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of so many steps without and with a checkpoint, and of the copy."""
    found: dict[str, list[float]] = {"without": [], "with": [], "copy": []}
    number = 0
    for _ in range(rounds):
        for kind in ("without", "with"):
            training.runtime.synchronize()
            began = time.perf_counter()
            if kind == "with":
                number += 1
                training.save(number)
                training.runtime.synchronize()
                found["copy"].append(time.perf_counter() - began)
            for step in range(steps):
                training.train_step(step, train_gpt.Moment(1.0, 0.9, False, training.hp.train_seq_len))
            training.runtime.synchronize()
            found[kind].append(time.perf_counter() - began)
            if kind == "with":  # the writing must be over before the other kind's turn, and within this one's
                late = training.checkpoints.writer.is_alive()
                training.checkpoints.wait()
                if late:
                    print(
                        f"note: {steps} steps were over before the checkpoint was: take more --steps", file=sys.stderr
                    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="the record's model")
    parser.add_argument("--steps", type=int, default=8, help="steps of a group")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    knobs = (RECORD if arguments.record else SMALL) | {
        "RUN_ID": "bench",
        "CHECKPOINT_EVERY": "1",
        "COMPILE": "0",
        "EVAL_SEQ_LEN": "512",
    }
    with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        hp = train_gpt.Hyperparameters.from_env({**knobs, **os.environ, "DATA_PATH": temporary})
        with train_gpt.Runtime.start(hp) as runtime:
            training = prepare(Path(temporary), runtime, hp)
            with contextlib.closing(training.loader), contextlib.closing(training.checkpoints):
                found = measure(training, arguments.steps, arguments.rounds)
            where, files = runtime.describe(), list(Path(temporary).glob("checkpoints/bench/*/*.safetensors"))
            nbytes = files[0].stat().st_size
    medians = {kind: statistics.median(values) for kind, values in found.items()}
    cost = medians["with"] - medians["without"]
    step_ms = 1000 * medians["without"] / arguments.steps
    print(f"{where}\n{hp.num_layers} layers of {hp.model_dim}, a step {step_ms:.0f} ms, checkpoint {nbytes:,} bytes")
    for name, value in (
        ("copy, which the step waits for", medians["copy"]),
        (f"added to {arguments.steps} steps", cost),
    ):
        print(f"  {name:32}{1000 * value:10.1f} ms")
    print(f"  {'of the time, at one a minute':32}{100 * cost / 60:10.2f} %")
    print(json.dumps({"steps": arguments.steps, "bytes": nbytes, "share_at_one_a_minute": cost / 60, "seconds": found}))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Time the training loader beside the plain loader of the published script.

    python bench/loader.py                      # shards of random tokens in a temporary folder
    DATA_PATH=... python bench/loader.py        # the shards of DATA_PATH
    python bench/loader.py --work-ms 20         # with a pause for a training step between two batches

The plain loader reads a whole shard when it reaches it, every rank takes the tokens of all ranks,
and tokens are widened to int64 on the host. Ours has all shards open and reads ahead in a thread.
Prints the tokens per second of one rank, the median and the slowest wait for a batch (widened to
int64, as the model takes it), and the slowest wait for a batch that reaches into another shard. The
files are in the page cache: the first pass reads them all and is not timed. The last line is JSON.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]

import shards
import train_gpt
from common import positive

# isort: split
import numpy as np
import torch


class PlainLoader:
    """Keeps one shard in memory. Each step takes the batch of all ranks from it and cuts out this
    rank's part."""

    def __init__(self, hp: train_gpt.Hyperparameters, comm: train_gpt.Comm):
        self.paths = train_gpt.TokenStream(hp.data_path, "train", hp.vocab_size).paths
        self.comm = comm
        self.seq_len = hp.train_seq_len
        self.span = hp.train_batch_tokens // comm.size + 1
        self.number = -1
        self.position = 0
        self.tokens = torch.empty(0, dtype=torch.uint16)

    def take(self, count: int) -> torch.Tensor:
        """The next `count` tokens."""
        parts = []
        while count:
            if self.position == len(self.tokens):
                self.number, self.position = (self.number + 1) % len(self.paths), 0
                content = np.fromfile(
                    self.paths[self.number], dtype="<u2", offset=train_gpt.SHARD_HEADER_BYTES
                )
                self.tokens = torch.from_numpy(content)
            part = self.tokens[self.position : self.position + count]
            parts.append(part)
            self.position += len(part)
            count -= len(part)
        return torch.cat(parts)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets (B, T) int64."""
        local = self.take(self.span * self.comm.size)[self.span * self.comm.rank :][: self.span].to(
            torch.int64
        )
        return local[:-1].view(-1, self.seq_len), local[1:].view(-1, self.seq_len)


class Variant:
    """A loader, and the seconds that each of its batches took."""

    def __init__(self, name: str, make: Callable, stack: contextlib.ExitStack):
        self.name = name
        self.loader = make()
        self.waits: list[float] = []
        self.step = 0
        if hasattr(self.loader, "close"):
            stack.enter_context(contextlib.closing(self.loader))

    def run(self, steps: int, work: float) -> None:
        """Take this many more batches, with a pause of `work` seconds after each."""
        for _ in range(steps):
            begin = time.perf_counter()
            batch = self.loader.batch(self.step)
            if isinstance(batch, torch.Tensor):
                ids = batch.to(torch.int64)
                batch = ids[:, :-1], ids[:, 1:]
            self.waits.append(time.perf_counter() - begin)
            self.step += 1
            time.sleep(work)


def write_shards(folder: Path, count: int, tokens: int) -> None:
    """Write shards of random tokens with a document boundary about every thousand tokens."""
    rng = np.random.default_rng(0)
    for split, number in (("val", 1), ("train", count)):
        for i in range(number):
            content = rng.integers(3, 1024, tokens, dtype=np.uint16)
            content[rng.integers(tokens, size=tokens // 1000)] = train_gpt.BOS
            shards.write_shard(folder / f"fineweb_{split}_{i:06d}.bin", content)


def variants(
    hp: train_gpt.Hyperparameters,
    runtime: train_gpt.Runtime,
    world_sizes: list[int],
    stack: contextlib.ExitStack,
) -> list[Variant]:
    """The plain loader and ours in its two orders, as rank 0 of each number of ranks."""
    found = []
    for size in world_sizes:
        comm = train_gpt.Comm(0, size)
        found.append(
            Variant(f"plain, rank 0 of {size}", functools.partial(PlainLoader, hp, comm), stack)
        )
        here = dataclasses.replace(runtime, comm=comm)
        for name, seed in {"sequential": 0, "shuffled": 1}.items():
            make = functools.partial(
                train_gpt.TrainingLoader, dataclasses.replace(hp, shuffle_seed=seed), here
            )
            found.append(Variant(f"ours, {name}, rank 0 of {size}", make, stack))
    return found


def report(
    found: list[Variant], hp: train_gpt.Hyperparameters, borders: set[int], warm: int
) -> None:
    """Print the table. `borders` are the steps that reach into another shard; the first `warm`
    steps do not count."""
    print(
        f"{'':30}{'Mtok/s':>9}{'median ms':>11}{'slowest ms':>12}{'ratio':>7}{'at a border':>13}{'ratio':>7}"
    )
    rows = []
    for variant in found:
        size = int(variant.name.split()[-1])
        waits = variant.waits[warm:]
        median, slowest = statistics.median(waits), max(waits)
        border = max(
            (wait for step, wait in enumerate(variant.waits) if step >= warm and step in borders),
            default=0.0,
        )
        rate = hp.train_batch_tokens / size * len(waits) / sum(waits) / 1e6
        print(
            f"{variant.name:30}{rate:9.1f}{1000 * median:11.3f}{1000 * slowest:12.3f}{slowest / median:7.1f}"
            f"{1000 * border:13.3f}{border / median:7.1f}"
        )
        row = {
            "loader": variant.name,
            "million_tokens_per_second": round(rate, 2),
            "median_ms": round(1000 * median, 4),
            "slowest_ms": round(1000 * slowest, 4),
            "slowest_at_border_ms": round(1000 * border, 4),
        }
        rows.append(row)
    print(
        json.dumps(
            {
                "bench": "loader",
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
                "rows": rows,
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", nargs="+", type=positive, default=[1, 8], help="numbers of ranks (default: 1 8)"
    )
    parser.add_argument("--passes", type=positive, default=3, help="timed passes over the data")
    parser.add_argument("--work-ms", type=float, default=0.0, help="pause between two batches")
    parser.add_argument("--shards", type=positive, default=6)
    parser.add_argument("--shard-tokens", type=positive, default=10_000_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        environment = dict(os.environ)
        if "DATA_PATH" not in environment:
            write_shards(Path(folder), arguments.shards, arguments.shard_tokens)
            environment["DATA_PATH"] = folder
        hp = train_gpt.Hyperparameters.from_env(environment)
        runtime = stack.enter_context(train_gpt.Runtime.start(hp))
        stream = train_gpt.TokenStream(hp.data_path, "train", hp.vocab_size)
        steps = max(1, len(stream) // hp.train_batch_tokens)
        turns = range(0, (arguments.passes + 1) * len(stream), len(stream))
        ends = [turn + int(end) for turn in turns for end in stream.ends]
        borders = {end // hp.train_batch_tokens + after for end in ends for after in (0, 1)}
        found = variants(hp, runtime, arguments.ranks, stack)
        for _ in range(arguments.passes + 1):
            for variant in found:
                variant.run(steps, arguments.work_ms / 1000)
        tokens = hp.train_batch_tokens
        print(
            f"torch {torch.__version__} {runtime.describe()} shards:{len(stream.paths)} tokens per step:{tokens}"
        )
        report(found, hp, borders, warm=steps)


if __name__ == "__main__":
    train_gpt.run_program(main)

#!/usr/bin/env python3
"""Time one training step and its parts: eager and compiled, with several micro-batch sizes.

    python bench/step.py                       # a small model on a CPU; on a GPU one of 8 ranks of the record
    python bench/step.py --micro 2048 16384 --modes compiled --rounds 9
    TRAIN_BATCH_TOKENS=8192 TRAIN_SEQ_LEN=1024 python bench/step.py --record --of 8 --micro 8192

The model is that of the environment's knobs; tokens are random, which costs what real ones cost. With --of W this
process owns the rows of one of W ranks and does its part of the optimizer's work, without collectives
(bench/scaling.py models them). The variants take turns within a round, so a slowdown of the machine affects all of
them. Prints medians in milliseconds; `ratio` is the median over rounds of the first row's forward and backward over
this row's. The last line is JSON.
"""

import argparse
import collections
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt
from common import SMALL, run
from flops import flops_per_token, peak_flops

RECORD_RANK = {"TRAIN_BATCH_TOKENS": "98304"}  # one of 8 ranks of the record run
PARTS = ("forward", "backward", "communication", "clip", "Newton-Schulz", "small parameters", "average")
TITLES = ("forward", "backward", "comm.", "clip", "NS", "small", "average")


class OneOf(train_gpt.Ranks):
    """The first of W ranks without its peers: a collective moves only this rank's part."""

    def _start(self, collective, out: torch.Tensor, source: torch.Tensor | None = None) -> Callable[[], None]:
        if source is not None and out.numel() < source.numel():
            out.copy_(source[: out.size(0)])  # reduce-scatter; in an all-gather the own rows are in place already
        return lambda: None


class Variant:
    """A model and its optimizer, in `mode` eager or compiled, with `micro` tokens per forward."""

    def __init__(
        self,
        mode: str,
        micro: int,
        hp: train_gpt.Hyperparameters,
        runtime: train_gpt.Runtime,
        batch: torch.Tensor,
        ranks: int,
    ):
        self.mode, self.micro, self.runtime = mode, micro, runtime
        self.parts = batch.split(max(1, micro // hp.train_seq_len))
        compiled = mode == "compiled"
        self.model = train_gpt.GPT(hp, runtime.attend, runtime.dtype)
        weights = self.model.initialise(hp.seed)
        self.forward = train_gpt.compile_whole(self.model.to(runtime.device), compiled)
        self.optimizers = train_gpt.Optimizers(self.model, weights, hp, OneOf(0, ranks), len(self.parts), compiled)
        self.average = train_gpt.WeightAverage(self.optimizers.owned(), hp)

    def mark(self, part: str) -> None:
        """Add the time since the last call to the previous part and begin this one."""
        self.runtime.synchronize()
        now = 1000 * time.perf_counter()
        self.spent[self.part] += now - self.since
        self.part, self.since = part, now

    def step(self) -> dict[str, float]:
        """Milliseconds of the parts of one step."""
        self.spent: collections.Counter = collections.Counter()
        self.part, self.since = "", 1000 * time.perf_counter()
        for ids in self.parts:
            self.mark("forward")
            loss = self.forward(ids[:, :-1], ids[:, 1:]) / len(self.parts)
            self.mark("backward")
            loss.backward()
            self.optimizers.accumulate()
        self.optimizers.step(1.0, 0.9, self.mark)
        self.mark("average")
        self.average.update(0, 1.0)
        self.mark("communication")
        self.optimizers.finish()
        self.mark("")
        return self.spent


def report(
    variants: list[Variant], times: list[list[dict[str, float]]], hp: train_gpt.Hyperparameters, peak: float | None
) -> None:
    """Print the table. `times` has a row per round and a column per variant."""
    titles = (*TITLES, "fwd+bwd", "step", "ktok/s", "GFLOP/s", "ratio")
    print(f"{'mode':9}{'micro':>8}" + "".join(f"{title:>10}" for title in titles))
    flops = flops_per_token(hp, hp.train_seq_len)
    passes = [[spent["forward"] + spent["backward"] for spent in row] for row in times]
    rows = []
    for column, variant in enumerate(variants):
        own = [row[column] for row in times]
        medians = {part: statistics.median(spent[part] for spent in own) for part in PARTS}
        medians["fwd+bwd"] = statistics.median(row[column] for row in passes)
        medians["step"] = statistics.median(sum(spent.values()) for spent in own)
        medians["ktok/s"] = hp.train_batch_tokens / medians["step"]
        medians["GFLOP/s"] = medians["ktok/s"] * flops / 1e6
        medians["ratio"] = statistics.median(row[0] / row[column] for row in passes)
        mfu = f"  mfu {1e9 * medians['GFLOP/s'] / peak:.3f}" if peak else ""
        print(f"{variant.mode:9}{variant.micro:8}" + "".join(f"{value:10.2f}" for value in medians.values()) + mfu)
        rows.append({"mode": variant.mode, "micro": variant.micro, **{k: round(v, 3) for k, v in medians.items()}})
    print(json.dumps({"bench": "step", "torch": torch.__version__, "rounds": len(times), "rows": rows}))


def main() -> None:
    gpu = torch.cuda.is_available()
    micro = [98304] if gpu else [2048, 4096, 8192, 16384]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--micro", nargs="+", type=int, default=micro, help="tokens per forward")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true", default=gpu, help="the record's model, also on a CPU")
    parser.add_argument("--of", type=int, default=8 if gpu else 1, help="do the optimizer's work of one of W ranks")
    arguments = parser.parse_args()
    base = RECORD_RANK if arguments.record else SMALL
    hp = train_gpt.Hyperparameters.from_env({**base, **os.environ})
    with train_gpt.Runtime.start(hp) as runtime:
        rows = hp.train_batch_tokens // hp.train_seq_len
        batch = torch.randint(hp.vocab_size, (rows, hp.train_seq_len + 1), device=runtime.device)
        variants = [
            Variant(mode, micro, hp, runtime, batch, arguments.of)
            for mode in arguments.modes
            for micro in arguments.micro
        ]
        for variant in variants:
            print(f"preparing {variant.mode} with {variant.micro} tokens per forward", file=sys.stderr, flush=True)
            variant.step()
            variant.step()
        times = [[variant.step() for variant in variants] for _ in range(arguments.rounds)]
        print(
            f"torch {torch.__version__} {runtime.describe()} one of {arguments.of} ranks, "
            f"{hp.train_batch_tokens} tokens, {flops_per_token(hp, hp.train_seq_len) / 1e6:.2f} MFLOP per token, "
            f"rounds:{arguments.rounds}"
        )
        report(variants, times, hp, peak_flops(runtime.device))


if __name__ == "__main__":
    run(main)

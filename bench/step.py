#!/usr/bin/env python3
"""Time one training step and its parts: eager and compiled, with several micro-batches, in one process, turn by turn.

    python bench/step.py                                  # a CPU-sized model on a CPU; on a GPU what one of 8 ranks does
    python bench/step.py --micro 2048 16384 --modes compiled --rounds 9
    TRAIN_BATCH_TOKENS=8192 TRAIN_SEQ_LEN=1024 python bench/step.py --record --of 8 --micro 8192

Prints a table of medians in milliseconds and, last, one JSON line. The model is that of the environment's knobs
(NUM_LAYERS, MODEL_DIM, ...); tokens are random, which costs what real ones cost. With --of W this process owns the rows
that one of W ranks owns and does its part of the optimizer's work; collectives are left out (bench/scaling.py models
them). All variants take turns within a round, so that a machine that slows down slows all of them.
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

CPU_MODEL = {
    "NUM_LAYERS": "6", "MODEL_DIM": "256", "NUM_HEADS": "4", "NUM_KV_HEADS": "2", "TRAIN_SEQ_LEN": "512", "EVAL_SEQ_LEN": "512",
    "TRAIN_BATCH_TOKENS": "16384",
}  # fmt: skip
RECORD_RANK = {"TRAIN_BATCH_TOKENS": "98304"}  # what one of 8 ranks computes in the record run
PARTS = ("forward", "backward", "communication", "clip", "Newton-Schulz", "small parameters", "average")


class OneOf(train_gpt.Ranks):
    """The first of W ranks, whose peers are only imagined: a collective moves this rank's own part."""

    def _start(self, collective, out: torch.Tensor, source: torch.Tensor | None = None) -> Callable[[], None]:
        if source is not None and out.numel() < source.numel():
            out.copy_(source[: out.size(0)])  # reduce-scatter; a gather has its own rows in place already
        return lambda: None


class Variant:
    """One way to compute a step: `mode` eager or compiled, and so many tokens a forward."""

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
        self.model = train_gpt.GPT(hp, runtime.attend, runtime.dtype)
        weights, compiled = self.model.initialise(hp.seed), mode == "compiled"
        self.forward = train_gpt.compile_whole(self.model.to(runtime.device), compiled)
        self.optimizers = train_gpt.Optimizers(self.model, weights, hp, OneOf(0, ranks), len(self.parts), compiled)
        self.average = train_gpt.WeightAverage(self.optimizers.owned(), hp)

    def mark(self, part: str) -> None:
        """Time up to now belonged to the part before, from now on to this one."""
        self.runtime.synchronize()
        now = 1000 * time.perf_counter()
        self.spent[self.part] += now - self.since
        self.part, self.since = part, now

    def step(self) -> dict[str, float]:
        """Milliseconds of the parts of one step."""
        self.spent, self.part, self.since = collections.Counter(), "", 1000 * time.perf_counter()
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument(
        "--micro", nargs="+", type=int, default=[98304] if gpu else [2048, 4096, 8192, 16384], help="tokens a forward"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true", default=gpu, help="the record's model also on a CPU")
    parser.add_argument(
        "--of", type=int, default=8 if gpu else 1, help="do the optimizer's work of one of so many ranks"
    )
    arguments = parser.parse_args()
    hp = train_gpt.Hyperparameters.from_env({**(RECORD_RANK if arguments.record else CPU_MODEL), **os.environ})
    with train_gpt.Runtime.start(hp) as runtime:
        rows = hp.train_batch_tokens // hp.train_seq_len
        batch = torch.randint(hp.vocab_size, (rows, hp.train_seq_len + 1), device=runtime.device)
        variants = [
            Variant(mode, micro, hp, runtime, batch, arguments.of)
            for mode in arguments.modes
            for micro in arguments.micro
        ]
        for variant in variants:
            print(f"preparing {variant.mode} with {variant.micro} tokens a forward", file=sys.stderr, flush=True)
            variant.step()
            variant.step()
        times = [[variant.step() for variant in variants] for _ in range(arguments.rounds)]
        flops = train_gpt.flops_per_token(hp, hp.train_seq_len)
        print(f"torch {torch.__version__} {runtime.describe()} one of {arguments.of} ranks, {hp.train_batch_tokens} tokens, "
              f"{flops / 1e6:.2f} MFLOP a token, rounds:{arguments.rounds}")  # fmt: skip
        report(variants, times, hp, train_gpt.peak_flops(runtime.device))


def report(
    variants: list[Variant], times: list[list[dict[str, float]]], hp: train_gpt.Hyperparameters, peak: float | None
) -> None:
    """The table, in which `ratio` is the median over rounds of the first row's forward and backward over this row's."""
    names = (
        "forward",
        "backward",
        "comm.",
        "clip",
        "NS",
        "small",
        "average",
        "fwd+bwd",
        "step",
        "ktok/s",
        "GFLOP/s",
        "ratio",
    )
    print(f"{'mode':9}{'micro':>8}" + "".join(f"{name:>10}" for name in names))
    table = []
    for column, variant in enumerate(variants):
        own, first = [row[column] for row in times], [row[0] for row in times]
        medians = {part: statistics.median(t[part] for t in own) for part in PARTS}
        medians["fwd+bwd"] = statistics.median(t["forward"] + t["backward"] for t in own)
        medians["step"] = statistics.median(sum(t.values()) for t in own)
        medians["ktok/s"] = hp.train_batch_tokens / medians["step"]
        medians["GFLOP/s"] = medians["ktok/s"] * train_gpt.flops_per_token(hp, hp.train_seq_len) / 1e6
        passes = [(a["forward"] + a["backward"], b["forward"] + b["backward"]) for a, b in zip(first, own, strict=True)]
        medians["ratio"] = statistics.median(a / b for a, b in passes)
        print(f"{variant.mode:9}{variant.micro:8}" + "".join(f"{value:10.2f}" for value in medians.values()), end="")
        print(f"  mfu {1e9 * medians['GFLOP/s'] / peak:.3f}" if peak else "")
        table.append({"mode": variant.mode, "micro": variant.micro, **{k: round(v, 3) for k, v in medians.items()}})
    print(json.dumps({"bench": "step", "torch": torch.__version__, "rounds": len(times), "rows": table}))


if __name__ == "__main__":
    main()

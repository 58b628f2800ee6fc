#!/usr/bin/env python3
"""Time one training step: eager and compiled, with several micro-batches, in one process, turn by turn.

    python bench/step.py                                  # a CPU-sized model on a CPU, the record's on a GPU
    python bench/step.py --micro 2048 16384 --modes compiled --rounds 9

Prints a table of medians in milliseconds and, last, one JSON line. The model is that of the environment's knobs
(NUM_LAYERS, MODEL_DIM, ...); tokens are random, which costs what real ones cost. All variants share weights and take
turns within a round, so that a machine that slows down slows all of them.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt

CPU_MODEL = {
    "NUM_LAYERS": "6", "MODEL_DIM": "256", "NUM_HEADS": "4", "NUM_KV_HEADS": "2", "TRAIN_SEQ_LEN": "512", "EVAL_SEQ_LEN": "512",
    "TRAIN_BATCH_TOKENS": "16384",
}  # fmt: skip
GPU_MODEL = {"TRAIN_BATCH_TOKENS": "98304"}  # what one of 8 ranks computes in the record run


class Variant:
    """One way to compute a step: `mode` eager or compiled, and so many tokens a forward."""

    def __init__(self, mode: str, micro: int, hp: train_gpt.Hyperparameters, runtime: train_gpt.Runtime, batch: torch.Tensor):
        self.mode, self.micro, self.runtime = mode, micro, runtime
        self.model = train_gpt.GPT(hp, runtime.attend, runtime.dtype).initialise(hp.seed).to(runtime.device)
        self.forward = torch.compile(self.model, dynamic=False, fullgraph=True) if mode == "compiled" else self.model
        self.optimizers = train_gpt.Optimizers(self.model, hp, runtime.ranks)
        self.average = train_gpt.WeightAverage(self.model, hp)
        self.parts = batch.split(max(1, micro // hp.train_seq_len))

    def now(self) -> float:
        self.runtime.synchronize()
        return 1000 * time.perf_counter()

    def step(self) -> dict[str, float]:
        """Milliseconds of the parts of one step."""
        spent = {"forward": 0.0, "backward": 0.0}
        for ids in self.parts:
            begin = self.now()
            loss = self.forward(ids[:, :-1], ids[:, 1:]) / len(self.parts)
            middle = self.now()
            loss.backward()
            spent["forward"] += middle - begin
            spent["backward"] += self.now() - middle
        begin = self.now()
        self.optimizers.step(1.0, 0.9)
        middle = self.now()
        self.average.update(0, 1.0)
        spent |= {"optimizer": middle - begin, "average": self.now() - middle}
        return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--micro", nargs="+", type=int, default=[98304] if gpu else [2048, 4096, 8192, 16384], help="tokens a forward")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    hp = train_gpt.Hyperparameters.from_env({**(GPU_MODEL if gpu else CPU_MODEL), **os.environ})
    with train_gpt.Runtime.start(hp) as runtime:
        rows = hp.train_batch_tokens // hp.train_seq_len
        batch = torch.randint(hp.vocab_size, (rows, hp.train_seq_len + 1), device=runtime.device)
        variants = [Variant(mode, micro, hp, runtime, batch) for mode in arguments.modes for micro in arguments.micro]
        for variant in variants:
            print(f"preparing {variant.mode} with {variant.micro} tokens a forward", file=sys.stderr, flush=True)
            variant.step()
            variant.step()
        times = [[variant.step() for variant in variants] for _ in range(arguments.rounds)]
        print(f"torch {torch.__version__} {runtime.describe()} tokens a step:{hp.train_batch_tokens} rounds:{arguments.rounds}")
    report(variants, times, hp)


def report(variants: list[Variant], times: list[list[dict[str, float]]], hp: train_gpt.Hyperparameters) -> None:
    """The table, in which `ratio` is the median over rounds of the first row's forward and backward over this row's."""
    parts = ("forward", "backward", "optimizer", "average")
    print(f"{'mode':9}{'micro':>8}" + "".join(f"{part:>11}" for part in (*parts, "fwd+bwd", "step", "ktok/s", "ratio")))
    table = []
    for column, variant in enumerate(variants):
        own, first = [row[column] for row in times], [row[0] for row in times]
        medians = {part: statistics.median(t[part] for t in own) for part in parts}
        medians["fwd+bwd"] = statistics.median(t["forward"] + t["backward"] for t in own)
        medians["step"] = statistics.median(sum(t.values()) for t in own)
        medians["ktok/s"] = hp.train_batch_tokens / medians["step"]
        passes = [(a["forward"] + a["backward"], b["forward"] + b["backward"]) for a, b in zip(first, own, strict=True)]
        medians["ratio"] = statistics.median(a / b for a, b in passes)
        print(f"{variant.mode:9}{variant.micro:8}" + "".join(f"{value:11.2f}" for value in medians.values()))
        table.append({"mode": variant.mode, "micro": variant.micro, **{k: round(v, 3) for k, v in medians.items()}})
    print(json.dumps({"bench": "step", "torch": torch.__version__, "rounds": len(times), "rows": table}))


if __name__ == "__main__":
    main()

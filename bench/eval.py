#!/usr/bin/env python3
"""Time the sliding evaluation: ours against the published way, on the same model and tokens, turn by turn.

    python bench/eval.py                       # a CPU-sized model on a CPU; the record's on a GPU
    python bench/eval.py --windows 256 --rounds 5

The published way takes the windows in a Python loop, copies each to the device, sends every position through every layer
and the head, and sums the last positions of each window one by one. Ours gathers windows from the tokens on the device
and computes the last layer and the head where they are scored. Both are compiled if the machine compiles. Prints medians
of milliseconds, tokens scored a second, FLOPs and, where the device's peak is known, the share of it; last a JSON line.
Weights are random, which costs what trained ones cost; the losses of both ways are compared.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt

CPU_MODEL = {"NUM_LAYERS": "6", "MODEL_DIM": "256", "NUM_HEADS": "4", "NUM_KV_HEADS": "2", "EVAL_SEQ_LEN": "512", "TRAIN_SEQ_LEN": "512",
             "TRAIN_BATCH_TOKENS": "16384"}  # fmt: skip


def published(forward, val, hp, runtime) -> float:
    """Mean nats a target, with a batch of windows as large as ours."""
    window, stride, device = hp.eval_seq_len, hp.eval_stride, runtime.device
    starts = [0, *range(stride, val.targets - window + 1, stride)]
    tokens, rows, total, count = val.tokens.cpu(), train_gpt.eval_rows(hp, runtime, window), 0.0, 0
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


def forward_flops(hp, positions: int, scored: int) -> float:
    """Floating-point operations of a window of `positions` of which the last layer and the head serve `scored`."""
    layer = sum(math.prod(train_gpt.matrix_shape(kind, hp)) for kind in train_gpt.MATRICES)
    keys = sum(math.prod(train_gpt.matrix_shape(kind, hp)) for kind in train_gpt.MATRICES if kind.name in "kv")
    bigram = hp.model_dim * hp.bigram_dim if hp.bigram_vocab_size else 0
    causal = hp.model_dim * positions * (positions + 1)  # of one layer
    last = hp.model_dim * (positions * (positions + 1) - (positions - scored) * (positions - scored + 1))
    whole = positions * ((hp.num_layers - 1) * layer + keys + bigram) + scored * (
        layer - keys + hp.vocab_size * hp.model_dim
    )
    return 2 * (whole + (hp.num_layers - 1) * causal + last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=0, help="so many windows (default: 8 batches)")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    gpu = torch.cuda.is_available()
    hp = train_gpt.Hyperparameters.from_env({**({} if gpu else CPU_MODEL), **os.environ})
    with train_gpt.Runtime.start(hp) as runtime:
        window, stride = hp.eval_seq_len, hp.eval_stride
        windows = arguments.windows or 8 * train_gpt.eval_rows(hp, runtime, window)
        targets = window + (windows - 1) * stride
        tokens = torch.randint(2, hp.vocab_size, (targets + 1,), dtype=torch.int32, device=runtime.device)
        val = SimpleNamespace(tokens=tokens, targets=targets, nbytes=torch.ones(targets, dtype=torch.int16, device=runtime.device),
                              total_bytes=targets, spans=lambda documents: train_gpt.np.array([[0, targets]]))  # fmt: skip
        model = train_gpt.GPT(hp, runtime.attend, runtime.dtype)
        model.initialise(0)
        forward = train_gpt.compile_whole(model.to(runtime.device), runtime.compiled)

        def through_all(ids: torch.Tensor, targets: torch.Tensor, tail: int = 0, **rest) -> torch.Tensor:
            """Our evaluator without the short way: every position through the last layer and the head."""
            return forward(ids, torch.cat((ids[:, 1:], targets[:, -1:]), dim=1), **rest)[:, -tail:]

        ways = {
            "published": lambda: published(forward, val, hp, runtime),
            "whole windows": lambda: train_gpt.evaluate(through_all, val, hp, runtime, stride).nats,
            "ours": lambda: train_gpt.evaluate(forward, val, hp, runtime, stride).nats,
        }
        report(ways, hp, runtime, windows, targets, arguments.rounds)


def report(ways, hp, runtime, windows: int, targets: int, rounds: int) -> None:
    """Warm up, take turns, print."""
    times, nats = {name: [] for name in ways}, {}
    for turn in range(rounds + 1):  # the first one compiles
        for name, way in ways.items():
            runtime.synchronize()
            began = time.perf_counter()
            nats[name] = way()
            runtime.synchronize()
            if turn:
                times[name].append(time.perf_counter() - began)
    peak, rows = train_gpt.peak_flops(runtime.device), []
    print(f"torch {torch.__version__} {runtime.describe()}")
    print(f"window:{hp.eval_seq_len} stride:{hp.eval_stride} windows:{windows} targets:{targets} rounds:{rounds}")
    print(f"{'way':16}{'ms':>10}{'scored/s':>11}{'TFLOP':>9}{'GFLOP/s':>10}{'speed':>8}{'nats':>11}")
    for name in ways:
        seconds = statistics.median(times[name])
        scored = hp.eval_stride if name == "ours" else hp.eval_seq_len
        flops = forward_flops(hp, hp.eval_seq_len, hp.eval_seq_len) + (windows - 1) * forward_flops(
            hp, hp.eval_seq_len, scored
        )
        speed = statistics.median(a / b for a, b in zip(times["published"], times[name], strict=True))
        print(f"{name:16}{1000 * seconds:10.1f}{targets / seconds:11.0f}{flops / 1e12:9.3f}{flops / seconds / 1e9:10.0f}{speed:8.3f}"
              f"{nats[name]:11.6f}" + (f"  share of peak {flops / seconds / peak:.3f}" if peak else ""))  # fmt: skip
        rows.append({"way": name, "ms": 1000 * seconds, "flops": flops, "speed": speed, "nats": nats[name]})
    print(json.dumps({"bench": "eval", "torch": torch.__version__, "windows": windows, "rounds": rounds, "rows": rows}))


if __name__ == "__main__":
    main()

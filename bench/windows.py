#!/usr/bin/env python3
"""Bits per byte of an artifact against the length of the evaluation window and against the stride, as a plot and JSON.

    DATA_PATH=... TOKENIZER_PATH=... python bench/windows.py final_model.int6.xz --plot windows.png

Lengths beyond the training length are what rotary embeddings without rescaling make of them. Windows of the length curve
lie side by side; the stride curve uses the artifact's own window.
"""

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt


def measure(path: str, lengths: list[int], strides: list[int]) -> list[dict]:
    """A row for each window and stride, on the validation text of DATA_PATH."""
    blob = train_gpt.read_artifact(path)
    hp = train_gpt.artifact_hyperparameters(path, blob, dict(os.environ))
    own, rows = hp.eval_seq_len, []
    tries = [("length", length, length) for length in lengths] + [
        ("stride", own, stride) for stride in strides if stride <= own
    ]
    print(f"{'window':>8}{'stride':>8}{'bpb':>10}{'nats':>10}{'seconds':>9}")
    with train_gpt.Runtime.start(hp) as runtime:
        for curve, window, stride in tries:
            changed = dataclasses.replace(hp, eval_seq_len=window, eval_stride=stride)
            val = train_gpt.Validation(changed, runtime.device)
            model = train_gpt.GPT(changed, runtime.attend, runtime.dtype)
            with train_gpt.reading_artifact(path):
                train_gpt.load_artifact(blob, model)
            score = train_gpt.evaluate(model.to(runtime.device), val, changed, runtime, stride)
            rows.append(
                {
                    "curve": curve,
                    "window": window,
                    "stride": stride,
                    "bpb": score.bits_per_byte,
                    "seconds": score.seconds,
                }
            )
            print(f"{window:8}{stride:8}{score.bits_per_byte:10.4f}{score.nats:10.4f}{score.seconds:9.1f}", flush=True)
    return rows


def draw(rows: list[dict], path: str) -> None:
    """Two panels: length, stride."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    labels = {
        "length": ("window", "EVAL_SEQ_LEN, tokens (windows side by side)"),
        "stride": ("stride", "EVAL_STRIDE, tokens"),
    }
    for axes, (curve, (key, label)) in zip(panels, labels.items(), strict=True):
        points = sorted((row[key], row["bpb"]) for row in rows if row["curve"] == curve)
        axes.plot(*zip(*points, strict=True), marker="o")
        axes.set_xscale("log", base=2)
        axes.set_xticks([x for x, _ in points], [str(x) for x, _ in points])
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("bits per byte")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact")
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--strides", nargs="+", type=int, default=[512, 256, 128, 64])
    parser.add_argument("--plot", help="draw the curves to this file")
    arguments = parser.parse_args()
    try:
        rows = measure(arguments.artifact, arguments.lengths, arguments.strides)
    except train_gpt.UserError as error:
        sys.exit(f"error: {error}")
    if arguments.plot:
        draw(rows, arguments.plot)
    print(json.dumps({"bench": "windows", "artifact": arguments.artifact, "rows": rows}))


if __name__ == "__main__":
    main()

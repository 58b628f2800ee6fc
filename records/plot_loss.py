#!/usr/bin/env python3
"""Draw training loss and validation bits per byte of one or more runs, against steps and against seconds.

    python records/plot_loss.py logs/a.jsonl logs/b.jsonl -o loss.png
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read_run(path: Path) -> dict[str, list[tuple[int, float, float]]]:
    """{"train": [(step, seconds, loss)], "val": [(step, seconds, bpb)]} of a log of JSON lines. Exits with a sentence if it has none."""
    try:
        events = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        sys.exit(f"error: cannot read {path}: {error}; give a logs/<RUN_ID>.jsonl of train_gpt.py")
    run = {
        "train": [(e["step"], e["train_seconds"], e["train_loss"]) for e in events if e.get("event") == "train"],
        "val": [(e["step"], e["train_seconds"], e["val_bpb"]) for e in events if e.get("event") == "val"],
    }
    if not run["train"]:
        sys.exit(f"error: {path} has no training step in it; give a logs/<RUN_ID>.jsonl of train_gpt.py")
    return run


def draw(runs: dict[str, dict], output: Path) -> None:
    """One PNG: loss above, bits per byte below; steps on the left, seconds on the right."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), sharex="col", sharey="row", layout="constrained")
    for name, run in runs.items():
        for row, kind in enumerate(("train", "val")):
            for column in (0, 1):
                points = run[kind]
                x, y, marker = [p[column] for p in points], [p[2] for p in points], "o" if kind == "val" else ""
                axes[row][column].plot(x, y, marker=marker, ms=4, lw=1.5, label=name)
    axes[0][0].set_ylabel("training loss (nats a token)")
    axes[1][0].set_ylabel("validation (bits per byte)")
    axes[1][0].set_xlabel("step")
    axes[1][1].set_xlabel("training time (s)")
    axes[0][1].legend(title="run")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    figure.savefig(output, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("loss.png"))
    arguments = parser.parse_args()
    draw({path.stem: read_run(path) for path in arguments.logs}, arguments.output)
    print(f"drawn: {arguments.output}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What rounding costs: bits per byte against artifact bytes, for plain rounding, GPTQ and the published rule.

    python bench/quantisation.py                          # trains the small model of the README, some minutes on a CPU
    python bench/quantisation.py --sizes 1 0.85 0.7 --plot bench/quantisation.png

Trains once (the model of the environment's knobs), then exports the same averaged weights in each way, as large as
TARGET_BYTES would let them be, loads what it has written and scores it with windows side by side. Sizes are parts of
the bytes that GPTQ takes with the steps of the tables. Prints a table and, last, one JSON line.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt

SMALL = {
    "NUM_LAYERS": "6", "MODEL_DIM": "256", "NUM_HEADS": "4", "NUM_KV_HEADS": "2", "TRAIN_SEQ_LEN": "512", "EVAL_SEQ_LEN": "512",
    "TRAIN_BATCH_TOKENS": "16384", "EMA_DECAY": "0.97", "LATE_QAT": "0", "MUON_MOMENTUM": "0.95", "MUON_MOMENTUM_WARMUP_START": "0.85",
    "MUON_MOMENTUM_WARMUP_STEPS": "50", "ITERATIONS": "200", "WARMDOWN_ITERS": "80", "MAX_WALLCLOCK_SECONDS": "0", "VAL_LOSS_EVERY": "0",
    "WARMUP_STEPS": "1", "MLP_SLOPE": "0", "SKIP_GATES": "0", "MUON_EQ": "0", "SHORT_SEQ_PARTS": "1", "SHUFFLE_SEED": "0",
}  # fmt: skip
WAYS = {"rounded": "o", "GPTQ": "s", "published": "^"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", nargs="+", type=float, default=[1.0, 0.85, 0.7, 0.55], help="parts of the bytes at the tables' steps"
    )
    parser.add_argument("--plot", help="draw the curves to this file")
    arguments = parser.parse_args()
    hp = train_gpt.Hyperparameters.from_env({**SMALL, **os.environ})
    try:
        with train_gpt.Runtime.start(hp) as runtime:
            rows = measure(hp, runtime, arguments.sizes)
    except train_gpt.UserError as error:
        sys.exit(f"error: {error}")
    if arguments.plot:
        draw(rows, arguments.plot)
    print(json.dumps({"bench": "quantisation", "rows": rows}))


def measure(hp: train_gpt.Hyperparameters, runtime: train_gpt.Runtime, sizes: list[float]) -> list[dict]:
    """Train, then a row for each way and size."""
    log, val = train_gpt.Log(hp, runtime.ranks), train_gpt.Validation(hp, runtime.device)
    run = train_gpt.Training(hp, runtime, log, val)
    run.warm_up()
    run.train()
    averaged, moments = run.finish()
    run.loader.close()
    weights = run.optimizers.weights()

    def score() -> train_gpt.Score:
        return train_gpt.evaluate(run.forward, val, hp, runtime, hp.eval_seq_len)

    before = score()
    print(f"torch {train_gpt.torch.__version__} {runtime.describe()} {averaged}, {val.targets} validation tokens")
    print(f"{'way':12}{'bytes':>11}{'bpb':>10}{'lost':>10}{'steps x':>9}{'seconds':>9}")
    print(f"{'before':12}{'':11}{before.bits_per_byte:10.4f}", flush=True)
    full = len(train_gpt.pack_artifact(weights, hp, moments))
    tries = [(way, size) for size in sizes for way in ("rounded", "GPTQ")] + [("published", 1.0)]
    rows = [{"way": "before", "bpb": before.bits_per_byte}]
    for way, size in tries:
        began = time.perf_counter()
        changed = dataclasses.replace(hp, row_range="published", compressor="lzma") if way == "published" else hp
        room = math.inf if way == "published" else full * size
        blob = train_gpt.fit_artifact(weights, changed, moments if way == "GPTQ" else {}, {}, room, lambda text: None)
        seconds = time.perf_counter() - began
        train_gpt.load_artifact(blob, run.model)
        (entry,) = [entry for entry in train_gpt.open_artifact(blob)[2] if entry.name == "q"]
        steps, bpb = (entry.clip or math.nan) / train_gpt.MATRICES[0].clip, score().bits_per_byte
        lost = bpb - before.bits_per_byte
        rows.append(
            {"way": way, "bytes": len(blob), "bpb": bpb, "lost": lost, "steps": steps, "seconds": round(seconds, 1)}
        )
        print(f"{way:12}{len(blob):11}{bpb:10.4f}{lost:+10.4f}{steps:9.3f}{seconds:9.1f}", flush=True)
    return rows


def draw(rows: list[dict], path: str) -> None:
    """Bits per byte lost against megabytes, a curve for each way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for way, marker in WAYS.items():
        own = sorted((row["bytes"] / 1e6, row["lost"]) for row in rows if row["way"] == way)
        axes.plot(*zip(*own, strict=True), marker=marker, label=way)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_xlabel("artifact, MB")
    axes.set_ylabel("bits per byte lost by the export")
    axes.set_title(f"export of one model, {rows[0]['bpb']:.4f} bits per byte before")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()

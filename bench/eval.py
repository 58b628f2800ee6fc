#!/usr/bin/env python3
"""Time the evaluations beside #399's, or score an artifact with several windows and strides.

    python bench/eval.py                       # a small model on a CPU, the record's model on a GPU
    python bench/eval.py --windows 1024 --rounds 3
    DATA_PATH=... TOKENIZER_PATH=... python bench/eval.py --artifact final_model.npz --windows 1024
    ... python bench/eval.py --artifact final_model.npz --lengths 256 512 1024 --strides 256 64 --plot windows.png

The modes are non-overlapping windows, sliding windows by #399's loop, ours, and the banded pass.
#399 takes windows in a Python loop, copies each to the device, sends all positions through the
head, and sums the scored positions window by window. Our sliding windows are gathered from the
tokens on the device, and the head is computed only where they are scored. All are compiled if the
machine compiles, and take turns within a round; the table has medians. All score the same targets,
as many as --windows sliding windows have. Without an artifact, weights and tokens are random, which
cost what real ones cost.

With --lengths the table has the artifact's bits per byte for non-overlapping windows of these
lengths, with --strides for these strides of its own window. Positions beyond the training length
are new to the rotary embeddings.

With --against OTHER_TRAIN_GPT_PY the evaluations of another version of the script and of this one
take turns on one random text. `ratio` is the median over rounds of this one's time over the
other's: below 1, this one is faster.

The last line is JSON.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]

import program
import train_gpt
from common import SMALL, image_file, load_script, report, score_of, take_turns
from flops import peak_flops, window_flops

# isort: split
import numpy as np
import torch


def loop_399(
    forward: Callable, val: SimpleNamespace, hp: train_gpt.Hyperparameters, rows: int
) -> float:
    """Mean nats per target by #399's loop, with `rows` windows per batch."""
    window, stride, device = hp.eval_seq_len, hp.eval_stride, val.tokens.device
    starts = [0, *range(stride, val.targets - window + 1, stride)]
    tokens = val.tokens.cpu()
    total = 0.0
    count = 0
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


def random_text(
    windows: int, hp: train_gpt.Hyperparameters, device: torch.device
) -> SimpleNamespace:
    """Random tokens for this many sliding windows, with the attributes of a Validation."""
    targets = hp.eval_seq_len + (windows - 1) * hp.eval_stride
    return SimpleNamespace(
        tokens=torch.randint(2, hp.vocab_size, (targets + 1,), dtype=torch.int32, device=device),
        targets=targets,
        nbytes=torch.ones(targets, dtype=torch.int16, device=device),
        total_bytes=targets,
        refused=None,
        hints=None,
        # Read by older scripts, which --against can name
        spans=lambda documents=False: np.array([[0, targets]]),
    )


def validation_text(
    windows: int, hp: train_gpt.Hyperparameters, device: torch.device
) -> train_gpt.Validation:
    """The validation text of DATA_PATH, as much as this many sliding windows score."""
    val = train_gpt.read_validation(hp, device)
    val.targets = min(val.targets, hp.eval_seq_len + (windows - 1) * hp.eval_stride)
    val.tokens, val.nbytes = val.tokens[: val.targets + 1], val.nbytes[: val.targets]
    val.total_bytes = int(val.nbytes.sum(dtype=torch.int64))
    val.documents = val.documents[val.documents < val.targets]
    return val


def forward_of(script: ModuleType, hp, runtime, weights: dict | None = None) -> Callable:
    """The forward of a model with these or random weights, compiled if the machine compiles."""
    model = script.GPT(hp, runtime.attend, runtime.dtype, runtime.fused_mlp)
    if weights is None:
        model.initialise(0)
    else:
        model.load_state_dict(weights)
    # Older scripts compile the whole model.
    compile_model = getattr(script, "compile_blocks", script.compile_whole)
    return compile_model(model.to(runtime.device), runtime.compiled)


def modes(windows: int, rounds: int, artifact: str | None) -> None:
    """Time all modes and print the table."""
    environ, weights, text = knobs() | {"EVAL_MODE": "banded"}, None, random_text
    hp = train_gpt.Hyperparameters.from_env(environ)
    if artifact:
        blob, hp = train_gpt.read_artifact(artifact, {**os.environ, "EVAL_MODE": "banded"})
        with train_gpt.reading_artifact(artifact):
            weights, text = train_gpt.load_artifact(blob), validation_text
    with train_gpt.Runtime.start(hp) as runtime:
        rows = train_gpt.eval_rows(hp, runtime, hp.eval_seq_len)
        windows = windows or 8 * rows
        val = text(windows, hp, runtime.device)
        forward = forward_of(train_gpt, hp, runtime, weights)

        def ours(forward: Callable, stride: int) -> Callable[[], float]:
            return lambda: score_of(train_gpt, forward, val, hp, runtime, stride).val_loss

        variants = {
            "plain": ours(forward, hp.eval_seq_len),
            "sliding, #399": lambda: loop_399(forward, val, hp, rows),
            "sliding": ours(forward, hp.eval_stride),
            "banded": ours(forward, 0),
        }
        nats = {name: variant() for name, variant in variants.items()}  # compiles
        times = take_turns(variants, rounds, runtime.synchronize, warm=0)
        print(f"torch {torch.__version__} {runtime.describe()}")
        print(
            f"window:{hp.eval_seq_len} stride:{hp.eval_stride} targets:{val.targets} rounds:{rounds}"
        )
        report_modes(times, nats, hp, val, peak_flops(runtime.device))


def knobs() -> dict[str, str]:
    """The environment; on a CPU, with the small model where it sets nothing else."""
    return {**({} if torch.cuda.is_available() else SMALL), **os.environ}


def compare(other: Path, windows: int, rounds: int) -> None:
    """Time the evaluation of the script at `other` and of this one in turns, on the same text."""
    scripts = {str(other): load_script(other), "this train_gpt.py": train_gpt}
    with contextlib.ExitStack() as stack:
        variants = {}
        hp = train_gpt.Hyperparameters.from_env(knobs())
        here = stack.enter_context(train_gpt.Runtime.start(hp))
        windows = windows or 8 * train_gpt.eval_rows(hp, here, hp.eval_seq_len)
        val = random_text(windows, hp, here.device)
        for name, script in scripts.items():
            own = script.Hyperparameters.from_env(knobs())
            runtime = stack.enter_context(script.Runtime.start(own))
            arguments = forward_of(script, own, runtime), val, own, runtime, own.eval_stride
            variants[name] = functools.partial(score_of, script, *arguments)
        print(f"torch {torch.__version__} {here.describe()}")
        print(
            f"window:{hp.eval_seq_len} stride:{hp.eval_stride} windows:{windows} targets:{val.targets} rounds:{rounds}"
        )
        nats = {name: variant()[0] for name, variant in variants.items()}  # compiles
        rows = report("sliding windows", take_turns(variants, rounds, here.synchronize, warm=0))
    print("  nats: " + ", ".join(f"{value:.9f}" for value in nats.values()))
    rows = [row | {"nats": nats[row["variant"]]} for row in rows]
    print(
        json.dumps(
            {
                "bench": "eval",
                "torch": torch.__version__,
                "windows": windows,
                "rounds": rounds,
                "against": rows,
            }
        )
    )


def operations(mode: str, hp: train_gpt.Hyperparameters, targets: int) -> float:
    """Forward operations of one row of the table."""
    only_read, stride, band = hp.eval_seq_len - hp.eval_stride, hp.eval_stride, 0
    if mode == "plain":
        only_read, stride = 0, hp.eval_seq_len
    elif mode == "banded":
        (only_read, stride), band = train_gpt.band_block(hp), hp.eval_seq_len
    windows = train_gpt.plan_windows(np.array([[0, targets]]), only_read + stride, stride)
    total = 0.0
    for start, scored, stop, *_ in windows.T.tolist():
        first = start if mode == "sliding, #399" else scored  # of the head
        total += window_flops(hp, stop - start, stop - first, band)
    return total


def report_modes(
    times: dict[str, list[float]],
    nats: dict[str, float],
    hp: train_gpt.Hyperparameters,
    val: SimpleNamespace | train_gpt.Validation,
    peak: float | None,
) -> None:
    """Print the table of `modes`. Bits per byte are of no use for random tokens, whose bytes are
    not known."""
    print(
        f"{'mode':20}{'ms':>10}{'targets/s':>11}{'TFLOP':>9}{'GFLOP/s':>10}{'speed':>8}{'nats':>11}{'bpb':>9}"
    )
    rows = []
    for name, own in times.items():
        seconds = statistics.median(own)
        flops = operations(name, hp, val.targets)
        ratio = statistics.median(a / b for a, b in zip(times["sliding, #399"], own, strict=True))
        bpb = nats[name] * val.targets / val.total_bytes / math.log(2)
        share = f"  share of peak {flops / seconds / peak:.3f}" if peak else ""
        print(
            f"{name:20}{1000 * seconds:10.1f}{val.targets / seconds:11.0f}{flops / 1e12:9.3f}"
            f"{flops / seconds / 1e9:10.0f}{ratio:8.3f}{nats[name]:11.6f}{bpb:9.5f}{share}"
        )
        row = {
            "mode": name,
            "ms": 1000 * seconds,
            "flops": flops,
            "speed": ratio,
            "nats": nats[name],
            "bpb": bpb,
        }
        rows.append(row)
    print(
        json.dumps(
            {"bench": "eval", "torch": torch.__version__, "targets": val.targets, "rows": rows}
        )
    )


def curves(path: str, lengths: list[int], strides: list[int]) -> list[dict]:
    """Score the artifact on the validation text of DATA_PATH; one row per window length and per
    stride."""
    blob, hp = train_gpt.read_artifact(path, dict(os.environ))
    own = hp.eval_seq_len
    cases = [("length", length, length) for length in lengths]
    cases += [("stride", own, stride) for stride in strides if stride <= own]
    print(f"{'window':>8}{'stride':>8}{'bpb':>10}{'nats':>10}{'seconds':>9}")
    rows = []
    with train_gpt.Runtime.start(hp) as runtime:
        for curve, window, stride in cases:
            changed = dataclasses.replace(hp, eval_seq_len=window, eval_stride=stride)
            val = train_gpt.read_validation(changed, runtime.device)
            model = train_gpt.GPT(changed, runtime.attend, runtime.dtype, runtime.fused_mlp)
            with train_gpt.reading_artifact(path):
                model.load_state_dict(train_gpt.load_artifact(blob))
            forward = model.to(runtime.device)
            score = score_of(train_gpt, forward, val, changed, runtime, stride)
            bpb, seconds = score.val_bpb, score.eval_seconds
            rows.append(
                {"curve": curve, "window": window, "stride": stride, "bpb": bpb, "seconds": seconds}
            )
            print(
                f"{window:8}{stride:8}{bpb:10.4f}{score.val_loss:10.4f}{seconds:9.1f}", flush=True
            )
    print(json.dumps({"bench": "windows", "artifact": path, "rows": rows}))
    return rows


def draw(rows: list[dict], path: Path) -> None:
    """Plot bits per byte against the length of the window and against the stride."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    panels[0].set(xlabel="EVAL_SEQ_LEN, tokens (no overlap)", ylabel="bits per byte")
    panels[1].set(xlabel="EVAL_STRIDE, tokens")
    for axes, curve, key in zip(panels, ("length", "stride"), ("window", "stride"), strict=True):
        points = sorted((row[key], row["bpb"]) for row in rows if row["curve"] == curve)
        axes.plot(*zip(*points, strict=True), marker="o")
        axes.set_xscale("log", base=2)
        axes.set_xticks([x for x, _ in points], [str(x) for x, _ in points])
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = program.parser(__doc__)
    parser.add_argument(
        "--windows",
        type=program.count,
        default=0,
        help="number of windows to time (default: 8 batches)",
    )
    parser.add_argument("--rounds", type=program.count, default=5)
    parser.add_argument(
        "--against", type=Path, help="another version of train_gpt.py: compare evaluations with it"
    )
    parser.add_argument(
        "--artifact", help="score this artifact on the validation text instead of random tokens"
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=program.count,
        default=[],
        help="score the artifact with these windows",
    )
    parser.add_argument(
        "--strides",
        nargs="+",
        type=program.count,
        default=[],
        help="score the artifact with these strides",
    )
    parser.add_argument("--plot", type=image_file, help="plot these scores to this file")
    arguments = parser.parse_args()
    if arguments.against:
        compare(arguments.against, arguments.windows, arguments.rounds)
        return
    if not arguments.lengths and not arguments.strides:
        modes(arguments.windows, arguments.rounds, arguments.artifact)
        return
    if not arguments.artifact:
        parser.error("--lengths and --strides need --artifact")
    rows = curves(arguments.artifact, arguments.lengths, arguments.strides)
    if arguments.plot:
        draw(rows, arguments.plot)


if __name__ == "__main__":
    program.run_program(main)

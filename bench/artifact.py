#!/usr/bin/env python3
"""Compare coders on the codes of an artifact, or ways to quantise a model.

    python bench/artifact.py final_model.npz
    python bench/artifact.py --quantise                      # trains a small model, some minutes on a CPU
    python bench/artifact.py --quantise --sizes 1 0.85 0.7 --plot bench/quantisation.png

With an artifact the table has bytes, their ratio to the order-0 entropy of the codes (one frequency
table per matrix), and seconds. Every result is decoded and compared. The coders of train_gpt.py
come first, then #399's container (torch.save, then xz -9e), and xz, zstd, and brotli and lrzip
where they are installed, on the codes by rows and by columns.

With --quantise the program trains the model of the environment's knobs once and exports its
averaged weights with plain rounding, with calibration (GPTQ), with a trellis as well, and by #399's
rule. It loads every artifact and scores it with non-overlapping windows. `lost` is the mean of the
scores of w + D and w - D, less the score of w: weights w, errors D. So the part that is linear in
the errors, which is noise, cancels. `expected` is the prediction. Both are bits per byte.
--sizes are fractions of the bytes with the finest steps.

The last line is JSON.
"""

import dataclasses
import functools
import importlib.util
import io
import json
import lzma
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("", "bench", "tools")]

import program
import train_gpt
from common import SMALL, image_file
from inspect_artifact import order0_entropy

# isort: split
import numpy as np
import torch

Codes = dict[str, np.ndarray]  # (L, out, in) int16 by name
# Write: codes -> blobs by name; read: blobs, codes (for their shapes) -> codes
Coder = tuple[Callable, Callable]


def narrow(codes: np.ndarray) -> np.ndarray:
    """The codes in one byte each if they fit, as all but those of the token embedding do."""
    return codes.astype(np.int8) if abs(codes).max() < 128 else codes


def by_tensor(encode: Callable, decode: Callable) -> Coder:
    """A coder of train_gpt.py, which takes one tensor at a time."""

    def write(codes: Codes) -> dict[str, bytes]:
        return {name: encode(matrix) for name, matrix in codes.items()}

    def read(blobs: dict[str, bytes], codes: Codes) -> Codes:
        return {name: decode(blob, codes[name].shape) for name, blob in blobs.items()}

    return write, read


def by_stream(encode: Callable, decode: Callable, columns: bool) -> Coder:
    """A general compressor on all codes as one stream, row by row or column by column."""

    def turned(matrix: np.ndarray) -> np.ndarray:
        return matrix.transpose(0, 2, 1) if columns else matrix

    def write(codes: Codes) -> dict[str, bytes]:
        return {
            "all": encode(b"".join(narrow(turned(matrix)).tobytes() for matrix in codes.values()))
        }

    def read(blobs: dict[str, bytes], codes: Codes) -> Codes:
        raw = decode(blobs["all"])
        found = {}
        for name, matrix in codes.items():
            like = narrow(turned(matrix))
            found[name] = turned(np.frombuffer(raw, like.dtype, like.size).reshape(like.shape))
            raw = raw[like.nbytes :]
        return found

    return write, read


def container_399() -> Coder:
    """torch.save of one integer tensor per matrix, then xz at its highest preset, as in #399."""

    def write(codes: Codes) -> dict[str, bytes]:
        buffer = io.BytesIO()
        matrices = {
            f"{layer}.{name}": matrix
            for name, stack in codes.items()
            for layer, matrix in enumerate(stack)
        }
        torch.save(
            {name: torch.from_numpy(narrow(matrix).copy()) for name, matrix in matrices.items()},
            buffer,
        )
        return {"all": xz(buffer.getvalue())}

    def read(blobs: dict[str, bytes], codes: Codes) -> Codes:
        found = torch.load(io.BytesIO(lzma.decompress(blobs["all"])))
        return {
            name: np.stack([found[f"{layer}.{name}"].numpy() for layer in range(len(stack))])
            for name, stack in codes.items()
        }

    return write, read


def xz(raw: bytes) -> bytes:
    """xz -9e."""
    return lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)


def lrzip(*options: str) -> Callable[[bytes], bytes]:
    """A function that runs the program of that name."""

    def call(raw: bytes) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            source, result = Path(folder, "in"), Path(folder, "out")
            source.write_bytes(raw)
            subprocess.run(
                ["lrzip", "-q", *options, "-o", result, source], check=True, capture_output=True
            )
            return result.read_bytes()

    return call


def coders() -> Iterator[tuple[str, Coder]]:
    """(name, coder) of all that are installed."""
    for name, (encode, decode) in train_gpt.CODERS.items():
        yield name, by_tensor(encode, decode)
    yield "#399", container_399()
    unpack = functools.partial(train_gpt.zstd_unpack, most=1 << 30)
    programs = {"xz -9e": (xz, lzma.decompress), "zstd 22": (train_gpt.zstd_pack, unpack)}
    if importlib.util.find_spec("brotli"):
        import brotli

        programs["brotli 11"] = (
            lambda raw: brotli.compress(raw, quality=11, lgwin=24),
            brotli.decompress,
        )
    if shutil.which("lrzip"):
        programs["lrzip -z"] = (lrzip("-z", "-L", "9"), lrzip("-d"))
    for name, pair in programs.items():
        yield f"{name} rows", by_stream(*pair, columns=False)
        yield f"{name} columns", by_stream(*pair, columns=True)


def measure(coder: Coder, codes: Codes, entropy: float) -> dict:
    """Write, read and compare. Returns one row of the table."""
    write, read = coder
    began = time.perf_counter()
    blobs = write(codes)
    wrote = time.perf_counter()
    found = read(blobs, codes)
    done = time.perf_counter()
    equal = all(np.array_equal(found[name], codes[name]) for name in codes)
    train_gpt.require(equal, "the coder does not restore the codes")
    size = sum(map(len, blobs.values()))
    ratio = round(8 * size / entropy, 4)
    return {
        "bytes": size,
        "ratio": ratio,
        "write_s": round(wrote - began, 2),
        "read_s": round(done - wrote, 2),
    }


def compare_coders(path: str, only: list[str] | None) -> None:
    """Print the table of one artifact."""
    # Whichever tokenizer is installed
    blob, _ = train_gpt.read_artifact(path, {"TOKENIZER_PATH": ""})
    with train_gpt.reading_artifact(path):
        began = time.perf_counter()
        weights = sum(tensor.numel() for tensor in train_gpt.load_artifact(blob).values())
        decoded = time.perf_counter() - began
        header, hp, streams, _ = train_gpt.open_artifact(blob)
        decode = train_gpt.CODERS[header["coder"]][1]
        views = train_gpt.artifact_tensors(train_gpt.meta_parameters(hp))
        codes = {
            name: decode(streams[name], tuple(view.shape)) for kind, name, view in views if kind
        }
    entropy = sum(map(order0_entropy, codes.values()))
    count = sum(matrix.size for matrix in codes.values())
    rest = len(blob) - sum(map(len, streams.values()))
    print(
        f"{path}: {len(blob)} bytes, {weights} weights, {count} of them codes of {entropy / count:.4f} bits, "
        f"{entropy / 8:.0f} bytes; all else {rest} bytes ({100 * rest / len(blob):.2f} %); read in {decoded:.1f} s"
    )
    print(f"{'coder':20}{'bytes':>11}{'/ entropy':>11}{'write s':>9}{'read s':>9}")
    rows = {}
    for name, coder in coders():
        if only is None or name in only:
            rows[name] = measure(coder, codes, entropy)
            print(
                f"{name:20}"
                + "{bytes:11}{ratio:11.4f}{write_s:9.2f}{read_s:9.2f}".format(**rows[name]),
                flush=True,
            )
    sizes = {"bytes": len(blob), "entropy_bytes": entropy / 8, "rest_bytes": rest}
    print(json.dumps({"bench": "artifact", "file": path, **sizes, "coders": rows}))


# fmt: off
SHORT_RUN = {
    "EMA_DECAY": "0.97", "LATE_QAT": "0", "MUON_MOMENTUM": "0.95", "MUON_MOMENTUM_WARMUP_START": "0.85",
    "MUON_MOMENTUM_WARMUP_STEPS": "50", "ITERATIONS": "200", "WARMDOWN_ITERS": "80", "MAX_WALLCLOCK_SECONDS": "0",
    "VAL_LOSS_EVERY": "0", "WARMUP_STEPS": "1", "MLP_SLOPE": "0", "SKIPS": "scales", "MUON_EQ": "0",
    "SHORT_SEQ_PARTS": "1", "SHUFFLE_SEED": "0",
}
# fmt: on


def compare_quantisation(
    hp: train_gpt.Hyperparameters, runtime: train_gpt.Runtime, sizes: list[float]
) -> list[dict]:
    """Train, then print a row for each way to quantise and each size."""
    log, val = train_gpt.Log(hp, runtime.comm), train_gpt.read_validation(hp, runtime.device)
    training = train_gpt.Run(hp, runtime, log, val)
    training.warm_up()
    training.train()
    averaged, calibration = training.finish()
    weights = training.optimizer.weights()
    plain = train_gpt.final_passes(hp)["roundtrip"]

    def score(tensors: dict[str, torch.Tensor]) -> float:
        training.model.load_state_dict(tensors)
        return plain.run(training.make_scorer, log, "score").val_bpb

    before = score(weights)
    print(
        f"torch {torch.__version__} {runtime.describe()} {averaged}, {val.targets} validation tokens"
    )
    print(f"{'way':12}{'bytes':>11}{'bpb':>10}{'lost':>10}{'expected':>10}{'seconds':>9}")
    print(f"{'before':12}{'':11}{before:10.4f}", flush=True)
    quantisers = train_gpt.make_quantisers(weights, hp, calibration)
    full = len(train_gpt.pack_artifact(weights, hp, quantisers, {}, train_gpt.FINEST, runtime.comm))
    cases = [(way, full * size) for size in sizes for way in ("rounded", "GPTQ", "trellis")] + [
        ("#399", math.inf)
    ]
    rows = [{"way": "before", "bpb": before}]
    for way, max_bytes in cases:
        changed = (
            dataclasses.replace(hp, rounding="399", compressor="lzma")
            if way == "#399"
            else dataclasses.replace(hp, trellis_states=8 if way == "trellis" else 0)
        )
        began = time.perf_counter()
        guides = {} if way == "rounded" else calibration
        quantisers = train_gpt.make_quantisers(weights, changed, guides)
        pack = functools.partial(
            train_gpt.pack_artifact, weights, changed, quantisers, {}, comm=runtime.comm
        )
        blob = train_gpt.fit_bytes(
            quantisers.values(), pack, max_bytes, lambda line: None, runtime.comm
        )
        seconds = round(time.perf_counter() - began, 1)
        rounded = train_gpt.load_artifact(blob)
        mirrored = {name: 2 * w.cpu() - rounded[name] for name, w in weights.items()}
        expected = sum(train_gpt.open_artifact(blob)[0]["expected_loss"].values()) or math.nan
        expected *= val.targets / val.total_bytes / math.log(2)
        bpb = score(rounded)
        lost = (bpb + score(mirrored)) / 2 - before
        rows.append(
            {
                "way": way,
                "bytes": len(blob),
                "bpb": bpb,
                "lost": lost,
                "expected": expected,
                "seconds": seconds,
            }
        )
        print(
            f"{way:12}{len(blob):11}{bpb:10.4f}{lost:+10.4f}{expected:10.4f}{seconds:9.1f}",
            flush=True,
        )
    print(json.dumps({"bench": "quantisation", "rows": rows}))
    return rows


def draw(rows: list[dict], path: Path) -> None:
    """Plot bits per byte lost against megabytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for way, marker in {"rounded": "o", "GPTQ": "s", "trellis": "D", "#399": "^"}.items():
        own = sorted((row["bytes"] / 1e6, row["lost"]) for row in rows if row["way"] == way)
        axes.plot(*zip(*own, strict=True), marker=marker, label=way)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_xlabel("artifact, MB")
    axes.set_ylabel("bits per byte lost by the export")
    axes.set_title(f"export of one model, {rows[0]['bpb']:.4f} bits per byte before")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = program.parser(__doc__)
    parser.add_argument("artifact", nargs="*")
    parser.add_argument("--only", nargs="+", help="names of coders")
    parser.add_argument(
        "--quantise", action="store_true", help="train a model and compare ways to quantise it"
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=float,
        default=[1.0, 0.85, 0.7, 0.55],
        help="fractions of the bytes",
    )
    parser.add_argument(
        "--plot", type=image_file, help="plot the loss by quantisation to this file"
    )
    arguments = parser.parse_args()
    if bool(arguments.artifact) == arguments.quantise:
        parser.error("give either artifacts or --quantise")
    for path in arguments.artifact:
        compare_coders(path, arguments.only)
    if arguments.quantise:
        hp = train_gpt.Hyperparameters.from_env({**SMALL, **SHORT_RUN, **os.environ})
        with train_gpt.Runtime.start(hp) as runtime:
            rows = compare_quantisation(hp, runtime, arguments.sizes)
        if arguments.plot:
            draw(rows, arguments.plot)


if __name__ == "__main__":
    program.run_program(main)

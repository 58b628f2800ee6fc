#!/usr/bin/env python3
"""Code what is in an artifact with every coder at hand, and print bytes, their ratio to the entropy, and seconds.

    python bench/artifact.py final_model.int6.xz

The entropy is that of the codes by their frequencies alone, each matrix for itself: what a coder can reach that knows
no more than a table for each matrix. Every result is decoded and compared. The coders of train_gpt.py come first; then
what they are measured against: the published container (torch.save, then xz -9e), xz, brotli and lrzip where they are
installed, on the codes row by row and column by column. Last, one JSON line.
"""

import argparse
import importlib.util
import io
import json
import lzma
import math
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt

Codes = dict[str, np.ndarray]  # (L, out, in) int16 by name


def narrow(codes: np.ndarray) -> np.ndarray:
    """In one byte each if they fit, as all but those of the token embedding do."""
    return codes.astype(np.int8) if abs(codes).max() < 128 else codes


def by_tensor(encode: Callable, decode: Callable) -> tuple[Callable, Callable]:
    """A coder of train_gpt.py, which takes one tensor at a time."""

    def write(codes: Codes) -> dict[str, bytes]:
        return {name: encode(matrix) for name, matrix in codes.items()}

    def read(blobs: dict[str, bytes], codes: Codes) -> Codes:
        return {name: decode(blob, codes[name].shape) for name, blob in blobs.items()}

    return write, read


def by_stream(encode: Callable, decode: Callable, columns: bool) -> tuple[Callable, Callable]:
    """A general compressor, on all codes as one stream, row by row or column by column."""

    def turned(matrix: np.ndarray) -> np.ndarray:
        return matrix.transpose(0, 2, 1) if columns else matrix

    def write(codes: Codes) -> dict[str, bytes]:
        return {"all": encode(b"".join(narrow(turned(matrix)).tobytes() for matrix in codes.values()))}

    def read(blobs: dict[str, bytes], codes: Codes) -> Codes:
        raw, found = decode(blobs["all"]), {}
        for name, matrix in codes.items():
            like = narrow(turned(matrix))
            found[name] = turned(np.frombuffer(raw, like.dtype, like.size).reshape(like.shape))
            raw = raw[like.nbytes :]
        return found

    return write, read


def published() -> tuple[Callable, Callable]:
    """torch.save of a tensor of whole numbers a matrix, then xz at its highest preset, as in #399."""

    def write(codes: Codes) -> dict[str, bytes]:
        buffer = io.BytesIO()
        matrices = {f"{layer}.{name}": matrix for name, stack in codes.items() for layer, matrix in enumerate(stack)}
        torch.save({name: torch.from_numpy(narrow(matrix).copy()) for name, matrix in matrices.items()}, buffer)
        return {"all": lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME)}

    def read(blobs: dict[str, bytes], codes: Codes) -> Codes:
        found = torch.load(io.BytesIO(lzma.decompress(blobs["all"])))
        return {
            name: np.stack([found[f"{layer}.{name}"].numpy() for layer in range(len(m))]) for name, m in codes.items()
        }

    return write, read


def lrzip(*options: str) -> Callable[[bytes], bytes]:
    """The program of that name, from file to file."""

    def call(raw: bytes) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            source, result = Path(folder, "in"), Path(folder, "out")
            source.write_bytes(raw)
            subprocess.run(["lrzip", "-q", *options, "-o", result, source], check=True, capture_output=True)
            return result.read_bytes()

    return call


def coders() -> Iterator[tuple[str, tuple[Callable, Callable]]]:
    """(name, (write, read)) of all that are here."""
    for name, (encode, decode) in train_gpt.CODERS.items():
        yield name, by_tensor(encode, decode)
    yield "published", published()
    programs = {"xz -9e": (lambda raw: lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME), lzma.decompress)}
    if importlib.util.find_spec("brotli"):
        import brotli

        programs["brotli 11"] = (lambda raw: brotli.compress(raw, quality=11, lgwin=24), brotli.decompress)
    if shutil.which("lrzip"):
        programs["lrzip -z"] = (lrzip("-z", "-L", "9"), lrzip("-d"))
    for name, pair in programs.items():
        yield f"{name} rows", by_stream(*pair, columns=False)
        yield f"{name} columns", by_stream(*pair, columns=True)


def measure(write: Callable, read: Callable, codes: Codes, entropy: float) -> dict:
    """Write, read, compare."""
    began = time.perf_counter()
    blobs = write(codes)
    wrote = time.perf_counter()
    found = read(blobs, codes)
    seconds = wrote - began, time.perf_counter() - wrote
    assert all(np.array_equal(found[name], codes[name]) for name in codes), "what was read is not what was written"
    size = sum(map(len, blobs.values()))
    return {
        "bytes": size,
        "ratio": round(8 * size / entropy, 4),
        "write_s": round(seconds[0], 2),
        "read_s": round(seconds[1], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", nargs="+")
    parser.add_argument("--only", nargs="+", help="names of coders")
    arguments = parser.parse_args()
    try:
        for path in arguments.artifact:
            report(path, arguments.only)
    except train_gpt.UserError as error:
        sys.exit(f"error: {error}")


def report(path: str, only: list[str] | None) -> None:
    """The table of one artifact."""
    blob = train_gpt.read_artifact(path)
    with train_gpt.reading_artifact(path):
        codes = {entry.name: matrix for entry, matrix, _ in train_gpt.decode_artifact(blob) if matrix is not None}
        began = time.perf_counter()
        weights = sum(math.prod(entry.shape) for entry, _, _ in train_gpt.decode_artifact(blob))
        decoded = time.perf_counter() - began
        entries = train_gpt.open_artifact(blob)[2]
    entropy, count = sum(map(train_gpt.order0_entropy, codes.values())), sum(matrix.size for matrix in codes.values())
    rest = len(blob) - sum(entry.nbytes for entry in entries)
    print(f"{path}: {len(blob)} bytes, {weights} weights, {count} of them codes of {entropy / count:.4f} bits,"
          f" {entropy / 8:.0f} bytes; all else {rest} bytes ({100 * rest / len(blob):.2f} %); read in {decoded:.1f} s")  # fmt: skip
    print(f"{'coder':20}{'bytes':>11}{'/ entropy':>11}{'write s':>9}{'read s':>9}")
    rows = {}
    for name, (write, read) in coders():
        if only is None or name in only:
            rows[name] = measure(write, read, codes, entropy)
            print(f"{name:20}" + "{bytes:11}{ratio:11.4f}{write_s:9.2f}{read_s:9.2f}".format(**rows[name]), flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (20 if sys.platform == "darwin" else 10)
    print(f"peak memory of all this: {peak} MiB")
    sizes = {"bytes": len(blob), "entropy_bytes": entropy / 8, "rest_bytes": rest}
    print(json.dumps({"bench": "artifact", "file": path, **sizes, "coders": rows}))


if __name__ == "__main__":
    main()

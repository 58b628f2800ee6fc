#!/usr/bin/env python3
"""Compare coders on the codes of an artifact.

    python bench/artifact.py final_model.npz

The table has bytes, their ratio to the order-0 entropy of the codes (one frequency table per
matrix), and seconds. Every result is decoded and compared. The coders are those of train_gpt.py,
which take one tensor at a time, and #399's container: torch.save of all matrices, then xz -9e. The
last line is JSON.
"""

import io
import lzma
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("", "bench", "tools")]

import program
import train_gpt
from common import Table, finish
from inspect_artifact import order0_entropy

# isort: split
import numpy as np
import torch

Codes = dict[str, np.ndarray]  # (L, out, in) int16 by name
Blobs = dict[str, bytes]


def by_tensor(encode: Callable, decode: Callable) -> tuple[Callable, Callable]:
    """(codes -> blobs, blobs and codes, for their shapes -> codes) by a coder of train_gpt.py."""
    return (
        lambda codes: {name: encode(stack) for name, stack in codes.items()},
        lambda blobs, codes: {name: decode(blobs[name], codes[name].shape) for name in codes},
    )


def write_399(codes: Codes) -> Blobs:
    """One integer tensor per matrix, of one byte per code if they fit."""
    tensors, buffer = {}, io.BytesIO()
    for name, stack in codes.items():
        kind = np.int8 if abs(stack).max() < 128 else np.int16
        for layer, matrix in enumerate(stack):
            tensors[f"{layer}.{name}"] = torch.from_numpy(matrix.astype(kind))
    torch.save(tensors, buffer)
    return {"all": lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME)}


def read_399(blobs: Blobs, codes: Codes) -> Codes:
    tensors = torch.load(io.BytesIO(lzma.decompress(blobs["all"])))
    return {
        name: np.stack([tensors[f"{layer}.{name}"].numpy() for layer in range(len(stack))])
        for name, stack in codes.items()
    }


def compare_coders(path: str) -> None:
    """Print the table of one artifact."""
    # Whichever tokenizer is installed
    blob, _ = train_gpt.read_artifact(path, {"TOKENIZER_PATH": ""})
    with train_gpt.reading_artifact(path):
        header, hp, streams, _ = train_gpt.open_artifact(blob)
        decode = train_gpt.CODERS[header["coder"]][1]
        views = train_gpt.artifact_tensors(train_gpt.meta_parameters(hp))
        codes = {
            name: decode(streams[name], tuple(view.shape)) for kind, name, view in views if kind
        }
    entropy = sum(map(order0_entropy, codes.values())) / 8
    count, rest = sum(c.size for c in codes.values()), len(blob) - sum(map(len, streams.values()))
    print(f"{path}: {len(blob)} bytes, of which {rest} are not codes")
    print(f"{count} codes of {8 * entropy / count:.4f} bits, {entropy:.0f} bytes")
    coders = {name: by_tensor(*pair) for name, pair in train_gpt.CODERS.items()}
    coders["#399"] = write_399, read_399
    table = Table("coder", bytes="11,", ratio="9.4f", write_s="9.2f", read_s="9.2f")
    for name, (write, read) in coders.items():
        began = time.perf_counter()
        blobs = write(codes)
        wrote = time.perf_counter()
        found = read(blobs, codes)
        read_s = time.perf_counter() - wrote
        equal = all(np.array_equal(found[name], codes[name]) for name in codes)
        train_gpt.require(equal, f"the coder {name} does not restore the codes")
        size = sum(map(len, blobs.values()))
        table.row(name, bytes=size, ratio=size / entropy, write_s=wrote - began, read_s=read_s)
    sizes = {"bytes": len(blob), "entropy_bytes": entropy, "rest_bytes": rest}
    finish("artifact", file=path, **sizes, coders=table.rows)


def main() -> None:
    parser = program.parser(__doc__)
    parser.add_argument("artifact", nargs="+")
    for path in parser.parse_args().artifact:
        compare_coders(path)


if __name__ == "__main__":
    program.run_program(main)

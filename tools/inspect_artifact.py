#!/usr/bin/env python3
"""Print the contents of an artifact: its header, and each tensor's shape, bits, clip range and size.

    python tools/inspect_artifact.py final_model.int6.xz

`entropy` is the order-0 entropy of a tensor's codes and `coded` what the coder used, both in bits per code. A clip
range of "max" means that each row is scaled to its largest weight.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt

CHECKSUM_BYTES = 32


def order0_entropy(codes: np.ndarray) -> float:
    """Total bits of codes (L, ...) by the frequencies of their values, with one frequency table per matrix."""
    total = 0.0
    for matrix in codes:
        counts = np.unique(matrix, return_counts=True)[1]
        total += float((counts * np.log2(matrix.size / counts)).sum())
    return total


def row(entry: train_gpt.Entry, codes: np.ndarray | None, size: int) -> str:
    """The line of one tensor with `size` weights."""
    shape = "x".join(map(str, entry.shape)) or "scalar"
    line = f"  {entry.name:12} {shape:>18} {entry.bits:5}"
    if codes is None:
        return f"{line} {'':7} {'':8} {16:8} {2 * size:10}   before compression"
    clip = "max" if entry.clip is None else f"{entry.clip:.3f}"
    entropy = order0_entropy(codes) / codes.size
    coded = 8 * entry.nbytes / codes.size
    return f"{line} {clip:>7} {entropy:8.4f} {coded:8.4f} {entry.nbytes:10}"


def inspection(path: str) -> str:
    """The report on the artifact at `path`. Raises UserError if it cannot be read."""
    blob = train_gpt.read_artifact(path)
    with train_gpt.reading_artifact(path):
        header, _, entries, start = train_gpt.open_artifact(blob)
        lines = [f"{path}: {len(blob)} bytes, sha256 {hashlib.sha256(blob).hexdigest()}"]
        lines += [f"  {key}: {json.dumps(value)}" for key, value in header.items() if key != "tensors"]
        titles = f"  {'tensor':12} {'shape':>18} {'bits':>5} {'clip':>7} {'entropy':>8} {'coded':>8} {'bytes':>10}"
        lines.append(f"{titles}   (bits per code)")
        lines += [row(entry, codes, values.numel()) for entry, codes, values in train_gpt.decode_artifact(blob)]
    coded = sum(entry.nbytes for entry in entries)
    plain = len(blob) - start - coded - CHECKSUM_BYTES
    lines.append(
        f"  codes {coded}, scales and plain values {plain}, header and checksum {start + CHECKSUM_BYTES} bytes"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact")
    arguments = parser.parse_args()
    try:
        print(inspection(arguments.artifact))
    except train_gpt.UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

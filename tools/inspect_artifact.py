#!/usr/bin/env python3
"""Print the contents of an artifact: its header, and each tensor's shape and size.

    python tools/inspect_artifact.py final_model.int6.xz

`entropy` is the order-0 entropy of a tensor's codes and `coded` what the coder used, both in bits
per code. `loss` is what rounding the tensor was expected to cost, in nats per token. For gains and
other plain tensors the range of their values is printed.
"""

import argparse
import hashlib
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt

# isort: split
import numpy as np


def order0_entropy(codes: np.ndarray) -> float:
    """Total bits of codes (L, ...) by the frequencies of their values, with one frequency table per
    matrix."""
    total = 0.0
    for matrix in codes:
        counts = np.unique(matrix, return_counts=True)[1]
        total += float((counts * np.log2(matrix.size / counts)).sum())
    return total


def row(entry: train_gpt.Entry, codes: np.ndarray | None, values, loss: float | None) -> str:
    """The line of one tensor."""
    line = f"  {entry.name:12} {'x'.join(map(str, entry.shape)) or 'scalar':>18}"
    if entry.kind is None:
        reach = f"{values.min():.3g} to {values.max():.3g}" if values.numel() else "empty"
        size = 2 * math.prod(entry.shape)
        return f"{line} {'':8} {'':9} {16:8} {size:10}   {reach}, before compression"
    nbytes = len(entry.stream)
    entropy = order0_entropy(codes) / codes.size
    cost = "" if loss is None else f"{loss:.6f}"
    return f"{line} {cost:>8} {entropy:9.4f} {8 * nbytes / codes.size:8.4f} {nbytes:10}"


def inspection(path: str) -> str:
    """The report on the artifact at `path`. Raises UserError if it cannot be read."""
    # Whichever tokenizer is installed
    blob, _ = train_gpt.read_artifact(path, {"TOKENIZER_PATH": ""})
    with train_gpt.reading_artifact(path):
        header, _, entries, packed = train_gpt.open_artifact(blob)
        lines = [f"{path}: {len(blob)} bytes, sha256 {hashlib.sha256(blob).hexdigest()}"]
        lines += [
            f"  {key}: {json.dumps(value)}" for key, value in header.items() if key != "code_bytes"
        ]
        titles = (
            f"  {'tensor':12} {'shape':>18} {'loss':>8} {'entropy':>9} {'coded':>8} {'bytes':>10}"
        )
        lines.append(f"{titles}   (bits per code)")
        losses = header["expected_loss"]
        tensors = zip(entries, train_gpt.decode_artifact(blob), strict=True)
        lines += [
            row(entry, codes, values, losses.get(name)) for entry, (name, codes, values) in tensors
        ]
    coded = sum(len(entry.stream) for entry in entries)
    rest = len(blob) - coded - len(packed)
    lines.append(
        f"  codes {coded}, steps and plain values {len(packed)}, header and container {rest} bytes"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact")
    arguments = parser.parse_args()
    print(inspection(arguments.artifact))


if __name__ == "__main__":
    train_gpt.run_program(main)

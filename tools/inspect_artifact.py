#!/usr/bin/env python3
"""Print the contents of an artifact: its header, and each tensor's shape and size.

    python tools/inspect_artifact.py final_model.int6.xz

`entropy` is the order-0 entropy of a tensor's codes and `coded` what the coder used, both in bits
per code. `loss` is what its rounding is expected to cost, in thousandths of a nat per token.
"""

import argparse
import hashlib
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt
from program import run_program

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


def row(
    kind: train_gpt.Matrix | None,
    name: str,
    shape: tuple[int, ...],
    stream: bytes,
    header: dict,
) -> str:
    """The line of one tensor, given its codes' stream."""
    line = f"  {name:12} {'x'.join(map(str, shape)) or 'scalar':>18}"
    if kind is None:
        return f"{line} {'':8} {16:8} {2 * math.prod(shape):10}   before compression"
    codes = train_gpt.CODERS[header["coder"]][1](stream, shape)
    nbytes = len(stream)
    entropy = order0_entropy(codes) / codes.size
    line = f"{line} {entropy:8.4f} {8 * nbytes / codes.size:8.4f} {nbytes:10}"
    loss = header["expected_loss"].get(name)
    return line if loss is None else f"{line} {1000 * loss:8.4f}"


def inspection(path: str) -> str:
    """The report on the artifact at `path`. Raises UserError if it cannot be read."""
    # Whichever tokenizer is installed
    blob, _ = train_gpt.read_artifact(path, {"TOKENIZER_PATH": ""})
    with train_gpt.reading_artifact(path):
        header, hp, streams, values = train_gpt.open_artifact(blob)
        lines = [f"{path}: {len(blob)} bytes, sha256 {hashlib.sha256(blob).hexdigest()}"]
        lines += [
            f"  {key}: {json.dumps(value)}"
            for key, value in header.items()
            if key not in ("code_bytes", "expected_loss")
        ]
        titles = (
            f"  {'tensor':12} {'shape':>18} {'entropy':>8} {'coded':>8} {'bytes':>10} {'loss':>8}"
        )
        lines.append(titles)
        lines += [
            row(kind, name, tuple(view.shape), streams.get(name, b""), header)
            for kind, name, view in train_gpt.artifact_tensors(train_gpt.meta_parameters(hp))
        ]
        total = sum(header["expected_loss"].values())
        expected = f", expected loss of rounding {total:.4f} nats" if total else ""
    coded = sum(map(len, streams.values()))
    rest = len(blob) - coded - len(values)
    lines.append(
        f"  codes {coded}, steps and plain values {len(values)}, header and container {rest} bytes"
    )
    bits = 8 * len(blob) / sum(w.numel() for w in train_gpt.meta_parameters(hp).values())
    lines.append(f"  {bits:.2f} bits per weight{expected}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact")
    arguments = parser.parse_args()
    print(inspection(arguments.artifact))


if __name__ == "__main__":
    run_program(main)

#!/usr/bin/env python3
"""Print the contents of an artifact: its header, and each tensor's shape and size.

    python tools/inspect_artifact.py final_model.npz

`entropy` is the order-0 entropy of a tensor's codes and `coded` what the coder used, both in bits
per code. `loss` is what its rounding is expected to cost, in thousandths of a nat per token. Then
come the learned gains and gates, with a column per layer: each value, or mean, least and largest of
more than 16.
"""

import hashlib
import json
import math
import sys
import textwrap
from pathlib import Path

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]

import program
import train_gpt
from lib.runs import aligned

# isort: split
import numpy as np
import torch

MOST = 16  # values of one layer that are printed


def order0_entropy(codes: np.ndarray) -> float:
    """Total bits of codes (L, ...) by the frequencies of their values in each matrix."""
    total = 0.0
    for matrix in codes:
        counts = np.unique(matrix, return_counts=True)[1]
        total += float((counts * np.log2(matrix.size / counts)).sum())
    return total


def row(
    kind: train_gpt.MatrixKind | None, name: str, shape: tuple, stream: bytes, header: dict
) -> list[str]:
    """The cells of one tensor, given its codes' stream."""
    cells = [f"  {name}", "x".join(map(str, shape)) or "scalar"]
    if kind is None:
        return [*cells, "", "16", str(2 * math.prod(shape)), "before compression"]
    codes = train_gpt.CODERS[header["coder"]][1](stream, shape)
    loss = header["expected_loss"].get(name)
    sizes = order0_entropy(codes) / codes.size, 8 * len(stream) / codes.size
    shown = "" if loss is None else f"{1000 * loss:.4f}"
    return [*cells, *(f"{bits:.4f}" for bits in sizes), str(len(stream)), shown]


def learned(name: str, gain: torch.Tensor) -> list[str]:
    """The lines of a gain (layers, ...), of a vector or of a number."""
    if gain.dim() == 3 and gain.size(1) == 2:  # of the stream and of the embedding; of two lanes
        return [
            line for i, part in enumerate(gain.unbind(1)) for line in learned(f"{name}[{i}]", part)
        ]
    if gain.dim() < 2:
        gain = gain.reshape(-1, 1) if gain.numel() <= MOST else gain[None]
    rows = gain.flatten(1)  # (layers, values)
    shown = dict(enumerate(rows.T))
    if len(shown) > MOST:
        shown = {"mean": rows.mean(1), "min": rows.amin(1), "max": rows.amax(1)}
    return [
        f"  {name:14} {label if len(shown) > 1 else '':>4} "
        + " ".join(f"{value:8.4f}" for value in values.tolist())
        for label, values in shown.items()
    ]


def inspection(path: str) -> str:
    """The report on the artifact at `path`. Raises UserError if it cannot be read."""
    # Whichever tokenizer is installed
    blob, _ = train_gpt.read_artifact(path, {"TOKENIZER_PATH": ""})
    with train_gpt.reading_artifact(path):
        header, hp, streams, values = train_gpt.open_artifact(blob)
        lines = [f"{path}: {len(blob)} bytes, sha256 {hashlib.sha256(blob).hexdigest()}"]
        lines += [
            textwrap.fill(f"  {key}: {json.dumps(value)}", 100, subsequent_indent="    ")
            for key, value in header.items()
            if key not in ("code_bytes", "expected_loss")
        ]
        views = train_gpt.artifact_tensors(train_gpt.meta_parameters(hp))
        rows = [row(k, n, tuple(v.shape), streams.get(n, b""), header) for k, n, v in views]
        lines.append(aligned([["  tensor", "shape", "entropy", "coded", "bytes", "loss"], *rows]))
        lines.append("  learned gains and gates, a column per layer")
        weights = train_gpt.load_artifact(blob)
        for kind, name, gain in train_gpt.artifact_tensors(weights):
            lines += learned(name, gain) if kind is None else []
        total = sum(header["expected_loss"].values())
        expected = f", expected loss of rounding {total:.4f} nats" if total else ""
    coded = sum(map(len, streams.values()))
    rest = f"header and container {len(blob) - coded - len(values)} bytes"
    lines.append(f"  codes {coded}, steps and plain values {len(values)}, {rest}")
    bits = 8 * len(blob) / sum(w.numel() for w in train_gpt.meta_parameters(hp).values())
    lines.append(f"  {bits:.2f} bits per weight{expected}")
    return "\n".join(lines)


def main() -> None:
    parser = program.parser(__doc__)
    parser.add_argument("artifact")
    print(inspection(parser.parse_args().artifact))


if __name__ == "__main__":
    program.run_program(main)

"""Floating-point operations of the model, and the peaks of GPUs. A multiply-add counts as 2
operations."""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt
from train_gpt import Hyperparameters

# isort: split
import torch

# Dense bf16 FLOP/s and bytes/s of the memory from the data sheets, by a part of the device's name. A
# card with another memory of the same name reaches less.
GPUS = {
    "H100 PCIe": (756e12, 2.0e12),
    "H100 NVL": (835e12, 3.9e12),
    "H100": (989e12, 3.35e12),
    "GH200": (989e12, 4.0e12),
    "H200": (989e12, 4.8e12),
    "H800": (989e12, 3.35e12),
    "H20": (148e12, 4.0e12),
    "B200": (2250e12, 7.7e12),
    "A100-SXM4-80GB": (312e12, 2.039e12),
    "A100 80GB": (312e12, 1.935e12),
    "A100": (312e12, 1.555e12),
    "L40S": (362e12, 0.864e12),
    "RTX 4090 D": (147e12, 1.008e12),
    "RTX 4090": (165e12, 1.008e12),
}
PEAK_FLOPS = {name: flops for name, (flops, _) in GPUS.items()}
BANDWIDTH = {name: bandwidth for name, (_, bandwidth) in GPUS.items()}


def of_gpu(name: str, table: dict[str, float]) -> float | None:
    """A table's value for the GPU of this name; None if it is unknown, or not a whole desktop card."""
    if "MIG" in name or "Laptop" in name:
        return None
    return next((value for part, value in table.items() if part in name), None)


def peak_flops(device: torch.device) -> float | None:
    """The data-sheet peak of this GPU, or None if it is unknown or the device is a CPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return of_gpu(name, PEAK_FLOPS)


def attended(hp: Hyperparameters, positions: int) -> int:
    """Pairs of a position and one that it sees, in all visits of layers, of a sequence."""
    most = [min(positions, hp.reach(layer, positions)) for layer in hp.layer_order()]
    return sum(full * (full + 1) // 2 + (positions - full) * full for full in most)


def flops_per_token(hp: Hyperparameters, length: int) -> float:
    """Forward and backward operations per token of sequences of this length; backward costs twice
    the forward."""
    layer = sum(math.prod(kind.shape(hp)) for kind in train_gpt.MATRICES)
    bigram = hp.model_dim * hp.bigram_dim if hp.bigram_vocab_size else 0
    matrices = len(hp.layer_order()) * layer + bigram + hp.vocab_size * hp.model_dim
    attention = 2 * hp.model_dim * attended(hp, length) / length
    return 3 * 2 * (matrices + attention)

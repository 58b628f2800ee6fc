#!/usr/bin/env python3
"""Compare our quantiser with what people would use instead, on the same weights.

    python bench/quantisers.py DATA [--models llama gpt2 context] [--steps 1000] [--plot FILE]

DATA is a folder of shards of 1,024 pieces, such as demo_data. Each model is trained on it: a Llama and
a GPT-2 of `transformers`, 4 layers of 128, and a network of nn.Linear that reads 8 tokens. Then all
its matrices, embeddings included, are rounded in each way:

    group 32, group 64   to the nearest, with an fp16 scale for each group of weights of a row
    torchao              its int8, int4 and int3 weights in groups of 32 (pip install torchao)
    hqq                  HQQ with 8, 4 and 3 bits in groups of 64 (pip install hqq)
    GPTQ                 #2135's steps: 0.419, 0.371 and 0.222 deviations of a row of attention, MLP
                         and embedding, times a factor, with our coder

and by tools/quantise.py to the same bytes. Bytes are those of all weights: packed codes, scales and
zeros, and 2 for each other number; ours are those of the file. `lost` is the mean of the losses of
w + D and w - D, less the loss of w, in nats per token of the validation shard: weights w, errors D.
So the part that is linear in the errors, which has either sign, cancels. The last line is JSON.
"""

import argparse
import importlib.util
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("", "bench", "tools")]

import program
import quantise
import train_gpt
from common import image_file, positive

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, LENGTH = 1024, 128
BITS = (8, 4, 3)
FACTORS = (0.5, 0.8, 1.25, 2.0)  # of #2135's steps
Rounded = tuple[Tensor, float]  # (rows (out, in) as they are read back, their bytes)


class Context(nn.Module):
    """Predicts a token from the 8 before it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 64)
        layers = (nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU())
        self.layers = nn.Sequential(*layers, nn.Linear(512, VOCAB))

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, T) -> logits (B, T - 7, V)."""
        return self.layers(self.embedding(ids).unfold(1, 8, 1).flatten(2))


def context_nats(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).mT, rows[:, 8:], reduction="none")


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, **sizes))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = dict(n_embd=128, n_layer=4, n_head=4, n_positions=LENGTH, initializer_range=0.08)
    sizes |= dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, **sizes))


MODELS = {
    "llama": (llama, quantise.nats_of),
    "gpt2": (gpt2, quantise.nats_of),
    "context": (Context, context_nats),
}


def trained(make: Callable, loss: Callable, tokens: Tensor, steps: int) -> tuple[nn.Module, list]:
    """(a model, batches to calibrate it with)."""
    draw = torch.Generator().manual_seed(1)

    def batch(rows: int) -> Tensor:
        places = torch.randint(0, len(tokens) - LENGTH - 1, (rows, 1), generator=draw)
        return tokens[places + torch.arange(LENGTH + 1)].long()

    torch.manual_seed(0)
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        rate = min((step + 1) / 50, max(0.02, 2 * (1 - step / steps)), 1)
        optimizer.param_groups[0]["lr"] = 3e-3 * rate
        optimizer.zero_grad()
        loss(model, batch(16)).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval(), [batch(8) for _ in range(64)]


def nearest(rows: Tensor, bits: int, group: int) -> Rounded:
    """A scale for each group, which reaches its largest weight."""
    grouped = F.pad(rows, (0, -rows.size(1) % group)).unflatten(1, (-1, group))
    limit = 2 ** (bits - 1) - 1
    scales = (grouped.abs().amax(dim=2, keepdim=True) / limit).clamp(min=1e-8).half().float()
    back = (grouped / scales).round().clamp(-limit - 1, limit) * scales
    return back.flatten(1)[:, : rows.size(1)], rows.numel() * bits / 8 + 2 * scales.numel()


def torchao(rows: Tensor, bits: int, group: int = 32) -> Rounded:
    from torchao.quantization import IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    linear = nn.Linear(*rows.shape[::-1], bias=False)
    linear.weight.data.copy_(rows)
    kind = getattr(torch, f"int{bits}")
    quantize_(linear, IntxWeightOnlyConfig(weight_dtype=kind, granularity=PerGroup(group)))
    return linear.weight.dequantize().detach(), rows.numel() * (bits / 8 + 2 / group)


def hqq(rows: Tensor, bits: int, group: int = 64) -> Rounded:
    from hqq.core.quantize import Quantizer

    how = dict(axis=1, device="cpu", compute_dtype=torch.float32, bitpack=False)
    codes, meta = Quantizer.quantize(rows, nbits=bits, group_size=group, **how)
    size = rows.numel() * bits / 8 + 2 * (meta["scale"].numel() + meta["zero"].numel())
    return Quantizer.dequantize(codes, meta), size


def gptq(rows: Tensor, name: str, lookup: bool, hessian: Tensor, factor: float) -> Rounded:
    """By train_gpt.py's GPTQ and coder, without a trellis."""
    mlp = "mlp" in name or name in ("layers.0.weight", "layers.2.weight")  # of Context
    ratio = 0.222 if lookup else 0.371 if mlp else 0.419
    steps = (ratio * factor * rows.std(dim=1, keepdim=True)).half().float().clamp(min=1e-6)[None]
    order = train_gpt.inverse_factor(train_gpt.damped(hessian[None], 0.01))
    integers = train_gpt.gptq(
        rows[None], *order, steps, lambda column: (column / steps).round().clamp(-2047, 2047)
    )
    codes = train_gpt.encode_ans(integers.short().numpy())
    return (integers * steps)[0], len(codes) + 2 * len(rows)


def ways(model: nn.Module, calibration: quantise.Calibration) -> Iterator[tuple[str, Callable]]:
    """(name, function of a matrix's name and rows that returns `Rounded`)."""
    matrices = quantise.matrices_of(model)
    libraries = {"torchao": torchao, "hqq": hqq}
    for bits in BITS:
        for group in (32, 64):
            yield (
                f"group {group}, {bits} bits",
                lambda _, rows, bits=bits, group=group: nearest(rows, bits, group),
            )
        for name, library in libraries.items():
            if importlib.util.find_spec(name):
                yield (
                    f"{name}, {bits} bits",
                    lambda _, rows, bits=bits, library=library: library(rows, bits),
                )
    for factor in FACTORS:
        yield (
            f"GPTQ, steps x {factor:g}",
            lambda name, rows, factor=factor: gptq(
                rows,
                name,
                matrices[name].lookup,
                calibration.hessian(name, rows.size(1)),
                factor,
            ),
        )


@torch.no_grad()
def mean_loss(model: nn.Module, batches: list[Tensor], loss: Callable) -> float:
    return float(torch.cat([loss(model, batch).flatten() for batch in batches]).double().mean())


@torch.no_grad()
def lost(
    model: nn.Module, rounded: dict[str, Tensor], batches: list[Tensor], loss: Callable
) -> float:
    """Nats per token, without the part that is linear in the errors. The model stays as it is."""
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    losses = []
    for sign in (1, -1):
        for name, tensor in model.named_parameters():
            tensor.copy_(before[name] + sign * (rounded.get(name, before[name]) - before[name]))
        losses.append(mean_loss(model, batches, loss))
    for name, tensor in model.named_parameters():
        tensor.copy_(before[name])
    return sum(losses) / 2 - mean_loss(model, batches, loss)


@torch.no_grad()
def apply(model: nn.Module, way: Callable) -> tuple[dict[str, Tensor], float]:
    """(parameters as one of the ways leaves them, their bytes)."""
    matrices, tensors = quantise.matrices_of(model), dict(model.named_parameters())
    names = {matrix.parameter: name for name, matrix in matrices.items()}
    found, size = {}, 0.0
    for name, parameter in tensors.items():
        if parameter not in names:
            found[name], size = parameter.half().float(), size + 2 * parameter.numel()
            continue
        matrix = matrices[names[parameter]]
        back, nbytes = way(names[parameter], matrix.rows(parameter).detach().float().contiguous())
        found[name], size = matrix.rows(back), size + nbytes  # its own inverse
    return found, size


def ours(
    model: nn.Module, calibration: quantise.Calibration, make: Callable, max_bytes: float
) -> tuple[dict[str, Tensor], int]:
    """(parameters as tools/quantise.py leaves them, bytes of the file)."""
    file, _ = quantise.quantise(model, calibration, max_bytes)
    twin = make()
    with tempfile.NamedTemporaryFile(suffix=".npz") as path:
        path.write(file)
        path.flush()
        quantise.load(twin, path.name)
    return dict(twin.named_parameters()), len(file)


def compare(name: str, steps: int, shards: dict[str, Tensor]) -> list[dict]:
    """Train the model and print a row for each way."""
    make, loss = MODELS[name]
    model, batches = trained(make, loss, shards["train"], steps)
    text = shards["val"]
    held_out = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].long()
    held_out = list(held_out.view(-1, LENGTH + 1).split(64))
    calibration = quantise.calibrate(model, batches, loss)
    count = train_gpt.count_numbers(model.parameters())
    print(
        f"{name}: {count:,} weights, {mean_loss(model, held_out, loss):.4f} nats per token before",
        flush=True,
    )
    rows = []
    for way, function in ways(model, calibration):
        rounded, nbytes = apply(model, function)
        row = {"model": name, "way": way, "bytes": round(nbytes), "bits": 8 * nbytes / count}
        row["lost"] = lost(model, rounded, held_out, loss)
        tensors, row["our_bytes"] = ours(model, calibration, make, nbytes)
        row["our_lost"] = lost(model, tensors, held_out, loss)
        rows.append(row)
        print(
            f"{way:20}{row['bits']:7.2f} bits{row['lost']:10.5f}   ours {row['our_lost']:10.5f} "
            f"{8 * row['our_bytes'] / count:6.2f} bits",
            flush=True,
        )
    return rows


def draw(rows: list[dict], path: Path) -> None:
    """Plot the loss of rounding against bits per weight, a panel for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = pyplot.subplots(
        1, len(names), figsize=(4 * len(names), 4), layout="constrained", squeeze=False
    )
    markers = {"group 32": "v", "group 64": "^", "torchao": "x", "hqq": "o", "GPTQ": "s"}
    for name, axes in zip(names, panels[0], strict=True):
        own = [row for row in rows if row["model"] == name]
        for way, marker in markers.items():
            points = sorted((row["bits"], row["lost"]) for row in own if row["way"].startswith(way))
            if points:
                axes.plot(*zip(*points, strict=True), marker=marker, label=way)
        count = own[0]["bytes"] / own[0]["bits"]
        points = sorted({(row["our_bytes"] / count, row["our_lost"]) for row in own})
        axes.plot(*zip(*points, strict=True), marker="D", color="black", label="ours")
        axes.set_yscale("log")
        axes.set_xlabel("bits per weight, all bytes")
        axes.set_title(name)
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("loss of rounding, nats per token")
    panels[0][-1].legend()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="folder of shards of 1,024 pieces")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=positive, default=1000, help="training steps of each model")
    parser.add_argument("--plot", type=image_file, help="plot the losses to this file")
    arguments = parser.parse_args()
    shards = {}
    for split in ("train", "val"):
        stream = train_gpt.TokenStream(arguments.data, split, VOCAB)
        shards[split] = torch.from_numpy(stream.read(0, min(len(stream), 1 << 23)))
    for name in ("torchao", "hqq"):
        if not importlib.util.find_spec(name):
            print(f"note: {name} is not installed, so its rows are missing")
    rows = []
    for name in arguments.models:
        rows += compare(name, arguments.steps, shards)
    if arguments.plot:
        draw(rows, arguments.plot)
    assert all(math.isfinite(row["lost"]) for row in rows)
    print(json.dumps({"bench": "quantisers", "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    program.run_program(main)

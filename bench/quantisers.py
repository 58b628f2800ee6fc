#!/usr/bin/env python3
"""Compare our quantiser with what people would use instead, on the same weights.

    python bench/quantisers.py DATA [--models llama gpt2 context] [--steps 1000] [--papers]

DATA is a folder of shards of 1,024 pieces, such as demo_data. Each model is trained on it: a Llama and
a GPT-2 of `transformers`, 4 layers of 128, and a network of nn.Linear that reads 8 tokens. Then all
its matrices, embeddings included, are rounded in each way:

    group 32, group 64   to the nearest, with an fp16 scale for each group of weights of a row
    torchao              its int8, int4 and int3 weights in groups of 32 (pip install torchao)
    hqq                  HQQ with 8, 4 and 3 bits in groups of 64 (pip install hqq)
    GPTQ                 #2135's steps, times a factor, with our coder

and by tools/quantise.py to the same bytes: packed codes, scales and zeros, and 2 for each other
number. `lost` is the mean of the losses of w + D and w - D, less the loss of w, in nats per token of
the validation shard: weights w, errors D. `kl` is the divergence of the model of w + D from that of
w, in nats per token: it has less noise.

With --papers the matrices of the layers alone are rounded, in the ways that PAPERS lists and "as
exported" by train_gpt.py and tools/quantise.py, with our damping and coder. Bytes are those of the
codes, and 2 for each step. Models of train_gpt.py can then be named too (--models 4x128 11x96 2135).

The last line is JSON.
"""

import dataclasses
import functools
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("", "bench", "tools")]

import program
import quantise
import train_gpt
from common import finish
from demo_settings import CPU

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

VOCAB, LENGTH, BATCHES = 1024, 128, 64  # batches of 8 rows to calibrate with
BITS = (8, 4, 3)
FACTORS = (0.5, 0.8, 1.25, 2.0)  # of #2135's steps
AIMS = (2.3, 2.9, 3.5, 4.1)  # bits per weight, about, of the ways of papers
SHOWN = (2.5, 3.0, 3.5, 4.0)  # between them
Rounded = tuple[Tensor, float]  # (rows (out, in) as they are read back, their bytes)


class Form(NamedTuple):
    """A way to round the matrices of the layers."""

    # Of a matrix: "bits", as many for each, or "cost", by its sensitivity; of a row: "rows", by its.
    steps: str = "bits"
    rotate: bool = False  # both sides
    feedback: bool = False  # of errors between rows; between columns always
    states: int = 0  # of the trellis; 0: integers
    water: bool = False  # steps of columns by their pivots, gains by least squares


PAPERS = {
    "GPTQ": Form(),  # arXiv:2210.17323
    "WaterSIC": Form(water=True),  # arXiv:2603.04956, without its corrections for drift
    "YAQA": Form(rotate=True, feedback=True),  # arXiv:2505.22988
    "YAQA, trellis": Form(rotate=True, feedback=True, states=8),
    "ours": Form("rows", states=8),
    "ours, feedback": Form("rows", feedback=True, states=8),
    "combination": Form("cost", rotate=True, feedback=True, states=8),
    "combination, integers": Form("cost", rotate=True, feedback=True),
}


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


# By name: (function that makes it, function of it and rows (B, T + 1): logits of the last tokens)
MODELS = {
    "llama": (llama, lambda model, rows: model(rows[:, :-1]).logits.float()),
    "gpt2": (gpt2, lambda model, rows: model(rows[:, :-1]).logits.float()),
    "context": (Context, lambda model, rows: model(rows[:, :-1])),
}


DEEP = {"NUM_LAYERS": 11, "MODEL_DIM": 96}
# The demonstration's in place of what a record has for thousands of steps
LONG = ("EMA_", "MUON_", "LATE_", "SHORT_", "WARMUP_", "VAL_", "TRAIN_LOG")
BRIEF = {name: value for name, value in CPU.items() if name.startswith(LONG)}
SCRIPT_MODELS = {  # of train_gpt.py: knobs beside the demonstration's
    "4x128": {},
    "11x96": DEEP,
    "2135": program.read_env(ROOT / "configs/2135.env") | DEEP | BRIEF,
}


class Subject(NamedTuple):
    """A trained model, and what rounds and judges it."""

    name: str
    model: nn.Module
    logits: Callable
    nats: Callable  # function of a model and rows: those of each token that has logits
    batches: list[Tensor]  # (B, T + 1) each, to calibrate with
    calibration: quantise.Calibration | train_gpt.Tensors  # tensors: `train_gpt.Calibration.sums`
    held_out: list[Tensor]  # (B, T + 1) each


class Layers(NamedTuple):
    """The matrices of a model's layers, without tables."""

    # The names of N matrices, and a quantiser that has their rows and Hessians
    groups: list[tuple[list[str], train_gpt.Quantiser]]
    # Maps tensors by the name of a parameter to views (out, in) of them by the name of a matrix
    views: Callable[[train_gpt.Tensors], train_gpt.Tensors]


def nats_of(logits: Callable, model: nn.Module, rows: Tensor) -> Tensor:
    """Losses (B, n) of the last tokens of rows (B, T + 1), which have logits (B, n, V)."""
    found = logits(model, rows)
    return F.cross_entropy(found.mT, rows[:, -found.size(1) :], reduction="none")


def sampler(tokens: Tensor) -> Callable[[int], Tensor]:
    """A function that draws n random rows (n, LENGTH + 1)."""
    draw = torch.Generator().manual_seed(1)

    def batch(rows: int) -> Tensor:
        places = torch.randint(0, len(tokens) - LENGTH - 1, (rows, 1), generator=draw)
        return tokens[places + torch.arange(LENGTH + 1)].long()

    return batch


def train(make: Callable, nats: Callable, batch: Callable, steps: int) -> nn.Module:
    """Train one of MODELS by AdamW."""
    torch.manual_seed(0)
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        rate = min((step + 1) / 50, max(0.02, 2 * (1 - step / steps)), 1)
        optimizer.param_groups[0]["lr"] = 3e-3 * rate
        optimizer.zero_grad()
        nats(model, batch(16)).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def train_by_script(name: str, data: str, steps: int) -> train_gpt.GPT:
    """Train one of SCRIPT_MODELS and average its weights."""
    knobs = CPU | SCRIPT_MODELS[name]
    knobs |= dict(DATA_PATH=data, VOCAB_SIZE=VOCAB, TRAIN_BATCH_TOKENS=16 * LENGTH)
    knobs |= dict(TRAIN_SEQ_LEN=LENGTH, EVAL_SEQ_LEN=LENGTH)
    knobs |= dict(ITERATIONS=steps, WARMDOWN_FRAC=0.5, MAX_WALLCLOCK_SECONDS=0)
    knobs |= dict(DEVICE="cpu", COMPUTE_DTYPE="float32", COMPILE=0)
    hp = train_gpt.Hyperparameters.from_env({key: str(value) for key, value in knobs.items()})
    with train_gpt.Runtime.start(hp) as runtime:
        run = train_gpt.Run(hp, runtime, lambda *_, **__: None, None)
        for step in range(steps):
            run.train_step(step, train_gpt.schedule(hp, step, 0, math.inf))
        run.average.apply()
        run.optimizer.sync_banks()
    return run.model


def prepare(name: str, steps: int, shards: dict[str, Tensor], data: str) -> Subject:
    """Train and calibrate a model."""
    batch, text = sampler(shards["train"]), shards["val"]
    make, logits = MODELS.get(name, (None, lambda model, rows: model(rows[:, :-1]).float()))
    nats = functools.partial(nats_of, logits)
    model = train(make, nats, batch, steps) if make else train_by_script(name, data, steps)
    batches = [batch(8) for _ in range(BATCHES)]
    rows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].long()
    held_out = list(rows.view(-1, LENGTH + 1).split(64))
    if make:
        calibration = quantise.calibrate(model, batches, nats)
    else:
        collected = train_gpt.Calibration(model, BATCHES * 8 * LENGTH)
        for rows in batches:
            collected.add(rows)
        calibration = dict(collected.sums)
    with torch.no_grad():
        before = torch.cat([nats(model, rows).flatten() for rows in held_out]).double().mean()
    count = train_gpt.count_numbers(model.parameters())
    print(f"{name}: {count:,} weights, {before:.4f} nats per token before", flush=True)
    return Subject(name, model, logits, nats, batches, calibration, held_out)


def layers_of(subject: Subject, exported: bool = False) -> Layers:
    """Of a model of `transformers`, of nn.Linear or of train_gpt.py; exported: with the quantisers of
    a file, in which tools/quantise.py may rotate."""
    model = subject.model
    if isinstance(model, train_gpt.GPT):
        weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
        made = train_gpt.make_quantisers(weights, model.hp, subject.calibration)
        layers = range(model.hp.num_layers)
        groups = [([f"{kind} {i}" for i in layers], q) for kind, q in made.items()]

        def views(tensors):
            parts = {k.name: train_gpt.bank_part(tensors[k.bank], k) for k in train_gpt.MATRICES}
            return {f"{kind} {i}": part[i] for kind, part in parts.items() for i in layers}

        shown = views(weights)
        return Layers([(names, one) for names, one in groups if names[0] in shown], views)
    matrices = quantise.matrices_of(model)
    calibration = subject.calibration if exported else subject.calibration._replace(outputs={})
    groups, make = quantise.make_groups(model, calibration, 8)
    made = [(names, make(names)) for names in groups if not matrices[names[0]].lookup]
    made = [(names, one) for names, one in made if one.rows.size(1) != VOCAB]  # heads
    shown = {name: matrices[name] for names, _ in made for name in names}
    return Layers(made, lambda tensors: {n: one.rows(tensors[n]) for n, one in shown.items()})


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
    back = linear.weight.dequantize().detach()  # also of a weight that it has left as it was
    left = f"torchao has not rounded a matrix {tuple(rows.shape)}: update it"
    train_gpt.require(not back.equal(rows), left)
    return back, rows.numel() * (bits / 8 + 2 / group)


def hqq(rows: Tensor, bits: int, group: int = 64) -> Rounded:
    from hqq.core.quantize import Quantizer

    how = dict(axis=1, device="cpu", compute_dtype=torch.float32, bitpack=False)
    codes, meta = Quantizer.quantize(rows, nbits=bits, group_size=group, **how)
    size = rows.numel() * bits / 8 + 2 * (meta["scale"].numel() + meta["zero"].numel())
    return Quantizer.dequantize(codes, meta), size


def gptq(rows: Tensor, hessian: Tensor, ratio: float, damping: float = 0.01) -> Rounded:
    """By train_gpt.py's GPTQ and coder, in steps of so many deviations of a row."""
    steps = (ratio * rows.std(dim=1, keepdim=True)).half().float().clamp(min=1e-6)[None]
    order = train_gpt.inverse_factor(train_gpt.damped(hessian[None], damping))
    to_codes = lambda column: (column / steps).round().clamp(-2047, 2047)  # noqa: E731
    integers = train_gpt.gptq(rows[None], *order, steps, to_codes)
    codes = train_gpt.encode_ans(integers.short().numpy())
    return (integers * steps)[0], len(codes) + 2 * len(rows)


def ways(calibration: quantise.Calibration) -> Iterator[tuple[str, Callable]]:
    """(name, function of a matrix's name, matrix and rows that returns `Rounded`)."""
    plain = {f"group {group}": functools.partial(nearest, group=group) for group in (32, 64)}
    libraries = {"torchao": torchao, "hqq": hqq}
    plain |= {name: way for name, way in libraries.items() if importlib.util.find_spec(name)}
    for bits in BITS:
        for name, way in plain.items():
            yield f"{name}, {bits} bits", lambda _, __, rows, bits=bits, way=way: way(rows, bits)

    def steps_of_2135(name, matrix, rows, factor):
        mlp = "mlp" in name or name in ("layers.0.weight", "layers.2.weight")  # of Context
        ratio = 0.222 if matrix.lookup else 0.371 if mlp else 0.419
        return gptq(rows, calibration.hessian(name, rows.size(1)), ratio * factor)

    for factor in FACTORS:
        yield f"GPTQ, steps x {factor:g}", functools.partial(steps_of_2135, factor=factor)


@torch.no_grad()
def judge_sets(
    model: nn.Module, logits: Callable, batches: list[Tensor], sets: list[dict[str, Tensor]]
) -> list[dict[str, float]]:
    """`lost` and `kl` of each of these sets of parameters in place of the model's."""
    sums, count = torch.zeros(len(sets), 2, dtype=torch.float64), 0
    for rows in quantise.bar(batches, "judging"):

        def log_odds(parameters, rows=rows):
            def replaced(ids):
                return functional_call(model, parameters, (ids,))

            return logits(replaced, rows).log_softmax(dim=-1)

        plain = log_odds({})
        targets = rows[:, -plain.size(1) :, None]
        count += targets.numel()
        for parameters, total in zip(sets, sums, strict=True):
            away = plain - log_odds(parameters)
            total[0] += away.gather(2, targets).double().sum()
            total[1] += away.mul_(plain.exp()).sum(dim=-1).double().sum()
    return [{"lost": lost, "kl": kl} for lost, kl in (sums / count).tolist()]


def judge(subject: Subject, rounded: dict[str, Tensor]) -> dict[str, float]:
    """`lost` and `kl` of these parameters in place of the model's."""
    before = dict(subject.model.named_parameters())
    mirrored = {name: 2 * before[name].detach() - tensor for name, tensor in rounded.items()}
    arguments = subject.model, subject.logits, subject.held_out
    there, back = judge_sets(*arguments, [rounded, mirrored])
    return {"lost": (there["lost"] + back["lost"]) / 2, "kl": there["kl"]}


@torch.no_grad()
def round_matrices(model: nn.Module, way: Callable) -> tuple[dict[str, Tensor], dict[str, float]]:
    """(the matrices as one of the ways leaves them, the bytes of each)."""
    found, sizes = {}, {}
    for name, matrix in quantise.bar(list(quantise.matrices_of(model).items()), "rounding"):
        rows = matrix.rows(matrix.parameter).detach().float().contiguous()
        back, sizes[name] = way(name, matrix, rows)
        found[name] = matrix.rows(back)  # its own inverse
    return found, sizes


def ours(subject: Subject, max_bytes: float) -> tuple[dict[str, Tensor], int]:
    """(parameters as tools/quantise.py leaves them, bytes of the file)."""
    file, _ = quantise.quantise(subject.model, subject.calibration, max_bytes)
    tensors = quantise.read(subject.model, *quantise.parse(file))
    return {name: tensors[name] for name, _ in subject.model.named_parameters()}, len(file)


def compare(subject: Subject) -> list[dict]:
    """Print and return a row for each way."""
    rows, count = [], train_gpt.count_numbers(subject.model.parameters())
    for way, function in ways(subject.calibration):
        rounded, sizes = round_matrices(subject.model, function)
        named = subject.model.named_parameters()
        rest = {name: one.detach().half().float() for name, one in named if name not in rounded}
        nbytes = sum(sizes.values()) + 2 * train_gpt.count_numbers(rest.values())
        row = {
            "model": subject.name,
            "way": way,
            "bytes": round(nbytes),
            "bits": 8 * nbytes / count,
        }
        tensors, row["our_bytes"] = ours(subject, nbytes)
        row |= judge(subject, rounded | rest)
        row |= {f"our_{key}": value for key, value in judge(subject, tensors).items()}
        rows.append(row)
        theirs = f"{row['bits']:7.2f} bits, lost{row['lost']:10.5f}, kl{row['kl']:10.5f}"
        bits = 8 * row["our_bytes"] / count
        found = f"{bits:5.2f}{row['our_lost']:10.5f}{row['our_kl']:10.5f}"
        print(f"{way:20}{theirs}; ours {found}", flush=True)
    return rows


def between_rows(output: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """(A (N, R, R), the diagonal of D (N, R)) with G = A^T D A of matrices G (N, R, R): A is the
    identity in each block of rows and 0 right of it, D has entries in blocks only."""
    upper = torch.linalg.cholesky(output.double().flip(1, 2)).flip(1, 2)  # G = upper upper^T
    place = torch.arange(output.size(1)) // block
    own = upper * (place[:, None] == place)
    triangle = torch.linalg.solve_triangular(own, upper, upper=True, left=False).mT
    return triangle.float(), own.square().sum(dim=2).float()


def gained(rows: Tensor, rounded: Tensor, hessian: Tensor) -> Tensor:
    """Rounded rows (N, R, C) times a gain for each row, then for each column, which lower the error
    of the products: WaterSIC's, by least squares."""
    products = rounded @ hessian
    gain = (products * rows).sum(dim=2) / (products * rounded).sum(dim=2).clamp(min=1e-30)
    rounded = rounded * gain.half().float()[..., None]
    normal = (rounded.mT @ rounded) * hessian
    slope = ((rows - rounded) @ hessian * rounded).sum(dim=1)
    ridge = 1e-4 * normal.diagonal(0, 1, 2).mean(dim=1)[:, None, None] * torch.eye(rows.size(2))
    gain = 1 + torch.linalg.solve(normal + ridge, slope)
    return rounded * gain.half().float()[:, None]


@dataclasses.dataclass
class Kronecker:
    """Rounds matrices so that tr(G E H E^T) of their errors E is small: H of the inputs, G of the
    gradients of the outputs. A form without feedback between rows knows the diagonal of G only."""

    rows: Tensor  # (N, R, C)
    hessian: Tensor  # H (N, C, C), damped
    output: Tensor  # G (N, R, R)
    form: Form

    def __post_init__(self):
        form, height = self.form, self.rows.size(1)
        # Integers in a step, and what divides its square to give the mean squared error.
        self.choices, self.divisor = (2, 15) if form.states else (1, 12)
        given = self.rows, self.hessian, self.output
        rows, hessian, output = map(quantise.rotate, given) if form.rotate else given
        self.order, factor = train_gpt.inverse_factor(hessian)
        pivots = factor.diagonal(0, 1, 2) ** -2.0  # (N, C), of columns in this order
        self.scale = torch.ones_like(pivots)  # of columns: GPTQ rounds rows / scale
        if form.water:
            self.scale = (pivots / pivots.log().mean(dim=1, keepdim=True).exp()).rsqrt()
        self.factor, self.pivots = factor / self.scale[:, None], pivots * self.scale.square()
        self.scale = self.scale.gather(1, self.order.argsort())[:, None]
        self.turned = rows / self.scale
        self.block = height
        if form.feedback:  # a path through the trellis takes a segment together
            self.block = train_gpt.SEGMENT if form.states else 1
        damping = 0.05 * output.diagonal(0, 1, 2).mean(dim=1)[:, None, None]
        output = output + damping * torch.eye(height)
        self.least = torch.linalg.slogdet(output.double())[1] / height  # mean log of the weights
        if form.feedback:
            self.triangle, self.weights = between_rows(output, self.block)
        else:
            self.triangle, self.weights = 0 * output, output.diagonal(0, 1, 2)
        # With an ideal coder equal bits are steps in proportion to this.
        self.spread = (self.turned.abs() + 1e-12).log().mean(dim=(1, 2), keepdim=True).exp() / 0.53
        weights = self.weights if form.steps == "rows" else self.weights.mean(dim=1, keepdim=True)
        self.costs = weights[..., None] * self.pivots.mean(dim=1)[:, None, None]
        if form.steps == "bits":
            self.costs = self.spread**-2

    def distance(self) -> tuple[Tensor, Tensor]:
        """(N,) each: by how many dB the form exceeds the Gaussian bound, by columns and by rows that
        should have steps of their own, beside the 1.53 of integers or the 0.46 of the trellis."""
        unequal = self.form.steps != "rows"
        rows = self.weights.mean(dim=1).log() if unequal else self.weights.log().mean(dim=1)
        columns = self.pivots.mean(dim=1).log() - self.pivots.log().mean(dim=1)
        return columns * 10 / math.log(10), (rows - self.least) * 10 / math.log(10)

    def steps(self, level: float) -> Tensor:
        """(N, R or 1, 1). `level` is what a weight costs, unless steps are by bits."""
        over = 2 if self.form.steps == "rows" else (1, 2)
        deviation = self.turned.square().mean(dim=over, keepdim=True).add(1e-30).sqrt()
        largest = self.turned.abs().amax(dim=over, keepdim=True)
        wanted = (self.divisor * level / self.costs).sqrt()
        return train_gpt.round_steps(wanted.clamp(largest / 1875, 2 * deviation), 20)

    def count_steps(self) -> int:
        """Numbers that a reader needs beside the codes."""
        columns = self.scale.numel() + self.rows[:, :, 0].numel() if self.form.water else 0
        return columns or self.costs.numel()

    def round(self, level: float) -> tuple[Tensor, Tensor, Tensor]:
        """(codes (N, R, C), the rows as they are read back, what they cost by prediction (N,))."""
        steps = self.steps(level).expand(-1, self.rows.size(1), 1)
        unit, weights = steps / self.choices, self.weights[..., None] * steps.square()

        def to_integers(column):  # (N, R, 1)
            errors, found = torch.zeros_like(column), []
            for first in range(0, column.size(1), self.block):
                part = slice(first, first + self.block)
                fed = self.triangle[:, part, :first] @ errors[:, :first]
                targets = ((column[:, part] + fed) / unit[:, part]).clamp(-4000, 4000)
                if self.form.states:
                    found.append(train_gpt.viterbi(targets, weights[:, part], self.form.states))
                else:
                    found.append(targets.round())
                errors[:, part] = column[:, part] - found[-1] * unit[:, part]
            return torch.cat(found, dim=1)

        integers = train_gpt.gptq(self.turned, self.order, self.factor, unit, to_integers)
        back = integers * unit * self.scale
        back = quantise.rotate(back, back=True) if self.form.rotate else back
        if self.form.water:
            back = gained(self.rows, back, self.hessian)
        cost = weights.sum(dim=(1, 2)) * self.pivots.sum(dim=1) / self.divisor
        return (integers / self.choices).floor(), back, cost


def is_rotated(quantiser: train_gpt.Quantiser) -> bool:
    return isinstance(quantiser, quantise.RotatedQuantiser)


@dataclasses.dataclass
class Exported:
    """A quantiser of an export in the place of a `Kronecker`."""

    quantiser: train_gpt.Quantiser
    weights: int  # as how many its costs count each weight

    def __post_init__(self):
        self.rows, self.spread = self.quantiser.rows, self.quantiser.deviation
        self.steps = self.quantiser.steps

    def count_steps(self) -> int:
        return self.steps(1.0).numel()

    def round(self, level: float) -> tuple[Tensor, Tensor, Tensor]:
        """Like Kronecker's."""
        codes, steps, cost = self.quantiser.round(level)
        rotated = is_rotated(self.quantiser)
        back = quantise.rows_of_codes(codes, steps, self.quantiser.states, rotated)
        return codes, back, cost / self.weights


def output_factors(subject: Subject, views: Callable) -> dict[str, Tensor]:
    """By matrix of `Layers.views` G (out, out): half the mean of g g^T over tokens and inputs, where
    g (out,) is the gradient of a token's loss by the weights of an input. The calibrations have its
    diagonal."""
    parameters, sums, count = dict(subject.model.named_parameters()), {}, 0
    random = torch.Generator().manual_seed(0)
    for batch in subject.batches:
        nats = subject.nats(subject.model, batch)
        loss = (nats * torch.randn(nats.shape, generator=random)).sum()
        grads = torch.autograd.grad(loss, parameters.values(), materialize_grads=True)
        for name, rows in views(dict(zip(parameters, grads, strict=True))).items():
            sums[name] = sums.get(name, 0) + rows @ rows.mT / rows.size(1)
        count += nats.numel()
    return {name: total / (2 * count) for name, total in sums.items()}


def counted(subject: Subject) -> int:
    """The weights by whose number the costs of a calibration are multiplied."""
    parameters = subject.model.parameters()
    if not isinstance(subject.model, train_gpt.GPT):
        matrices, squares = quantise.matrices_of(subject.model), subject.calibration.squares
        parameters = [one.parameter for name, one in matrices.items() if squares[name].any()]
    return train_gpt.count_numbers(parameters)


def level_of(bits: float, rounders: list[Kronecker | Exported]) -> float:
    """With which the codes of all matrices have about this many bits, if weights are Gaussian."""
    count = sum(one.rows.numel() for one in rounders)

    def bits_at(level):
        total = 0.0
        for one in rounders:
            ratio = (one.spread / one.steps(level)).square()
            rate = (1 + 2 * math.pi * math.e * ratio).log2().mean() / 2
            total += float(rate) * one.rows.numel()
        return total / count

    low, high = -100.0, 20.0  # of the level's log2
    while high - low > 0.001:
        middle = (low + high) / 2
        low, high = (middle, high) if bits_at(2**middle) > bits else (low, middle)
    return 2**low


def at_bits(points: list[tuple[float, float]]) -> np.ndarray:
    """Of (bits, kl), the kl at SHOWN bits by its logarithm, nan beyond the points."""
    bits, kl = zip(*sorted(points), strict=True)
    return np.exp(np.interp(SHOWN, bits, np.log(kl), left=np.nan, right=np.nan))


def compare_papers(subject: Subject) -> list[dict]:
    """Print and return a row for each way and size, then print `kl` at equal bits."""
    subject = subject._replace(held_out=subject.held_out[:4])
    plain, views = layers_of(subject)
    outputs, weights = output_factors(subject, views), dict(subject.model.named_parameters())
    count, rows = sum(one.rows.numel() for _, one in plain), []
    ways = [*PAPERS, "as exported"]
    for way in ways:
        groups, rounders = plain, []
        if way in PAPERS:
            for names, one in plain:
                output = torch.stack([outputs[name] for name in names])
                rounders.append(Kronecker(one.rows, one.damped, output, PAPERS[way]))
            shares = [(*one.distance(), one.rows[0].numel() / count) for one in rounders]
            away = [sum(float(share[i].sum()) * share[2] for share in shares) for i in (0, 1)]
            print("{}: {:.2f} dB by columns, {:.2f} by rows".format(way, *away), flush=True)
        else:
            groups = layers_of(subject, exported=True).groups
            rounders = [Exported(one, counted(subject)) for _, one in groups]
            turned = sum(len(names) for names, one in groups if is_rotated(one))
            print(f"{way}: {turned} of {len(outputs)} matrices are rotated", flush=True)
        side = 16 * sum(one.count_steps() for one in rounders) / count
        for aim in AIMS:
            rounded = {name: weight.detach().clone() for name, weight in weights.items()}
            places, level = views(rounded), level_of(aim - side, rounders)
            size, expected = 0, 0.0
            for (names, _), one in zip(groups, rounders, strict=True):
                codes, back, cost = one.round(level)
                size += len(train_gpt.encode_ans(codes.short().numpy()))
                expected += float(cost.sum())
                for name, matrix in zip(names, back, strict=True):
                    places[name].copy_(matrix)
            row = {"model": subject.name, "way": way, "codes": 8 * size / count}
            row |= {"bits": row["codes"] + side, "expected": expected, **judge(subject, rounded)}
            rows.append(row)
            found = f"lost{row['lost']:10.6f}, kl{row['kl']:10.6f}, expected{expected:10.6f}"
            bits = f"{row['bits']:7.2f} bits, {row['codes']:.2f} of codes"
            print(f"{way:22}{bits}, {found}", flush=True)
    for measure in ("bits", "codes"):
        print(f"kl at {SHOWN} {measure} per weight")
        for way in ways:
            points = [(row[measure], row["kl"]) for row in rows if row["way"] == way]
            print(f"{way:22}" + "".join(f"{kl:10.6f}" for kl in at_bits(points)), flush=True)
    return rows


def main() -> None:
    parser = program.parser(__doc__)
    add, models = parser.add_argument, [*MODELS, *SCRIPT_MODELS]
    add("data", help="folder of shards of 1,024 pieces")
    add("--models", nargs="+", choices=models, default=list(MODELS))
    add("--steps", type=program.count, default=1000, help="training steps of each model")
    add("--papers", action="store_true", help="the ways that PAPERS lists")
    arguments = parser.parse_args()
    for name in arguments.models:
        if name in SCRIPT_MODELS and not arguments.papers:
            parser.error(f"--models {name} is for --papers only")
        if name in ("llama", "gpt2") and not importlib.util.find_spec("transformers"):
            parser.error(f"--models {name} needs transformers: pip install transformers")
    torch.use_deterministic_algorithms(True)  # as train_gpt.py does, for the other models too
    shards = {}
    for split in ("train", "val"):
        stream = train_gpt.TokenStream(arguments.data, split, VOCAB)
        shards[split] = torch.from_numpy(stream.read(0, min(len(stream), 1 << 23)))
    if not arguments.papers:
        for name in ("torchao", "hqq"):
            if not importlib.util.find_spec(name):
                print(f"note: {name} is not installed, so its rows are missing")
    rows = []
    for name in arguments.models:
        subject = prepare(name, arguments.steps, shards, arguments.data)
        rows += (compare_papers if arguments.papers else compare)(subject)
    assert all(math.isfinite(row["lost"]) for row in rows)
    finish("quantisers", rows=rows)


if __name__ == "__main__":
    program.run_program(main)

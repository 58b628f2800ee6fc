#!/usr/bin/env python3
"""Round the weights of a torch model to a number of bytes, with the quantiser of train_gpt.py.

    python tools/quantise.py FOLDER --text text.txt --bits 3.5 -o model.npz

FOLDER holds a causal language model of `transformers` and its tokenizer. The first nine tenths of the
text calibrate. The last tenth, or another text, measures the loss before and after. For any other
model use this file as a module (docs/quantiser.md).

What is rounded: the weights of nn.Linear, nn.Embedding and transformers' Conv1D that calibration has
used. Other parameters are stored in fp16, or exactly if fp16 would change them by more than 0.05 %
of their norm (a 1e-9 among ordinary numbers becomes 0), and buffers exactly.
"""

import argparse
import contextlib
import functools
import hashlib
import io
import itertools
import json
import math
import numbers
import os
import re
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

if __name__ == "__main__":  # a module must change neither sys.path nor sys.excepthook
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

    import program

import train_gpt
from train_gpt import Quantiser, Rule, require

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VERSION = 4
ENOUGH = 50_000  # tokens of calibration; a prediction from fewer is too low
PARTED = "a copy of a model parts parameters that were tied by .data: tie them again"
# Rows of a segment in a rotated matrix. Errors are fed back between segments, which makes up for
# paths through the trellis that are shorter than train_gpt.py's.
SEGMENT = 32
GROUP = 1 << 24  # weights that are rounded together, at most, unless one matrix has more
ARRAYS = ("header", "codes", "values", "exact")
FLOATS = ("F64", "F32", "F16", "BF16")  # types of weights in a safetensors file
Names = tuple[str, ...]


class Matrix(NamedTuple):
    """A parameter that is rounded."""

    parameter: nn.Parameter
    transposed: bool  # (in, out), as in Conv1D
    lookup: bool  # an embedding, perhaps also a head

    def rows(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape as (out, in)."""
        return tensor.mT if self.transposed else tensor


class Calibration(NamedTuple):
    """What `calibrate` finds: sums over all tokens, whose scale does not matter, but for `squares`."""

    hessians: dict[Names, Tensor]  # x^T x (in, in) of the inputs x that these matrices read
    # (out,): mean over a row and all tokens of the squared gradient of a token's loss
    squares: dict[str, Tensor]
    tokens: int
    # Sums of g g^T |x|^2 (out, out), g the gradient of an output, of matrices that may be rotated
    outputs: dict[str, Tensor]

    def hessian(self, name: str, width: int) -> Tensor:
        """(in, in) of a matrix. Without products, as in a lookup, each column counts equally."""
        used = [sums * names.count(name) for names, sums in self.hessians.items() if name in names]
        return sum(used) if used else self.squares[name].new_ones(width).diag()


def names_of(model: nn.Module) -> dict[Tensor, str]:
    """The name of each parameter and buffer of the state dict before the model or a part of it was
    compiled. Those over the same numbers have the first one's. Raises UserError."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        require(
            not (tensor.is_meta or nn.parameter.is_lazy(tensor)),
            f"{name} has no values, as on the meta device: make the whole model with values first",
        )
    names, firsts = {}, {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        require(isinstance(tensor, Tensor), f"{name} in the state dict is no tensor: remove it")
        require(
            not tensor.is_inference(),
            f"{name} was made in torch.inference_mode(): make the model without it",
        )
        plain = type(tensor.data) is Tensor and tensor.layout is torch.strided
        require(
            plain and not tensor.is_quantized,
            f"{name} is quantised, sparse or of a tensor's subclass: make it a plain tensor",
        )
        strides = [step for step, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]
        place = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, *strides
        place = place if tensor.numel() else tensor
        names[tensor] = firsts.setdefault(place, name.replace("_orig_mod.", ""))
    return names


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of the state dict by their `names_of`. No two share memory."""
    tensors = {}
    for tensor, name in names_of(model).items():
        tensors.setdefault(name, tensor)
    spans = []
    for name, tensor in tensors.items():
        if tensor.numel():
            strides = zip(tensor.stride(), tensor.shape, strict=True)
            length = tensor.itemsize * (1 + sum(step * (n - 1) for step, n in strides))
            require(tensor.nbytes <= length, f"{name} is expanded: give it a clone() of itself")
            spans.append((str(tensor.device), tensor.data_ptr(), length, name))
    spans.sort()
    for place, (device, start, length, name) in enumerate(spans, 1):
        for *other, _, twin in itertools.islice(spans, place, None):
            if tuple(other) >= (device, start + length):
                break
            require(
                not np.shares_memory(addresses(tensors[name]), addresses(tensors[twin])),
                f"{name} and {twin} share a part of their memory: give one a clone() of itself",
            )
    return tensors


def addresses(tensor: Tensor) -> np.ndarray:
    """An array at the same addresses, perhaps of a GPU: nothing may read it."""
    strides, size = (tensor.itemsize * step for step in tensor.stride()), tensor.itemsize
    place = {"shape": tuple(tensor.shape), "strides": tuple(strides), "typestr": f"|V{size}"}
    place |= {"data": (tensor.data_ptr(), True), "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=place))


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D, whose weight is (in, out)."""
    return isinstance(module, getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", ()))


def matrices_of(model: nn.Module) -> dict[str, Matrix]:
    """The parameters that may be rounded, by name."""
    tensors, names, found = tensors_of(model), names_of(model), {}
    for module in model.modules():
        lookup, name = isinstance(module, nn.Embedding), names.get(getattr(module, "weight", None))
        known = lookup or isinstance(module, nn.Linear) or is_conv1d(module)
        if name and known and module.weight.is_floating_point() and module.weight.numel():
            lookup |= name in found and found[name].lookup
            found[name] = Matrix(tensors[name], is_conv1d(module), lookup)
    require(found, "the model has no nn.Linear, nn.Embedding or Conv1D: nothing can be rounded")
    return found


def rotate(x: Tensor, back: bool = False) -> Tensor:
    """P x Q^T of matrices x (..., m, n), with orthogonal P and Q by their sizes, or P^T x Q. Each is
    random signs and Hadamard's matrix, as in QuIP# (arXiv:2402.04396), for the first 2^k elements,
    then for the last 2^k. Sums have a fixed order: all machines get the same numbers."""
    for _ in range(2):
        x = x.mT.clone(memory_format=torch.contiguous_format)
        power = 1 << (x.size(-2).bit_length() - 1)
        for first in sorted({0, x.size(-2) - power}, reverse=back):
            signs = np.random.RandomState(first).choice([-1, 1], (power, 1))
            signs = torch.from_numpy(signs).to(x) * power**-0.5
            part, width = x[..., first : first + power, :], power
            if not back:
                part.mul_(signs)
            while width := width // 2:
                a, b = part.unflatten(-2, (-1, 2, width)).unbind(-3)
                a.add_(b)
                b.mul_(-2).add_(a)  # a + b - 2 b
            if back:
                part.mul_(signs)
    return x


def to_segments(rows: Tensor) -> Tensor:
    """Rows (N, out, n) as (B, N, length, n): B segments of this length, SEGMENT or out if that is
    less, the last one filled up with zeros."""
    length = min(SEGMENT, rows.size(1))
    padded = F.pad(rows, (0, 0, 0, -rows.size(1) % length))
    return padded.unflatten(1, (-1, length)).transpose(0, 1)


def from_segments(segments: Tensor, out: int) -> Tensor:
    """The inverse of `to_segments`."""
    return segments.transpose(0, 1).flatten(1, 2)[:, :out]


def row_feedback(output: Tensor) -> tuple[Tensor, Tensor]:
    """(A (B, N, rows, length) for B segments of rows, weights of rows (N, out)) of second moments G
    (N, out, out), as in YAQA (arXiv:2505.22988). `rows` is B * length, at least out. Errors D of
    rows cost tr(G D H D^T). That is the sum of weight_r E_r H E_r^T over rows, where E is D plus the
    segment's A^T times the D of later ones. Products of two rows of one segment are left out."""
    out = output.size(1)
    length = min(SEGMENT, out)
    extra = -out % length
    lower = F.pad(torch.linalg.cholesky(output.double()), (0, extra, 0, extra))
    lower.diagonal(0, 1, 2)[:, out:] = 1
    columns = lower.unflatten(2, (-1, length)).permute(2, 0, 1, 3)  # (B, N, rows, length)
    own = columns.unflatten(2, (-1, length)).diagonal(0, 0, 2).movedim(-1, 0)
    feedback = (columns @ own.inverse()).float()
    feedback.unflatten(2, (-1, length)).diagonal(0, 0, 2).zero_()  # it was the identity
    return feedback, own.square().sum(3).transpose(0, 1).flatten(1)[:, :out].float()


def gptq(
    weights: Tensor,
    order: Tensor,
    factor: Tensor,
    steps: Tensor,
    to_integers: Callable,
    feedback: Tensor,
    block: int = 128,
) -> Tensor:
    """Integers (N, out, in), like train_gpt.gptq's, of matrices with one step, (N, 1, 1).
    `to_integers` rounds a column of each of B segments of rows, (B, N, length, 1).

    With the A of `row_feedback` a segment also compensates the errors of later segments in the same
    column. It rounds a column one turn after the next segment, so all take in + B - 1 turns instead
    of in * B."""
    rows, width = torch.take_along_dim(weights, order[:, None], 2), weights.size(2)
    segments = to_segments(rows)
    # `left` (B, N, length, in + 2 * last) has `last` columns of zeros on both sides. In turn t
    # segment b rounds column t + b of it, so the last segment is first. Errors replace the column.
    last = len(segments) - 1
    left, turns = F.pad(segments, (last, last)), width + last
    factor = F.pad(factor / factor.diagonal(0, 1, 2)[..., None], 4 * (last,))
    integers = torch.zeros_like(left)
    for first in range(0, turns, block):
        stop, errors = min(first + block, turns), []
        for turn in range(first, stop):
            now = slice(turn, turn + last + 1)
            column = left[..., now].diagonal(0, 0, 3).movedim(-1, 0)[..., None]
            # (B, N, rows): the column of each, in all segments. A is 0 for earlier ones.
            columns = left[..., now].permute(3, 1, 0, 2).flatten(2)
            rounded = to_integers(column + (columns[..., None, :] @ feedback).mT)
            integers[..., now].diagonal(0, 0, 3).copy_(rounded[..., 0].movedim(0, -1))
            # Errors from targets that earlier columns have compensated, so feedback has their share.
            errors.append(column - rounded * steps)
            near = slice(turn + 1, stop + last)
            effect = factor[:, now, near].transpose(0, 1)[:, :, None]
            left[..., near].flatten(0, 1).baddbmm_(
                errors[-1].flatten(0, 1), effect.flatten(0, 1), alpha=-1
            )
            column.copy_(errors[-1])
        effect = [factor[:, first + b : stop + b, stop + last :] for b in range(last + 1)]
        left[..., stop + last :].flatten(0, 1).baddbmm_(
            torch.cat(errors, 3).flatten(0, 1), torch.cat(effect), alpha=-1
        )
    integers = from_segments(integers[..., last:turns], weights.size(1))
    return torch.take_along_dim(integers, order.argsort()[:, None], 2)


class RotatedQuantiser(Quantiser):
    """Rounds matrices after `rotate`, with one step for all rows and feedback between rows."""

    def __init__(self, rows: Tensor, hessian: Tensor, output: Tensor, states: int, rule: Rule):
        """`output` (N, out, out) is the G of `row_feedback`, whose diagonal a `Quantiser` has as its
        cost."""
        self.output = rotate(output)
        self.feedback, weights = row_feedback(self.output)
        super().__init__(rotate(rows), rotate(hessian), weights, states, rule)
        self.largest = self.largest.amax(1, keepdim=True)
        self.deviation = (self.rows.square().mean((1, 2), keepdim=True) + 1e-30).sqrt()

    def steps(self, loss: float) -> Tensor:
        """(N, 1, 1), with which each weight costs `loss` on average."""
        cost = self.cost.mean(1, keepdim=True) * self.pivot
        wanted = ((15 if self.states else 12) * loss / cost).sqrt()
        return train_gpt.round_steps(wanted.clamp(self.largest / 1875, 2 * self.deviation), 16)

    def round(self, loss: float) -> tuple[Tensor, ...]:
        """Codes (N, out, in) int16, steps (N, 1, 1), and what the weights of each matrix are expected
        to cost together, (N,): tr(G D H D^T) of their errors D, where H is damped."""
        steps = self.steps(loss)
        parts = 2 if self.states else 1
        unit = steps / parts
        weights = to_segments(self.cost * steps.square()).flatten(0, 1)

        def to_integers(column: Tensor) -> Tensor:
            if not self.states:
                return train_gpt.to_codes(column, unit, self.rule.limit)
            targets = (column / unit).clamp(-4000, 4000).flatten(0, 1)
            return train_gpt.viterbi(targets, weights, self.states).view_as(column)

        integers = gptq(self.rows, self.order, self.factor, unit, to_integers, self.feedback)
        errors = self.rows - integers * unit
        expected = (self.output @ errors * (errors @ self.damped)).sum((1, 2))
        return (integers / parts).floor().short(), steps, expected


def rows_of_codes(codes: Tensor, steps: Tensor, states: int, rotated: bool) -> Tensor:
    """The rows (N, out, in) that codes (N, out, in) and steps (N, out or 1, 1) stand for."""
    if states and rotated:
        segments = to_segments(codes)
        bits = train_gpt.trellis_bits(segments.flatten(0, 1), states).view_as(segments)
        codes = codes + from_segments(bits, codes.size(1)) / 2
    elif states:
        codes = codes + train_gpt.trellis_bits(codes, states) / 2
    rows = codes * steps
    return rotate(rows, back=True) if rotated else rows


def costs_of_errors(squares: Tensor, output: Tensor) -> Tensor:
    """`output` of a `RotatedQuantiser` by `Calibration`: its squares (N, out), times half the number of
    rounded weights, and its outputs (N, out, out)."""
    # The gradients of weights have products of different tokens too, so they give the scale.
    scale = (squares / output.diagonal(0, 1, 2).clamp(min=1e-30)).sqrt()[..., None]
    output = scale * output * scale.mT
    output.diagonal(0, 1, 2).copy_(train_gpt.cost_of_rows(squares))
    return output


class Uses:
    """How one forward uses matrices."""

    def __init__(self, names: Mapping[nn.Parameter, str]):
        self.names = names
        self.outputs: dict[str, Tensor] = {}  # of all forwards: `Calibration.outputs`
        self.inputs: dict[int, tuple[Tensor, list[str]]] = {}  # with who reads them
        self.looked_up: dict[str, list[Tensor]] = defaultdict(list)  # rows of tables

    def product(self, x: Tensor, weight: nn.Parameter, y: Tensor) -> None:
        name = self.names[weight]
        self.inputs.setdefault(id(x), (x, []))[1].append(name)
        out, width = y.size(-1), x.size(-1)
        if not y.requires_grad or out >= 8 * width or out**2 > 8 * GROUP:
            return  # a head, or a sum that takes 512 MB and more
        if name not in self.outputs:
            self.outputs[name] = torch.zeros(out, out, dtype=torch.float32, device=y.device)
        total, norm = self.outputs[name], x.detach().float().norm(dim=-1).view(-1, 1)

        def add(grad: Tensor) -> None:
            rows = norm * grad.float().reshape(-1, out)
            total.addmm_(rows.mT, rows)

        # A view loses its hooks when it is changed in place, as by nn.ReLU(inplace=True).
        (y if y._base is None else y._base).register_hook(add)

    def lookup(self, ids: Tensor, weight: nn.Parameter, rows: Tensor) -> None:
        self.looked_up[self.names[weight]].append(ids.flatten())

    def clear(self) -> None:
        self.inputs.clear()
        self.looked_up.clear()

    def add_to(self, hessians: dict[Names, Tensor]) -> None:
        for x, readers in list(self.inputs.values()):
            rows = x.detach().reshape(-1, x.size(-1)).float()
            if tuple(readers) not in hessians:
                hessians[tuple(readers)] = rows.new_zeros(2 * rows.shape[1:])
            hessians[tuple(readers)].addmm_(rows.mT, rows)

    def check(self, name: str, squares: Tensor) -> None:
        """Raise UserError if this matrix has a use that is not here, by its squares (out,)."""
        if not any(name in readers for _, readers in self.inputs.values()):
            hidden = squares.clone()
            for ids in self.looked_up[name]:
                hidden[ids] = 0
            require(
                not hidden.any(),
                f"{name} is used otherwise than by its module, F.linear or F.embedding: use one of "
                "them, so that calibration sees what it multiplies",
            )


def calibrate(model: nn.Module, batches: Iterable, loss: Callable) -> Calibration:
    """Observe what the matrices read, and how much the loss depends on them.

    loss(model, batch) returns the nats of each token of a batch, in a tensor of any shape, without
    those that do not count. One backward per batch: with random weights of mean 0 and variance 1
    the squared gradient of their sum is, on average, the sum of the tokens' squared gradients. So
    many small batches are better than a few large ones. Raises UserError."""
    check_finite(tensors_of(model))
    matrices = matrices_of(model)
    names = {tensor: name for tensor, name in names_of(model).items() if name in matrices}
    uses, hessians, squares, tokens = Uses(names), {}, defaultdict(float), 0
    random = torch.Generator().manual_seed(0)
    with observed(model, names, uses):
        for batch in batches:
            uses.clear()
            nats = loss(model, batch)
            check_loss(nats)
            uses.add_to(hessians)
            weights = torch.randn(nats.shape, generator=random).to(nats.device)
            grads = torch.autograd.grad((nats * weights).sum(), list(names), materialize_grads=True)
            total = defaultdict(float)
            for name, grad in zip(names.values(), grads, strict=True):
                total[name] += grad.to_dense().float()
            for name, grad in total.items():
                square = matrices[name].rows(grad).square().mean(dim=1)
                uses.check(name, square)
                squares[name] += square
            tokens += nats.numel()
    require(tokens, "there is no batch to calibrate with: give some")
    for total in squares.values():
        total.div_(tokens)
    inputs = [(readers[0], total) for readers, total in hessians.items()]
    for name, total in (*squares.items(), *uses.outputs.items(), *inputs):
        require(
            total.isfinite().all(),
            f"gradients or inputs of {name} are not finite: use bf16 or fp32, or scale the weights "
            "before it down",
        )
    require(
        any(total.any() for total in squares.values()),
        "all squared gradients are 0 in fp32: check that loss() uses the model that it gets, and that "
        "the model's weights are not tiny",
    )
    outputs = {n: total for n, total in uses.outputs.items() if not matrices[n].lookup}
    return Calibration(hessians, dict(squares), tokens, outputs)


@contextlib.contextmanager
def observed(model: nn.Module, parameters: Iterable[nn.Parameter], uses: Uses) -> Iterator[None]:
    """Until the block ends: evaluation mode, no compiled code, gradients of these parameters, and
    their uses in `uses`. Functions are replaced, as not every user of a weight calls its module: a
    head that is the embedding, nn.MultiheadAttention."""
    wanted = set(parameters)

    def watched(function, observe):
        def call(input, weight, *rest, **options):
            output = function(input, weight, *rest, **options)
            if weight in wanted:
                observe(input, weight, output)
            return output

        return call

    def after_conv1d(module, arguments, keywords, output):
        uses.product((*arguments, *keywords.values())[0], module.weight, output)

    with contextlib.ExitStack() as restored:
        for module in model.modules():
            restored.callback(setattr, module, "training", module.training)
            if is_conv1d(module) and module.weight in wanted:
                hook = module.register_forward_hook(after_conv1d, with_kwargs=True)
                restored.callback(hook.remove)
        model.eval()
        for parameter in wanted:
            restored.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(True)
        for name, observe in {"linear": uses.product, "embedding": uses.lookup}.items():
            function = getattr(F, name)
            restored.callback(setattr, F, name, function)
            setattr(F, name, watched(function, observe))
        with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            yield


def check_loss(nats: object) -> None:
    """Raise UserError unless it is what `calibrate` needs."""
    require(
        isinstance(nats, Tensor) and nats.dim() and nats.numel(),
        "loss(model, batch) must return the nats of each token, not their mean or sum: use "
        'reduction="none"',
    )
    require(nats.requires_grad, "the loss has no gradient: compute it without torch.no_grad()")
    require(nats.isfinite().all(), "a loss is not finite: check the model and the batches")


def check_finite(tensors: dict[str, Tensor]) -> None:
    """Raise UserError if a parameter is not finite. A buffer may be a mask."""
    for name, tensor in tensors.items():
        numbers = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        require(not numbers or finite(tensor).all(), f"{name} is not finite: check the model")


def quantise(
    model: nn.Module,
    calibration: Calibration,
    max_bytes: float,
    states: int = 8,
    progress: Callable = list,
) -> tuple[bytes, dict[str, float]]:
    """(the file of at most `max_bytes` with the least loss; by tensor the nats per token that its
    rounding is expected to cost). `states` of the trellis are 0, 4, 8, 16, 64 or 256; more take
    longer and gain about 0.1 dB. `progress` wraps the list of matrices, then that of groups in each
    of a few passes, as tqdm does. The model does not change. Raises UserError."""
    number = isinstance(max_bytes, numbers.Real) and not math.isnan(max_bytes)
    require(number, f"max_bytes={max_bytes} is not a number")
    require(states in (0, *train_gpt.PARITY), f"states={states}: choose 0, 4, 8, 16, 64 or 256")
    tensors = tensors_of(model)
    check_finite(tensors)
    groups, make = make_groups(model, calibration, states, progress)
    quantisers = [emptied(make(group)) for group in progress(groups)]
    pack_all = functools.partial(pack, model, groups, make, states, progress=progress)
    file = train_gpt.fit_bytes(quantisers, pack_all, max_bytes, lambda line: None, train_gpt.Comm())
    with train_gpt.as_user_error("the file cannot be read back", "report this", Exception):
        header, arrays = parse(file)
        found = read(model, header, arrays)
        for name in header["exact"]:
            back = torch.empty_like(tensors[name]).copy_(found[name])
            require(to_bytes([back]) == to_bytes([tensors[name]]), f"{name} has other values")
    predicted = header["expected_loss"]
    total = sum(predicted.values())
    require(math.isfinite(total), "the expected loss is not finite: scale it down")
    plain = {name: one.numel() for name, one in tensors.items() if name not in predicted}
    largest = ", ".join(sorted(plain, key=plain.get, reverse=True)[:3])
    sizes = {n: tensors[n].itemsize if n in header["exact"] else 2 for n in plain}
    matter = sum(sizes[n] * plain[n] for n in plain) >= len(file) - max_bytes
    rest = f", with {sum(plain.values())} numbers that are not rounded: {largest}" * matter
    bits = f"{8 * len(file) / train_gpt.count_numbers(tensors.values()):.2f} bits per parameter"
    few = f"{max_bytes} bytes are too few: the smallest file has {len(file)}, {bits}{rest}"
    require(len(file) <= max_bytes, few)
    return file, predicted


def make_groups(
    model: nn.Module, calibration: Calibration, states: int, progress: Callable = list
) -> tuple[list[list[str]], Callable]:
    """Names of matrices that are rounded together, those of one shape and form, which calibration
    has used; and what makes the quantiser of such a group. It takes several times the memory of the
    group's weights, so each pass makes it anew."""
    matrices, by_shape, groups = matrices_of(model), defaultdict(list), []
    require(
        matrices.keys() == calibration.squares.keys(),
        f"the calibration is of another model ({PARTED})",
    )
    used = [name for name in matrices if calibration.squares[name].any()]
    count, rotated = sum(matrices[name].parameter.numel() for name in used), set()

    def make(group: list[str]) -> Quantiser:
        rows = torch.stack([matrices[name].rows(matrices[name].parameter) for name in group])
        require(
            rows.float().square().mean().isfinite(),
            f"weights have squares beyond fp32 in one of {' '.join(group)}: scale them down",
        )
        squares = torch.stack([calibration.squares[name] for name in group]) * (count / 2)
        hessian = torch.stack([calibration.hessian(name, rows.size(2)) for name in group])
        # A lookup reads each column alike.
        rule = Rule(1.0 if matrices[group[0]].lookup else 0.1)
        form, cost = Quantiser, train_gpt.cost_of_rows(squares)
        if group[0] in rotated:
            outputs = torch.stack([calibration.outputs[name] for name in group])
            form, cost = RotatedQuantiser, costs_of_errors(squares, outputs)
        return form(rows.detach().float(), hessian, cost, states, rule)

    for name in progress(used):
        if name in calibration.outputs:  # rotated if the codes are expected to be smaller
            plain = make([name]).expected_bytes(train_gpt.FINEST)
            rotated.add(name)
            if make([name]).expected_bytes(train_gpt.FINEST) >= plain:
                rotated.remove(name)
        matrix = matrices[name]
        shape = matrix.rows(matrix.parameter).shape
        by_shape[shape, matrix.lookup, name in rotated].append(name)
    for (shape, _, turned), names in by_shape.items():
        widest = max(shape) if turned else shape[1]
        most = max(1, GROUP // max(math.prod(shape), widest**2))
        groups += [names[first : first + most] for first in range(0, len(names), most)]
    return groups, make


def emptied(quantiser: Quantiser) -> Quantiser:
    """Without what it needs for more than `expected_bytes`. So `steps` may read only the shape of the
    rows, `cost`, `pivot`, `largest` and `deviation`."""
    quantiser.rows = quantiser.rows.to("meta")
    for name in {"damped", "order", "factor", "output", "feedback"} & vars(quantiser).keys():
        delattr(quantiser, name)
    return quantiser


def fits_half(tensor: Tensor) -> bool:
    """Whether it is stored in fp16, whose 11 bits change it little unless its numbers are beyond
    65,504 or mostly below 0.00006. Buffers are not: some hold counts, masks or angles."""
    if not isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
        return False
    exact = tensor.detach().double()
    return bool((exact.half() - exact).norm() <= 2**-11 * exact.norm())


def finite(tensor: Tensor) -> Tensor:
    """Which numbers are. torch has no `isfinite` of 8 bits."""
    return (tensor.float() if tensor.itemsize == 1 else tensor).isfinite()


def to_bytes(tensors: Iterable[Tensor]) -> bytes:
    """All values, one after the other."""
    plain = (tensor.detach().cpu().resolve_conj().resolve_neg() for tensor in tensors)
    flat = (tensor.contiguous().flatten() for tensor in plain)
    return b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in flat)


def pack(
    model: nn.Module,
    groups: list[list[str]],
    make: Callable,
    states: int,
    loss: float,
    progress: Callable = list,
) -> bytes:
    """The file, with codes that cost `loss` together."""
    tensors = tensors_of(model)
    count = sum(tensors[name].numel() for group in groups for name in group)
    streams, words, rotated, predicted = [], [], [], {}
    for group in progress(groups):
        quantiser = make(group)
        codes, steps, costs = quantiser.round(loss)
        rotated.append(isinstance(quantiser, RotatedQuantiser))
        del quantiser  # its memory is free when the codes are coded
        streams.append(train_gpt.encode_ans(codes.cpu().numpy()))
        words.append(steps.bfloat16())
        predicted |= dict(zip(group, (costs / count).tolist(), strict=True))
    plain = {name: tensor for name, tensor in tensors.items() if name not in predicted}
    exact = {name: tensor for name, tensor in plain.items() if not fits_half(tensor)}
    words += [tensor.half() for name, tensor in plain.items() if name not in exact]
    header = {
        "version": VERSION,
        "trellis_states": states if groups else 0,
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "groups": groups,
        "rotated": rotated,
        "code_bytes": [len(stream) for stream in streams],
        "exact": {name: str(tensor.dtype).split(".")[1] for name, tensor in exact.items()},
        "expected_loss": predicted,
    }
    planes = train_gpt.to_planes(np.frombuffer(to_bytes(words), "<i2"))
    stored = map(train_gpt.lzma_pack, (planes, to_bytes(exact.values())))
    parts = (json.dumps(header).encode(), b"".join(streams), *stored)
    arrays = (np.frombuffer(part, np.uint8) for part in parts)
    file = io.BytesIO()
    np.savez(file, **dict(zip(ARRAYS, arrays, strict=True)))
    return file.getvalue()


def load(model: nn.Module, path: str | Path) -> None:
    """Give a model of the same shapes the tensors of a file. Raises UserError if it is of another
    model, truncated or altered; the model is then as before."""
    require(Path(path).is_file(), f"there is no file {path}: check the path")
    advice = "if truncated or altered, copy it again"
    sentence = f"{path} cannot be loaded"
    tensors = tensors_of(model)
    shapes = {name: list(one.shape) for name, one in tensors.items()}
    with train_gpt.as_user_error(sentence, advice, Exception):
        size = os.path.getsize(path)
        sizes = (max(8, 2 * t.element_size()) * t.numel() for t in tensors.values())
        most = (1 << 20) + sum(sizes)
        require(size <= most, f"it has {size} bytes, too many for this model")
        header, arrays = parse(Path(path).read_bytes())
        stored = dict(header["shapes"])
    for name in shapes | stored:
        there, here = stored.get(name, "missing"), shapes.get(name, "missing")
        require(
            there == here,
            f"{path} is of another model: {name} is {there} in the file and {here} in the model; "
            f"load it into a model with the names and shapes of the one that was rounded ({PARTED})",
        )
    with train_gpt.as_user_error(sentence, advice, Exception):
        found = read(model, header, arrays)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(found[name])


def parse(blob: bytes) -> tuple[dict, dict[str, bytes]]:
    """(header, arrays) of a file. Raises an error if it is invalid."""
    ours = blob.startswith(b"PK\3\4") and blob.count(b"PK\1\2") < train_gpt.MAX_ENTRIES
    require(ours, "it is no file of tools/quantise.py")
    stored = train_gpt.read_arrays(io.BytesIO(blob))
    arrays = {name: stored[name].tobytes() for name in ARRAYS}
    header = json.loads(arrays["header"])
    version = header["version"]
    require(version == VERSION, f"its version is {version!r}, not {VERSION}")
    return header, arrays


def from_bytes(raw: bytes, kinds: Iterable[tuple[torch.dtype, tuple]]) -> Iterator[Tensor]:
    """The inverse of `to_bytes`, given (type, shape) of each tensor."""
    stream = io.BytesIO(raw)
    for dtype, shape in kinds:
        part = bytearray(stream.read(math.prod(shape) * dtype.itemsize))
        flat = torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)
        yield flat.view(shape)


def read(model: nn.Module, header: Mapping, arrays: Mapping[str, bytes]) -> dict[str, Tensor]:
    """The tensors of a file by name. Their sizes are those of the model, so a file cannot ask
    for more memory. Raises an error if it is invalid."""
    tensors = tensors_of(model)
    groups, sizes, states = header["groups"], header["code_bytes"], header["trellis_states"]
    rotated = header["rotated"]
    exact = {name: getattr(torch, dtype) for name, dtype in header["exact"].items()}
    half = tensors.keys() - exact.keys() - {name for group in groups for name in group}
    half = [name for name in header["shapes"] if name in half]
    listed = [*(name for group in groups for name in group), *exact, *half]
    matrices = matrices_of(model)
    rows = [[matrices[name].rows(tensors[name]) for name in group] for group in groups]
    consistent = (
        sorted(listed) == sorted(tensors)
        and all(one.shape == group[0].shape for group in rows for one in group)
        and len(sizes) == len(groups) == len(rotated)
        and all(type(one) is bool for one in rotated)
        and min(sizes, default=0) >= 0
        and sum(sizes) == len(arrays["codes"])
        and states in (0, *train_gpt.PARITY)
        # From bytes, a quantised type has no scale and kills the process.
        and not any(str(dtype).startswith("torch.q") for dtype in exact.values())
    )
    require(consistent, "its header contradicts itself")
    steps = [1 if one else group[0].size(0) for group, one in zip(rows, rotated, strict=True)]
    kinds = [(torch.bfloat16, (len(g), n, 1)) for g, n in zip(rows, steps, strict=True)]
    kinds += [(torch.float16, tensors[name].shape) for name in half]
    most = sum(2 * math.prod(shape) for _, shape in kinds)
    words = train_gpt.from_planes(train_gpt.lzma_unpack(arrays["values"], most))
    words = from_bytes(words.tobytes(), kinds)
    found, stream = {}, io.BytesIO(arrays["codes"])
    for names, group, size, one in zip(groups, rows, sizes, rotated, strict=True):
        shape = (len(group), *group[0].shape)
        codes = torch.from_numpy(train_gpt.decode_ans(stream.read(size), shape))
        back = rows_of_codes(codes, next(words).float(), states, one)
        for name, matrix in zip(names, back, strict=True):
            found[name] = matrices[name].rows(matrix)
    found |= dict(zip(half, words, strict=True))
    for name, tensor in found.items():
        require(tensor.isfinite().all(), f"{name} has values that are not finite")
    kinds = [(dtype, tensors[name].shape) for name, dtype in exact.items()]
    most = sum(math.prod(shape) * dtype.itemsize for dtype, shape in kinds)
    raw = train_gpt.lzma_unpack(arrays["exact"], most)
    found |= dict(zip(exact, from_bytes(raw, kinds), strict=True))
    for name, tensor in found.items():
        like = tensors[name]
        if like.dtype != tensor.dtype:
            found[name] = tensor.to(like.dtype)
            kept = finite(found[name]).equal(finite(tensor))
            require(kept, f"{name} has values that {like.dtype} cannot hold")
    return found


def nats_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Of each token of rows (B, T + 1), by a causal model of transformers."""
    logits = model(rows[:, :-1]).logits.float()
    return F.cross_entropy(logits.mT, rows[:, 1:], reduction="none")


@torch.no_grad()
def mean_loss(model: nn.Module, rows: Tensor) -> float:
    """Nats per token of rows (B, T + 1)."""
    parts = bar(rows.split(8), "measuring")
    return float(torch.cat([nats_of(model, part) for part in parts]).double().mean())


def bar(items: Iterable, name: str) -> Iterable:
    """The items, with a progress bar on stderr; if that is no terminal, one every 30 seconds."""
    from tqdm import tqdm  # transformers brings it

    pause = 0.1 if sys.stderr.isatty() else 30
    return tqdm(items, name, leave=False, delay=pause, mininterval=pause)


def read_model(folder: str) -> tuple[nn.Module, Callable]:
    """(model, tokenizer) of a folder of transformers."""
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    advice = "give a folder that save_pretrained has written, of a model that transformers knows"
    # Without trust_remote_code=False a model with code of its own asks on standard input.
    options = {"local_files_only": True, "trust_remote_code": False}
    with train_gpt.as_user_error(f"cannot load {folder}", advice, Exception):
        require(Path(folder).is_dir(), "it is not a folder")
        require(
            any(Path(folder).glob("*.safetensors")) or not any(Path(folder).glob("*.bin")),
            "its weights are .bin files, which may run code: if you trust them, load the model and "
            "save_pretrained it again",
        )
        # transformers only warns of what it has made at random.
        report = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        report |= {"use_safetensors": True}
        model, found = AutoModelForCausalLM.from_pretrained(folder, **options, **report)
        other = [f"{name} {there} not {here}" for name, there, here in found["mismatched_keys"]]
        codes = []
        for path in Path(folder).glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if name.endswith("weight") and file.get_slice(name).get_dtype() not in FLOATS:
                        codes.append(f"{path.name} {name}")
        missing, unused, hint = found["missing_keys"], found["unexpected_keys"], ""
        tied = set(model._tied_weights_keys or ())
        if unused and all(re.match(r"module\.|_orig_mod\.", name) for name in unused):
            hint = " (all names have module. or _orig_mod. before them: save the model inside)"
        elif missing and tied.issuperset(missing):
            hint = " (is the head the embedding? set tie_word_embeddings in config.json to true)"
        require(not missing, f"it lacks: {listed(missing)}{hint}")
        head, table = model.get_output_embeddings(), model.get_input_embeddings()
        require(
            not (tied and head and getattr(model.config, "tie_word_embeddings", False))
            or head.weight is table.weight,
            "its head is not the embedding: set tie_word_embeddings in config.json to false",
        )
        require(not other, f"it has other shapes: {listed(other)}")
        require(not codes, f"it is rounded already: {listed(codes)}")
    advice = "save it there with tokenizer.save_pretrained"
    with train_gpt.as_user_error(f"no tokenizer can be loaded from {folder}", advice, Exception):
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    if unused:
        place = f"the model of {folder}/config.json has no place for {listed(unused)}"
        print(f"note: {place}: is it all of your model?", file=sys.stderr)
    return model.eval(), tokenizer


def listed(names: Collection[str]) -> str:
    """Three of the names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + more


def read_text(path: Path) -> str:
    with train_gpt.as_user_error(f"cannot read {path}", "give a text", ValueError):
        return path.read_text(encoding="utf-8")


def to_rows(tokenizer: Callable, text: str, width: int, most: int) -> Tensor:
    """At most `most` rows (N, width + 1) of tokens, in pieces of some rows from all over the text.
    Tokenizing takes 200 bytes of memory for a byte of text, so the rest stays text."""
    width, rows = width + 1, []
    size = 32 * width
    draw = torch.Generator().manual_seed(0)
    for place in torch.randperm(-(-len(text) // size), generator=draw).tolist():
        ids = tokenizer(text[place * size : (place + 1) * size], verbose=False)["input_ids"]
        rows += [ids[first : first + width] for first in range(0, len(ids) - width + 1, width)]
        if len(rows) >= most:
            break
    require(rows, f"a text has no {width} tokens in a row: give more text or a smaller --width")
    return torch.tensor(rows[:most])


def check_rows(model: nn.Module, width: int, rows: Tensor) -> None:
    """Raise UserError unless the model can read these rows."""
    positions = getattr(model.config, "max_position_embeddings", None) or width
    require(width <= positions, f"--width {width} is above the model's {positions} positions")
    size, largest = model.get_input_embeddings().num_embeddings, int(rows.max())
    other = f"the tokenizer has a token {largest}, the model {size} tokens: give its own"
    require(largest < size, other)


def kept_calibration(path: Path | None, model: nn.Module, rows: Tensor) -> Calibration:
    """That of the file, if there is one, or a new one, which becomes the file."""
    digest = hashlib.sha256()
    for tensor in (rows, *tensors_of(model).values()):
        digest.update(to_bytes([tensor]))
    of = digest.hexdigest()
    if path and path.is_file():
        advice = "delete it if it is a damaged calibration, else name another file"
        with train_gpt.as_user_error(f"cannot read {path}", advice, Exception):
            with zipfile.ZipFile(path) as archive:  # torch.load does not look at checksums
                require(not archive.testzip(), "it is damaged")
            kept = torch.load(path, weights_only=True)
            other = kept.pop("of") != of
            calibration = Calibration(**kept)
        require(not other, f"{path} is of other weights, text, --rows or --width: delete it")
        return calibration
    calibration = calibrate(model, bar(rows.split(4), "calibrating"), nats_of)
    if path:
        with train_gpt.replacing(path) as partial:
            torch.save({"of": of, **calibration._asdict()}, partial)
    return calibration


def parse_arguments() -> argparse.Namespace:
    """Arguments, and as `outputs` the sizes by the file of each."""
    parser = program.parser(__doc__)
    add = parser.add_argument
    add("folder", help="model and tokenizer, as save_pretrained writes them")
    add("--text", type=Path, required=True, help="calibrates: without --test-text nine tenths")
    add("--test-text", type=Path, help="measures; default: the last tenth of --text")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--bits", type=program.positive, nargs="+", help="of a file, per parameter")
    group.add_argument("--bytes", type=program.count, nargs="+", help="of a file, at most")
    add("--width", type=program.count, default=128, help="tokens of a row (default: 128)")
    add("--rows", type=program.count, default=512, help="to calibrate, and to measure (512 each)")
    add("--calibration", type=program.output_file, help="file that keeps it: read, or written")
    text = "file to write, .npz; with several sizes name_SIZE.npz for each"
    add("-o", "--output", type=program.output_file, required=True, help=text)
    arguments = parser.parse_args()
    sizes = arguments.bits or arguments.bytes
    arguments.outputs = {}
    for size in sizes:
        suffix = f"_{size:.12g}" if len(sizes) > 1 else ""
        path = arguments.output.parent / f"{arguments.output.stem}{suffix}{arguments.output.suffix}"
        arguments.outputs[path] = size
    return arguments


def main() -> None:
    arguments = parse_arguments()
    text = read_text(arguments.text)
    if arguments.test_text:
        test = read_text(arguments.test_text)
    else:
        cut = len(text) * 9 // 10
        text, test = text[:cut], text[cut:]
    model, tokenizer = read_model(arguments.folder)
    sizes = arguments.width, arguments.rows
    rows, test = (to_rows(tokenizer, part, *sizes) for part in (text, test))
    check_rows(model, arguments.width, torch.cat([rows, test]))
    count = train_gpt.count_numbers(model.parameters())
    before = mean_loss(model, test)
    calibration = kept_calibration(arguments.calibration, model, rows)
    if calibration.tokens < ENOUGH:
        low = "what is expected is probably too low; give more --rows or text"
        print(f"note: {calibration.tokens} tokens calibrated, not {ENOUGH}: {low}")
    for path, size in arguments.outputs.items():
        max_bytes = size if arguments.bytes else int(size * count / 8)
        progress = functools.partial(bar, name=f"rounding to {max_bytes} bytes")
        file, predicted = quantise(model, calibration, max_bytes, progress=progress)
        with train_gpt.replacing(path) as partial:
            partial.write_bytes(file)
        total = 1000 * sum(predicted.values())
        print(f"{path}: {len(file)} bytes, {8 * len(file) / count:.2f} bits per parameter")
        if len(file) < 0.95 * max_bytes:
            print("note: that is less than allowed; there are no finer steps")
        print(f"{total:10.4f} expected loss in thousandths of a nat per token; most of it:")
        for name, loss in sorted(predicted.items(), key=lambda item: -item[1])[:10]:
            print(f"{1000 * loss:10.4f} {name}", flush=True)
    for path in arguments.outputs:
        load(model, path)
        found = f"{before:.4f} -> {mean_loss(model, test):.4f} nats per token"
        print(f"{path}: on {test[:, 1:].numel()} tokens {found}")


if __name__ == "__main__":
    program.run_program(main)

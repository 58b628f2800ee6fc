#!/usr/bin/env python3
"""Round the weights of a torch model to a number of bytes, with the quantiser of train_gpt.py.

    python tools/quantise.py FOLDER --text text.txt --bits 3.5 -o model.npz

FOLDER holds a causal language model of `transformers` and its tokenizer. The first 90 % of the text
calibrate, the rest measures the loss before and after. For any other model use this file as a
module (docs/quantiser.md):

    calibration = calibrate(model, batches, loss)
    file, predicted = quantise(model, calibration, max_bytes)
    load(fresh_model, "model.npz")

What is rounded: the weights of nn.Linear, nn.Embedding and transformers' Conv1D that calibration has
used. Other parameters are stored in fp16, or exactly if that is too small for them, and buffers
exactly.
"""

import argparse
import contextlib
import functools
import io
import json
import math
import os
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import program
import train_gpt
from train_gpt import Quantiser, Rule, require

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VERSION = 2
GROUP = 1 << 24  # weights that are rounded together, at most, unless one matrix has more
ARRAYS = ("header", "codes", "values", "exact")
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
    """What `calibrate` sums over all tokens."""

    hessians: dict[Names, Tensor]  # x^T x (in, in) of the inputs x that these matrices read
    squares: dict[str, Tensor]  # (out,): mean over a row of the squared gradients of a token's loss
    tokens: int

    def hessian(self, name: str, width: int) -> Tensor:
        """(in, in) of a matrix. Without products, as in a lookup, each column counts equally."""
        used = [
            total * names.count(name) for names, total in self.hessians.items() if name in names
        ]
        return sum(used) if used else torch.eye(width, device=self.squares[name].device)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of the state dict. A shared one has its first name."""
    names = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        require(isinstance(tensor, Tensor), f"{name} in the state dict is no tensor: remove it")
        names.setdefault(tensor, name)
    return {name: tensor for tensor, name in names.items()}


def multiplies(module: nn.Module) -> bool:
    """Whether it multiplies its input by a matrix."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def matrices_of(model: nn.Module) -> dict[str, Matrix]:
    """The parameters that may be rounded, by name."""
    names = {tensor: name for name, tensor in tensors_of(model).items()}
    found = {}
    for module in model.modules():
        lookup, name = isinstance(module, nn.Embedding), names.get(getattr(module, "weight", None))
        if name and (lookup or multiplies(module)) and module.weight.is_floating_point():
            lookup |= name in found and found[name].lookup
            found[name] = Matrix(module.weight, type(module).__name__ == "Conv1D", lookup)
    require(found, "the model has no nn.Linear, nn.Embedding or Conv1D: nothing can be rounded")
    return found


def calibrate(model: nn.Module, batches: Iterable, loss: Callable) -> Calibration:
    """Observe what the matrices read, and how much the loss depends on them.

    loss(model, batch) returns the nats of each token of a batch, in a tensor of any shape, without
    those that do not count. One backward per batch: with random weights of mean 0 and variance 1
    the squared gradient of their sum is, on average, the sum of the tokens' squared gradients. So
    many small batches are better than a few large ones. Raises UserError."""
    matrices = matrices_of(model)
    names = {matrix.parameter: name for name, matrix in matrices.items()}
    inputs: dict[int, tuple[Tensor, list[str]]] = {}  # of one forward, with who reads them
    hessians, squares, tokens = {}, defaultdict(float), 0
    random = torch.Generator().manual_seed(0)

    def hook(module, arguments, keywords):
        x = (*arguments, *keywords.values())[0]
        inputs.setdefault(id(x), (x, []))[1].append(names[module.weight])

    with observed(model, names, hook):
        for batch in batches:
            inputs.clear()
            nats = loss(model, batch)
            check_loss(nats)
            for x, readers in list(inputs.values()):
                rows = x.detach().flatten(0, -2).float()
                if tuple(readers) not in hessians:
                    hessians[tuple(readers)] = rows.new_zeros(2 * rows.shape[1:])
                hessians[tuple(readers)].addmm_(rows.mT, rows)
            weights = torch.randn(nats.shape, generator=random).to(nats.device)
            grads = torch.autograd.grad((nats * weights).sum(), list(names), materialize_grads=True)
            for name, grad in zip(names.values(), grads, strict=True):
                squares[name] += matrices[name].rows(grad.to_dense().float()).square().mean(dim=1)
            tokens += nats.numel()
    require(tokens, "there is no batch to calibrate with: give some")
    for name, total in squares.items():
        total.div_(tokens)
        require(total.isfinite().all(), f"gradients of {name} are not finite: use bf16 or fp32")
    return Calibration(hessians, dict(squares), tokens)


@contextlib.contextmanager
def observed(
    model: nn.Module, parameters: Iterable[nn.Parameter], hook: Callable
) -> Iterator[None]:
    """Until the block ends: evaluation mode, gradients of these parameters, and a call of
    hook(module, arguments, keywords) before each product with one of them."""
    modules = list(model.modules())
    training = [module.training for module in modules]
    wanted = {parameter: parameter.requires_grad for parameter in parameters}
    handles = [
        module.register_forward_pre_hook(hook, with_kwargs=True)
        for module in modules
        if multiplies(module) and module.weight in wanted
    ]
    try:
        model.eval()
        for parameter in wanted:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, before in wanted.items():
            parameter.requires_grad_(before)
        for module, before in zip(modules, training, strict=True):
            module.training = before


def check_loss(nats: object) -> None:
    """Raise UserError unless it is what `calibrate` needs."""
    require(
        isinstance(nats, Tensor) and nats.numel() > 1,
        "loss(model, batch) must return the nats of each token, not their mean or sum: use "
        'reduction="none"',
    )
    require(nats.requires_grad, "the loss has no gradient: compute it without torch.no_grad()")
    require(nats.isfinite().all(), "a loss is not finite: check the model and the batches")


def quantise(
    model: nn.Module, calibration: Calibration, max_bytes: float, states: int = 8
) -> tuple[bytes, dict[str, float]]:
    """(the file of at most `max_bytes` with the least loss; by tensor the nats per token that its
    rounding is expected to cost). `states` of the trellis are 0, 4, 8, 16, 64 or 256; more take
    longer. The model does not change. Raises UserError."""
    require(states in (0, *train_gpt.PARITY), f"states={states}: choose 0, 4, 8, 16, 64 or 256")
    groups, quantisers = make_groups(model, calibration, states)
    pack_all = functools.partial(pack, model, groups, quantisers)
    file = train_gpt.fit_bytes(quantisers, pack_all, max_bytes, lambda line: None, train_gpt.Comm())
    size = len(file)
    require(size <= max_bytes, f"{max_bytes} bytes are too few: the smallest file has {size}")
    header = json.loads(np.load(io.BytesIO(file))["header"].tobytes())
    return file, header["expected_loss"]


def make_groups(
    model: nn.Module, calibration: Calibration, states: int
) -> tuple[list[list[str]], list[Quantiser]]:
    """Names of matrices that are rounded together, and a quantiser of each group: those of one
    shape, which calibration has used."""
    matrices, by_shape = matrices_of(model), defaultdict(list)
    require(matrices.keys() == calibration.squares.keys(), "the calibration is of another model")
    for name, matrix in matrices.items():
        if calibration.squares[name].any():
            shape = matrix.rows(matrix.parameter).shape
            by_shape[shape, matrix.lookup].append(name)
    groups, quantisers = [], []
    count = sum(math.prod(shape) * len(names) for (shape, _), names in by_shape.items())
    for (shape, lookup), names in by_shape.items():
        most = max(1, GROUP // max(math.prod(shape), shape[1] ** 2))
        for first in range(0, len(names), most):
            group = names[first : first + most]
            rows = torch.stack([matrices[name].rows(matrices[name].parameter) for name in group])
            require(rows.isfinite().all(), f"weights are not finite in one of {' '.join(group)}")
            cost = torch.stack([calibration.squares[name] for name in group]) * (count / 2)
            quantiser = Quantiser(
                rows.detach().float(),
                torch.stack([calibration.hessian(name, shape[1]) for name in group]),
                # Rows that the calibration has hardly seen are not free of cost.
                cost + 0.05 * cost.mean(dim=1, keepdim=True),
                states,
                # A lookup reads each column alike.
                Rule(1.0 if lookup else 0.1),
            )
            groups.append(group)
            quantisers.append(quantiser)
    return groups, quantisers


def fits_half(tensor: Tensor) -> bool:
    """Whether it is stored in fp16. Buffers are not: some hold counts, masks or angles."""
    return isinstance(tensor, nn.Parameter) and bool(tensor.half().isfinite().all())


def to_bytes(tensors: Iterable[Tensor]) -> bytes:
    """All values, one after the other."""
    flat = (tensor.detach().cpu().contiguous().flatten() for tensor in tensors)
    return b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in flat)


def pack(
    model: nn.Module, groups: list[list[str]], quantisers: list[Quantiser], loss: float
) -> bytes:
    """The file, with codes that cost `loss` together."""
    tensors = tensors_of(model)
    count = sum(one.rows.numel() for one in quantisers)
    streams, words, predicted = [], [], {}
    for group, quantiser in zip(groups, quantisers, strict=True):
        codes, steps, costs = map(torch.stack, zip(*quantiser.round(loss), strict=True))
        streams.append(train_gpt.encode_ans(codes.to(torch.int16).cpu().numpy()))
        words.append(steps.bfloat16())
        predicted |= dict(zip(group, (costs / count).tolist(), strict=True))
    plain = {name: tensor for name, tensor in tensors.items() if name not in predicted}
    exact = {name: tensor for name, tensor in plain.items() if not fits_half(tensor)}
    words += [tensor.half() for name, tensor in plain.items() if name not in exact]
    header = {
        "version": VERSION,
        "trellis_states": quantisers[0].states if quantisers else 0,
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "groups": groups,
        "code_bytes": [len(stream) for stream in streams],
        "exact": {name: str(tensor.dtype).split(".")[1] for name, tensor in exact.items()},
        "expected_loss": predicted,
    }
    planes = train_gpt.to_planes(np.frombuffer(to_bytes(words), "<i2"))
    parts = (
        json.dumps(header).encode(),
        b"".join(streams),
        train_gpt.lzma_pack(planes),
        train_gpt.lzma_pack(to_bytes(exact.values())),
    )
    arrays = (np.frombuffer(part, np.uint8) for part in parts)
    file = io.BytesIO()
    np.savez(file, **dict(zip(ARRAYS, arrays, strict=True)))
    return file.getvalue()


def load(model: nn.Module, path: str | Path) -> None:
    """Give a model of the same shapes the tensors of a file. Raises UserError if it is of another
    model, truncated or altered; the model is then as before."""
    advice = "if truncated or altered, copy it again"
    with train_gpt.as_user_error(f"{path} cannot be loaded", Exception, advice=advice):
        found = read(model, path)
    with torch.no_grad():
        for name, tensor in tensors_of(model).items():
            tensor.copy_(found[name])


def open_file(path: str | Path, most: int) -> tuple[dict, dict[str, bytes]]:
    """(header, arrays) of a file of at most so many bytes. Raises an error if it is invalid."""
    size = os.path.getsize(path)
    require(size <= most, f"it has {size} bytes, too many for this model")
    blob = Path(path).read_bytes()
    ours = blob.startswith(b"PK\3\4") and blob.count(b"PK\1\2") < train_gpt.MAX_ENTRIES
    require(ours, "it is no file of tools/quantise.py")
    with np.load(io.BytesIO(blob)) as archive:
        # A compressed array could be a thousand times as large as the file.
        methods = {member.compress_type for member in archive.zip.infolist()}
        require(methods == {zipfile.ZIP_STORED}, "its arrays are compressed")
        arrays = {name: archive[name].tobytes() for name in ARRAYS}
    header = json.loads(arrays["header"])
    require(header["version"] == VERSION, f"its version is {header['version']}, not {VERSION}")
    return header, arrays


def from_bytes(raw: bytes, kinds: Iterable[tuple[torch.dtype, tuple]]) -> Iterator[Tensor]:
    """The inverse of `to_bytes`, given (type, shape) of each tensor."""
    stream = io.BytesIO(raw)
    for dtype, shape in kinds:
        part = stream.read(math.prod(shape) * dtype.itemsize)
        yield torch.frombuffer(bytearray(part), dtype=dtype).view(shape)


def read(model: nn.Module, path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file by name. Their sizes are those of the model, so they take no more memory
    than it does. Raises an error if the file is of another model, or invalid."""
    tensors = tensors_of(model)
    header, arrays = open_file(path, (1 << 20) + 8 * train_gpt.count_numbers(tensors.values()))
    shapes, stored = {name: list(one.shape) for name, one in tensors.items()}, header["shapes"]
    different = [name for name in shapes | stored if shapes.get(name) != stored.get(name)]
    require(not different, f"the model has another shape of {', '.join(different[:3])}")
    groups, sizes, states = header["groups"], header["code_bytes"], header["trellis_states"]
    exact = {name: getattr(torch, dtype) for name, dtype in header["exact"].items()}
    half = tensors.keys() - exact.keys() - {name for group in groups for name in group}
    half = [name for name in stored if name in half]
    listed = [*(name for group in groups for name in group), *exact, *half]
    matrices = matrices_of(model)
    rows = [[matrices[name].rows(tensors[name]) for name in group] for group in groups]
    consistent = (
        sorted(listed) == sorted(tensors)
        and all(one.shape == group[0].shape for group in rows for one in group)
        and len(sizes) == len(groups)
        and min(sizes, default=0) >= 0
        and sum(sizes) == len(arrays["codes"])
        and states in (0, *train_gpt.PARITY)
    )
    require(consistent, "its header contradicts itself")
    kinds = [(torch.bfloat16, (len(group), group[0].size(0), 1)) for group in rows]
    kinds += [(torch.float16, tensors[name].shape) for name in half]
    most = sum(2 * math.prod(shape) for _, shape in kinds)
    words = train_gpt.from_planes(train_gpt.lzma_unpack(arrays["values"], most))
    words = from_bytes(words.tobytes(), kinds)
    found, stream = {}, io.BytesIO(arrays["codes"])
    for names, group, size in zip(groups, rows, sizes, strict=True):
        shape = (len(group), *group[0].shape)
        codes = torch.from_numpy(train_gpt.decode_ans(stream.read(size), shape))
        if states:
            codes = codes + train_gpt.trellis_bits(codes, states) / 2
        for name, matrix in zip(names, codes * next(words).float(), strict=True):
            found[name] = matrices[name].rows(matrix)
    found |= dict(zip(half, words, strict=True))
    for name, tensor in found.items():
        require(tensor.isfinite().all(), f"{name} has values that are not finite")
    kinds = [(dtype, tensors[name].shape) for name, dtype in exact.items()]
    most = sum(math.prod(shape) * dtype.itemsize for dtype, shape in kinds)
    raw = train_gpt.lzma_unpack(arrays["exact"], most)
    return found | dict(zip(exact, from_bytes(raw, kinds), strict=True))


def nats_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Of each token of rows (B, T + 1), by a causal model of transformers."""
    logits = model(rows[:, :-1]).logits.float()
    return F.cross_entropy(logits.mT, rows[:, 1:], reduction="none")


@torch.no_grad()
def mean_loss(model: nn.Module, rows: Tensor) -> float:
    """Nats per token of rows (B, T + 1)."""
    return float(torch.cat([nats_of(model, part) for part in rows.split(8)]).double().mean())


def read_model(folder: str) -> tuple[nn.Module, Callable]:
    """(model, tokenizer) of a folder of transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    advice = "give a folder that save_pretrained has written"
    with train_gpt.as_user_error(f"cannot load {folder}", Exception, advice=advice):
        options = {"local_files_only": True, "use_safetensors": True}
        model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
        return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="model and tokenizer, as save_pretrained writes them")
    parser.add_argument("--text", type=Path, required=True, help="to calibrate and to measure")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--bits", type=float, help="largest file, in bits per parameter")
    size.add_argument("--bytes", type=int, help="largest file")
    parser.add_argument("--width", type=int, default=128, help="tokens of a row (default: 128)")
    parser.add_argument("--rows", type=int, default=512, help="to calibrate with (default: 512)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file to write, .npz")
    arguments = parser.parse_args()
    with train_gpt.as_user_error(f"cannot read {arguments.text}", ValueError, advice="give a text"):
        text = arguments.text.read_text(encoding="utf-8")
    model, tokenizer = read_model(arguments.folder)
    rows = torch.tensor(tokenizer(text, verbose=False)["input_ids"]).unfold(
        0, arguments.width + 1, arguments.width + 1
    )
    require(len(rows) >= 20, f"{arguments.text} has {len(rows)} rows: give a text of at least 20")
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    test, rows = rows.split([len(rows) // 10, len(rows) - len(rows) // 10])
    count = train_gpt.count_numbers(model.parameters())
    before = mean_loss(model, test)
    calibration = calibrate(model, rows[: arguments.rows].split(4), nats_of)
    max_bytes = arguments.bytes or int(arguments.bits * count / 8)
    file, predicted = quantise(model, calibration, max_bytes)
    with train_gpt.replacing(arguments.output) as partial:
        partial.write_bytes(file)
    load(model, arguments.output)
    after = mean_loss(model, test)
    print(f"expected loss in thousandths of a nat per token: {1000 * sum(predicted.values()):.4f}")
    for name, loss in sorted(predicted.items(), key=lambda item: -item[1])[:10]:
        print(f"{1000 * loss:10.4f} {name}")
    print(
        f"found on {test[:, 1:].numel()} tokens: {before:.4f} -> {after:.4f} nats per token\n"
        f"{arguments.output}: {len(file)} bytes, {8 * len(file) / count:.2f} bits per parameter"
    )


if __name__ == "__main__":
    program.run_program(main)

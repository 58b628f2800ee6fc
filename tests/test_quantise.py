"""tools/quantise.py rounds any torch model, predicts the loss of it, and reads its file back."""

import copy
import functools
import itertools
import json
import math
import re
import resource
import shutil
import sys
import types
import weakref
import zipfile

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

import quantise
import quantisers
import real_model
import train_gpt
from conftest import ROOT, made, made_lines, run, user_error, write_shard
from test_export import DAMAGES, VALUES, replaced, rewritten, rezipped, zeros

PIECES, WIDTH = 60, 24


@pytest.fixture(autouse=True)
def seeded():
    """No test depends on what ran before it."""
    torch.manual_seed(0)


class Model(nn.Module):
    """All that is treated in a way of its own."""

    def __init__(self, seed=0, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.second = nn.Embedding(PIECES, WIDTH), nn.Embedding(PIECES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.left, self.right = (nn.Linear(WIDTH, WIDTH) for _ in range(2))  # read the same tensor
        self.twice = nn.Linear(WIDTH, WIDTH, bias=False)  # in one forward
        self.conv = Conv1D(WIDTH, WIDTH)
        nn.init.normal_(self.conv.weight, std=WIDTH**-0.5)
        self.head = nn.Linear(WIDTH, PIECES, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(5, 7)
        self.large = nn.Parameter(torch.tensor([1.0, 70_000.0]))  # not in fp16
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("angles", torch.linspace(0, 1, 7))
        self.to(dtype)

    def forward(self, ids):  # (B, T, 2): two tokens before the target
        x = self.norm(self.embed(ids[..., 0]) + self.second(input=ids[..., 1]))
        x = x + F.gelu(self.left(x)) * self.right(x)
        x = x + self.twice(F.gelu(self.twice(x)))
        return self.head(x + self.conv(F.gelu(x)))


def logits_of(model, rows):
    """Of all but the first two tokens of rows (B, T + 2)."""
    return model(torch.stack((rows[:, 1:-1], rows[:, :-2]), dim=-1)).float()


nats = functools.partial(quantisers.nats_of, logits_of)


def texts(count: int, seed: int) -> torch.Tensor:
    """Batches (count, 8, 34) in which two tokens nearly decide the next."""
    draw = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 4, (count, 8, 34), generator=draw)
    rows = [torch.randint(0, PIECES, (count, 8), generator=draw) for _ in range(2)]
    for place in range(32):
        rows.append(
            (7 * rows[-1] + 11 * rows[-2] + rows[-1] * rows[-2] + noise[..., place]) % PIECES
        )
    return torch.stack(rows, dim=-1)


@pytest.fixture(scope="module")
def trained() -> Model:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for rows in texts(400, seed=1):
        optimizer.zero_grad()
        nats(model, rows).mean().backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def calibration(trained):
    return quantise.calibrate(trained, texts(64, seed=2), nats)


@pytest.fixture(scope="module")
def packed(trained, calibration) -> bytes:
    return quantise.quantise(trained, calibration, 5000)[0]


def rounded(model, file, path, make) -> nn.Module:
    path.write_bytes(file)
    twin = make()
    quantise.load(twin, path)
    return twin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_costs_what_was_expected(trained, calibration, dtype, tmp_path):
    """In no more bytes than were asked for."""
    model, rows, sizes = trained, texts(100, seed=3), (8000, 7000, 6000, 5000)
    if dtype != torch.float32:
        model, sizes = copy.deepcopy(trained), (6000,)
        nn.init.ones_(model.large)  # it has a number beyond fp16
        calibration = quantise.calibrate(model.to(dtype), texts(64, seed=2), nats)
    for max_bytes in sizes:
        file, predicted = quantise.quantise(model, calibration, max_bytes)
        assert 0.99 * max_bytes < len(file) <= max_bytes
        twin = rounded(model, file, tmp_path / "a.npz", lambda: Model(seed=1, dtype=dtype))
        assert twin.embed.weight.dtype == dtype
        plain, back = copy.deepcopy(model).float(), dict(twin.float().named_parameters())
        subject = quantisers.Subject("", plain, logits_of, nats, [], calibration, list(rows))
        found = quantisers.judge(subject, back)["lost"]
        assert sum(predicted.values()) == pytest.approx(found, rel=0.3), max_bytes


def test_what_is_not_rounded_is_stored_exactly_or_in_fp16(trained, packed, tmp_path):
    twin = rounded(trained, packed, tmp_path / "a.npz", lambda: Model(seed=1))
    assert twin.head.weight is twin.embed.weight
    found, close = twin.state_dict(), []
    for name, tensor in trained.state_dict().items():
        assert found[name].dtype == tensor.dtype
        if name in ("large", "count", "angles"):
            assert torch.equal(found[name], tensor), name
        elif torch.equal(found[name], tensor.half().float()):
            close.append(name)
    kept = {name for name in trained.state_dict() if re.search("bias|norm|unused", name)}
    assert set(close) == kept, "unused: calibration says nothing of it"
    again = quantise.calibrate(trained, texts(64, seed=2), nats)
    assert quantise.quantise(trained, again, 5000)[0] == packed


def odd() -> nn.Module:
    """With tensors that have no numbers, and some that fp16 would change."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Embedding(2, 4), nn.Embedding(3, 0))
    model.small = nn.Parameter(torch.tensor([1e-6, 1e-9]))
    model.complex = nn.Parameter(torch.tensor([1 + 2j], dtype=torch.complex64))
    model.empty = nn.Parameter(torch.empty(3, 0))
    model.register_buffer("cache", torch.empty(0))
    return model


@pytest.mark.parametrize(
    "numbers, fits",
    [
        ([1.0, 1e-9], True),
        ([1e-6, 1e-9], False),
        ([1.0, 7e4], False),
        ([1000.4 * 2**-24], True),  # an error of 0.04 %
        ([500.5 * 2**-24], False),  # of 0.1 %
    ],
)
def test_which_parameters_fit_fp16(numbers, fits):
    """By their norm, so one tiny number does not double the bytes of all."""
    assert quantise.fits_half(nn.Parameter(torch.tensor(numbers))) == fits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tensors_without_numbers_or_beyond_fp16_and_inputs_of_one_dimension(dtype, tmp_path):
    x, before = torch.randn(4), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model, x = odd(), x.to(dtype)
        calibration = quantise.calibrate(
            model, [x, x], lambda model, x: (model[0](x) * model[1](torch.tensor(1)) - 1).square()
        )
        outer = 2 * torch.outer(x.float(), x.float())
        torch.testing.assert_close(calibration.hessian("0.weight", 4), outer)
        file, predicted = quantise.quantise(model, calibration, 9000)
        assert list(predicted) == ["0.weight", "1.weight"]
        twin = rounded(model, file, tmp_path / "a.npz", odd)
    finally:
        torch.set_default_dtype(before)
    for name, tensor in model.state_dict().items():
        error = (twin.state_dict()[name] - tensor).abs().max() if tensor.numel() else 0
        assert error <= (0.1 if name in predicted else 0.001 * (name == "0.bias")), name


def test_calibration_sums_what_each_token_does(monkeypatch):
    """Against a backward per token, whose weight alone is 1. The model's state is as before."""
    model, rows = Model(seed=2), texts(1, seed=4)[0, :2, :6]
    model.twice.weight.requires_grad_(False)
    model.norm.eval()
    modes = [module.training for module in model.modules()]
    tokens = iter(torch.eye(8).reshape(8, 2, 4))
    monkeypatch.setattr(torch, "randn", lambda shape, generator: next(tokens))
    inputs, expected = {}, {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            keep = lambda module, x, name=name: inputs.setdefault(name, []).append(x[0].detach())  # noqa: E731
            module.register_forward_pre_hook(keep)
    found = quantise.calibrate(model, [rows] * 8, nats)
    assert modes == [module.training for module in model.modules()]
    assert not model.twice.weight.requires_grad and model.left.weight.requires_grad
    assert found.tokens == 64 and not found.squares["unused.weight"].any()
    for module, xs in inputs.items():
        name = "embed.weight" if module == "head" else f"{module}.weight"
        x = torch.cat(xs).flatten(0, 1)
        torch.testing.assert_close(found.hessian(name, WIDTH), x.T @ x)
        assert len(xs) == (16 if module == "twice" else 8)
    assert torch.equal(found.hessian("second.weight", WIDTH), torch.eye(WIDTH))
    model.twice.weight.requires_grad_(True)
    model.eval()
    for token in range(8):
        loss = nats(model, rows).flatten()[token]
        for name in found.squares:
            weight = model.get_parameter(name)
            [grad] = torch.autograd.grad(loss, weight, retain_graph=True, materialize_grads=True)
            grad = grad.T if name == "conv.weight" else grad
            expected[name] = expected.get(name, 0) + grad.square().mean(dim=1) / 64
    torch.testing.assert_close(found.squares, expected)


def test_an_input_that_is_read_twice_counts_twice_and_no_row_is_free_of_cost():
    model = nn.ModuleDict({"table": nn.Embedding(9, 4), "head": nn.Linear(4, 9)})

    def loss(model, rows):
        x = model["table"](rows[:, :-1])
        logits = model["head"](x) + model["head"](x)
        return F.cross_entropy(logits.mT, rows[:, 1:], reduction="none")

    rows = torch.arange(16).view(2, 8) % 8
    calibration = quantise.calibrate(model, [rows] * 3, loss)
    x = model["table"](rows[:, :-1]).detach().flatten(0, 1)
    torch.testing.assert_close(calibration.hessian("head.weight", 4), 3 * 2 * x.T @ x)
    squares = calibration.squares["table.weight"]
    assert squares[:7].all() and not squares[8], "row 8 is never read"
    groups, make = quantise.make_groups(model, calibration, 8)
    table, _ = map(make, groups)
    cost = squares * (9 * 4 * 2 / 2)
    torch.testing.assert_close(table.cost[0, :, 0], cost + 0.05 * cost.mean())


class Twice(nn.Module):
    """Reads one matrix with a bias twice, changes what it makes in place, and has a head with 8 times
    as many outputs."""

    def __init__(self, conv1d: bool):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(6, 48)
        self.once = Conv1D(6, 4) if conv1d else nn.Linear(4, 6)
        self.unused = nn.Linear(4, 6)

    def forward(self, ids, keep):
        x, total = self.embed(ids), 0
        for one in (x, 2 * x):
            weight = self.once.weight
            weight = weight if isinstance(self.once, Conv1D) else weight.mT
            y = one @ weight + self.once.bias if keep else self.once(one)
            if keep:
                y.register_hook(lambda grad, one=one: keep((one.detach(), grad)))
            total = total + F.relu(y, inplace=not keep)
        return self.head(total)


@pytest.mark.parametrize("conv1d", [False, True])
def test_outputs_are_of_the_gradients_of_each_token(conv1d):
    """Sums of g g^T |x|^2 of products that are used, also if an activation takes their place."""
    torch.manual_seed(0)
    model, rows = Twice(conv1d), torch.arange(16).view(2, 8) % 8

    def loss(model, rows, keep=None):
        return F.cross_entropy(model(rows[:, :-1], keep).mT, rows[:, 1:], reduction="none")

    found = quantise.calibrate(model, [rows], loss)
    assert list(found.outputs) == ["once.weight"]
    seen, draw = [], torch.Generator().manual_seed(0)
    nats = loss(model, rows, seen.append)
    (nats * torch.randn(nats.shape, generator=draw)).sum().backward()
    expected = 0
    for x, grad in seen:
        g = (x.norm(dim=-1, keepdim=True) * grad).flatten(0, 1)
        expected = expected + g.T @ g
    assert len(seen) == 2 and expected[0, 1] != 0
    torch.testing.assert_close(found.outputs["once.weight"], expected)


@pytest.fixture(scope="module")
def two_products():
    """A model and a calibration by which its first product is rotated: its rows are correlated."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 80, bias=False), nn.Linear(80, 40, bias=False))
    mix = torch.randn(80, 80) / 80**0.5 + torch.eye(80)
    calibration = quantise.Calibration(
        {("0.weight",): torch.eye(40), ("1.weight",): torch.eye(80)},
        {"0.weight": torch.ones(80), "1.weight": torch.logspace(-3, 3, 40)},
        1,
        {"0.weight": mix @ mix.T, "1.weight": torch.eye(40)},
    )
    return model, calibration


@pytest.mark.parametrize("states", [0, 8])
def test_a_rotated_matrix_is_read_back(two_products, states, tmp_path):
    """By the weights, whose errors are those of the header, and less in the rotated one."""
    model, calibration = two_products
    groups, make = quantise.make_groups(model, calibration, states)
    assert groups == [["0.weight"], ["1.weight"]]
    first, second = map(make, groups)
    assert [type(one) for one in (first, second)] == [
        quantise.RotatedQuantiser,
        train_gpt.Quantiser,
    ]
    steps = first.steps(0.01)
    assert steps.shape == (1, 1, 1), "a matrix has one step"
    assert torch.equal(steps, steps.bfloat16().float()), "as a file stores them"
    few = quantise.emptied(make(["0.weight"]))
    assert few.expected_bytes(0.01) == first.expected_bytes(0.01)
    held = [one for one in vars(few).values() if torch.is_tensor(one) and not one.is_meta]
    assert sum(one.numel() for one in held) < 3 * 80, "no matrix"
    found = {}
    for form, one in ("rotated", calibration), ("plain", calibration._replace(outputs={})):
        file, predicted = quantise.quantise(model, one, 3400, states=states)
        twin = rounded(model, file, tmp_path / "a.npz", lambda: copy.deepcopy(model))
        header, _ = quantise.parse(file)
        assert header["rotated"] == [form == "rotated", False] and header["version"] == 4
        errors = (model[0].weight - twin[0].weight).detach()
        output = quantise.costs_of_errors(
            calibration.squares["0.weight"][None], calibration.outputs["0.weight"][None]
        )
        found[form] = float((output[0] @ errors * errors).sum()) / 2  # nats, as is the prediction
        if form == "rotated":
            assert predicted["0.weight"] == pytest.approx(found[form], rel=1e-3)
    assert found["rotated"] < 0.95 * found["plain"]


def covariance(width, seed) -> torch.Tensor:
    """A second moment (width, width) of correlated numbers of different sizes."""
    draw = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=draw) / width**0.5 + torch.eye(width)
    x = torch.randn(4 * width, width, generator=draw) @ mix * torch.linspace(0.2, 2, width)
    return train_gpt.damped((x.T @ x)[None], 0.05)[0]


@pytest.mark.parametrize("block", [4, 128])
def test_feedback_between_rows_is_the_greedy_solution(block):
    """In float64: open segments compensate optimally in a column, the last of three comes first."""
    rows = torch.randn(2, 70, 12, generator=torch.Generator().manual_seed(1))
    hessian, output = (torch.stack([covariance(n, seed) for seed in (2, 3)]) for n in (12, 70))
    steps = torch.tensor([0.3, 0.2])[:, None, None]
    factor = train_gpt.inverse_factor(hessian)
    feedback, weights = quantise.row_feedback(output)

    def to_integers(column):
        assert column.shape == (3, 2, 32, 1)
        return (column / steps).round()

    found = quantise.gptq(rows, *factor, steps, to_integers, feedback, block)
    assert found.shape == rows.shape
    for layer in range(2):
        h, g, w = hessian[layer].double(), output[layer].double(), rows[layer].double()
        todo = h.diagonal().argsort(descending=True).tolist()
        while todo:
            column, *rest = todo
            error = torch.zeros(70, 1).double()
            for first in (64, 32, 0):
                later = slice(min(first + 32, 70), 70)
                own = slice(first, later.start)
                # The least (d, e)^T G (d, e) over the open d has d = -G[open, open]^-1 G[open, later] e
                pull = torch.linalg.solve(g[: own.stop, : own.stop], g[: own.stop, later])
                target = w[own, column] + (pull @ error[later])[own, 0]
                code = (target / steps[layer, 0]).round()
                assert torch.equal(found[layer, own, column].double(), code)
                error[own, 0] = w[own, column] - code * steps[layer, 0]
            w[:, rest] += error @ h[column, rest][None] @ torch.linalg.inv(h[rest][:, rest])
            todo = rest
        # A row weighs what its error costs when the rows of earlier segments are free.
        for first in (0, 32, 64):
            own = slice(first, min(first + 32, 70))
            inverse = torch.linalg.inv(g[: own.stop, : own.stop])[own, own]
            expected = torch.linalg.inv(inverse).diagonal().float()
            torch.testing.assert_close(weights[layer, own], expected, rtol=1e-4, atol=1e-5)


def orthogonal(size) -> torch.Tensor:
    """By hand: signs and Hadamard's matrix for the first 2^k elements, then for the last."""
    power, matrix, hadamard = 2 ** int(math.log2(size)), np.eye(size), np.ones((1, 1))
    while len(hadamard) < power:
        hadamard = np.kron([[1, 1], [1, -1]], hadamard)
    for first in sorted({0, size - power}):
        part, own = np.eye(size), slice(first, first + power)
        signs = np.random.RandomState(first).choice([-1, 1], power)
        part[own, own] = hadamard * signs / power**0.5
        matrix = part @ matrix
    return torch.from_numpy(matrix)


@pytest.mark.parametrize("size", [1, 2, 7, 96, 128])
def test_rotations(size):
    """Files need them forever: their weights are rotated back when they are loaded."""
    rows, left, right = torch.randn(3, size, 24).double(), orthogonal(size), orthogonal(24)
    before, turned = rows.clone(), quantise.rotate(rows)
    torch.testing.assert_close(turned, left @ rows @ right.T)
    torch.testing.assert_close(quantise.rotate(turned, back=True), rows)
    assert torch.equal(rows, before)
    assert size < 7 or left.abs().max() <= 2 / 2 ** (int(math.log2(size)) / 2), "all are mixed"


def test_costs_of_errors():
    """The sums of single tokens give the correlations of rows, the squares their scale; a row that
    calibration has hardly seen has 5 % of the mean cost."""
    squares = torch.tensor([[4.0, 1.0, 0.0]])
    sums = torch.tensor([[[18.0, -3.0, 0.0], [-3.0, 2.0, 0.0], [0.0, 0.0, 0.0]]])
    output, floor = quantise.costs_of_errors(squares, sums), 0.05 * 5 / 3
    expected = torch.tensor([[4.0 + floor, -1, 0], [-1, 1 + floor, 0], [0, 0, floor]])
    torch.testing.assert_close(output[0], expected)
    assert sums[0, 0, 0] == 18
    # A matrix that no token has used can be factored too.
    unused, eye = quantise.costs_of_errors(0 * squares, 0 * sums), torch.eye(4)[None]
    rows = torch.randn(1, 3, 4)
    one = quantise.RotatedQuantiser(rows, eye, unused, 8, train_gpt.Rule(0.1))
    codes, steps, _ = one.round(1e-4)
    assert (steps / rows.square().mean().sqrt() - 2).abs() < 0.01 and codes.abs().max() < 3


class Attention(nn.Module):
    """Weights that are used without a call of their module: the projection of
    nn.MultiheadAttention, and an embedding as a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(PIECES, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)
        nn.init.eye_(self.attention.out_proj.weight)  # so its output is its input
        self.other = nn.Linear(WIDTH, WIDTH)
        self.head = self.linear

    def linear(self, x):
        return F.linear(x, self.embed.weight)

    def matmul(self, x):
        return x @ self.embed.weight.T

    def bypass(self, x):
        return F.linear(x @ self.other.weight.T, self.embed.weight)

    def forward(self, ids):
        x = F.embedding(ids, self.embed.weight)
        self.y, _ = self.attention(x, x, x, need_weights=False)
        return self.head(self.y)


def next_nats(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).mT, rows[:, 1:], reduction="none")


def test_weights_that_are_used_without_their_module():
    model, rows = Attention(), texts(1, seed=4)[0]
    found = quantise.calibrate(model, [rows], next_nats)
    y = model.y.detach().flatten(0, 1)
    for name in ("embed.weight", "attention.out_proj.weight"):
        torch.testing.assert_close(found.hessian(name, WIDTH), y.T @ y)
    for name, head in (("embed", model.matmul), ("other", model.bypass)):
        model.head = head
        with user_error(f"{name}.weight is used otherwise than by its module, F.linear or F.embed"):
            quantise.calibrate(model, [rows[:2, :8]], next_nats)


def test_a_compiled_model_is_treated_as_before_it_was_compiled(trained, packed, tmp_path):
    """Whole or in part, also if it has run: the same sums, and the same names in files."""
    rows, graphs = texts(2, seed=2), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    expected = quantise.calibrate(trained, rows, nats)
    part = Model()
    part.load_state_dict(trained.state_dict())
    part.left = torch.compile(part.left, backend=backend)
    (tmp_path / "a.npz").write_bytes(packed)
    for model in (torch.compile(trained, backend=backend), part):
        nats(model, rows[0])
        compiled = len(graphs)
        found = quantise.calibrate(model, rows, nats)
        assert len(graphs) == compiled
        torch.testing.assert_close(found.squares, expected.squares)
        torch.testing.assert_close(found.hessians, expected.hessians)
        assert list(quantise.tensors_of(model)) == list(quantise.tensors_of(trained))
    quantise.load(part, tmp_path / "a.npz")


def no_grad(model, rows):
    with torch.no_grad():
        return nats(model, rows)


@pytest.mark.parametrize(
    "loss, count, sentence",
    [
        (lambda model, rows: nats(model, rows).mean(), 1, "the nats of each token, not their mean"),
        (lambda model, rows: 0.5, 1, "the nats of each token, not their mean"),
        (no_grad, 1, r"the loss has no gradient: compute it without torch.no_grad\(\)"),
        (lambda model, rows: nats(model, rows) * torch.inf, 1, "a loss is not finite"),
        (nats, 0, "there is no batch to calibrate with"),
        (lambda _, rows: nats(Model(), rows), 1, "all squared gradients are 0 in fp32: check that"),
        (lambda m, rows: nats(m, rows) * 1e-30, 1, "are 0 in fp32: .* weights are not tiny"),
    ],
)
def test_a_mistake_is_one_sentence(loss, count, sentence):
    with user_error(sentence):
        quantise.calibrate(Model(), texts(count, seed=2), loss)


def test_what_cannot_be_rounded_is_one_sentence(trained, calibration):
    sentence = "[0-9]{4}, .* bits per parameter, with 172 numbers that are not rounded: unused.weight, norm.weight"
    smallest = r"9 bytes are too few: the smallest file has \d+, [\d.]+ bits per parameter$"
    with user_error(smallest) as error:
        quantise.quantise(trained, calibration, 9)
    most = int(re.search(r"has (\d+)", str(error.value))[1]) - 300  # they take 348 bytes
    with user_error(f"{most} bytes are too few: the smallest file has {sentence}"):
        quantise.quantise(trained, calibration, most)
    for size in (None, math.nan):
        with user_error(f"max_bytes={size} is not a number"):
            quantise.quantise(trained, calibration, size)
    with user_error("states=5: choose 0, 4, 8"):
        quantise.quantise(trained, calibration, 9000, states=5)
    with user_error("the calibration is of another model"):
        quantise.quantise(nn.Linear(4, 4), calibration, 9000)
    huge = {name: 1e37 * one for name, one in calibration.squares.items()}
    with user_error("the expected loss is not finite: scale it down"):
        quantise.quantise(trained, calibration._replace(squares=huge, outputs={}), 9000)
    for module in (nn.LayerNorm(4), type("Conv1D", (nn.Conv1d,), {})(4, 4, 1)):
        with user_error("the model has no nn.Linear"):
            quantise.calibrate(module, [], nats)
    with torch.inference_mode():
        inference = Model()
    with user_error(r"large was made in torch.inference_mode\(\): make the model without it"):
        quantise.calibrate(inference, texts(1, seed=2), nats)
    with user_error("weight has no values, as on the meta device"):
        quantise.calibrate(nn.LazyLinear(4), [], nats)


def filled(name, number):
    return lambda model: nn.init.constant_(model.get_parameter(name), number)


def with_buffer(make):
    return lambda model: model.register_buffer("other", make())


def with_part(view):
    """A parameter over numbers of another one."""
    return lambda model: model.register_parameter(
        "part", nn.Parameter(view(model.left.weight.data), requires_grad=False)
    )


FINITE = "is not finite: check the model"
PLAIN = "other is quantised, sparse or of a tensor's subclass: make it a plain tensor"
SHARED = "left.weight and part share a part of their memory"
EMPTY = "has no values, as on the meta device: make the whole model with values"
# fmt: off
IMPOSSIBLE = {  # (sentence, by how many of `quantise`, `calibrate` and `load`, change of the model)
    "nan": (f"left.weight {FINITE}", 2, filled("left.weight", math.nan)),
    "infinite": (f"large {FINITE}", 2, filled("large", math.inf)),
    "a bias": (f"unused.bias {FINITE}", 2, filled("unused.bias", math.nan)),
    "squares": ("weights have squares beyond fp32 in one of left.weight", 1, filled("left.weight", 1e20)),
    "sparse": (PLAIN, 3, with_buffer(lambda: torch.eye(4).to_sparse())),
    "quantised": (PLAIN, 3, with_buffer(lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8))),
    "rows": (f"{SHARED}: give one a clone", 3, with_part(lambda w: w[2:5])),
    "columns": (SHARED, 3, with_part(lambda w: w.mT[1:])),
    "another type": (SHARED, 3, with_part(lambda w: w.view(torch.int32)[1:])),
    "expanded": (r"part is expanded: give it a clone\(\) of itself", 3, with_part(lambda w: w[1:2, :1].expand(3, 4))),
    "meta": (f"large {EMPTY}", 3, lambda model: model.to("meta")),
    "a part on meta": (f"left.weight {EMPTY}", 3, lambda model: model.left.to("meta")),
}
# fmt: on


@pytest.mark.parametrize("kind", IMPOSSIBLE)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_model_that_no_file_can_hold_is_refused(kind, trained, calibration, packed, tmp_path):
    """A quantised type was a segmentation fault in `load`; a model on meta loaded nothing."""
    sentence, count, change = IMPOSSIBLE[kind]
    model, path = copy.deepcopy(trained), tmp_path / "a.npz"
    path.write_bytes(packed)
    change(model)
    calls = (
        lambda: quantise.quantise(model, calibration, 9000),
        lambda: quantise.calibrate(model, texts(1, seed=2), nats),
        lambda: quantise.load(model, path),
    )
    for call in calls[:count]:
        with user_error(sentence):
            call()


def test_what_is_read_back_is_compared(trained, calibration, monkeypatch):
    """Codes with the coder's own, exact tensors with the model's."""
    call = functools.partial(quantise.quantise, trained, calibration, 6000)
    encode = train_gpt.CODERS["ans"][0]
    with monkeypatch.context() as patch:
        other = lambda codes: encode(codes + 1), train_gpt.decode_ans  # noqa: E731
        patch.setitem(train_gpt.CODERS, "ans", other)
        with user_error("the coder ans reads other codes than it wrote: update its package"):
            call()
    with monkeypatch.context() as patch:
        patch.setattr(quantise, "from_bytes", lambda *_: itertools.repeat(torch.zeros(())))
        with user_error("the file cannot be read back: .*; report this"):
            call()
    pack = train_gpt.lzma_pack

    def other_count(raw):
        raw = bytes(raw)
        return pack(raw.replace(b"\3", b"\4") if len(raw) < 64 else raw)

    monkeypatch.setattr(train_gpt, "lzma_pack", other_count)
    with user_error("the file cannot be read back: count has other values; report this"):
        call()


def test_infinities_a_conjugate_view_and_8_bits_are_stored(trained, calibration, tmp_path):
    eight = torch.linspace(-9, 9, 5).to(torch.float8_e4m3fn)

    def make(scale=0):
        model = copy.deepcopy(trained)
        model.eight = nn.Parameter((scale * eight.float()).to(eight.dtype), requires_grad=False)
        model.register_buffer("angles", (scale * torch.tensor([1 + 2j])).conj())
        model.register_buffer("mask", torch.tensor([0, -math.inf if scale else 5.0]))
        return model

    file, _ = quantise.quantise(make(scale=1), calibration, 6000)
    twin = rounded(trained, file, tmp_path / "a.npz", make)
    assert twin.angles.tolist() == [1 - 2j] and twin.mask.tolist() == [0, -math.inf]
    assert torch.equal(twin.eight.float(), eight.float())


def test_parameters_over_the_same_numbers_are_one(trained, calibration, packed, tmp_path):
    """As after `head.weight.data = embed.weight.data`: both were rounded, one after the other."""
    model = copy.deepcopy(trained)
    model.head.weight = nn.Parameter(torch.empty(0))
    model.head.weight.data = model.embed.weight.data
    assert model.head.weight is not model.embed.weight
    found = quantise.calibrate(model, texts(64, seed=2), nats)
    assert found.hessians.keys() == calibration.hessians.keys()
    torch.testing.assert_close(found.squares, calibration.squares)
    assert quantise.quantise(model, calibration, 5000)[0] == packed
    parted, path = copy.deepcopy(model), tmp_path / "a.npz"
    path.write_bytes(packed)
    for call in (
        lambda: quantise.load(parted, path),
        lambda: quantise.quantise(parted, calibration, 5000),
    ):
        with user_error("of another model.*a copy of a model parts parameters that were tied by"):
            call()


@pytest.mark.parametrize("parts", [lambda w: w.split(WIDTH), lambda w: (w[::2], w[1::2])])
def test_parts_of_one_storage_that_share_no_number_are_two(parts):
    model, whole = Model(), torch.randn(2 * WIDTH, WIDTH)
    model.left.weight.data, model.right.weight.data = parts(whole)
    assert {"left.weight", "right.weight"} <= quantise.tensors_of(model).keys()


def test_values_beyond_the_type_of_the_model_are_not_loaded(packed, tmp_path):
    """70,000 became infinite in fp16."""
    path, model = tmp_path / "a.npz", Model(seed=1, dtype=torch.float16)
    path.write_bytes(packed)
    with user_error("large has values that torch.float16 cannot hold"):
        quantise.load(model, path)
    assert torch.equal(model.embed.weight, Model(seed=1, dtype=torch.float16).embed.weight)


def test_each_matrix_is_rounded_once_and_a_table_with_its_damping(
    trained, calibration, monkeypatch
):
    """Also if it is a head, too, and if a shape is too large for one group."""
    whole = quantise.make_groups(trained, calibration, 8)
    monkeypatch.setattr(quantise, "GROUP", 1)
    parts = quantise.make_groups(trained, calibration, 8)
    matrices = {"embed", "second", "left", "right", "twice", "conv"}
    for groups, make in (whole, parts):
        names = [name.removesuffix(".weight") for group in groups for name in group]
        assert len(names) == len(matrices) and {*names} == matrices
        damping = {group[0]: make(group).rule.damping for group in groups}
        assert damping["embed.weight"] == 1.0 and damping["left.weight"] == 0.1
    assert len(whole[0]) == 2 and len(parts[0]) == 6
    head = nn.ModuleList([nn.Linear(3, 5, bias=False), nn.Embedding(5, 3)])
    head[0].weight = head[1].weight
    assert quantise.matrices_of(head)["0.weight"].lookup


def test_only_the_group_that_is_rounded_takes_memory(trained, calibration, packed, monkeypatch):
    """While one is coded, no other and not even it has its weights."""
    made, coded, encode = [], [], train_gpt.encode_ans

    init = train_gpt.Quantiser.__init__

    def counted(self, *given):
        init(self, *given)
        made.append(weakref.ref(self))

    def encoded(codes):
        alive = [one() for one in made if one()]
        kept = [tensor for one in alive for tensor in vars(one).values() if torch.is_tensor(tensor)]
        # Five numbers of a row and one of a matrix
        assert sum(one.numel() for one in kept if not one.is_meta) < 6 * (2 * PIECES + 4 * WIDTH)
        coded.append(codes.shape)
        return encode(codes)

    monkeypatch.setattr(train_gpt.Quantiser, "__init__", counted)
    monkeypatch.setitem(train_gpt.CODERS, "ans", (encoded, train_gpt.decode_ans))
    assert quantise.quantise(trained, calibration, 5000)[0] == packed
    tried = 2 * len(calibration.outputs)  # the forms of each matrix
    assert tried and len(coded) > 2 and len(made) == tried + 2 + len(coded)


def test_progress_is_a_line_each_half_minute_if_nobody_watches(capsys, monkeypatch):
    assert list(quantise.bar(range(9), "rounding")) == [*range(9)]
    assert not capsys.readouterr().err
    clock = itertools.count(0, 10)
    monkeypatch.setattr("tqdm.std.time", lambda: next(clock))
    assert list(quantise.bar(range(9), "rounding")) == [*range(9)]
    assert 2 <= capsys.readouterr().err.count("rounding") <= 5


def test_autocast_changes_no_reader(calibration, trained):
    """Inputs that it has cast are freed, so another one can get their id."""

    def cast(model, rows):
        with torch.autocast("cpu", torch.bfloat16):
            return nats(model, rows)

    found = quantise.calibrate(trained, texts(4, seed=2), cast)
    assert found.hessians.keys() == calibration.hessians.keys()


# fmt: off
HEADERS = {
    "an older version": ("its version is 3, not 4", lambda header: header.update(version=3)),
    "a version as text": ("its version is '4', not 4", lambda header: header.update(version="4")),
    "no shapes": ("", lambda header: header.update(shapes=5)),
    "a group twice": ("contradicts itself", lambda header: header["groups"].append(header["groups"][0])),
    "two shapes in a group": ("contradicts itself", lambda header: header["groups"][0].append("unused.weight")),
    "a vector in a group": ("KeyError", lambda header: header["groups"][0].append("norm.weight")),
    "an empty group": ("", lambda header: header["groups"].append([])),
    "no groups": ("contradicts itself", lambda header: header["groups"].clear()),
    "a stream less": ("contradicts itself", lambda header: header["code_bytes"].pop()),
    "negative length": ("contradicts", lambda header: header.update(code_bytes=[5 + sum(header["code_bytes"]), -5])),
    "codes left over": ("contradicts", lambda header: header.update(code_bytes=[n - 1 for n in header["code_bytes"]])),
    "length as text": ("", lambda header: header["code_bytes"].append("5")),
    "a number for a form": ("contradicts itself", lambda header: header.update(rotated=[*map(int, header["rotated"])])),
    "a form less": ("contradicts itself", lambda header: header["rotated"].pop()),
    "rotated, with steps of rows": ("exceeds", lambda header: header.update(rotated=[True] * len(header["groups"]))),
    "five states": ("contradicts itself", lambda header: header.update(trellis_states=5)),
    "a quantised type": ("contradicts itself", lambda header: header["exact"].update(count="quint8")),
    "no type": ("AttributeError", lambda header: header["exact"].update(count="load")),
    "a huge type": ("", lambda header: header["exact"].update({"norm.weight": "complex128"})),
    "no such tensor": ("contradicts itself", lambda header: header["exact"].update(more="int64")),
    "no header": ("KeyError: 'version'", dict.clear),
}
FILES = {
    **{name: DAMAGES[name] for name in ("truncated", "one byte", "compressed", "a huge array")},
    **VALUES,
    "codes compressed": ("its arrays are compressed", lambda blob: rezipped(blob, method=zipfile.ZIP_DEFLATED)),
    "foreign": ("it is no file of tools/quantise.py", lambda blob: b"hello"),
    "a huge directory": ("it is no file of tools/quantise.py", lambda blob: blob + b"PK\1\2" * 1000),
    "too large": ("it has 2000000 bytes, too many for this model", lambda blob: blob + bytes(2_000_000 - len(blob))),
    "more exact values": ("exceeds", lambda blob: replaced(blob, exact=zeros(1 << 24))),
}
# fmt: on


@pytest.mark.parametrize("damage", [*HEADERS, *FILES])
def test_a_damaged_file_is_refused_and_the_model_is_as_before(packed, damage, tmp_path):
    sentence, act = (HEADERS | FILES)[damage]
    path, model = tmp_path / "a.npz", Model(seed=1)
    path.write_bytes(rewritten(packed, act) if damage in HEADERS else act(packed))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sentence = f"{path} cannot be loaded: .*{sentence}.*; if truncated or altered, copy it again"
    with user_error(sentence):
        quantise.load(model, path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10  # KiB
    fresh = Model(seed=1).state_dict()
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in model.state_dict().items())


def test_a_file_of_another_model_is_refused(packed, tmp_path):
    path = tmp_path / "a.npz"
    model = Model(seed=1)
    for sentence, change in (
        ("large is missing in the file and [2] in the model", lambda shapes: shapes.pop("large")),
        ("m.x is [4] in the file and missing in the", lambda shapes: shapes.update({"m.x": [4]})),
        ("large is [9] in the file and [2] in", lambda shapes: shapes.update(large=[9])),
    ):
        path.write_bytes(rewritten(packed, lambda header, act=change: act(header["shapes"])))
        with user_error(re.escape(f"{path} is of another model: {sentence}")):
            quantise.load(model, path)
    assert torch.equal(model.conv.weight, Model(seed=1).conv.weight)
    with user_error("there is no file .*none.npz: check the path$"):
        quantise.load(nn.Linear(4, 4), tmp_path / "none.npz")


def test_a_file_is_loaded_as_in_the_document(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = llama(**SMALL)
    calibration = quantise.calibrate(model, texts(2, seed=2), quantise.nats_of)
    (tmp_path / "model.npz").write_bytes(quantise.quantise(model, calibration, 10**6)[0])
    text = (ROOT / "docs" / "quantiser.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```py\n(.*?)```", text, re.S)
    names, twin = {"FOLDER": folder / "model"}, llama(**SMALL)
    exec(example, names)
    quantise.load(twin, "model.npz")
    assert torch.equal(names["model"].lm_head.weight, twin.lm_head.weight)


def test_the_example_of_the_document_runs_after_pip_install(tmp_path):
    """With the files that setup.py installs, alone; they leave the reader's Python as it is."""
    for path in re.findall(r'"([\w/]+\.py)"', (ROOT / "setup.py").read_text()):
        shutil.copy(ROOT / path, tmp_path)
    text = (ROOT / "docs" / "quantiser.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(example.splitlines()) < 40
    start = (
        "import sys, warnings; warnings.simplefilter('error'); own = [*sys.path], sys.excepthook"
    )
    end = "assert own == (sys.path, sys.excepthook)"
    result = run(["-c", f"{start}\n{example}\n{end}"], {}, tmp_path)
    expected, found = map(float, re.findall(r"-?\d\.\d+", result.stdout.splitlines()[-1]))
    assert expected == pytest.approx(found, rel=0.3)


def llama(**changes) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=1024, hidden_size=128, intermediate_size=384, num_hidden_layers=4)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=2)
    knobs = dict(max_position_embeddings=128, **sizes, **heads)
    return LlamaForCausalLM(LlamaConfig(**knobs | changes))


SMALL = dict(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved Llama that reads bytes, as `model`, and two texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("transformers")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "model")
    torch.manual_seed(0)
    llama(**SMALL).save_pretrained(folder / "model")
    text = "\n".join(made_lines(200))
    (folder / "text").write_text(text[:8000], encoding="utf-8")
    (folder / "test").write_text(text[8000:9000], encoding="utf-8")
    return folder


@pytest.fixture
def program(folder, tmp_path, monkeypatch):
    """A function that calls the program with these words, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quantise, "program", sys.modules["program"], raising=False)

    def call(words, text=folder / "text", name="a.npz"):
        first = ["quantise.py", folder / "model", "--text", text, "--width", 31, "-o", name]
        monkeypatch.setattr(sys, "argv", [*map(str, first), *words.split()])
        quantise.main()

    return call


def test_the_program_rounds_to_several_sizes_from_one_calibration(
    program, folder, tmp_path, capsys, monkeypatch
):
    """Few tokens of calibration are named first, and a file far below its limit."""
    words = f"--bits 3 3.5 16 --rows 64 --calibration kept --test-text {folder / 'test'}"
    program(words)
    count = train_gpt.count_numbers(llama(**SMALL).parameters())
    printed = capsys.readouterr().out.splitlines()
    few = "note: 1984 tokens calibrated, not 50000: what is expected is probably "
    [below] = [place for place, line in enumerate(printed[1:]) if line.startswith("note:")]
    assert printed[0].startswith(few) and printed[below].startswith("a_16.npz: ")
    assert printed[below + 1] == "note: that is less than allowed; there are no finer steps"
    tokens = 31 * ((folder / "test").stat().st_size // 32)  # one token is a byte
    for bits in (3, 3.5):
        size = (tmp_path / f"a_{bits}.npz").stat().st_size
        assert 0.98 * bits < 8 * size / count <= bits
        assert f"a_{bits}.npz: {size} bytes, {8 * size / count:.2f} bits per parameter" in printed
        pattern = rf"a_{bits}.npz: on {tokens} tokens 5\.\d{{4}} -> 5\.\d{{4}} nats per token"
        assert re.fullmatch(pattern, printed[-3 if bits == 3 else -2])
    model, twin = (llama(**SMALL) for _ in range(2))
    quantise.load(twin, tmp_path / "a_3.npz")
    quantise.load(model, tmp_path / "a_3.5.npz")
    assert 0 < (model.lm_head.weight - twin.lm_head.weight).std() < model.lm_head.weight.std()
    # The calibration is that of the file.
    first = (tmp_path / "a_3.5.npz").read_bytes()
    monkeypatch.setattr(quantise, "calibrate", None)
    monkeypatch.setattr(quantise, "ENOUGH", 1984)
    program(words.replace("3 3.5 16", "3.5"))
    assert (tmp_path / "a.npz").read_bytes() == first
    assert "note:" not in capsys.readouterr().out
    # Without a test text the end of the text is that, and the rest calibrates.
    seen = []
    monkeypatch.setattr(quantise, "mean_loss", lambda model, rows: seen.append(rows))
    with user_error("kept is of other weights, text, --rows or --width: delete it"):
        program("--bits 3 --rows 63 --calibration kept")
    _, tokenizer = quantise.read_model(str(folder / "model"))
    text = (folder / "text").read_text(encoding="utf-8")
    assert tokenizer.decode(seen[0].flatten())[:200] == text[7200:7400]


def test_a_kept_calibration_is_whole_and_of_these_weights(tmp_path, monkeypatch):
    model, rows, path = llama(**SMALL), torch.randint(256, (8, 9)), tmp_path / "kept"
    first = quantise.kept_calibration(path, model, rows)
    monkeypatch.setattr(quantise, "calibrate", None)
    again = quantise.kept_calibration(path, model, rows)
    torch.testing.assert_close(again.squares, first.squares, rtol=0, atol=0)
    with torch.no_grad():
        model.lm_head.weight[3, 4] += 1e-6
    with user_error("kept is of other weights, text, --rows or --width: delete it"):
        quantise.kept_calibration(path, model, rows)
    whole = path.read_bytes()
    place = whole.index(b"/data/1") + 200  # torch.load reads it
    flipped = whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :]
    for file in (whole[: len(whole) // 2], flipped, b"a text"):
        path.write_bytes(file)
        with user_error(
            "cannot read .*kept: .*; delete it if it is a damaged calibration, else na"
        ):
            quantise.kept_calibration(path, model, rows)


def without(tensors, name):
    return {key: one for key, one in tensors.items() if name not in key}


LACKS = "it lacks: lm_head.weight"
# fmt: off
INCOMPLETE = {
    "a tensor less": (
        f"{LACKS} .is the head the embedding. set tie_word_embeddings in .* to true",
        lambda t: without(t, "lm_head"), {},
    ),
    "a head of its own": (
        "its head is not the embedding: set tie_word_embeddings in config.json to false;", dict,
        {"tie_word_embeddings": True},
    ),
    "names of a wrapper": (
        f"{LACKS}, model.embed_tokens.weight, model.layers.0.input_layernorm.weight and 9 more "
        ".all names have module. or _orig_mod. before them: save the model inside",
        lambda t: {f"module.{name}": one for name, one in t.items()}, {},
    ),
    "a layer more": ("it lacks: model.layers.1.[a-z_.]+, .* and 6 more", dict, {"num_hidden_layers": 2}),
    "integers": (
        "it is rounded already: model.safetensors lm_head.weight",
        lambda t: t | {"lm_head.weight": t["lm_head.weight"].mul(1000).to(torch.int8)}, {},
    ),
    "other shapes": (
        r"it has other shapes: lm_head.weight .*\[256, 32\].* not .*\[300, 32\].*, model.embed_t", dict,
        {"vocab_size": 300},
    ),
}
# fmt: on


@pytest.fixture
def changed(folder, tmp_path):
    """A function that copies the model with changed tensors and configuration."""

    def change(act, knobs):
        path = tmp_path / "changed"
        shutil.copytree(folder / "model", path)
        tensors = load_file(path / "model.safetensors")
        save_file(act(tensors), path / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((path / "config.json").read_text()) | knobs
        (path / "config.json").write_text(json.dumps(config))
        return str(path)

    return change


def test_a_folder_without_a_tokenizer_or_safetensors_says_what_to_do(changed, tmp_path):
    path = changed(dict, {})
    for file in (tmp_path / "changed").glob("tokenizer*"):
        file.unlink()
    sentence = f"no tokenizer can be loaded from {path}: .*; save it there with tokenizer.save_p"
    with user_error(sentence):
        quantise.read_model(path)
    (tmp_path / "changed/model.safetensors").rename(tmp_path / "changed/pytorch_model.bin")
    with user_error(
        "weights are .bin files, which may run code: if you trust them, load the model"
    ):
        quantise.read_model(path)


@pytest.mark.parametrize("kind", INCOMPLETE)
def test_a_folder_that_is_not_all_of_its_model_is_refused(kind, changed):
    """transformers warns and takes random weights."""
    sentence, act, knobs = INCOMPLETE[kind]
    path = changed(act, knobs)
    with user_error(f"cannot load {path}: {sentence}"):
        quantise.read_model(path)


def test_tensors_without_a_place_in_the_model_are_named(changed, capsys):
    path = changed(lambda t: t | {"model.layers.1.up.weight": torch.ones(3)}, {})
    quantise.read_model(path)
    note = f"note: the model of {path}/config.json has no place for model.layers.1.up.weight: is"
    assert note in capsys.readouterr().err


def test_little_more_of_a_text_is_tokenized_than_needed():
    counts = []

    def tokenizer(text, verbose):
        counts.append(len(text))
        return {"input_ids": [ord(letter) for letter in text]}

    text = "".join(chr(i) for i in range(33, 100_033) if not 0xD800 <= i < 0xE000)
    rows = quantise.to_rows(tokenizer, text, 31, 64)
    assert rows.shape == (64, 32) and (rows.diff() == 1).float().mean() > 0.9
    assert sum(counts) == 2 * 32 * 32
    places = rows[::32, 0].sort().values
    assert len(places) == 2
    everything = quantise.to_rows(tokenizer, text, 31, 1 << 20)
    assert len(everything) == len(text) // 32 == len(everything.unique(dim=0))
    with user_error("a text has no 32 tokens in a row: give more text or a smaller --width"):
        quantise.to_rows(tokenizer, "short", 31, 64)


@pytest.mark.parametrize(
    "words, name, sentence",
    [
        ("--bits 3 --width 0", "a.npz", "argument --width: 0 is not a whole number above 0"),
        ("--bits 3.5 nan", "a.npz", "argument --bits: nan is not a number above 0"),
        ("--bits 3", ".", "argument -o/--output: . is a folder: add the name of a file"),
        ("--bits 3", "no/a.npz", "argument -o/--output: no/a.npz is in no folder: make no first"),
        (
            "--bits 3 --calibration no/b",
            "a.npz",
            "argument --calibration: no/b is in no folder: make no first",
        ),
    ],
)
def test_a_mistake_is_found_before_the_work(program, words, name, sentence, capsys, monkeypatch):
    monkeypatch.setattr(quantise, "read_text", None)
    with pytest.raises(SystemExit, match="2"):
        program(words, name=name)
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"quantise.py: error: {sentence}")


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--models", "llama", "4x128"], "--models 4x128 is for --papers only"),
        (["--papers", "--models", "2135", "gpt2"], "--models gpt2 needs transformers: pip install"),
    ],
)
def test_the_benchmark_refuses_a_mistake_before_the_work(words, sentence, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["quantisers.py", "data", *words])
    if "needs" in sentence:
        monkeypatch.setattr(quantisers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        quantisers.main()
    assert sentence in capsys.readouterr().err


def test_a_library_that_rounds_nothing_is_an_error(monkeypatch):
    """Its `quantize_` may leave a weight as it is, and `dequantize` takes any tensor."""
    granularity = types.SimpleNamespace(PerGroup=lambda group: None)
    options = dict(IntxWeightOnlyConfig=lambda **_: None, quantize_=lambda module, how: None)
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    name = "torchao.quantization"
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**options))
    monkeypatch.setitem(sys.modules, f"{name}.granularity", granularity)
    with user_error(r"torchao has not rounded a matrix \(4, 8\): update it"):
        quantisers.torchao(torch.randn(4, 8), 4)


@pytest.fixture
def problem():
    """(rows (2, 96, 48), damped Hessian, G). 96 rows are a segment of the trellis and a half."""
    hessian, output = (torch.stack([covariance(n, seed) for seed in (2, 3)]) for n in (48, 96))
    return torch.randn(2, 96, 48), hessian, output


def floored(output):
    """G, damped as for feedback."""
    mean = output.diagonal(0, 1, 2).mean(dim=1)[:, None, None]
    return output + 0.05 * mean * torch.eye(96)


def cost_of(problem, back):
    """The quadratic form of the errors."""
    rows, hessian, output = problem
    errors = rows - back
    return float((floored(output) @ errors * (errors @ hessian)).sum())


def coded(problem, form, bits=4.0):
    """(bits per weight by the entropy of all codes, quadratic form, prediction)."""
    rounder = quantisers.Kronecker(*problem, form)
    codes, back, cost = rounder.round(quantisers.level_of(bits, [rounder]))
    share = codes.unique(return_counts=True)[1] / codes.numel()
    return float(-(share * share.log2()).sum()), cost_of(problem, back), float(cost.sum())


@pytest.mark.parametrize("way", quantisers.PAPERS)
def test_ways_of_papers_predict_their_quadratic_form(problem, way):
    bits, found, predicted = coded(problem, quantisers.PAPERS[way])
    assert found == pytest.approx(predicted, rel=0.08)  # of 9,216 errors
    # The level was made for 4. One entropy of all codes is above that where steps differ.
    assert bits == pytest.approx(4, abs=0.35)


def test_distances_from_the_bound(problem):
    def distance(**options):
        both = quantisers.Kronecker(*problem, quantisers.Form(**options)).distance()
        return [float(one.mean()) for one in both]

    nothing = pytest.approx(0, abs=1e-3)
    assert distance(water=True)[0] == nothing != distance()[0]
    assert distance(steps="rows", feedback=True)[1] == nothing  # integers: row by row
    rows = [distance(steps="rows", feedback=on, states=8)[1] for on in (True, False)]
    assert 0.1 < rows[0] < rows[1] < distance()[1]


def test_our_way_is_the_quantiser(problem):
    rows, hessian, output = problem
    ours = quantisers.Kronecker(*problem, quantisers.PAPERS["ours"])
    cost = floored(output).diagonal(0, 1, 2)
    quantiser = train_gpt.Quantiser(rows, hessian, cost, 8, train_gpt.Rule(0.0))
    codes, steps, _ = quantiser.round(0.01)
    assert torch.equal(ours.steps(0.01), steps)
    assert torch.equal(ours.round(0.01)[0], codes.float())


def test_costs_count_the_weights_that_are_rounded(subject, hyperparameters):
    """By tools/quantise.py, and all of a model of the script."""
    assert quantisers.counted(subject) == PIECES * 16 + 16 * 32 + 32 * quantisers.VOCAB
    model = made(hyperparameters())
    every = sum(one.numel() for one in model.parameters())
    assert quantisers.counted(subject._replace(model=model)) == every


@pytest.mark.parametrize("form", [train_gpt.Quantiser, quantise.RotatedQuantiser])
def test_what_is_exported_costs_what_it_says(problem, form):
    rows, hessian, output = problem
    rotated, cost = form is quantise.RotatedQuantiser, floored(output).diagonal(0, 1, 2)
    given = floored(output) if rotated else cost
    one = quantisers.Exported(form(rows, hessian, given, 8, train_gpt.Rule(0.0)), 10)
    assert one.count_steps() == (2 if rotated else 2 * 96)
    _, back, found = one.round(0.01)
    errors = rows - back
    expected = float((cost[..., None] * errors * (errors @ hessian)).sum())
    expected = cost_of(problem, back) if rotated else expected
    assert float(found.sum()) * 10 == pytest.approx(expected, rel=1e-3)


@pytest.fixture
def subject():
    def logits(model, rows):
        return model(rows[:, :-1])

    layers = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, quantisers.VOCAB)
    model = nn.Sequential(nn.Embedding(PIECES, 16), *layers)
    batches = [torch.randint(0, PIECES, (4, 17)) for _ in range(4)]
    nats = functools.partial(quantisers.nats_of, logits)
    calibration = quantise.calibrate(model, batches, nats)
    return quantisers.Subject("tiny", model, logits, nats, batches, calibration, batches)


def test_judges_of_the_benchmark(subject):
    before = {name: tensor.clone() for name, tensor in subject.model.named_parameters()}
    assert quantisers.judge(subject, {}) == {"lost": 0, "kl": 0}
    changed = {"1.weight": before["1.weight"] + 0.3 * torch.randn(32, 16)}
    found = quantisers.judge(subject, changed)
    mirrored = {"1.weight": 2 * before["1.weight"] - changed["1.weight"]}
    rows, logs = torch.cat(subject.held_out), []
    for state in (before, changed, mirrored):
        subject.model.load_state_dict(before | state)
        logs.append(subject.logits(subject.model, rows).double().log_softmax(dim=-1))
    plain, there, back = (one.detach() for one in logs)
    kl = F.kl_div(there, plain, reduction="sum", log_target=True) / rows[:, 1:].numel()
    nats = [F.nll_loss(one.flatten(0, 1), rows[:, 1:].flatten()) for one in (plain, there, back)]
    lost = (nats[1] + nats[2]) / 2 - nats[0]
    assert found == pytest.approx({"lost": float(lost), "kl": float(kl)}, rel=1e-3)


def test_the_table_of_libraries(subject, monkeypatch):
    monkeypatch.setattr(quantisers, "BITS", (4,))
    monkeypatch.setattr(quantisers, "FACTORS", (1.0,))
    ours, asked = quantisers.ours, []
    monkeypatch.setattr(
        quantisers, "ours", lambda *call: asked.append(round(call[1])) or ours(*call)
    )
    rows = quantisers.compare(subject)
    assert asked == [row["bytes"] for row in rows]
    for row in rows:
        assert row["our_bytes"] <= row["bytes"]
        assert all(0 < row[key] < 0.01 for key in ("kl", "lost", "our_kl", "our_lost"))


def test_the_table_of_papers(subject, capsys, monkeypatch):
    monkeypatch.setattr(quantisers, "AIMS", (3.0, 5.0))
    rows = quantisers.compare_papers(subject)
    ways = [*quantisers.PAPERS, "as exported"]
    assert [row["way"] for row in rows] == [way for way in ways for _ in range(2)]
    for row in rows:
        assert 0 < row["kl"] < 1 and row["codes"] < row["bits"]
    text = capsys.readouterr().out
    assert re.search(r"as exported: [01] of 1 matrices are rotated", text)
    assert "kl at (2.5, 3.0, 3.5, 4.0) bits per weight" in text
    points = [(5.0, 1 / 16), (2.5, 2.0), (3.0, 1.0)]
    expected = [2, 1, 0.5, 0.25]
    assert quantisers.at_bits(points) == pytest.approx(expected)
    assert quantisers.at_bits(points[::2])[1:] == pytest.approx(expected[1:])
    assert math.isnan(quantisers.at_bits(points[::2])[0])


def test_ways_of_papers_on_a_model_of_the_script(tmp_path, capsys, monkeypatch):
    tokens = torch.arange(1 << 13) * 7 % 50 + 1
    for split in ("train", "val"):
        write_shard(tmp_path / f"fineweb_{split}_000000.bin", tokens.numpy())
    sizes = {"NUM_LAYERS": 11, "MODEL_DIM": 32, "NUM_HEADS": 2}
    monkeypatch.setitem(quantisers.SCRIPT_MODELS, "2135", quantisers.SCRIPT_MODELS["2135"] | sizes)
    monkeypatch.setattr(quantisers, "LENGTH", 64)
    monkeypatch.setattr(quantisers, "BATCHES", 1)
    shards = {"train": tokens.to(torch.uint16), "val": tokens[:2000].to(torch.uint16)}
    subject = quantisers.prepare("2135", 20, shards, str(tmp_path))
    hp = subject.model.hp
    assert (hp.loop_visits, hp.mlp_mult, hp.xsa_last_n, hp.num_layers) == (3, 4, 11, 11)
    (before,) = re.findall(r"([\d.]+) nats per token before", capsys.readouterr().out)
    assert float(before) < 5  # 6.93 untrained

    # One row a batch, so that both sums draw the same weights of the tokens.
    batches = list(subject.batches[0].split(1))
    collected = train_gpt.Calibration(subject.model, 8 * 64)
    for rows in batches:
        collected.add(rows)
    subject = subject._replace(batches=batches, calibration=dict(collected.sums))
    groups, views = quantisers.layers_of(subject)
    weights = dict(subject.model.named_parameters())
    shown, factors = views(weights), quantisers.output_factors(subject, views)
    names = [name for group, _ in groups for name in group]
    assert sorted(names) == sorted(shown) and len(names) == 6 * 11
    count = train_gpt.count_numbers(weights.values())
    for group, quantiser in groups:
        for name, rows in zip(group, quantiser.rows, strict=True):
            assert rows.equal(shown[name])
            kind, layer = name.split()
            cost = subject.calibration[f"{kind}.cost"][int(layer)]
            assert torch.allclose(count * factors[name].diagonal(), cost, rtol=1e-4)

    monkeypatch.setattr(quantisers, "AIMS", (2.5, 5.5))
    monkeypatch.setattr(quantisers, "PAPERS", {"ours": quantisers.PAPERS["ours"]})
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    coarse, fine, *exported = quantisers.compare_papers(subject)
    assert [one["way"] for one in exported] == 2 * ["as exported"]
    assert 8 < coarse["kl"] / fine["kl"] < 500  # 3 bits: a factor of 64
    assert coarse["bits"] < fine["bits"] - 2
    assert all(weight.equal(before[name]) for name, weight in weights.items())


def test_rows_that_the_model_cannot_read_and_code_of_its_own(
    program, folder, tmp_path, monkeypatch
):
    with user_error("--width 129 is above the model's 128 positions"):
        program("--bits 3 --width 129")
    monkeypatch.setattr(quantise, "to_rows", lambda *_: torch.full((20, 32), 256))
    with user_error("the tokenizer has a token 256, the model 256 tokens: give its own"):
        program("--bits 3")
    own = {"model_type": "own", "auto_map": {"AutoConfig": "a.A", "AutoModelForCausalLM": "a.B"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    asked = []
    monkeypatch.setattr("builtins.input", lambda *prompt: asked.append(prompt) or "n")
    with user_error(
        "cannot load .*; give a folder that save_pretrained has written, of a model th"
    ):
        quantise.read_model(str(tmp_path))
    assert not asked


def test_the_loss_is_that_of_transformers():
    model, rows = llama(**SMALL).eval(), torch.randint(256, (2, 9))
    expected = model(rows, labels=rows).loss
    torch.testing.assert_close(quantise.nats_of(model, rows).mean(), expected)
    torch.testing.assert_close(quantise.mean_loss(model, rows), expected.item())


@pytest.mark.parametrize("tied", [True, False])
def test_the_table_of_a_real_model(tied, monkeypatch):
    """With its tables rounded and without; a head that is no embedding is one of them."""
    knobs = SMALL | dict(tie_word_embeddings=tied, initializer_range=0.2)
    model, twin = llama(**knobs).eval(), llama(**knobs).eval()
    batches = list(torch.randint(256, (4, 4, 33)))
    calibration = quantise.calibrate(model, batches, quantise.nats_of)
    _, logits = quantisers.MODELS["llama"]
    subject = quantisers.Subject("", model, logits, None, [], calibration, batches)
    judge, parts = real_model.judge, []
    monkeypatch.setattr(real_model, "judge", lambda *call: parts.extend(call[-1]) or judge(*call))
    rows = real_model.compare(model, calibration, batches, ["ours", "GPTQ", "nearest"], [4.0])
    assert [row["what"] for row in rows] == ["all", "no tables"] * 3
    names, before = (
        quantise.matrices_of(model).keys(),
        quantise.mean_loss(model, torch.cat(batches)),
    )
    tables = {"model.embed_tokens.weight", "lm_head.weight"}
    for row, rounded in zip(rows, parts, strict=True):
        assert rounded.keys() == names - (tables if row["what"] != "all" else set())
        assert 3 < row["bits"] < 6  # of such a small file much is no code
        twin.load_state_dict(model.state_dict())
        for name, tensor in rounded.items():
            twin.get_parameter(name).data.copy_(tensor)
        after = quantise.mean_loss(twin, torch.cat(batches))
        assert row["kl"] == pytest.approx(quantisers.judge(subject, rounded)["kl"], rel=0.01)
        assert row["lost"] == pytest.approx(after - before, abs=1e-5)
    assert rows[1]["expected"] < rows[0]["expected"] and rows[1]["kl"] < rows[0]["kl"]
    assert rows[4]["bits"] == rows[5]["bits"] == 4.5


def test_a_model_of_a_gguf_file_is_a_fresh_one(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = llama(**SMALL)
    read.config.quantization_config = {"quant_method": "gguf"}
    report = {"missing_keys": set(), "mismatched_keys": set()}
    for kind, found in ((AutoModelForCausalLM, (read, report)), (AutoTokenizer, None)):
        monkeypatch.setattr(kind, "from_pretrained", lambda *_, found=found, **__: found)
    model, _ = real_model.read_gguf(tmp_path / "a.gguf")
    model.save_pretrained(tmp_path)
    assert not hasattr(model.config, "quantization_config") and not model.training
    torch.testing.assert_close(model.state_dict(), read.state_dict())
    for kind in report:  # transformers only warns, and makes random weights
        report[kind] = {("model.norm.weight", 3, 4)}
        with user_error(
            "cannot load .*a.gguf: it lacks 1 tensors of the model, such as .*model.norm"
        ):
            real_model.read_gguf(tmp_path / "a.gguf")
        report[kind] = set()
    monkeypatch.undo()
    with user_error("cannot load .*a.gguf: .*; give a whole GGUF file of a causal model that"):
        real_model.read_gguf(tmp_path / "a.gguf")


@pytest.mark.parametrize("way", real_model.WAYS)
def test_a_way_that_reads_no_calibration_has_none(way, tmp_path, monkeypatch, capsys):
    model = llama(**SMALL).eval()
    for split in ("train", "val"):
        (tmp_path / f"{split}.txt").write_text("text " * 400)
    monkeypatch.setattr(
        real_model,
        "read_gguf",
        lambda _: (model, lambda text, **_: {"input_ids": list(text.encode())}),
    )
    monkeypatch.setattr(real_model, "ROWS", {"train": 2, "val": 2})
    made, calibrate = [], quantise.kept_calibration
    monkeypatch.setattr(
        quantise, "kept_calibration", lambda *call: made.append(1) or calibrate(*call)
    )
    monkeypatch.setattr(real_model, "compare", lambda *call: [bool(call[1])])
    monkeypatch.setattr(sys, "argv", ["real_model.py", str(tmp_path), "a.gguf", "--ways", way])
    real_model.main()
    assert len(made) == (way in ("ours", "GPTQ"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_models_of_transformers_lose_what_was_expected(name, tmp_path):
    """After 1,000 steps, at four sizes. `lost` is without what is linear in the errors."""
    data = tmp_path / "data"
    run([ROOT / "data" / "demo_corpus.py", data], {}, tmp_path)
    shards = {split: train_gpt.shard_paths(data, split)[0] for split in ("train", "val")}
    shards = {split: torch.from_numpy(train_gpt.read_shard(path)) for split, path in shards.items()}
    subject = quantisers.prepare(name, 1000, shards, str(data))
    for bits in (4, 3.5, 3, 2.5):
        size = int(bits * train_gpt.count_numbers(subject.model.parameters()) / 8)
        file, predicted = quantise.quantise(subject.model, subject.calibration, size)
        tensors, expected = (
            quantise.read(subject.model, *quantise.parse(file)),
            sum(predicted.values()),
        )
        found = quantisers.judge(
            subject, {n: tensors[n] for n, _ in subject.model.named_parameters()}
        )
        print(f"{bits} bits: expected {expected:.5f} found {found['lost']:.5f}")
        # Within 20 % when measured (docs/quantiser.md); another CPU trains other weights.
        assert expected == pytest.approx(found["lost"], rel=0.35), bits

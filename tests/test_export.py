"""The artifact is read exactly as it was written, on any machine, and a damaged one is refused."""

import base64
import collections
import contextlib
import errno
import io
import json
import math
import re
import resource
import struct
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import zstandard

import train_gpt
from conftest import (
    ROOT,
    TINY,
    exported,
    fitted,
    made,
    noise,
    quantised,
    run,
    script_after,
    user_error,
    variables,
    weights_of,
)
from inspect_artifact import order0_entropy
from train_gpt import GPT, Hyperparameters, knobs_with


@pytest.fixture(scope="module")
def model(hyperparameters) -> GPT:
    return noise(made(hyperparameters(), seed=2), seed=3, size=0.05)


@pytest.fixture(scope="module")
def packed(model) -> bytes:
    """Its artifact."""
    return exported(weights_of(model), model.hp)


# ---- Quantisation --------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1e-6, 0.05, 30.0])
def test_codes_of_late_qat_are_within_half_a_step_at_any_size(size):
    """Faults B13, B14: #399's floor under the steps leaves 7 levels at a deviation of 0.05."""
    rows = size * torch.randn(5, 40, 300, generator=torch.Generator().manual_seed(0))
    codes, steps = quantised(rows)
    assert torch.equal(codes, codes.round())
    assert ((codes * steps - rows).abs() <= steps / 2 * 1.0001).all()
    assert torch.equal(steps, steps.bfloat16().float())
    wanted = rows.square().mean(dim=-1, keepdim=True).sqrt() / 6
    # The nearest step of four significant bits
    assert ((steps / wanted - 1).abs() <= 1 / 16 + 1e-6).all()
    assert train_gpt.to_codes(rows, steps, 9).abs().max() == 9


def test_rows_of_zeros_are_zeros_and_constant_rows_are_kept():
    """The deviation about the mean would be 0 for a constant row."""
    rows = torch.zeros(2, 3, 8)
    rows[1, 1], rows[1, 2] = 0.5, torch.linspace(0.4999, 0.5001, 8)
    codes, steps = quantised(rows)
    assert not codes[0].any() and (steps[0] > 0).all() and (steps[0] < 1e-9).all()
    assert ((codes * steps - rows).abs() <= steps / 2).all() and steps[1, 1] < 0.1


def correlated(width, count, seed) -> torch.Tensor:
    """Activations (count, width): correlated, of different sizes, one always zero."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=draw) @ torch.randn(width, width, generator=draw)
    x *= torch.logspace(-1, 1, width)[torch.randperm(width, generator=draw)]
    x[:, width // 3] = 0
    return x


@pytest.mark.parametrize("block", [4, 7, 128])
def test_gptq_is_the_greedy_solution(block):
    """In float64: round a column, then let all open ones compensate its error optimally."""
    weights = torch.randn(2, 5, 20, generator=torch.Generator().manual_seed(1))
    hessian = torch.stack([(x := correlated(20, 60, seed)).T @ x for seed in (2, 3)])
    steps = weights.abs().amax(dim=-1, keepdim=True) / 10
    damped = train_gpt.damped(hessian, 0.01)
    encode = lambda column: train_gpt.to_codes(column, steps, 8)  # noqa: E731
    found = train_gpt.gptq(weights, *train_gpt.inverse_factor(damped), steps, encode, block=block)
    assert found.abs().max() == 8
    for layer in range(2):
        h, w = hessian[layer].double(), weights[layer].double()
        h = h / h.diagonal().mean() + 0.01 * torch.eye(20)
        torch.testing.assert_close(damped[layer], (h / 1.01).float())
        todo = hessian[layer].diagonal().argsort(descending=True).tolist()
        while todo:
            column, *rest = todo
            code = (w[:, [column]] / steps[layer]).round().clamp(-8, 8)
            assert torch.equal(found[layer, :, [column]].double(), code)
            error = w[:, [column]] - code * steps[layer]
            # The least (d, -error) H (d, -error)^T has d = error H[column, rest] H[rest, rest]^-1
            w[:, rest] += error @ h[column, rest][None] @ torch.linalg.inv(h[rest][:, rest])
            todo = rest


def test_gptq_without_activations_is_rounding():
    weights = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(1))
    steps = weights.abs().amax(dim=-1, keepdim=True) / 9
    for hessian in (torch.zeros(2, 12, 12), torch.eye(12).expand(2, 12, 12)):
        factor = train_gpt.inverse_factor(train_gpt.damped(hessian, 0.01))
        codes = train_gpt.gptq(weights, *factor, steps, lambda column: (column / steps).round())
        assert torch.equal(codes, (weights / steps).round())


# The trellis. Of 8 states, by hand from the parity checks 13 and 4 (octal) in observer form: the
# state behind an even and an odd code.
NEXT = [(0, 2), (5, 7), (1, 3), (4, 6), (2, 0), (7, 5), (3, 1), (6, 4)]
GAINS = [0.916, 0.973, 1.005, 1.049, 1.077]  # of 4 to 256 states


def walked(codes: torch.Tensor, segment=64) -> torch.Tensor:
    """The integers (N, out, n) of codes by 8 states, by hand: each segment begins in state 0."""
    integers, table = [], torch.tensor(NEXT)
    for row, code in enumerate(codes.long().unbind(1)):
        if row % segment == 0:
            state = torch.zeros_like(code)
        integers.append(2 * code + state % 2)
        state = table[state, code % 2]
    return torch.stack(integers, dim=1)


@pytest.mark.parametrize("states, gain", list(zip(train_gpt.PARITY, GAINS, strict=True)))
def test_trellis_decoder_repeats_the_encoder(states, gain):
    """The gain is in dB against rounding to every second integer, whose mean squared error is 1/3. A
    path that does not begin in state 0 would have 0.97, 1.07, 1.12, 1.23 and 1.31."""
    generator = torch.Generator().manual_seed(states)
    targets = 9 * torch.randn(2, 130, 25, generator=generator)
    integers = train_gpt.viterbi(targets, torch.rand(targets.shape, generator=generator), states)
    assert integers.shape == targets.shape and (integers - targets).abs().max() < 4
    codes = (integers / 2).floor()
    bits = train_gpt.trellis_bits(codes.to(torch.int16), states)
    assert torch.equal(2 * codes + bits, integers)
    assert states != 8 or torch.equal(walked(codes).float(), integers)
    targets = 9 * torch.randn(1, 64, 1500, generator=torch.Generator().manual_seed(1))
    errors = train_gpt.viterbi(targets, torch.ones(1, 64, 1500), states) - targets
    assert 10 * math.log10(1 / 3 / errors.square().mean()) == pytest.approx(gain, abs=0.006)


def test_short_columns_are_not_filled_up_to_whole_segments():
    """A forged file could have millions of columns of eight rows."""
    for rows, expected in (8, (8, 1)), (64, (64, 1)), (65, (64, 2)):
        assert train_gpt.to_segments(torch.zeros(9, rows, 5)).shape == (*expected, 9, 5)


def holds(joint: torch.Tensor, matrix: torch.Tensor) -> bool:
    """Whether these are consecutive rows of a joint matrix."""
    starts = range(len(joint) - len(matrix) + 1)
    return any(torch.equal(joint[i : i + len(matrix)], matrix) for i in starts)


def test_hessians_are_of_what_each_matrix_reads(monkeypatch, run_of):
    """Calibration sees the activations that each matrix multiplies."""
    run = run_of()
    noise(run.model, seed=3, size=0.05)
    real, products = train_gpt.F.linear, []
    monkeypatch.setattr(train_gpt.F, "linear", lambda x, w: products.append((x, w)) or real(x, w))
    sums = run.calibrate(range(1))
    with torch.no_grad():
        matrices = run.model.matrices()
    hessians = {name: total for name, total in sums.items() if "." not in name}
    kinds = [kind for kind in (*train_gpt.MATRICES, *train_gpt.TABLES) if kind.hessian]
    assert {kind.name for kind in kinds} == set(matrices)
    assert {kind.hessian for kind in kinds} == set(hessians)
    for kind in kinds:
        assert len(hessians[kind.hessian]) == len(matrices[kind.name])
        for layer, matrix in enumerate(matrices[kind.name]):
            inputs = [x.detach() for x, joint in products if holds(joint, matrix)]
            x = torch.cat(inputs).flatten(0, 1)
            x = train_gpt.rms_norm(x) if kind.name == "up" else x  # normalised after the product
            torch.testing.assert_close(hessians[kind.hessian][layer], x.T @ x, rtol=1e-4, atol=1e-4)


def test_squares_are_of_the_gradients_of_each_token(run_of, monkeypatch):
    """Half their mean, against a backward per token, whose weight alone is 1."""
    run = run_of(TRAIN_BATCH_TOKENS=32)
    noise(run.model, seed=3, size=0.05)
    rows = run.loader.batch(0)
    count = rows.size(0) * (rows.size(1) - 1)
    share = sum(p.numel() for p in run.model.parameters()) / (2 * count)
    calibration = train_gpt.Calibration(run.model, count)
    tokens = iter(torch.eye(count).reshape(count, rows.size(0), -1))

    def one_token(shape, **_):
        assert shape == (1, 32), "a weight of its own for each token"
        return next(tokens)

    monkeypatch.setattr(train_gpt.torch, "randn", one_token)
    expected = collections.defaultdict(float)
    for place in range(count):
        calibration.add(rows)
        nats = run.model(rows[:, :-1].long(), rows[:, 1:].long(), "none").flatten()[place]
        names, parameters = zip(*run.model.named_parameters(), strict=True)
        grads = torch.autograd.grad(nats, parameters, materialize_grads=True)
        for kind, name, grad in train_gpt.artifact_tensors(dict(zip(names, grads, strict=True))):
            if kind:
                expected[f"{name}.cost"] += grad.square().mean(dim=-1) * share
    for name, squares in expected.items():
        torch.testing.assert_close(calibration.sums[name], squares)


def quantiser(rows, cost=None, hessian=None, states=8, kind=train_gpt.MATRICES[0]):
    """Of matrices of this kind."""
    hessian = torch.eye(rows.size(2)).expand(len(rows), -1, -1) if hessian is None else hessian
    rule = train_gpt.RULES["sensitivity"][not kind.bank]
    return train_gpt.Quantiser(rows, hessian, cost, states, rule)


def test_a_row_that_calibration_has_hardly_seen_has_5_percent_of_the_mean_cost():
    squares = torch.tensor([[4.0, 1.0, 0.0]])
    torch.testing.assert_close(train_gpt.cost_of_rows(squares), squares + 0.05 * 5 / 3)
    # A matrix that no token has used, such as q while "out" is still zero, can be rounded too.
    rows = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))
    codes, steps, _ = quantiser(rows, train_gpt.cost_of_rows(0 * squares)).round(1e-4)
    deviation = rows.square().mean(2, keepdim=True).sqrt()
    assert ((steps / deviation / 2 - 1).abs() <= 1 / 16).all() and codes.abs().max() < 3


@pytest.mark.parametrize("states, divisor", [(0, 12), (8, 15)])
def test_steps_follow_from_the_cost_of_a_row(states, divisor):
    """By hand: a row that costs four times as much has half the step, whatever its weights. GPTQ
    leaves nothing to the cost of an input that another one determines."""
    rows = torch.tensor([[[0.5, -0.25], [1.0, 0.0], [0.0, 0.0]]])
    cost = torch.tensor([[4.0, 1.0, 1.0]])
    steps = quantiser(rows, cost, states=states).steps
    plain = steps(0.04 / divisor)
    wanted = (0.04 / cost).sqrt()  # of which four bits are left
    assert ((plain[0, :2, 0] / wanted[0, :2] - 1).abs() < 1 / 16).all() and plain[0, 2] < 1e-9
    # In a matrix without free inputs steps are wider, and only there.
    pair = torch.stack((torch.ones(2, 2), torch.eye(2)))
    both = quantiser(rows.repeat(2, 1, 1), cost.repeat(2, 1), pair, states).steps(0.04 / divisor)
    assert (both[0, :2] > 1.2 * plain[0, :2]).all() and torch.equal(both[1], plain[0])
    # A step is at most twice the deviation of the row, and finer ones have no codes.
    deviation = torch.tensor([0.395, 0.707, 0])
    for loss, expected in (1e9, 2 * deviation), (1e-12, torch.tensor([0.5, 1, 0]) / 1875):
        assert ((steps(loss)[0, :, 0] - expected).abs() <= expected / 16 + 1e-9).all()
    # Without calibration they follow the deviation.
    plain = quantiser(rows, states=states).steps(0.04 / divisor)[0, :2, 0]
    assert ((plain / deviation[:2] / 0.2 - 1).abs() < 1 / 16).all()


def test_the_finest_step_has_a_code_for_the_largest_weight():
    """Also a step that is rounded down."""
    rows = torch.linspace(0.5, 1, 200)[None, :, None]
    one = quantiser(rows)
    assert 1950 < (rows / one.steps(1e-12)).max() <= 2000
    codes, steps, _ = one.round(1e-12)
    assert ((walked(codes) * steps / 2 - rows).abs() <= 2 * steps).all()


def test_errors_weigh_what_they_cost():
    """A row whose step is limited has another weight in the trellis than the rows beside it."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 64, 400, generator=generator)
    cost = torch.ones(1, 64)
    cost[0, ::2] = 0.025  # their steps are at most twice the deviation
    one = quantiser(rows, cost)
    (codes,), (steps,), (expected,) = one.round(0.02)
    errors = (rows[0] - walked(codes[None])[0] * steps / 2).square()
    cost = one.cost[0] * errors
    torch.testing.assert_close(expected, cost.sum())
    plain = train_gpt.viterbi(rows / steps * 2, torch.ones(1, 64, 400), 8)[0]
    assert cost.sum() < 0.9 * (one.cost[0] * (rows[0] - plain * steps / 2).square()).sum()
    # Of random errors of the dear rows, a fifteenth of the step's square is left.
    assert errors[1::2].mean() < 1.05 * steps[1::2].square().mean() / 15


def test_rounding_costs_what_was_expected(run_of):
    """The loss of a trained model's artifact, without the part that is linear in the errors."""
    run = run_of(TRAIN_BATCH_TOKENS=1024)
    for step in range(60):
        run.train_step(step, train_gpt.StepSettings(1 - step / 60, 0.9, False, 32))
    calibration = run.calibrate(range(60, 68))
    weights = run.optimizer.weights()
    batches = [run.loader.batch(step) for step in range(100, 110)]

    def score(tensors) -> float:
        run.model.load_state_dict(tensors)
        with torch.no_grad():
            losses = [run.model(rows[:, :-1].long(), rows[:, 1:].long()) for rows in batches]
        return float(torch.stack(losses).double().mean())

    for loss in (0.004, 0.016):
        blob = exported(weights, run.hp, calibration, loss=loss)
        expected = sum(train_gpt.open_artifact(blob)[0]["expected_loss"].values())
        assert expected == pytest.approx(loss, rel=0.3)
        rounded = train_gpt.load_artifact(blob)
        mirrored = {name: 2 * weights[name] - rounded[name] for name in weights}
        found = (score(rounded) + score(mirrored)) / 2 - score(weights)
        assert expected / 2 < found < 2 * expected, (expected, found)


# ---- Coders --------------------------------------------------------------------------------------
DRAW = np.random.default_rng(0)
ROWS, COLUMNS = (np.exp(DRAW.normal(0, 1, shape)) for shape in ((2, 60, 1), (2, 1, 90)))
GAUSSIAN = DRAW.normal(0, 5, (2, 60, 90))
HOLES = GAUSSIAN * (DRAW.random((2, 60, 1)) > 0.3) * (DRAW.random((2, 1, 90)) > 0.3)
CODES = {  # (L, out, in) of many kinds
    "gaussian": GAUSSIAN,
    "products": GAUSSIAN * ROWS * COLUMNS,
    "laplace": DRAW.laplace(0, 3, (3, 7, 11)),
    "empty rows and columns": HOLES,
    "uniform": DRAW.integers(-127, 128, (1, 50, 50)),
    "12 bits": DRAW.normal(0, 600, (1, 40, 60)),
    "12 bits, uniform": DRAW.integers(-2047, 2048, (1, 30, 99)),
    "zeros": np.zeros((2, 3, 4)),
    "constant": np.full((1, 8, 8), -31),
    "one": np.full((1, 1, 1), 5),
    "two values": DRAW.integers(0, 2, (2, 9, 5)) * 254 - 127,
    "one column": DRAW.normal(0, 9, (1, 40, 1)),
    "one row": DRAW.normal(0, 9, (1, 1, 40)),
    "rare": (DRAW.random((1, 300, 300)) < 1e-4) * 100,
    "once": (np.arange(90000) == 7).reshape(1, 300, 300) * 3,
    "one row huge": np.concatenate((np.full((1, 1, 64), 127), np.zeros((1, 63, 64))), axis=1),
}
CODES = {name: np.rint(x).clip(-2047, 2047).astype(np.int16) for name, x in CODES.items()}


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("coder", train_gpt.CODERS)
def test_coders_are_exact(coder, kind):
    codes = CODES[kind]
    encode, decode = train_gpt.CODERS[coder]
    blob = encode(codes)
    found = decode(blob, codes.shape)
    assert found.dtype == np.int16 and np.array_equal(found, codes)
    assert encode(np.asfortranarray(codes)) == blob, "the order in memory does not matter"


def test_entropy_coder_comes_close_to_the_entropy_and_below_it():
    """0.7 % above that of codes without structure; below it if sizes depend on row or column."""
    draw, ratios = np.random.default_rng(1), []
    plain = draw.normal(0, 6, (4, 256, 512))
    columns, rows = (np.exp(draw.normal(0, 0.5, shape)) for shape in ((4, 1, 512), (4, 256, 1)))
    for factor in (1, columns, rows, rows * columns):
        codes = np.clip(np.rint(plain * factor), -127, 127).astype(np.int16)
        ratios.append(8 * len(train_gpt.encode_ans(codes)) / order0_entropy(codes))
    assert 1.0 < ratios[0] < 1.007 and max(ratios[1:3]) < 0.97 and ratios[3] < 0.95, ratios


# fmt: off
GOLDEN = base64.b85decode(
    "TLAz7-~>4VQvd*ULAPFmCfVYC9im6Rjuv9?gv)Ca-+k<gvz?c`yE3V;49IZDbY82{UdhB@y!r7!0?lO4nx)a!(l>l|7;xou5OuaNT+JGd1-BH&<9*P"
    "y1Q(qKb{7C>;Iyg*%9G`3%`SQ+UMrHl<UrK=2#&0=hMajVc@vqSy0Eb0Pj2SY6SKgwGb@caxTdUQIfSG=VBjtFyc(*jd(d&nP($}T-)^U`EtWy)8tE"
    "n+Kd$9)&ucllYF+S+H_q#SvzH83tm4?;X-zW4KpXTEd1b}~w8U|#p*^?Ng8;=(>$|XBW<D?Q@hSD3;19o^NUzrP1hH|&OyNXc{*BKp{;tZ%1?n9_fU"
    "+0uqe^S~_5QIBANxMhFXu74%$mZ~nsr6T+EDeI?!ZQ9QPb>z0KGKR_Z~b71PFaHLClj~Xiy)p%Z-h@_f*%<$EbFD<#gV~NdN#mg!>A(0F-TV>qXi4F"
    "SS#RNNy5|8WZ>A6vCCM73K}$*+J+X$fT5kFd37@xi>{5WWTww;6yp=N)c5Gz$J<DA{Cplg7myLMbx{x@E}a?qy0sh#dcd&7_KJ*v4%D0&<DpY{?c8D"
    "@=Qj@C@pih51_#Wl$01dBmtU8?Yb=?cN_$2{pm@YoODt344}<=QS$02eTvKh_2F{tFKo<6>FdR)3~C&(s8}olujl|?@2luew0vvA){|z;aHbYZ8~GW"
    "yX{qY#Q`s(eV5ipyW5s>URBH8Z&-7IjSUN?o*|B_15Ayp#Jh&Y8diw$"
)
# fmt: on


def test_stream_written_elsewhere_is_read_alike():
    """By constriction 0.5.0 on x86-64. Later versions and other machines must read the same."""
    number = np.arange(2 * 12 * 20).reshape(2, 12, 20)
    codes = ((number * number // 7) % 23 - 11) // (1 + (number % 20 > 12))
    codes *= 1 + (number // 20 % 3 > 1)  # larger in every third row
    assert np.array_equal(train_gpt.decode_ans(GOLDEN, codes.shape), codes)


@pytest.mark.parametrize("coder", train_gpt.CODERS)
def test_streams_of_another_length_are_refused(coder):
    """A few bytes could unpack to gigabytes."""
    codes = CODES["products"]
    encode, decode = train_gpt.CODERS[coder]
    blob = encode(codes)
    for wrong in (blob[:-4], blob[: len(blob) // 2], b"", blob + bytes(4)):
        with pytest.raises((ValueError, struct.error, zstandard.ZstdError)):
            decode(wrong, codes.shape)
    limit = (
        "." if coder == "ans" else "(packed part .*exceeds|states no size of at most) 1000 bytes"
    )
    for shape, sentence in ((2, 60, 91), "."), ((1, 5, 100), limit):
        with pytest.raises((ValueError, struct.error), match=sentence):
            decode(blob, shape)


# fmt: off
NO_SIZE = "a frame states no size of at most 21600 bytes"
FRAMES = {  # of 21,600 bytes; byte 4 of a frame says which fields follow: here 2 bytes of size less 256
    "no size": (NO_SIZE, lambda frame, raw: zstandard.ZstdCompressor(write_content_size=False).compress(raw)),
    "more": (NO_SIZE, lambda frame, raw: train_gpt.zstd_pack(raw + b"x")),
    "states more": (NO_SIZE, lambda frame, raw: frame[:5] + b"\xff\xff" + frame[7:]),
    "states petabytes": (NO_SIZE, lambda frame, raw: frame[:4] + b"\xe4" + struct.pack("<Q", 1 << 50) + frame[7:]),
    "states less": ("ZstdError: decompression error", lambda frame, raw: frame[:5] + bytes(2) + frame[7:]),
    "a window of 2 GiB": (NO_SIZE, lambda frame, raw: frame[:4] + b"\x44\xa8" + frame[5:]),
    "checksum": ("doesn't match checksum", lambda frame, raw: flipped(frame, -1)),
    "a byte more": ("1 bytes of unused data", lambda frame, raw: frame + b"x"),
}
# fmt: on


@pytest.mark.parametrize("kind", FRAMES)
def test_a_forged_frame_is_refused_before_memory_is_filled(kind):
    message, forge = FRAMES[kind]
    raw = train_gpt.to_planes(CODES["products"])
    frame = zstandard.ZstdCompressor(level=22, write_checksum=True).compress(raw)
    assert train_gpt.zstd_pack(raw) == frame and train_gpt.zstd_unpack(frame, 21600) == raw
    assert len(raw) == 21600 and frame[4] == 0x64
    smaller = zstandard.ZstdCompressionParameters(window_log=10)  # as above 128 MiB
    smaller = zstandard.ZstdCompressor(compression_params=smaller).compress(raw)
    assert train_gpt.zstd_unpack(smaller, 21600) == raw
    forged = forge(frame, raw)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with user_error(f"a.xz cannot be used: .*{message}"), train_gpt.reading_artifact("a.xz"):
        train_gpt.zstd_unpack(forged, 21600)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 << 10  # KiB


# ---- The file ------------------------------------------------------------------------------------
FORMS = [{"COMPRESSOR": name} for name in train_gpt.CODERS]
FORMS += [{"ROUNDING": "399"}, {"TRELLIS_STATES": 0}, {"MUDD": 1}]
FORMS += [variables("399") | TINY | {"COMPRESSOR": "zstd"}]  # #399's first revision


@pytest.mark.parametrize("knobs, wider", [*((form, 1.0) for form in FORMS), ({}, 2.0)])
def test_artifact_holds_the_quantised_model(knobs, wider, hyperparameters):
    """By any coder, with #399's steps, without trellis, and with wider steps."""
    hp = hyperparameters(**knobs | {"NUM_LAYERS": 2})
    weights, loss = weights_of(noise(made(hp))), wider**2 * train_gpt.FINEST
    twin = train_gpt.load_artifact(exported(weights, hp, loss=loss))
    views = zip(train_gpt.artifact_tensors(weights), train_gpt.artifact_tensors(twin), strict=True)
    for (kind, name, original), (_, _, found) in views:
        if kind is None:
            assert torch.equal(found, original.half().float()), name
        elif knobs.get("ROUNDING"):
            rule = train_gpt.RULES["399"][not kind.bank]
            codes, steps = quantised(original, rule)
            assert torch.equal(found, codes * steps), name
            assert rule.limit == (31 if kind.bank else 127), "int6, and int8 for the tables"
        else:
            plain = "TRELLIS_STATES" in knobs
            codes, steps, _ = quantiser(original, states=0 if plain else 8, kind=kind).round(loss)
            assert torch.equal(found, codes * steps if plain else walked(codes) * steps / 2), name
            assert (found - original).square().mean() < 1.2 * steps.square().mean() / 12, name


def test_artifact_holds_the_knobs_of_its_model_and_windows(model, packed):
    """A score must be repeatable from the file alone. A knob younger than it has its default."""
    header, made_with, streams, _ = train_gpt.open_artifact(packed)
    names = knobs_with("model", "training", "score")
    assert header["knobs"].keys() > {*map(str.upper, knobs_with("model")), "EVAL_STRIDE"}
    assert [getattr(made_with, n) for n in names] == [getattr(model.hp, n) for n in names]
    twin = GPT(made_with, None, torch.float32)
    assert [p.shape for p in twin.parameters()] == [p.shape for p in model.parameters()]
    # Matrices of any size are codes; #399 exports those of up to 65,536 elements in half precision
    assert " ".join(streams) == "q out k v up down tok_emb bigram_emb bigram_proj"
    older = rewritten(packed, lambda header: header["knobs"].pop("MLP_GATE"))
    assert train_gpt.open_artifact(older)[1] == made_with


def test_a_missing_coder_is_refused_before_the_run(
    packed, env, hyperparameters, tmp_path, monkeypatch
):
    monkeypatch.setattr(train_gpt.Runtime, "start", lambda hp: pytest.fail("the run has begun"))
    path = tmp_path / "a.xz"
    monkeypatch.setitem(sys.modules, "constriction", None)
    path.write_bytes(packed)
    advice = "run `pip install constriction`; COMPRESSOR=lzma or zstd trains without it"
    with user_error(f"^COMPRESSOR=ans: ModuleNotFoundError: .*; {advice}$"):
        train_gpt.train_and_score(hyperparameters())
    with user_error(f"a.xz cannot be used: COMPRESSOR=ans: .*; {advice}"):
        train_gpt.evaluate_only(env(), str(path))


# fmt: off
DAMAGES = {
    "truncated": ("BadZipFile", lambda blob: blob[: len(blob) // 2]),
    "one byte": ("its checksum is wrong", lambda blob: flipped(blob, len(blob) // 2)),
    "foreign": ("it is not an artifact", lambda blob: b"hello"),
    "version 10": ("before version 11: use the script that", lambda blob: b"PGOLF\r\n\x1a\n\0"),
    "another archive": ("tools/import_checkpoint.py for a checkpoint of torch", lambda blob: saved(weights=np.ones(3))),
    "compressed": ("larger than the file", lambda blob: saved(np.savez_compressed, **arrays_of(blob))),
    "compressed codes": ("larger than the file", lambda blob: rezipped(blob, bytes(1 << 20), zipfile.ZIP_DEFLATED)),
    "objects": ("Object arrays cannot be loaded", lambda blob: replaced(blob, codes=np.array([{}]))),
    "a huge array": ("(MemoryError|EOF)", lambda blob: claiming(blob, 1 << 40)),
    "a longer array": ("EOF: reading array data", lambda blob: claiming(blob, 1 << 34)),
    "a huge header": ("its header has 1048577 bytes", lambda blob: replaced(blob, header=np.zeros(1048577, np.uint8))),
    "a huge directory": ("it is not an artifact", lambda blob: blob + b"PK\1\2" * 1000),
}
VALUES = {
    "other numbers": ("", lambda blob: replaced(blob, codes=np.ones(3))),
    "no values": ("", lambda blob: replaced(blob, values=np.zeros(9, np.uint8))),
    "fewer values": ("", lambda blob: replaced(blob, values=zeros(8))),
    "more values": ("a packed part is cut or exceeds ", lambda blob: replaced(blob, values=zeros(1 << 24))),
}
# fmt: on


def zeros(count: int) -> np.ndarray:
    return np.frombuffer(train_gpt.lzma_pack(bytes(count)), np.uint8)


def saved(save=np.savez, **arrays) -> bytes:
    file = io.BytesIO()
    save(file, **arrays)
    return file.getvalue()


def arrays_of(blob) -> dict[str, np.ndarray]:
    """As NumPy alone reads them."""
    return dict(np.load(io.BytesIO(blob), allow_pickle=False))


def replaced(blob, **arrays) -> bytes:
    return saved(**arrays_of(blob) | arrays)


def flipped(blob, place) -> bytes:
    changed = bytearray(blob)
    changed[place] ^= 1
    return bytes(changed)


def rezipped(blob, content=None, method=zipfile.ZIP_STORED, member="codes.npy") -> bytes:
    """The file with other content of an array, or with it compressed to perhaps a thousandth."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(blob)) as archive, zipfile.ZipFile(file, "w") as forged:
        for name in archive.namelist():
            own = name == member
            raw = content if own and content else archive.read(name)
            forged.writestr(name, raw, method if own else zipfile.ZIP_STORED)
    return file.getvalue()


def claiming(blob, size) -> bytes:
    """The artifact with an array whose own header claims this size."""
    array = io.BytesIO()
    facts = {"descr": "|u1", "fortran_order": False, "shape": (size,)}
    np.lib.format.write_array_header_1_0(array, facts)
    return rezipped(blob, array.getvalue())


def test_numpy_alone_opens_an_artifact(model, packed):
    """Three arrays of bytes, stored as they are, and the same file each time."""
    arrays = arrays_of(packed)
    assert list(arrays) == ["header", "codes", "values"]
    assert all(array.dtype == np.uint8 and array.ndim == 1 for array in arrays.values())
    assert json.loads(arrays["header"].tobytes())["version"] == train_gpt.ARTIFACT_VERSION
    assert len(packed) - sum(array.nbytes for array in arrays.values()) < 800
    assert exported(weights_of(model), model.hp) == packed


@pytest.mark.parametrize("coder", ["lzma", "zstd"])
def test_a_run_needs_constriction_only_for_ans(coder, env, tmp_path):
    """Training, export and EVAL_ONLY where its import fails."""
    script = script_after("import sys; sys.modules['constriction'] = None")
    run(script, env(COMPRESSOR=coder, RUN_ID="a", ITERATIONS=2), tmp_path)
    run(script, env(EVAL_ONLY="logs/a.npz", RUN_ID="b"), tmp_path)
    made, read = (
        re.findall("final_int6.*val_bpb:[0-9.]+", (tmp_path / f"logs/{name}.txt").read_text())
        for name in "ab"
    )
    assert made == read and len(read) == 2


def rewritten(blob, change) -> bytes:
    """The artifact with a changed header."""
    header = json.loads(arrays_of(blob)["header"].tobytes())
    change(header)
    return replaced(blob, header=np.frombuffer(json.dumps(header).encode(), np.uint8))


def knob(name, value):
    return lambda header: header["knobs"].update({name: value})


# fmt: off
CHANGES = {
    "a tensor less": ("", lambda header: header["code_bytes"].pop()),
    "one byte less": ("", lambda header: header["code_bytes"].append(header["code_bytes"].pop() - 1)),
    "no knobs": ("KeyError: 'knobs'", lambda header: header.pop("knobs")),
    "another version": ("version 99, not [0-9]+: score it with the script", lambda header: header.update(version=99)),
    "an unknown knob": ("this script has no knob HEAD_TEMP", knob("HEAD_TEMP", "2")),
    "a knob of the run": ("this script has no knob RUN_ID of a model or score", knob("RUN_ID", "a")),
    "states without a trellis": ("TRELLIS_STATES=5 is not one of", knob("TRELLIS_STATES", "5")),
    "no coder": ("KeyError: 'pickle'", lambda header: header.update(coder="pickle")),
    "a huge model": ("", knob("MODEL_DIM", str(1 << 50))),
    "a large model": ("the limit of 67108864 of an artifact", knob("MODEL_DIM", str(1 << 15))),
    "a model of many layers": ("NUM_LAYERS=.* is not at most", knob("NUM_LAYERS", str(10**9))),
    "a huge window": ("EVAL_SEQ_LEN=.* is not at most", knob("EVAL_SEQ_LEN", str(10**12))),
}
# fmt: on


@pytest.mark.parametrize("damage", [*DAMAGES, *VALUES, *CHANGES])
def test_a_damaged_file_or_a_contradictory_header_is_refused(packed, damage, tmp_path):
    message, act = (DAMAGES | VALUES | CHANGES)[damage]
    path = tmp_path / "model.xz"
    path.write_bytes(rewritten(packed, act) if damage in CHANGES else act(packed))
    train_gpt.open_artifact(packed)  # the first one loads 100 MB of torch
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sentence = f"artifact {path} cannot be used: .*{message}.*; if truncated or altered, copy it"
    with user_error(sentence):
        blob, _ = train_gpt.read_artifact(str(path), {})
        assert damage not in DAMAGES, "a damaged file is refused before its codes are decoded"
        with train_gpt.reading_artifact(path):
            train_gpt.load_artifact(blob)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10  # KiB


def test_tables_of_another_total_are_refused(monkeypatch):
    """The coder's weights are equal on every machine only for a power of two."""
    codes = CODES["products"]
    monkeypatch.setattr(train_gpt, "ANS_TOTAL", 30_000)
    blob = train_gpt.encode_ans(codes)
    assert np.array_equal(train_gpt.decode_ans(blob, codes.shape), codes)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="tables of frequencies do not fit"):
        train_gpt.decode_ans(blob, codes.shape)


def test_huge_rotary_tables_are_refused(hyperparameters, tmp_path):
    """A few kilobytes whose windows and one wide head would need gigabytes."""
    changes = dict(NUM_LAYERS=1, NUM_HEADS=1, NUM_KV_HEADS=1, MODEL_DIM=256, XSA_LAST_N=0)
    changes |= dict(MLP_MULT=0.1, ROPE_DIMS=0, BIGRAM_VOCAB_SIZE=0, VOCAB_SIZE=4)
    hp = hyperparameters(**changes)
    zeros = {name: torch.zeros(p.shape) for name, p in train_gpt.meta_parameters(hp).items()}
    blob = exported(zeros, hp)
    path = tmp_path / "forged.xz"
    path.write_bytes(rewritten(blob, knob("EVAL_SEQ_LEN", str(1 << 20))))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with user_error("forged.xz cannot be used: .* rotary factors exceed the limit of 67108864"):
        train_gpt.read_artifact(str(path), {})
    path.write_bytes(rewritten(blob, knob("EVAL_SEQ_LEN", str(1 << 17))))
    train_gpt.read_artifact(str(path), {})
    assert path.stat().st_size < 4000
    with user_error("rotary factors exceed the limit"):
        train_gpt.read_artifact(str(path), {"EVAL_MODE": "banded"})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


@pytest.mark.parametrize("files", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutations_are_refused_with_a_sentence(files, tmp_path):
    """Damaged and forged files: no crash, no hang, no large allocation."""
    result = run([ROOT / "tests" / "fuzz_artifact.py", files], {}, tmp_path, fresh=True)
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["files"] == files and found["refused"] + found["loaded"] == files
    assert found["slowest_cpu_seconds"] < 2 and found["peak_growth_mib"] < 200
    # Some are harmless, such as other codes
    assert found["refused"] > files / 2 and found["loaded"] > files / 100
    assert len(found["sentences"]) > 15, "mutations reach every check"


def test_windows_of_the_run_are_defaults_and_the_tokenizer_is_checked(model, packed, tmp_path):
    """Other windows may be set, another model or tokenizer may not."""
    tokenizer = tmp_path / "t.model"
    tokenizer.write_bytes(b"pieces")
    path, digest = tmp_path / "a.xz", train_gpt.sha256_of(tokenizer)
    path.write_bytes(rewritten(packed, lambda header: header.update(tokenizer_sha256=digest)))
    environ = {"TOKENIZER_PATH": str(tokenizer)}
    blob, hp = train_gpt.read_artifact(str(path), environ)
    assert blob == path.read_bytes()
    stride = hp.eval_stride
    assert stride == model.hp.eval_stride != Hyperparameters().eval_stride
    assert train_gpt.read_artifact(str(path), environ | {"EVAL_STRIDE": "3"})[1].eval_stride == 3
    with user_error(f"MODEL_DIM=64 is set, but {path} was made with 32"):
        train_gpt.read_artifact(str(path), environ | {"MODEL_DIM": "64"})
    tokenizer.write_bytes(b"others")
    with user_error(f"is not the tokenizer of {path}"):
        train_gpt.read_artifact(str(path), environ)


@pytest.mark.parametrize("name", ["smear_gate", "bigram_emb", "qo_bank"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(model, name, number):
    """Matrices with NaN were packed as other numbers."""
    weights = weights_of(model)
    weights[name].view(-1)[3] = number
    with user_error(f"{name} is not finite: lower the learning rates"):
        exported(weights, model.hp)
    with user_error("q.cost is not finite: lower the learning rates"):
        exported(weights_of(model), model.hp, {"q.cost": torch.tensor([math.nan])})


# ---- Size ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("knobs, gptq", [({}, True), ({"MODEL_DIM": 64, "BIGRAM_DIM": 32}, False)])
def test_target_is_met(knobs, gptq, hyperparameters):
    """Within 1 %, also in a tiny model, where the coder's tables shrink with wider steps."""
    hp, calibration, lines = hyperparameters(**knobs), {}, []
    model = noise(made(hp), size=0.05)
    weights, matrices = weights_of(model), model.matrices()
    views = [view for view in train_gpt.artifact_tensors(weights) if view[0]]
    if gptq:
        calibration = {f"{name}.cost": torch.rand(view.shape[:2]) + 0.1 for _, name, view in views}
        for seed, name in enumerate(kind.hessian for kind, *_ in views if kind.hessian):
            seeds = enumerate(matrices[name], 3 * seed)
            inputs = [correlated(matrix.size(1), 99, each) for each, matrix in seeds]
            calibration[name] = torch.stack([x.T @ x for x in inputs])
    quantisers = train_gpt.make_quantisers(weights, hp, calibration)
    for kind, name, view in views:
        cost = train_gpt.cost_of_rows(calibration[f"{name}.cost"]) if gptq else None
        alone = quantiser(view, cost, calibration.get(kind.hessian), kind=kind).round(0.01)
        torch.testing.assert_close(quantisers[name].round(0.01), alone)
    free = len(exported(weights, hp, calibration))
    for enough in (math.inf, free):
        blob = fitted(weights, hp, calibration, enough, lines.append)
        assert len(blob) == free and not lines
        expected = train_gpt.open_artifact(blob)[0]["expected_loss"].values() if gptq else ()
        assert not gptq or sum(expected) == pytest.approx(train_gpt.FINEST, rel=0.5)
    for max_bytes in (free - 1, free * 3 // 4):
        blob = fitted(weights, hp, calibration, max_bytes, lines.append)
        assert max_bytes * 0.99 < len(blob) <= max_bytes
        train_gpt.load_artifact(blob)
    assert lines and f"bytes, {max_bytes} are" in lines[-1]


def fit(model, pack, most, comm=None) -> bytes:
    """The file that `fit_bytes` takes of pack(loss)."""
    quantisers = train_gpt.make_quantisers(weights_of(model), model.hp, {}).values()
    comm = comm or train_gpt.Comm()
    return train_gpt.fit_bytes(quantisers, pack, most, lambda line: None, comm)


def test_a_smaller_artifact_does_not_replace_a_larger_one_that_fits(model):
    """In any order. If none fits, the smallest is kept. A thousandth may be unused."""
    fitting, larger = (40_000, 10_000, 18_000, 24_000, 17_400), (12_000, 11_000, 14_000)
    closer = 19_900, 19_979, 19_981, 19_990
    cases = (fitting, 20_000, 18_000), (larger, 9_900, 11_000), (closer, 20_000, 19_981)
    for packed, most, kept in cases:
        sizes = iter((*packed, *[12_000] * 20))
        assert len(fit(model, lambda loss, sizes=sizes: bytes(next(sizes)), most)) == kept


@pytest.mark.parametrize("growth", [0.95, 1, 1.5, 2.5])
def test_few_files_are_packed(model, growth):
    """Each is a pass of GPTQ. A file may grow faster than its codes' expected bytes."""
    quantisers = train_gpt.make_quantisers(weights_of(model), model.hp, {}).values()
    size = lambda loss: int(3000 + growth * sum(q.expected_bytes(loss) for q in quantisers))  # noqa: E731
    for most in (size(0.001), size(0.1)):
        packed = []
        found = len(fit(model, lambda loss, p=packed: p.append(size(loss)) or bytes(p[-1]), most))
        assert 0.999 * most <= found <= most and len(packed) <= 4, packed


def test_all_ranks_take_the_loss_and_the_file_of_rank_0(model):
    """Other machines find other losses by the last bits, and another liblzma packs other bytes. Ranks
    that went by their own parted around a collective."""
    losses = []
    fit(model, lambda loss: losses.append(loss) or bytes(9_990), 10_000)
    sent = lambda own: own + 7 if isinstance(own, int) else bytes(9_995)  # noqa: E731
    pack = lambda loss: losses.append(loss) or bytes(10_001)  # noqa: E731
    assert len(fit(model, pack, 10_000, SimpleNamespace(broadcast=sent))) == 9_995
    own, found = np.searchsorted(np.geomspace(train_gpt.FINEST, 1e8, 20_000), losses)
    assert found == own + 7


def test_writing_is_atomic(tmp_path, monkeypatch):
    """On a full disk, with the longest RUN_ID."""
    path = tmp_path / f"{'r' * 230}.npz"

    def write(content):
        with train_gpt.replacing(path) as partial:
            partial.write_bytes(content)
            assert not path.exists() or path.read_bytes() in (b"old", b"first")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    write(b"first")
    write(b"old")
    monkeypatch.setattr(train_gpt.os, "fsync", full)
    with user_error("cannot write .*r.npz: No space left"):
        write(b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_runs_of_one_folder_write_their_copies_side_by_side(tmp_path, monkeypatch):
    """ARTIFACT is the copy of whichever ends last; with one temporary file a run ended as failed."""
    monkeypatch.chdir(tmp_path)
    Path("logs").mkdir()
    logs = [mock.Mock(artifact=Path("logs", f"{name}.npz"), failure="") for name in "ab"]
    fsync = train_gpt.os.fsync

    def other_run(descriptor):
        if Path("final_model.npz").exists() or not Path("logs/a.npz").exists():
            return fsync(descriptor)
        monkeypatch.setattr(train_gpt.os, "fsync", fsync)
        train_gpt.keep_artifact(b"b", logs[1])  # while the copy of the first is being written
        return fsync(descriptor)

    monkeypatch.setattr(train_gpt.os, "fsync", other_run)
    train_gpt.keep_artifact(b"a", logs[0])
    assert [log.failure for log in logs] == ["", ""]
    found = {path.name: path.read_bytes() for path in tmp_path.rglob("*.npz")}
    assert found == {"a.npz": b"a", "b.npz": b"b", "final_model.npz": b"a"}
    assert not list(tmp_path.rglob("*.partial"))


def test_over_the_cap_is_an_error():
    """Fault D3."""
    hp = Hyperparameters()
    train_gpt.check_limits(16_000_000, 600.0, hp)
    with user_error("16000001 bytes, 1 over the limit"):
        train_gpt.check_limits(16_000_001, 1.0, hp)
    with user_error("training took 600.01 s, over the limit of 600: this run is not a valid subm"):
        train_gpt.check_limits(1, 600.01, hp)
    for asked, allowed in ((10.0, 599), (3600.0, 3599), (0.0, 10**9)):
        hp = Hyperparameters(max_wallclock_seconds=asked)
        train_gpt.check_limits(1, allowed, hp)
        with user_error("over the limit") if asked else contextlib.nullcontext():
            train_gpt.check_limits(1, allowed + 2, hp)

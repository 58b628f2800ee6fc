"""Newton-Schulz, ownership of parameters, clipping, state of the optimizer. Its updates are compared
with published numbers in tests/test_conformance.py."""

from collections import defaultdict
from functools import partial

import pytest
import torch
import torch._dynamo
from torch import nn

import train_gpt
from conftest import made, weights_of
from train_gpt import GPT, Comm, ParallelMuon, bank_shape, newton_schulz


def prepared(hyperparameters, dtype=torch.float32, comm=None, accumulating=False, **changes):
    hp = hyperparameters(**changes)
    model = GPT(hp, None, dtype)
    return hp, model, ParallelMuon(model, model.initialise(0), hp, comm or Comm(), accumulating)


def set_gradients(model, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def advance(optimizer, *settings):
    optimizer.accumulate()
    return optimizer.step(*settings)


BAND = {"quintic": (0.6, 1.3), "polar-express": (0.85, 1.15)}


@pytest.mark.parametrize("coefficients", train_gpt.NEWTON_SCHULZ)
@pytest.mark.parametrize(
    "shape", [(3, 64, 64), (2, 64, 192), (2, 192, 64), (2, 8, 3), (1, 1, 7), (1, 5, 1), (1, 1, 1)]
)
def test_newton_schulz_brings_singular_values_near_one(shape, coefficients):
    """Within the band in which the polynomials leave them. tests/test_conformance.py has the numbers."""
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    out = newton_schulz(g, torch.float32, 5, coefficients)
    singular, lengths = (torch.linalg.svdvals(one.double()) for one in (out, g))
    directions, (low, high) = lengths / lengths.norm(dim=1, keepdim=True), BAND[coefficients]
    assert (singular[directions > 0.02] > low).all() and (singular < high).all()
    tiny = newton_schulz(torch.stack((0 * g[0], 1e-12 * g[0])), torch.bfloat16, 5, coefficients)
    assert not tiny[0].any() and tiny.isfinite().all(), "zero is zero"


@pytest.mark.parametrize("changes", [{}, {"MUON_COEFFS": "polar-express", "MUON_EQ": 0}])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_compiled_update_is_the_update(hyperparameters, backend, changes, monkeypatch):
    """Settings that change every step do not compile another graph."""
    hp, model, eager = prepared(hyperparameters, **changes)
    twin = made(hp)
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **rest: compile(f, backend=backend, **rest))
    compiled = ParallelMuon(twin, weights_of(model), hp, Comm(), compiled=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for step in range(3):
        for m, o in ((model, eager), (twin, compiled)):
            set_gradients(m, step)
            advance(o, 1 - step / 5, 0.8 + step / 100)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-5, msg=name)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(train_gpt.BANKS)


@pytest.mark.parametrize("limit", [0.3, 0.0])
def test_only_large_gradients_are_clipped(hyperparameters, limit):
    """To the norm of all; 0 clips none. The momentum shows it, Muon's update does not."""
    _, model, optimizer = prepared(hyperparameters, GRAD_CLIP_NORM=limit)
    momentum = optimizer.banks["qo_bank"].state["momentum"]
    for scale in (1e-5, 1.0):
        set_gradients(model, 1, scale)
        every = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        expected = model.qo_bank.grad * min(1.0, limit / every if limit else 1.0)
        advance(optimizer, 1.0, 0.0)
        torch.testing.assert_close(momentum, expected)
        assert not any(p.grad.any() for p in model.parameters()), "a step leaves zero gradients"


def test_every_parameter_has_one_owner(hyperparameters):
    """Fault B12: in #399 two parameters belonged to no optimizer."""
    hp, model, optimizer = prepared(hyperparameters)
    owned = [getattr(model, name) for name in optimizer.banks]
    owned += [p for group in optimizer.adam.param_groups for p in group["params"]]
    assert sorted(map(id, owned)) == sorted(map(id, model.parameters()))
    twin = made(hp)
    twin.stray = nn.Parameter(torch.zeros(3))
    other = ParallelMuon(twin, weights_of(twin), hp, Comm())
    twin.stray.grad += 1
    advance(other, 1.0, 0.9)
    # A parameter that no table names is updated, too
    assert twin.stray.all() and not twin.stray.grad.any()


def test_all_state_is_fp32_also_in_a_bf16_run(hyperparameters):
    """Faults B9, B10: in bf16, state loses updates below 1/256 of its value."""
    _, model, optimizer = prepared(hyperparameters, torch.bfloat16)
    set_gradients(model, 1)
    advance(optimizer, 1.0, 0.9)
    assert {tensor.dtype for tensor in optimizer.tensors().values()} == {torch.float32}
    before, coarse = optimizer.weights(), model.qo_bank.detach().clone()
    for step in range(3):
        set_gradients(model, step)
        advance(optimizer, 1e-3, 0.9)
    after = optimizer.weights()
    for name in ("tok_emb", "qo_bank"):  # an update of 1e-5 of a weight counts
        assert (after[name] != before[name]).float().mean() > 0.99, name
    assert (model.qo_bank != coarse).float().mean() < 0.5, "most of the bf16 copy stay the same"
    assert torch.equal(model.qo_bank, after["qo_bank"].bfloat16())


@pytest.mark.parametrize("accumulation", [1, 4])
def test_micro_batches_are_summed_in_fp32(hyperparameters, accumulation):
    """In bf16, 1 + 1/512 + 1/512 + 1/512 would still be 1. A single one needs no second buffer."""
    make = partial(prepared, hyperparameters, torch.bfloat16, accumulating=accumulation > 1)
    _, model, optimizer = make(comm=Comm(0, 2))
    for part in range(accumulation):
        model.qo_bank.grad += 1.0 if part == 0 else 1 / 512
        optimizer.accumulate()
    shard, alone = (one.banks["qo_bank"] for one in (optimizer, make()[2]))
    assert (shard.grad_sum[: shard.rows] == 1.0 + (accumulation - 1) / 512).all()
    assert shard.grad.dtype == shard.grad_shard.dtype == torch.bfloat16
    assert (shard.grad_sum is shard.grad) == (accumulation == 1)
    assert alone.grad_shard is alone.grad_sum, "one rank reduces nothing"


def test_collectives_need_no_copy(hyperparameters, monkeypatch):
    """Gradients are sent from the buffer that backward fills; rows are gathered in place."""
    _, model, optimizer = prepared(hyperparameters, comm=Comm(1, 2))
    given = defaultdict(list)
    for name, whole in (("all_reduce", 0), ("reduce_scatter", 1), ("all_gather", 0)):

        def noted(*tensors, calls=given[name], whole=whole):
            calls.append(tensors[whole].data_ptr())
            return lambda: None

        monkeypatch.setattr(optimizer.comm, name, noted)
    advance(optimizer, 1.0, 0.9)
    banks = [getattr(model, name) for name in optimizer.banks]
    assert given["reduce_scatter"] == [bank.grad.data_ptr() for bank in banks]
    assert given["all_gather"] == [bank.data_ptr() for bank in banks]
    for shard in optimizer.banks.values():
        assert shard.owned_rows.data_ptr() == shard.padded[shard.own_places].data_ptr()


def test_collectives_wait_for_what_they_need(hyperparameters, monkeypatch):
    """As the first rank of two nodes with two ranks each. A collective reads its input when it starts,
    and its result is there after its wait. Replicas would add up rows that the node has not summed
    yet; NCCL may hang if the group of all ranks is in use together with one of its parts."""
    whole, node, in_flight = Comm(0, 4), Comm(0, 2), []
    whole.shard, whole.replicate = node, Comm(0, 2)
    _, model, optimizer = prepared(hyperparameters, comm=whole)

    def start(comm, collective, out, *source):
        assert whole not in in_flight and (comm is not whole or not in_flight)
        value = (source or [out])[0][: len(out)] * (1 if comm is node else 3)
        in_flight.append(comm)
        return lambda: (in_flight.remove(comm), out.copy_(value))

    monkeypatch.setattr(Comm, "start", start)
    set_gradients(model, 1)
    expected = {name: 3 * shard.grad[shard.own_places] for name, shard in optimizer.banks.items()}
    flat = 3 * optimizer.flat_grad
    optimizer.reduce_gradients()
    assert not in_flight and torch.equal(optimizer.flat_grad, flat)
    for name, shard in optimizer.banks.items():
        assert torch.equal(shard.grad_shard, expected[name]), name


@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_every_row_of_a_bank_has_one_owner(hyperparameters, size, monkeypatch):
    """Fault B17. Padding rows stay zero. `scatter` is the inverse of `gather` for any ranks."""
    make = partial(prepared, hyperparameters, NUM_LAYERS=5)
    ranks = [make(comm=Comm(rank, size))[2] for rank in range(size)]
    name, shared = "qo_bank.momentum", []
    whole = torch.randn(bank_shape("qo_bank", ranks[0].hp))
    share = lambda value: shared.append(value) or shared[0]  # noqa: E731
    for rank, optimizer in enumerate(ranks):
        monkeypatch.setattr(optimizer.comm, "broadcast", share)
        # Only rank 0 has the checkpoint
        optimizer.scatter(name, optimizer.tensors()[name], None if rank else whole)
    masters = [one.banks["qo_bank"].master for one in ranks]
    owned = [one.tensors()[name] for one in ranks]
    sums = [rows.sum((1, 2), keepdim=True) for rows in owned]  # state of another shape
    pairs = (
        (masters, made(ranks[0].hp).qo_bank.detach()),
        (owned, whole),
        (sums, whole.sum((1, 2), keepdim=True)),
    )
    for parts, expected in pairs:
        full = torch.cat(parts)
        assert len(full) == len(whole) + -len(whole) % size and not full[len(whole) :].any()
        for optimizer, mine in zip(ranks, parts, strict=True):
            copy = lambda out, _, full=full: lambda: out.copy_(full)  # noqa: E731
            monkeypatch.setattr(optimizer.comm, "all_gather", copy)
            torch.testing.assert_close(optimizer.gather(name, mine), expected)

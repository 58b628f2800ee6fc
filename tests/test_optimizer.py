"""Updates against the formulas, matrix by matrix; ownership of parameters; state of the
optimizer."""

import dataclasses

import pytest
import torch
import torch._dynamo
from torch import nn

import train_gpt
from conftest import made, matrices_of, user_error, weights_of
from train_gpt import GPT, Comm, ParallelMuon, bank_shape, newton_schulz


def prepared(hyperparameters, dtype=torch.float32, **changes):
    hp = hyperparameters(**changes)
    model = GPT(hp, None, dtype)
    return hp, model, ParallelMuon(model, model.initialise(0), hp, Comm())


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
    """As in float64, and within the band in which the polynomials leave singular values."""
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    out = newton_schulz(g, torch.float32, 5, coefficients)
    assert out.shape == g.shape
    expected = newton_schulz(g.double(), torch.float64, 5, coefficients).float()
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)
    singular = torch.linalg.svdvals(out.double())
    directions = torch.linalg.svdvals(g.double()) / g.double().flatten(1).norm(dim=1)[:, None]
    low, high = BAND[coefficients]
    assert (singular[directions > 0.02] > low).all() and (singular < high).all()
    left, _, right = torch.linalg.svd(g.double(), full_matrices=False)
    along = (left.mT @ out.double() @ right.mT).diagonal(dim1=-2, dim2=-1)
    assert (along > 0).all(), "directions stay, only lengths change"
    tiny = newton_schulz(torch.stack((0 * g[0], 1e-12 * g[0])), torch.bfloat16, 5, coefficients)
    assert not tiny[0].any() and tiny.isfinite().all(), "zero is zero"


def reference_steps(hp, weights, gradients, settings):
    """The weights after updates by the published formulas, one (out, in) matrix at a time, with the
    gradient clipped by its whole norm. Weights and gradients are by matrix and small parameter."""
    weights = {name: w.clone() for name, w in weights.items()}
    memory, first, second = {}, {}, {}
    for t, (gradient, (lr_scale, momentum)) in enumerate(zip(gradients, settings, strict=True), 1):
        norm = torch.cat([g.flatten() for g in gradient.values()]).norm()
        clip = min(1.0, hp.grad_clip_norm / (norm.item() + 1e-6))
        for name, weight in weights.items():
            g = gradient[name] * clip
            if name.startswith("blocks"):
                memory[name] = momentum * memory.get(name, torch.zeros_like(g)) + g
                update = g + momentum * memory[name]
                if hp.muon_eq:
                    update = update / update.norm(dim=1, keepdim=True)
                form = torch.float32, hp.muon_backend_steps, hp.muon_coeffs
                update = newton_schulz(update[None], *form)[0]
                lr = lr_scale * hp.matrix_lr
                weight *= 1 - lr * hp.muon_wd
                weight -= lr * max(1, weight.size(0) / weight.size(1)) ** 0.5 * update
                continue
            embedding = name in ("tok_emb", "bigram_emb")
            lr = lr_scale * (hp.tied_embed_lr if embedding else hp.scalar_lr)
            first[name] = hp.beta1 * first.get(name, 0) + (1 - hp.beta1) * g
            second[name] = hp.beta2 * second.get(name, 0) + (1 - hp.beta2) * g * g
            decays = embedding or name == "bigram_proj"
            weight *= 1 - lr * (hp.adam_wd if decays else hp.scalar_wd)
            root = (second[name] / (1 - hp.beta2**t)).sqrt()
            weight -= lr * first[name] / (1 - hp.beta1**t) / (root + hp.adam_eps)
    return weights


def trained(hyperparameters, gradients, settings, **changes):
    """(hyperparameters, weights before, weights after), by matrix, for gradients by matrix."""
    hp, model, optimizer = prepared(hyperparameters, **changes)
    before = matrices_of(optimizer.weights())
    for gradient, setting in zip(gradients, settings, strict=True):
        views = matrices_of({name: p.grad for name, p in model.named_parameters()})
        for name, view in views.items():
            view.copy_(gradient[name])
        advance(optimizer, *setting)
        assert not any(p.grad.any() for p in model.parameters()), "a step leaves zero gradients"
    after = optimizer.weights()
    assert all(torch.equal(weight, after[name]) for name, weight in weights_of(model).items())
    return hp, before, matrices_of(after)


SETTINGS = [(1.0, 0.85), (0.5, 0.9)]


@pytest.fixture
def gradients(hyperparameters):
    hp, model, _ = prepared(hyperparameters)
    found = []
    for seed in (1, 2):
        set_gradients(model, seed)
        found.append(matrices_of({name: p.grad.clone() for name, p in model.named_parameters()}))
    return found


@pytest.mark.parametrize(
    "changes",
    [{}, {"MUON_COEFFS": "polar-express"}, {"MUON_EQ": 0}, {"GRAD_CLIP_NORM": 0}, {"SCALAR_WD": 1}],
)
def test_updates_are_the_formulas(hyperparameters, gradients, changes):
    """Faults B4 (clip) and B16 (each bank once per step). Up and down projections, which share a
    bank, have the rate of their own shapes. fp32 agrees to 1e-4 of an update."""
    hp, before, after = trained(hyperparameters, gradients, SETTINGS, **changes)
    if not hp.grad_clip_norm:  # 0 is no clipping, which the reference gets from a large norm
        hp = dataclasses.replace(hp, grad_clip_norm=1e9)
    expected = reference_steps(hp, before, gradients, SETTINGS)
    for name, weight in after.items():
        moved = (expected[name] - before[name]).norm()
        assert moved > 0 and (weight - expected[name]).norm() < 1e-4 * moved, name


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


def test_small_gradients_are_not_clipped(hyperparameters):
    """Muon's update does not depend on the size of a gradient, but its momentum does."""
    hp, model, optimizer = prepared(hyperparameters)
    set_gradients(model, 1, scale=1e-5)
    expected = model.qo_bank.grad.clone()
    advance(optimizer, 1.0, 0.9)
    torch.testing.assert_close(optimizer.banks["qo_bank"].momentum, expected)
    set_gradients(model, 1, scale=1.0)
    advance(optimizer, 1.0, 0.0)
    norm = sum(s.momentum.square().sum() for s in optimizer.banks.values()).sqrt()
    assert norm < hp.grad_clip_norm, "the part of the banks in a gradient of norm 0.3"


def test_every_parameter_has_one_owner(hyperparameters):
    """Fault B12: in #399 two parameters belonged to no optimizer."""
    hp, model, optimizer = prepared(hyperparameters)
    owned = [id(getattr(model, name)) for name in optimizer.banks]
    owned += [id(p) for group in optimizer.adam.param_groups for p in group["params"]]
    assert sorted(owned) == sorted(id(p) for p in model.parameters())
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
    # Most weights of the bf16 copy stay the same
    assert (model.qo_bank != coarse).float().mean() < 0.5
    assert model.qo_bank.dtype == torch.bfloat16
    assert torch.equal(model.qo_bank, after["qo_bank"].bfloat16())


@pytest.mark.parametrize("accumulation", [1, 4])
def test_micro_batches_are_summed_in_fp32(hyperparameters, accumulation):
    """In bf16, 1 + 1/512 + 1/512 + 1/512 would still be 1. A single one needs no second buffer."""
    hp = hyperparameters()
    model = made(hp, None, torch.bfloat16)
    optimizer = ParallelMuon(model, weights_of(model), hp, Comm(0, 2), accumulation > 1)
    for part in range(accumulation):
        model.qo_bank.grad += 1.0 if part == 0 else 1 / 512
        optimizer.accumulate()
    shard = optimizer.banks["qo_bank"]
    assert (shard.grad_sum[: shard.rows] == 1.0 + (accumulation - 1) / 512).all()
    assert shard.comm_buffer.dtype == shard.grad_shard.dtype == torch.bfloat16
    for buffer in (shard.grad, shard.comm_buffer):
        assert (shard.grad_sum is buffer) == (accumulation == 1)


def test_collectives_need_no_copy(hyperparameters, monkeypatch):
    """Gradients are sent from the buffer that backward fills; rows are gathered in place."""
    hp = hyperparameters()
    model = made(hp)
    optimizer = ParallelMuon(model, weights_of(model), hp, Comm(1, 2))
    given = {"all_reduce": [], "reduce_scatter": [], "all_gather": []}
    for name, calls in given.items():
        noted = lambda *tensors, calls=calls: calls.append(tensors) or (lambda: None)  # noqa: E731
        monkeypatch.setattr(optimizer.comm, name, noted)
    advance(optimizer, 1.0, 0.9)
    banks = [getattr(model, name) for name in optimizer.banks]
    scattered = [full.data_ptr() for _, full in given["reduce_scatter"]]
    gathered = [full.data_ptr() for full, _ in given["all_gather"]]
    assert scattered == [bank.grad.data_ptr() for bank in banks]
    assert gathered == [bank.data_ptr() for bank in banks]


def two_nodes() -> Comm:
    """The first of four ranks, two on each node."""
    whole = Comm(0, 4)
    whole.shard, whole.replicate = Comm(0, 2), Comm(0, 2)
    return whole


def test_the_gradient_norm_is_reduced_over_all_ranks_at_once(hyperparameters, monkeypatch):
    """Two groups may add in another order, and replicas that clip differently drift apart. Each row
    counts once, though every node has it."""
    hp, model, optimizer = prepared(hyperparameters)
    whole = two_nodes()
    optimizer = ParallelMuon(model, weights_of(model), hp, whole)

    def start(comm, collective, out, *source):
        if comm is whole:
            out.mul_(4)  # four equal ranks
        return lambda: None

    monkeypatch.setattr(Comm, "start", start)
    optimizer.flat_grad.fill_(0.1)
    for shard in optimizer.banks.values():
        shard.grad_shard.normal_()
    squares = sum(shard.grad_shard.square().sum() for shard in optimizer.banks.values())
    optimizer.reduce_gradients()
    expected = (2 * squares + optimizer.flat_grad.square().sum()).sqrt()
    torch.testing.assert_close(optimizer.gradient_norm(), expected)


def test_collectives_wait_for_what_they_need(hyperparameters, monkeypatch):
    """As a rank of two nodes with two ranks each. A collective reads its input when it starts, and
    its result is there after its wait. Replicas would add up rows that the node has not summed yet;
    NCCL may hang if the group of all ranks is in use together with one of its parts."""
    hp, model, optimizer = prepared(hyperparameters)
    whole = two_nodes()
    node = whole.shard
    optimizer = ParallelMuon(model, weights_of(model), hp, whole)
    in_flight = []

    def start(comm, collective, out, *source):
        assert whole not in in_flight and (comm is not whole or not in_flight)
        value = (source or [out])[0][: len(out)].clone()
        in_flight.append(comm)

        def wait():
            in_flight.remove(comm)
            out.copy_(value if comm is node else 3 * value)

        return wait

    monkeypatch.setattr(Comm, "start", start)
    set_gradients(model, 1)
    expected = {name: 3 * shard.grad[shard.mine] for name, shard in optimizer.banks.items()}
    flat = 3 * optimizer.flat_grad
    optimizer.reduce_gradients()
    assert not in_flight and torch.equal(optimizer.flat_grad, flat)
    for name, shard in optimizer.banks.items():
        assert torch.equal(shard.grad_shard, expected[name]), name


def test_padding_of_banks_for_any_number_of_ranks(hyperparameters):
    """Fault B17. Each row has one owner; padding rows stay zero, fewer than ranks."""
    hp = hyperparameters()
    for size in (1, 3, 4, 8, 16):
        models = [made(hp) for _ in range(size)]
        comms = [Comm(rank, size) for rank in range(size)]
        pairs = zip(models, comms, strict=True)
        shards = [ParallelMuon(m, weights_of(m), hp, comm).banks for m, comm in pairs]
        for bank in train_gpt.BANKS:
            rows = bank_shape(bank, hp)[0]
            assert all(len(s[bank].padded) == rows + -rows % size for s in shards)
            owned = torch.cat([s[bank].master for s in shards])
            assert torch.equal(owned[:rows], weights_of(models[0])[bank]) and not owned[rows:].any()
            scales = torch.cat([s[bank].scale for s in shards]).flatten()
            assert (scales >= 1).all()
            for shard, model in ((shards[0][bank], models[0]), (shards[-1][bank], models[-1])):
                assert getattr(model, bank).data_ptr() == shard.padded.data_ptr()
                assert getattr(model, bank).grad.data_ptr() == shard.grad.data_ptr()
                assert shard.owned_rows.data_ptr() == shard.padded[shard.mine].data_ptr()


@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_scatter_is_the_inverse_of_gather(hyperparameters, size, monkeypatch):
    """A checkpoint holds whole banks without padding, so any number of ranks can read it."""
    hp = hyperparameters(NUM_LAYERS=5)
    model = made(hp)
    comms = [Comm(rank, size) for rank in range(size)]
    ranks = [ParallelMuon(made(hp), weights_of(model), hp, comm) for comm in comms]
    bank = torch.randn(bank_shape("qo_bank", hp))
    shared = []
    for rank, optimizer in enumerate(ranks):
        share = lambda value: shared.append(value) or shared[0]  # noqa: E731
        monkeypatch.setattr(optimizer.comm, "broadcast", share)
        source = bank if rank == 0 else None  # only rank 0 has the checkpoint
        optimizer.scatter("qo_bank.momentum", optimizer.tensors()["qo_bank.momentum"], source)
    owned = [optimizer.tensors()["qo_bank.momentum"] for optimizer in ranks]
    assert torch.equal(torch.cat(owned)[: len(bank)], bank)
    assert not torch.cat(owned)[len(bank) :].any()
    for optimizer, rows in zip(ranks, owned, strict=True):
        sums = [rows.sum((1, 2), keepdim=True) for rows in owned]  # state of another shape
        for parts, mine, shape in ((owned, rows, bank.shape), (sums, sums[0], (len(bank), 1, 1))):
            copy = lambda full, _, parts=parts: full.copy_(torch.cat(parts)) is None  # noqa: E731
            monkeypatch.setattr(
                optimizer.comm, "all_gather", lambda *a, copy=copy: lambda: copy(*a)
            )
            found = optimizer.gather("qo_bank.momentum", mine)
            assert found.shape == shape and torch.equal(found, torch.cat(parts)[: len(bank)])
    for wrong in (torch.zeros(3, 4), None):
        shared.clear()
        with user_error("qo_bank.momentum with shape .*, not .*: it belongs to another model"):
            ranks[0].scatter("qo_bank.momentum", owned[0], wrong)

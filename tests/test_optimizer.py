"""One update against the formulas, written out matrix by matrix; ownership; state."""

import copy

import pytest
import torch
from torch import nn

import train_gpt
from conftest import made, matrices_of, weights_of
from train_gpt import GPT, Matrix, Optimizers, Ranks, bank_shape, newton_schulz, row_traits

# The layout of #399: four banks, the down projections as they are.
PUBLISHED = (
    Matrix("q", "qo_bank", 0, "dim", "dim", "", normed=True),
    Matrix("out", "qo_bank", 1, "dim", "dim", "", zero=True, gain="attn_scale"),
    Matrix("k", "kv_bank", 0, "kv", "dim", "", normed=True),
    Matrix("v", "kv_bank", 1, "kv", "dim", "", normed=True),
    Matrix("up", "mlp_up_bank", 0, "mlp", "dim", "", normed=True),
    Matrix("down", "mlp_down_bank", 0, "dim", "mlp", "", zero=True, gain="mlp_scale"),
)


def prepared(hyperparameters, dtype=torch.float32, accumulation=1, **changes):
    hp = hyperparameters(**changes)
    model = GPT(hp, None, dtype)
    return hp, model, Optimizers(model, model.initialise(0), hp, Ranks(), accumulation)


def set_gradients(model, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def advance(optimizers, *settings):
    optimizers.accumulate()
    report = optimizers.step(*settings)
    optimizers.finish()
    return report


def low_rank(shape, seed=0):
    """Three independent directions only."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape[:-1], 3, generator=generator) @ torch.randn(
        *shape[:-2], 3, shape[-1], generator=generator
    )


BAND = {"quintic": (0.6, 1.3), "polar-express": (0.85, 1.15)}


@pytest.mark.parametrize("coefficients", train_gpt.NEWTON_SCHULZ)
@pytest.mark.parametrize("shape", [(3, 64, 64), (2, 64, 192), (2, 192, 64), (2, 8, 3), (1, 1, 7), (1, 5, 1), (1, 1, 1)])
def test_newton_schulz_brings_singular_values_near_one(shape, coefficients):
    """Square, wide, tall and tiny matrices, against float64 of the same iteration and within the polynomials' band."""
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    out = newton_schulz(g, torch.float32, 5, coefficients)
    assert out.shape == g.shape
    torch.testing.assert_close(
        out, newton_schulz(g.double(), torch.float64, 5, coefficients).float(), rtol=1e-3, atol=1e-4
    )
    singular = torch.linalg.svdvals(out.double())
    directions = torch.linalg.svdvals(g.double()) / g.double().flatten(1).norm(dim=1)[:, None]
    low, high = BAND[coefficients]
    assert (singular[directions > 0.02] > low).all() and (singular < high).all()
    left, _, right = torch.linalg.svd(g.double(), full_matrices=False)
    assert ((left.mT @ out.double() @ right.mT).diagonal(dim1=-2, dim2=-1) > 0).all(), (
        "directions stay, only lengths change"
    )


@pytest.mark.parametrize("coefficients", train_gpt.NEWTON_SCHULZ)
@pytest.mark.parametrize("shape", [(2, 24, 24), (2, 16, 40), (2, 40, 16)])
def test_newton_schulz_of_low_rank_has_the_same_rank(shape, coefficients):
    g = low_rank(shape)
    singular = torch.linalg.svdvals(newton_schulz(g, torch.float32, 5, coefficients).double())
    low, high = BAND[coefficients]
    assert (singular[:, :3] > low).all() and (singular[:, :3] < high).all() and (singular[:, 3:] < 1e-3).all()


@pytest.mark.parametrize("coefficients", train_gpt.NEWTON_SCHULZ)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_newton_schulz_of_zero_is_zero(dtype, coefficients):
    g = torch.randn(4, 8, 16)
    g[2] = 0
    out = newton_schulz(g, dtype, 5, coefficients)
    assert not out[2].any() and out.isfinite().all() and out[3].any()
    assert newton_schulz(g * 1e-12, dtype, 5, coefficients).isfinite().all()


def test_newton_schulz_rounds_less_than_the_published_form():
    """Three products without elementwise passes: about half the bf16 rounding error of `b*A + c*A@A` and `a*X + B@X`."""
    g = torch.randn(4, 128, 256, generator=torch.Generator().manual_seed(0))
    exact = newton_schulz(g, torch.float64)
    a, b, c = train_gpt.NEWTON_SCHULZ["quintic"][0]
    x = (g / g.flatten(1).norm(dim=1)[:, None, None]).bfloat16()
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    ours, published = ((form.double() - exact).norm() / exact.norm() for form in (newton_schulz(g, torch.bfloat16), x))
    assert ours < 0.7 * published < 0.1


def test_newton_schulz_does_not_mind_transposition():
    """What lets a bank hold down projections transposed beside up projections."""
    g = torch.randn(3, 32, 96, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        newton_schulz(g.mT.contiguous(), torch.float32), newton_schulz(g, torch.float32).mT, rtol=1e-4, atol=1e-5
    )


def reference_steps(hp, weights, gradients, settings):
    """Updates by the published formulas, one (out, in) matrix at a time, clip by the norm of the whole gradient.
    Weights and gradients are by matrix and small parameter."""
    weights = {name: w.clone() for name, w in weights.items()}
    memory, first, second = {}, {}, {}
    for t, (gradient, (lr_scale, momentum)) in enumerate(zip(gradients, settings, strict=True), start=1):
        norm = torch.cat([g.flatten() for g in gradient.values()]).norm()
        clip = min(1.0, hp.grad_clip_norm / (norm.item() + 1e-6))
        for name, weight in weights.items():
            g = gradient[name] * clip
            if name.startswith("blocks"):
                memory[name] = momentum * memory.get(name, torch.zeros_like(g)) + g
                update = g + momentum * memory[name]
                if hp.muon_eq:
                    update = update / update.norm(dim=1, keepdim=True)
                update = newton_schulz(update[None], torch.float32, hp.muon_backend_steps, hp.muon_coeffs)[0]
                lr = lr_scale * hp.matrix_lr
                weight *= 1 - lr * hp.muon_wd
                weight -= lr * max(1, weight.size(0) / weight.size(1)) ** 0.5 * update
                continue
            lr = lr_scale * (hp.tied_embed_lr if name in ("tok_emb", "bigram_emb") else hp.scalar_lr)
            first[name] = hp.beta1 * first.get(name, 0) + (1 - hp.beta1) * g
            second[name] = hp.beta2 * second.get(name, 0) + (1 - hp.beta2) * g * g
            weight *= 1 - lr * hp.adam_wd
            weight -= lr * (first[name] / (1 - hp.beta1**t)) / ((second[name] / (1 - hp.beta2**t)).sqrt() + hp.adam_eps)
    return weights


def by_matrix(tensors, hp) -> dict[str, torch.Tensor]:
    """The tensors of a model (by parameter) as (out, in) matrices and small parameters."""
    return {name: tensor.clone() for name, tensor in matrices_of(tensors).items()}


def trained(hyperparameters, gradients, settings, **changes):
    """(hyperparameters, weights before, weights after) by matrix, of updates from gradients given by matrix."""
    hp, model, optimizers = prepared(hyperparameters, **changes)
    before = by_matrix(optimizers.weights(), hp)
    for gradient, setting in zip(gradients, settings, strict=True):
        for name, view in matrices_of({name: p.grad for name, p in model.named_parameters()}).items():
            view.copy_(gradient[name])
        advance(optimizers, *setting)
        assert not any(p.grad.any() for p in model.parameters()), "a step leaves zero gradients"
    assert all(
        torch.equal(p.float(), w)
        for p, w in zip(weights_of(model).values(), (optimizers.weights()[n] for n in weights_of(model)), strict=True)
    )
    return hp, before, by_matrix(optimizers.weights(), hp)


SETTINGS = [(1.0, 0.85), (0.5, 0.9)]


@pytest.fixture
def gradients(hyperparameters):
    hp, model, _ = prepared(hyperparameters)
    found = []
    for seed in (1, 2):
        set_gradients(model, seed)
        found.append(by_matrix({name: p.grad.clone() for name, p in model.named_parameters()}, hp))
    return found


@pytest.mark.parametrize("changes", [{}, {"MUON_COEFFS": "polar-express"}, {"MUON_EQ": 0}, {"GRAD_CLIP_NORM": 0}])
def test_updates_are_the_formulas(hyperparameters, gradients, changes):
    """Faults B4 (clip), B16 (each bank once a step): any factor of two would show; fp32 agrees to 1e-4 of an update."""
    hp, before, after = trained(hyperparameters, gradients, SETTINGS, **changes)
    hp = hyperparameters(**{**changes, **({"GRAD_CLIP_NORM": 1e9} if "GRAD_CLIP_NORM" in changes else {})})
    expected = reference_steps(hp, before, gradients, SETTINGS)
    for name, weight in after.items():
        moved = (expected[name] - before[name]).norm()
        assert moved > 0 and (weight - expected[name]).norm() < 1e-4 * moved, name


def test_the_published_layout_gives_the_same_updates(hyperparameters, gradients, monkeypatch):
    """Three balanced banks with the down projections transposed, or four as in #399: it is a matter of storage."""
    _, before, ours = trained(hyperparameters, gradients, SETTINGS)
    monkeypatch.setattr(train_gpt, "MATRICES", PUBLISHED)
    monkeypatch.setattr(train_gpt, "BANKS", ("qo_bank", "kv_bank", "mlp_up_bank", "mlp_down_bank"))
    hp, start, published = trained(hyperparameters, gradients, SETTINGS)
    assert bank_shape("mlp_down_bank", hp) == (3, 32, 96), "the layout is another one"
    for name, weight in published.items():
        assert torch.equal(start[name], before[name])
        assert (weight - ours[name]).norm() < 1e-5 * (weight - before[name]).norm(), name


def test_up_and_down_have_updates_of_their_own_shape(hyperparameters):
    """A scale by the bank's shape would multiply the down projections' rate by sqrt(3)."""
    traits = row_traits("mlp_bank", hyperparameters(MLP_MULT=3))
    assert traits == [(False, 3**0.5)] * 3 + [(True, 1.0)] * 3
    assert {
        scale for _, scale in row_traits("qo_bank", hyperparameters()) + row_traits("kv_bank", hyperparameters())
    } == {1.0}


@pytest.mark.parametrize("changes", [{}, {"MUON_COEFFS": "polar-express", "MUON_EQ": 0}])
def test_the_compiled_update_is_the_update(hyperparameters, changes):
    """In fp32; and settings that change every step do not make another graph."""
    import torch._dynamo

    hp, model, eager = prepared(hyperparameters, **changes)
    twin = made(hp)
    compiled = Optimizers(twin, weights_of(model), hp, Ranks(), compiled=True)
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
    """Muon ignores the length of a gradient, its momentum does not."""
    hp, model, optimizers = prepared(hyperparameters)
    set_gradients(model, 1, scale=1e-5)
    expected = model.qo_bank.grad.clone()
    advance(optimizers, 1.0, 0.9)
    torch.testing.assert_close(optimizers.banks["qo_bank"].momentum, expected)
    set_gradients(model, 1, scale=1.0)
    advance(optimizers, 1.0, 0.0)
    norm = sum(s.momentum.square().sum() for s in optimizers.banks.values()).sqrt()
    assert norm < hp.grad_clip_norm, "the banks' part of a gradient of norm 0.3"


def test_every_parameter_has_one_owner(hyperparameters):
    """Fault B12: there two parameters belonged to no optimizer and only inflated the clip norm."""
    hp, model, optimizers = prepared(hyperparameters)
    owned = [id(shard.bank) for shard in optimizers.banks.values()] + [
        id(p) for group in optimizers.adam.param_groups for p in group["params"]
    ]
    assert sorted(owned) == sorted(id(p) for p in model.parameters())
    model.stray = nn.Parameter(torch.zeros(3))
    with pytest.raises(AssertionError, match="stray"):
        Optimizers(model, weights_of(model), hp, Ranks())


def test_peak_rates_are_those_of_the_knobs(hyperparameters):
    hp, model, optimizers = prepared(hyperparameters, TIE_EMBEDDINGS=0)
    rates = {id(p): group["peak_lr"] for group in optimizers.adam.param_groups for p in group["params"]}
    assert rates[id(model.tok_emb)] == hp.embed_lr and rates[id(model.lm_head)] == hp.head_lr
    assert rates[id(model.q_gain)] == rates[id(model.bigram_proj)] == hp.scalar_lr
    hp, model, optimizers = prepared(hyperparameters)
    rates = {id(p): group["peak_lr"] for group in optimizers.adam.param_groups for p in group["params"]}
    assert rates[id(model.tok_emb)] == rates[id(model.bigram_emb)] == hp.tied_embed_lr


def test_all_state_is_fp32_also_in_a_bf16_run(hyperparameters):
    """Faults B9 and B10: bf16 moments and momentum lose what is below 1/256 of them; so would bf16 weights."""
    _, model, optimizers = prepared(hyperparameters, torch.bfloat16)
    set_gradients(model, 1)
    advance(optimizers, 1.0, 0.9)
    assert {tensor.dtype for tensor in optimizers.tensors().values()} == {torch.float32}
    before, coarse = optimizers.weights(), model.qo_bank.detach().clone()
    for step in range(3):
        set_gradients(model, step)
        advance(optimizers, 1e-3, 0.9)
    after = optimizers.weights()
    for name in ("tok_emb", "qo_bank"):
        assert (after[name] != before[name]).float().mean() > 0.99, f"an update of 1e-5 of a weight is not lost: {name}"
    assert (model.qo_bank != coarse).float().mean() < 0.5, "in the copy that the forward reads, it is"
    assert model.qo_bank.dtype == torch.bfloat16 and torch.equal(model.qo_bank, after["qo_bank"].bfloat16())


@pytest.mark.parametrize("changes, reduce_dtype", [({}, torch.bfloat16), ({"REDUCE_DTYPE": "float32"}, torch.float32)])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_micro_batches_are_summed_in_fp32(hyperparameters, changes, reduce_dtype, accumulation):
    """In bf16, 1 + 1/512 + 1/512 + 1/512 would still be 1. A single micro-batch needs no second buffer in bf16."""
    hp = hyperparameters(**changes)
    model = made(hp, None, torch.bfloat16)
    optimizers = Optimizers(model, weights_of(model), hp, Ranks(0, 2), accumulation)
    for part in range(accumulation):
        model.qo_bank.grad += 1.0 if part == 0 else 1 / 512
        optimizers.accumulate()
    shard = optimizers.banks["qo_bank"]
    expected = 1.0 + (accumulation - 1) / 512
    assert (shard.sum[: shard.bank.size(0)] == expected).all() and shard.wire.dtype == shard.shard.dtype == reduce_dtype
    assert (shard.sum is shard.grad) == (accumulation == 1 and not changes)
    assert (shard.sum is shard.wire) == (shard.sum.dtype == reduce_dtype), "nothing is copied that need not be"


def test_tensors_are_all_state(hyperparameters):
    """Fault B11: there it was empty after sharded steps. A copy continues exactly like the original."""
    hp, model, optimizers = prepared(hyperparameters)
    for step in range(3):
        set_gradients(model, step)
        advance(optimizers, 1.0, 0.9)
    state = copy.deepcopy(optimizers.tensors())
    assert {name for name in state if name.endswith(".momentum")} == {f"{bank}.momentum" for bank in train_gpt.BANKS}
    assert all(tensor.any() for tensor in state.values())
    twin = made(hp, seed=5)
    twin.load(weights_of(model))
    continued = Optimizers(twin, weights_of(model), hp, Ranks())
    for name, tensor in continued.tensors().items():
        tensor.zero_()
        tensor.copy_(state[name])
    continued.publish()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)), (
        "the banks are published"
    )
    for step in range(3, 5):
        for m, o in ((model, optimizers), (twin, continued)):
            set_gradients(m, step)
            advance(o, 0.7, 0.9)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_padding_of_banks_for_any_number_of_ranks(hyperparameters):
    """Fault B17: any W. Rows are owned once, padding is less than a row a rank and gets no update."""
    hp = hyperparameters()
    for size in (1, 2, 3, 4, 5, 6, 8, 16, 64):
        shards = [Optimizers(model := made(hp), weights_of(model), hp, Ranks(rank, size)).banks for rank in range(size)]
        for bank in train_gpt.BANKS:
            rows = bank_shape(bank, hp)[0]
            assert all(s[bank].padding == -rows % size == s[bank].working.size(0) - rows for s in shards)
            owned = torch.cat([s[bank].master for s in shards])
            assert torch.equal(owned[:rows], weights_of(model)[bank]) and not owned[rows:].any()
            scales = torch.cat([s[bank].scale for s in shards]).flatten()
            assert (scales[:rows] >= 1).all() and not scales[rows:].any()
            assert s_grad(shards[0][bank])


def s_grad(shard) -> bool:
    """The parameter and its gradient are the first rows of the padded buffers."""
    return shard.bank.data_ptr() == shard.working.data_ptr() and shard.bank.grad.data_ptr() == shard.grad.data_ptr()


def test_the_record_on_8_ranks_pads_22_rows_to_24():
    hp = train_gpt.Hyperparameters()
    shapes = {bank: bank_shape(bank, hp) for bank in train_gpt.BANKS}
    assert shapes == {"qo_bank": (22, 512, 512), "kv_bank": (22, 256, 512), "mlp_bank": (22, 1536, 512)}
    assert {-rows % 8 for rows, _, _ in shapes.values()} == {2}

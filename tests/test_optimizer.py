"""One update against the formulas, written out matrix by matrix; ownership; state."""

import copy

import pytest
import torch
from torch import nn

import train_gpt
from train_gpt import GPT, Optimizers, Ranks, newton_schulz


def prepared(hyperparameters, dtype=torch.float32, **changes):
    hp = hyperparameters(**changes)
    model = GPT(hp, None, dtype).initialise(0)
    return hp, model, Optimizers(model, hp, Ranks())


def set_gradients(model, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad.copy_(torch.randn(parameter.shape, generator=generator) * scale)


@pytest.mark.parametrize("shape", [(3, 64, 64), (2, 64, 192), (2, 192, 64), (1, 1, 7)])
def test_newton_schulz_brings_singular_values_near_one(shape):
    """Against float64 of the same iteration, and within the band that the quintic's fixed points allow."""
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    out = newton_schulz(g, 5)
    assert out.shape == g.shape
    torch.testing.assert_close(out, newton_schulz(g.double(), 5).float(), rtol=1e-3, atol=1e-4)
    singular = torch.linalg.svdvals(out.double())
    directions = torch.linalg.svdvals(g.double()) / g.double().flatten(1).norm(dim=1)[:, None]
    assert (singular[directions > 0.02] > 0.6).all() and (singular < 1.3).all()
    left, _, right = torch.linalg.svd(g.double(), full_matrices=False)
    assert ((left.mT @ out.double() @ right.mT).diagonal(dim1=-2, dim2=-1) > 0).all(), "directions stay, only lengths change"


def test_newton_schulz_keeps_zero_rows_of_a_bank():
    g = torch.randn(4, 8, 16)
    g[2] = 0
    assert not newton_schulz(g, 5)[2].any() and newton_schulz(g, 5).isfinite().all()


def reference_steps(hp, model, gradients, settings):
    """Two updates by the published formulas, one matrix at a time, clip by the norm of the whole gradient."""
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    memory, first, second = {}, {}, {}
    for t, (gradient, (lr_scale, momentum)) in enumerate(zip(gradients, settings, strict=True), start=1):
        norm = torch.cat([g.flatten() for g in gradient.values()]).norm()
        clip = min(1.0, hp.grad_clip_norm / (norm.item() + 1e-6))
        for name, weight in weights.items():
            g = gradient[name] * clip
            if name in train_gpt.BANKS:
                for row in range(len(weight)):
                    key = (name, row)
                    memory[key] = momentum * memory.get(key, torch.zeros_like(g[row])) + g[row]
                    update = newton_schulz((g[row] + momentum * memory[key])[None], hp.muon_backend_steps)[0]
                    lr = lr_scale * hp.matrix_lr
                    weight[row] *= 1 - lr * hp.muon_wd
                    weight[row] -= lr * max(1, weight.size(1) / weight.size(2)) ** 0.5 * update
                continue
            lr = lr_scale * (hp.tied_embed_lr if name in ("tok_emb", "bigram_emb") else hp.scalar_lr)
            first[name] = hp.beta1 * first.get(name, 0) + (1 - hp.beta1) * g
            second[name] = hp.beta2 * second.get(name, 0) + (1 - hp.beta2) * g * g
            weight *= 1 - lr * hp.adam_wd
            weight -= lr * (first[name] / (1 - hp.beta1**t)) / ((second[name] / (1 - hp.beta2**t)).sqrt() + hp.adam_eps)
    return weights


def test_updates_are_the_formulas(hyperparameters):
    """Faults B4 (clip), B16 (each bank once a step): any factor of two would show; fp32 agrees to 1e-4 of an update."""
    hp, model, optimizers = prepared(hyperparameters)
    gradients, settings = [], [(1.0, 0.85), (0.5, 0.9)]
    for seed in (1, 2):
        set_gradients(model, seed)
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = reference_steps(hp, model, gradients, settings)
    for gradient, (lr_scale, momentum) in zip(gradients, settings, strict=True):
        for name, p in model.named_parameters():
            p.grad.copy_(gradient[name])
        optimizers.step(lr_scale, momentum)
    for name, p in model.named_parameters():
        moved = (expected[name] - before[name]).norm()
        assert moved > 0 and (p - expected[name]).norm() < 1e-4 * moved, name
        assert not p.grad.any(), "a step leaves zero gradients"


def test_small_gradients_are_not_clipped(hyperparameters):
    """Muon ignores the length of a gradient, its momentum does not."""
    hp, model, optimizers = prepared(hyperparameters)
    set_gradients(model, 1, scale=1e-5)
    expected = model.qo_bank.grad.clone()
    optimizers.step(1.0, 0.9)
    shard = next(shard for shard in optimizers.banks if shard.bank is model.qo_bank)
    torch.testing.assert_close(shard.momentum, expected)
    set_gradients(model, 1, scale=1.0)
    optimizers.step(1.0, 0.0)
    norm = sum(s.momentum.square().sum() for s in optimizers.banks).sqrt()
    assert norm < hp.grad_clip_norm, "the banks' part of a gradient of norm 0.3"


def test_every_parameter_has_one_owner(hyperparameters):
    """Fault B12: there two parameters belonged to no optimizer and only inflated the clip norm."""
    hp, model, optimizers = prepared(hyperparameters)
    owned = [id(shard.bank) for shard in optimizers.banks] + [id(p) for group in optimizers.adam.param_groups for p in group["params"]]
    assert sorted(owned) == sorted(id(p) for p in model.parameters())
    model.stray = nn.Parameter(torch.zeros(3))
    with pytest.raises(AssertionError, match="stray"):
        Optimizers(model, hp, Ranks())


def test_peak_rates_are_those_of_the_knobs(hyperparameters):
    hp, model, optimizers = prepared(hyperparameters, TIE_EMBEDDINGS=0)
    rates = {id(p): group["peak_lr"] for group in optimizers.adam.param_groups for p in group["params"]}
    assert rates[id(model.tok_emb)] == hp.embed_lr and rates[id(model.lm_head)] == hp.head_lr
    assert rates[id(model.q_gain)] == rates[id(model.bigram_proj)] == hp.scalar_lr
    hp, model, optimizers = prepared(hyperparameters)
    rates = {id(p): group["peak_lr"] for group in optimizers.adam.param_groups for p in group["params"]}
    assert rates[id(model.tok_emb)] == rates[id(model.bigram_emb)] == hp.tied_embed_lr


def test_all_state_is_fp32_also_in_a_bf16_run(hyperparameters):
    """Faults B9 and B10: bf16 moments and momentum lose what is below 1/256 of them."""
    _, model, optimizers = prepared(hyperparameters, torch.bfloat16)
    set_gradients(model, 1)
    optimizers.step(1.0, 0.9)
    state = optimizers.state_dict()
    moments = [t for s in state["adam"]["state"].values() for t in s.values()]
    assert {t.dtype for t in (*moments, *state["momentum"])} == {torch.float32}
    before = model.tok_emb.detach().clone()
    for step in range(3):
        set_gradients(model, step)
        optimizers.step(1e-3, 0.9)
    assert (model.tok_emb != before).float().mean() > 0.99, "an update of 1e-5 of a weight is not lost"


def test_state_dict_holds_everything(hyperparameters):
    """Fault B11: there it was empty after sharded steps. A copy continues exactly like the original."""
    hp, model, optimizers = prepared(hyperparameters)
    for step in range(3):
        set_gradients(model, step)
        optimizers.step(1.0, 0.9)
    state = copy.deepcopy(optimizers.state_dict())
    assert len(state["momentum"]) == len(train_gpt.BANKS) and all(m.any() for m in state["momentum"])
    twin = GPT(hp, None, torch.float32)
    twin.load_state_dict(model.state_dict())
    continued = Optimizers(twin, hp, Ranks())
    continued.load_state_dict(state)
    for step in range(3, 5):
        for m, o in ((model, optimizers), (twin, continued)):
            set_gradients(m, step)
            o.step(0.7, 0.9)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_padding_of_banks_for_any_number_of_ranks(hyperparameters):
    """Fault B17: any W; padding rows stay zero and are dropped."""
    hp = hyperparameters()
    for size in (1, 2, 3, 4, 5, 8, 16, 64):
        model = GPT(hp, None, torch.float32)
        for shard in Optimizers(model, hp, Ranks(0, size)).banks:
            assert shard.grad.size(0) == size * shard.owned >= shard.rows > size * (shard.owned - 1)
            assert shard.bank.grad.data_ptr() == shard.grad.data_ptr() and shard.bank.grad.shape == shard.bank.shape

"""The model against a plain reference in float64, and the properties that the published one lacked."""

import math

import pytest
import torch
import torch.nn.functional as F

import train_gpt
from conftest import made, matrices_of, weights_of
from train_gpt import BOS, GPT, Hyperparameters


def random_model(hp, dtype=torch.float32) -> GPT:
    """A model in which nothing is zero or one, so that every term of the forward matters."""
    attend = train_gpt.load_attention("flash")
    model = made(hp, attend, dtype, 3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def documents(hp, rows=3, length=24) -> torch.Tensor:
    ids = torch.randint(3, hp.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))
    ids[:, 0], ids[1, 9], ids[2, 15] = BOS, BOS, BOS
    return ids


def norm(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def reference_logits(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """The forward written out position by position where that is clearer, in float64, nothing folded or fused."""
    hp, p = model.hp, {name: value.detach().double() for name, value in model.named_parameters()}
    rows = matrices_of(p)
    batch, time = ids.shape
    E, H, K = hp.head_dim, hp.num_heads, hp.num_kv_heads
    x = torch.zeros(batch, time, hp.model_dim, dtype=torch.float64)
    for b in range(batch):
        for t in range(time):
            start = t == 0 or ids[b, t] == BOS
            bucket = hp.bigram_vocab_size - 1
            if not start:
                bucket = ((36313 * int(ids[b, t])) ^ (27191 * int(ids[b, t - 1]))) % bucket
            x[b, t] = norm(p["tok_emb"][ids[b, t]] + p["bigram_scale"] * (p["bigram_proj"] @ p["bigram_emb"][bucket]))
    smeared, gate = x.clone(), torch.sigmoid(p["smear_gate"])
    for b in range(batch):
        for t in range(time):
            before = torch.zeros(hp.model_dim, dtype=torch.float64) if t == 0 or ids[b, t] == BOS else x[b, t - 1]
            smeared[b, t] = (1 - gate) * x[b, t] + gate * before
    x = x0 = smeared
    skips, half, gates = (
        [],
        hp.num_layers // 2,
        1 / (1 + torch.exp(1.5 - p["skip_scale"])) if hp.skip_gates else p["skip_scale"],
    )
    for i in range(hp.num_layers):
        if i >= half and skips:
            x = x + gates[i - half] * skips.pop()
        x = p["resid_mix"][i, 0] * x + p["resid_mix"][i, 1] * x0
        scale = 1 / math.sqrt(i + 1)
        h = norm(x) * scale
        q = norm((h @ rows[f"blocks.{i}.q"].T).view(batch, time, H, E))
        k = norm((h @ rows[f"blocks.{i}.k"].T).view(batch, time, K, E))
        v = (h @ rows[f"blocks.{i}.v"].T).view(batch, time, K, E)
        q, k = turn(q, hp) * p["q_gain"][i][:, None], turn(k, hp)
        y = torch.zeros_like(q)
        for head in range(H):
            kv = head // (H // K)
            scores = torch.einsum("bte,bse->bts", q[:, :, head], k[:, :, kv]) / math.sqrt(E)
            scores = scores.masked_fill(torch.ones(time, time).triu(1).bool(), -math.inf)
            y[:, :, head] = scores.softmax(-1) @ v[:, :, kv]
            if i >= hp.num_layers - hp.xsa_last_n:
                unit = v[:, :, kv] / v[:, :, kv].norm(dim=-1, keepdim=True)
                y[:, :, head] -= (y[:, :, head] * unit).sum(-1, keepdim=True) * unit
        x = x + p["attn_scale"][i] * (y.flatten(2) @ rows[f"blocks.{i}.out"].T)
        hidden = (norm(x) * scale) @ rows[f"blocks.{i}.up"].T
        hidden = torch.where(hidden > 0, hidden, hp.mlp_slope * hidden)
        x = x + p["mlp_scale"][i] * (hidden**2 @ rows[f"blocks.{i}.down"].T)
        if i < half:
            skips.append(x)
    head = p["tok_emb"] if hp.tie_embeddings else p["lm_head"]
    return hp.logit_softcap * torch.tanh(norm(x) @ head.T / hp.logit_softcap)


def turn(x, hp):
    """RoPE as complex rotation of pairs (j, j + half) of the first dimensions."""
    rotated = hp.rope_dims or hp.head_dim
    half = rotated // 2
    angle = torch.arange(x.size(1))[:, None, None] * hp.rope_base ** (-torch.arange(0, rotated, 2).double() / rotated)
    turned = torch.complex(x[..., :half], x[..., half:rotated]) * torch.exp(-1j * angle)
    return torch.cat((turned.real, turned.imag, x[..., rotated:]), dim=-1)


@pytest.mark.parametrize("changes", [{}, {"TIE_EMBEDDINGS": 0}, {"ROPE_DIMS": 0, "NUM_KV_HEADS": 4}, {"NUM_LAYERS": 4, "XSA_LAST_N": 4},
                                     {"SKIP_GATES": 0, "MLP_SLOPE": 0}])  # fmt: skip
def test_forward_is_the_reference(hyperparameters, changes):
    """fp32 against fp64: the tolerance is some hundred roundings of 6e-8 through 4 layers; a wrong term is over 1e-2."""
    model = random_model(hyperparameters(**changes))
    ids = documents(model.hp)
    expected, found = reference_logits(model, ids), model(ids)
    assert found.dtype == torch.float32
    assert (found.double() - expected).abs().max() / expected.abs().max() < 2e-5


def test_one_forward_gives_loss_nats_and_logits(hyperparameters):
    model = random_model(hyperparameters())
    ids = documents(model.hp)
    x, y = ids[:, :-1], ids[:, 1:]
    nats = model(x, y, reduction="none")
    expected = -model(x).log_softmax(-1).gather(-1, y[..., None])[..., 0]
    assert nats.shape == y.shape
    torch.testing.assert_close(nats, expected)
    torch.testing.assert_close(model(x, y), expected.mean())


def test_parameter_count_of_the_record():
    hp = Hyperparameters()
    with torch.device("meta"):
        model = GPT(hp, None, torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == 26_829_913
    assert {name: tuple(getattr(model, name).shape) for name in train_gpt.BANKS} == {
        "qo_bank": (22, 512, 512), "kv_bank": (22, 256, 512), "mlp_bank": (22, 1536, 512),
    }  # fmt: skip


def test_initialisation(hyperparameters):
    hp = hyperparameters()
    model = made(hp, None, torch.float32, 1)
    for kind in train_gpt.MATRICES:
        for matrix in train_gpt.bank_part(getattr(model, kind.bank).detach(), kind):
            if kind.zero:
                assert not matrix.any()
            else:
                small = matrix if matrix.size(0) <= matrix.size(1) else matrix.T
                torch.testing.assert_close(small @ small.T, torch.eye(len(small)), atol=1e-5, rtol=0)
    again, other = (made(hp, None, torch.float32, seed) for seed in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not torch.equal(model.qo_bank, other.qo_bank)


def test_only_banks_and_arithmetic_are_in_the_compute_dtype(hyperparameters):
    """Fault B9: bf16 embeddings lost most of their late updates. The banks' fp32 weights are the optimizer's."""
    model = random_model(hyperparameters(), torch.bfloat16)
    assert {p.dtype for name, p in model.named_parameters() if name not in train_gpt.BANKS} == {torch.float32}
    assert {getattr(model, bank).dtype for bank in train_gpt.BANKS} == {torch.bfloat16}
    seen = []
    model.attend = lambda q, k, v: seen.append((q.dtype, k.dtype, v.dtype)) or q
    assert model(documents(model.hp)).dtype == torch.float32
    assert set(seen) == {(torch.bfloat16,) * 3}
    assert model.embed(documents(model.hp)).dtype == torch.bfloat16


def test_rope_does_not_depend_on_the_lengths(hyperparameters):
    """Fault B6: #399 rescaled its base whenever a sequence was longer than 1,024."""
    short = train_gpt.rotary_tables(hyperparameters())
    long = train_gpt.rotary_tables(hyperparameters(EVAL_SEQ_LEN=4096))
    assert long[0].size(0) == 4096
    for a, b in zip(short, long, strict=True):
        assert torch.equal(a, b[: len(a)])
    record = train_gpt.rotary_tables(Hyperparameters())[0]
    assert record.shape == (2048, 1, 8)
    assert record[2047, 0, 1].item() == pytest.approx(math.cos(2047 * 10000 ** (-2 / 16)), abs=1e-6)


def test_nothing_but_attention_looks_across_a_document_start(hyperparameters):
    """Fault B15: smear and bigram features took the last token of the document before."""
    model = random_model(hyperparameters())
    ids = documents(model.hp)
    changed = ids.clone()
    changed[1, :9] = (ids[1, :9] + 1) % model.hp.vocab_size
    assert torch.equal(model.embed(ids)[1, 9:], model.embed(changed)[1, 9:])
    assert not torch.equal(model.embed(ids)[1, 8], model.embed(changed)[1, 8])


def test_scores_are_causal(hyperparameters):
    model = random_model(hyperparameters())
    ids = documents(model.hp)
    changed = ids.clone()
    changed[:, 17:] = 7
    assert torch.equal(model(ids)[:, :17], model(changed)[:, :17])


def test_evaluation_before_training_does_not_spoil_it(hyperparameters):
    """Fault B6b: a rotary cache filled under inference mode made the next backward fail."""
    model = random_model(hyperparameters())
    ids = documents(model.hp)
    with torch.inference_mode():
        model(ids)
    model(ids[:, :-1], ids[:, 1:]).backward()
    assert model.qo_bank.grad.isfinite().all()


def test_folded_gains_have_the_gradients_of_gains(hyperparameters):
    """Folding must change neither the loss nor the gradient of the gain: against finite differences in the loss."""
    model = random_model(hyperparameters()).double()
    model.dtype, ids = torch.float64, documents(model.hp)
    model(ids[:, :-1], ids[:, 1:]).backward()
    for gain in (model.attn_scale, model.mlp_scale):
        expected, step = gain.grad[1, 3].item(), 0.05
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                gain[1, 3] += sign * step
                losses.append(model(ids[:, :-1], ids[:, 1:]).item())
                gain[1, 3] -= sign * step
        # The loss is rounded to fp32 (5e-7) and the step is finite; the gradients themselves are about 5e-3.
        assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(expected, rel=0.05, abs=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_late_qat_acts_on_the_banks(hyperparameters, compiled):
    """Fault B1: there the switch reached no bank, and the compiled graph did not notice it at all."""
    model = random_model(hyperparameters())
    ids = documents(model.hp)
    forward = torch.compile(model, dynamic=False, fullgraph=True) if compiled else model
    plain, rounded = (forward(ids[:, :-1], ids[:, 1:], "none", qat=qat) for qat in (False, True))
    assert (plain - rounded).abs().mean() > 1e-2
    rounded.mean().backward()
    weights = weights_of(model)
    for kind in train_gpt.MATRICES:
        matrices = train_gpt.bank_part(weights[kind.bank], kind)
        codes, scale = train_gpt.quantise_rows(matrices, kind.bits, kind.clip)
        matrices.copy_(codes * scale)
    model.load(weights)
    exported = model(ids[:, :-1], ids[:, 1:], "none")
    assert (rounded - exported).abs().mean() < 1e-4, "training sees the weights that are exported"
    assert model.mlp_bank.grad[-1].norm() > 0, "gradients pass straight through"


def test_attention_kernel_is_chosen_and_a_missing_one_is_only_noted(hyperparameters):
    """Fault B18: #399 needs flash_attn_interface to be imported at all."""
    for wanted, chosen in (("auto", "flash"), ("math", "math"), ("fa3", "flash"), ("torch-fa4", "flash")):
        name, attend, refused = train_gpt.choose_attention(
            hyperparameters(ATTENTION=wanted), torch.device("cpu"), torch.float32, False
        )
        assert name == chosen
        assert len(refused) == (wanted not in ("auto", chosen)) and all(wanted in note for note in refused)
        for time in (6, train_gpt.WRITTEN_OUT, train_gpt.WRITTEN_OUT + 1):
            q, k, v = torch.randn(1, time, 4, 8), torch.randn(1, time, 2, 8), torch.randn(1, time, 2, 8)
            mask = torch.ones(time, time).tril().bool()
            expected = F.scaled_dot_product_attention(
                *(t.transpose(1, 2) for t in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))), mask
            )
            torch.testing.assert_close(attend(q, k, v), expected.transpose(1, 2))


def test_efficient_attention_gets_heads_without_groups(monkeypatch):
    """torch's kernel for fp32 on a GPU takes as many keys as queries; here only what it is given can be seen."""
    given = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **how: given.append((q, k, v, how)) or v)
    q, k, v = torch.randn(1, 6, 4, 8), torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 8)
    try:
        out = train_gpt.load_attention("efficient")(q, k, v)
        assert torch.backends.cuda.mem_efficient_sdp_enabled() and not torch.backends.cuda.math_sdp_enabled()
    finally:
        train_gpt.load_attention("flash")
    ((q, k_given, v_given, how),) = given
    assert q.shape == k_given.shape == v_given.shape == (1, 4, 6, 8) and how == {"is_causal": True, "enable_gqa": False}
    assert all(
        torch.equal(k_given[:, head], k[:, :, head // 2]) and torch.equal(out[:, :, head], v[:, :, head // 2])
        for head in range(4)
    )


def test_kernel_that_raises_anything_is_passed_over(hyperparameters, monkeypatch):
    """A build of the kernel with another signature must cost a note, not the run."""
    real = train_gpt.load_attention
    monkeypatch.setattr(
        train_gpt, "load_attention", lambda name: (lambda q, k, v: (1, 2, 3, 4, 5)) if name == "flash" else real(name)
    )
    name, _, refused = train_gpt.choose_attention(hyperparameters(), torch.device("cpu"), torch.float32, False)
    assert name == "math" and "AttributeError" in refused[0]


def test_compiling_needs_what_it_needs(monkeypatch):
    """A laptop without a compiler trains eagerly and is told why; COMPILE=0 and 1 are obeyed."""
    cpu = torch.device("cpu")
    assert train_gpt.choose_compile("0", cpu) == (False, []) and train_gpt.choose_compile("1", cpu) == (True, [])
    monkeypatch.setattr(train_gpt.shutil, "which", lambda name: None)
    compiled, (note,) = train_gpt.choose_compile("auto", cpu)
    assert not compiled and "a C++ compiler is missing" in note


def test_dtype_is_bf16_only_where_it_is_fast(monkeypatch):
    cpu = torch.device("cpu")
    assert (
        train_gpt.choose_dtype("float32", cpu) is torch.float32
        and train_gpt.choose_dtype("bfloat16", cpu) is torch.bfloat16
    )
    for amx, avx, expected in (
        (True, False, torch.bfloat16),
        (False, True, torch.bfloat16),
        (False, False, torch.float32),
    ):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx, raising=False)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda avx=avx: avx, raising=False)
        assert train_gpt.choose_dtype("auto", cpu) is expected

"""The model against a plain reference in float64, and against the faults of #399's model."""

import math
import os
import runpy
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import train_gpt
from conftest import ROOT, made, matrices_of, noise, quantised, run, weights_of
from train_gpt import BOS, GPT, Hyperparameters


def random_model(hp, dtype=torch.float32) -> GPT:
    """A model in which no parameter is zero or one, so that every term of the forward matters."""
    return noise(made(hp, train_gpt.load_attention("sdpa"), dtype, 3), seed=5)


def documents(hp, rows=3, length=24) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, hp.vocab_size, (rows, length), generator=generator)
    ids[:, 0], ids[1, 9], ids[2, 15] = BOS, BOS, BOS
    return ids


def norm(x):
    return x / (x.square().mean(-1, keepdim=True) + train_gpt.NORM_EPS).sqrt()


def in_double(model: GPT) -> dict[str, torch.Tensor]:
    return {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}


def mudd_sums(x, sources, hidden, weights):
    """Of each group of rows in `weights` (sums, sources, hidden + 1): unit by unit."""
    unit = x / x.norm(dim=-1, keepdim=True)
    units = [F.gelu(unit @ row) for row in hidden]
    units = torch.stack([*units, torch.ones_like(units[0])], dim=-1) / len(hidden)
    # Two layers have no third source.
    pairs = [zip(sources, way, strict=False) for way in weights]
    return [sum((units @ row)[..., None] * source for source, row in way) for way in pairs]


def reference_logits(hp: Hyperparameters, p: dict, ids: torch.Tensor) -> torch.Tensor:
    """The forward in float64, position by position, without folding or fusing."""
    rows = matrices_of(p)
    batch, time = ids.shape
    E, H, K = hp.head_dim, hp.num_heads, hp.num_kv_heads
    x, inputs = torch.zeros(batch, time, hp.model_dim, dtype=torch.float64), train_gpt.GATE_INPUTS
    for b in range(batch):
        for t in range(time):
            bucket = hp.bigram_vocab_size - 1
            if t == 0 or ids[b, t] == BOS:
                before = torch.zeros(hp.model_dim, dtype=torch.float64)
            else:
                bucket = ((36313 * int(ids[b, t])) ^ (27191 * int(ids[b, t - 1]))) % bucket
            pair = p["bigram_proj"] @ p["bigram_emb"][bucket]
            token = p["tok_emb"][ids[b, t]] + p["bigram_scale"] * pair
            if hp.smear_token:
                factor, *weights = p["smear_gate"]
                gate = factor * torch.sigmoid(torch.stack(weights) @ token[:inputs])
                x[b, t] = norm(token + gate * before)
            else:
                token, gate = norm(token), torch.sigmoid(p["smear_gate"])
                x[b, t] = (1 - gate) * token + gate * before
            before = token
    x0 = x
    skips, streams, gates = [], [], p["skip_scale"]
    gates = torch.sigmoid(gates) if hp.skips == "gates" else gates
    order = list(range(hp.num_layers))
    for _ in range(hp.loop_visits - 1):
        last = hp.loop_first + hp.loop_layers
        order[last:last] = range(hp.loop_first, last)
    half, lane = len(order) // 2, None
    visible = torch.ones(time, time).tril().bool().expand(batch, -1, -1)
    if hp.doc_attention:
        number = (ids == BOS).cumsum(1)
        visible = visible & (number[:, :, None] == number[:, None])
    within = torch.ones(time, time).triu(1 - (hp.attn_window or time)).bool()
    for place, i in enumerate(order):
        seen = visible & within if i < hp.num_layers - round(hp.num_layers / 4) else visible
        # Number of the layer among those with two lanes
        parallel = i - (hp.num_layers - hp.lanes_last_n)
        streams.append(x)
        mudd, value = hp.mudd and place == len(order) - 1, 0
        if mudd:
            sources, ways = (x0, x, *streams[-3:-2]), p["mudd_out"].view(3, 3, -1)
            residual, value = mudd_sums(x, sources, p["mudd_in"][0], ways[:2])
            x = x + residual
        lane = x if parallel == 0 else lane
        if place >= half and skips:
            skip = gates[place - half] * skips.pop()
            if hp.skips == "lerp":
                keep = torch.sigmoid(p["skip_gate"][place - half])
                x = (1 - keep) * skip + keep * x
            else:
                x = x + skip
        mixed = p["resid_mix"][i, 0] * x + p["resid_mix"][i, 1] * x0
        scale = 1 / math.sqrt(i + 1)
        h = norm(mixed) * scale
        q = norm((h @ rows[f"blocks.{i}.q"].T).view(batch, time, H, E))
        k = norm((h @ rows[f"blocks.{i}.k"].T).view(batch, time, K, E))
        v = ((h + scale * value) @ rows[f"blocks.{i}.v"].T).view(batch, time, K, E)
        q, k = turn(q, hp) * p["q_gain"][i][:, None], turn(k, hp)
        k, v = (heads.repeat_interleave(H // K, dim=2) for heads in (k, v))
        scores = torch.einsum("bthe,bshe->bhts", q, k) / math.sqrt(E)
        weights = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)
        y = torch.einsum("bhts,bshe->bthe", weights, v)
        if i >= hp.num_layers - hp.xsa_last_n:
            unit = v / v.norm(dim=-1, keepdim=True)
            y = y - (y * unit).sum(-1, keepdim=True) * unit
        if hp.attn_gate:
            gate = torch.einsum("btd,hd->bth", h[..., :inputs], p["attn_gate"][i])
            y = y * torch.sigmoid(gate / 2)[..., None]
        y = p["attn_scale"][i] * (y.flatten(2) @ rows[f"blocks.{i}.out"].T)
        source = mixed + y if parallel < 0 else lane
        hidden = (norm(source) * scale) @ rows[f"blocks.{i}.up"].T
        hidden = torch.where(hidden > 0, hidden, hp.mlp_slope * hidden)
        change = p["mlp_scale"][i] * (hidden**2 @ rows[f"blocks.{i}.down"].T)
        if hp.mlp_gate:
            *weights, bias = p["mlp_gate"][i]
            gate = torch.sigmoid(source[..., :inputs] @ torch.stack(weights) + bias)
            change = gate[..., None] * change
        if parallel < 0:
            x = mixed + y + change
        else:
            (a, b, c), (d, e, f) = p["lane_mix"][parallel]
            x, lane = a * x + b * y + c * change, d * lane + e * y + f * change
        if place < half:
            skips.append(x)
    x = x if lane is None else x + lane
    if hp.mudd:
        [residual] = mudd_sums(x, sources, p["mudd_in"][1], ways[2:])
        x = x + residual
    return hp.logit_softcap * torch.tanh(norm(x) @ p["tok_emb"].T / hp.logit_softcap)


def turn(x, hp):
    """RoPE as complex rotation of pairs (j, j + half) of the first dimensions."""
    rotated = hp.rope_dims or hp.head_dim
    half = rotated // 2
    frequency = hp.rope_base ** (-torch.arange(0, rotated, 2).double() / rotated)
    angle = torch.arange(x.size(1))[:, None, None] * frequency
    turned = torch.complex(x[..., :half], x[..., half:rotated]) * torch.exp(-1j * angle)
    return torch.cat((turned.real, turned.imag, x[..., rotated:]), dim=-1)


SMEARED = {"SMEAR_TOKEN": 1, "SKIPS": "lerp"}
LOOP = {"LOOP_VISITS": 3, "LOOP_FIRST": 1, "LOOP_LAYERS": 2}
VARIANTS = (
    {},
    {"ROPE_DIMS": 0, "NUM_KV_HEADS": 4, "DOC_ATTENTION": 1},
    {"NUM_LAYERS": 4, "XSA_LAST_N": 4, "SKIPS": "scales", "MLP_SLOPE": 0},
    {"NUM_LAYERS": 4, "LANES_LAST_N": 2, "MLP_GATE": 1, "ATTN_WINDOW": 3},
    {"NUM_LAYERS": 2, "MUDD": 1},
    {"NUM_LAYERS": 4, "MUDD": 1},
    {"NUM_LAYERS": 5, **LOOP, "SMEAR_TOKEN": 1},
    {"NUM_LAYERS": 4, **LOOP, "LOOP_FIRST": 0, "LANES_LAST_N": 1, "ATTN_GATE": 1},
    {"NUM_LAYERS": 6, **LOOP, "LANES_LAST_N": 2, "DOC_ATTENTION": 1, "ATTN_WINDOW": 7},
    {"NUM_LAYERS": 5, **LOOP, "LANES_LAST_N": 2, "MLP_GATE": 1, "MUDD": 1, **SMEARED},
    {"NUM_LAYERS": 3, **LOOP, "MUDD": 1},
)


@pytest.mark.parametrize("changes", VARIANTS)
def test_forward_and_gradients_are_the_reference(hyperparameters, changes):
    """Also fault B15: in #399 smear and bigram use the last token of the previous document, and B6b:
    there a rotary cache filled in inference mode makes the next backward fail. The tolerance allows
    a few hundred fp32 roundings of 6e-8. A wrong term is over 1e-2."""
    model = random_model(hyperparameters(**changes))
    ids, exact = documents(model.hp), in_double(model)
    expected = reference_logits(model.hp, exact, ids)
    with torch.inference_mode():
        model(ids)
    found = model(ids)
    assert (found.double() - expected).abs().max() / expected.abs().max() < 2e-5
    expected = torch.autograd.grad(expected.square().sum(), exact.values(), materialize_grads=True)
    found = torch.autograd.grad(found.square().sum(), model.parameters(), materialize_grads=True)
    for name, right, grad in zip(exact, expected, found, strict=True):
        assert (grad - right).norm() <= 1e-4 * right.norm(), name


def test_attention_gets_the_narrower_of_window_and_band(hyperparameters):
    """None if the sequence is no longer: then all layers have one graph, and no mask."""
    wide = (24, 0, [0, 0]), (99, 0, [0, 0]), (0, 24, [0, 0])
    for window, band, bands in (*wide, (8, 0, [8, 0]), (8, 5, [5, 5]), (8, 12, [8, 12])):
        seen, model = [], made(hyperparameters(NUM_LAYERS=3, ATTN_WINDOW=window))
        model.attend = lambda q, k, v, band, *_, seen=seen: seen.append(band) or q
        model(documents(model.hp), config=train_gpt.ForwardConfig((0, 2), band=band))
        assert seen == bands, (window, band)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "parts", [{}, {"NUM_LAYERS": 5, **LOOP, "LANES_LAST_N": 1, **SMEARED}, {"NUM_LAYERS": 2}]
)
def test_mudd_changes_nothing_at_first(hyperparameters, parts, dtype):
    """Not a bit of the loss, initial weights and other gradients. Then it learns."""
    results, attend = [], train_gpt.load_attention("math")
    for mudd in (0, 1):
        model = made(hyperparameters(XSA_LAST_N=1, **parts, MUDD=mudd), attend, dtype)
        initial, ids = weights_of(model), documents(model.hp)
        if not mudd:
            weights = weights_of(noise(model))
        model.load_state_dict(initial | weights)
        loss = model(ids, ids)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        results += [initial, {"loss": loss} | dict(zip(initial, grads, strict=True))]
    before, plain, after, found = results
    assert found.keys() - plain.keys() == {"mudd_in", "mudd_out"}
    for first, second in (before, after), (plain, found):
        assert all(torch.equal(second[name], tensor) for name, tensor in first.items())
    assert found["mudd_out"].norm() > 0
    with torch.no_grad():
        model.mudd_out.sub_(found["mudd_out"])
        assert model(ids, ids) < loss


@pytest.fixture
def with_activation(tmp_path):
    """A function that returns train_gpt.py with another formula in `activation`, as a module."""

    def load(formula: str):
        source = (ROOT / "train_gpt.py").read_text()
        assert source.count(SQUARED) == 1
        (tmp_path / "edited.py").write_text(source.replace(SQUARED, formula))
        return SimpleNamespace(**runpy.run_path(str(tmp_path / "edited.py"), run_name="edited"))

    return load


DEEP = LOOP | {"LANES_LAST_N": 2, "SKIPS": "lerp"}
GATES = {"ATTN_GATE": 1, "MLP_GATE": 1, "DOC_ATTENTION": 1}


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize(
    ("parts", "kinds"),
    [
        ({}, 8),
        ({"ATTN_WINDOW": 8}, 8),  # the layers without a window are those with XSA
        (DEEP | GATES | {"ATTN_WINDOW": 8}, 9),
        (DEEP | GATES | {"MUDD": 1}, 10),
        ({"SKIPS": "scales", "LANES_LAST_N": 1}, 9),
    ],
)
def test_compiled_blocks_compute_what_the_model_does(
    parts, kinds, adapted, hyperparameters, monkeypatch
):
    """All gradients too, with a graph for each kind of layer and four more, for any depth."""
    for layers in (8, 10):
        hp = hyperparameters(NUM_LAYERS=layers, EVAL_SEQ_LEN=64, **parts)
        # With seed 5 the gradient of `bigram_scale` cancels to 0.0002 of 0.1 to 0.4.
        model = noise(made(hp, train_gpt.load_attention("math")), seed=6)
        counter = CompileCounterWithBackend("aot_eager")
        compiling = partial(torch.compile, backend=counter, dynamic=False, fullgraph=True)
        monkeypatch.setattr(train_gpt, "compile_whole", lambda f, _, c=compiling: c(f))
        torch._dynamo.reset()
        ids, sought, adapter, results = documents(hp), list(model.parameters()), None, []
        if adapted:
            adapter = train_gpt.lora_adapter(hp, torch.device("cpu"))
            adapter = {n: f.repeat(3, 1, 1, 1) + 0.1 for n, f in adapter.items()}
            sought = [factor.requires_grad_() for factor in adapter.values()]
            model.requires_grad_(False)
        for forward in (model, train_gpt.compile_blocks(model, True)):
            loss = forward(ids, ids, adapter=adapter)
            results.append([loss, *torch.autograd.grad(loss, sought)])
        for right, found in zip(*results, strict=True):
            assert (found - right).norm() <= 1e-5 * right.norm() + 1e-9
        assert counter.frame_count == kinds


SQUARED = "F.leaky_relu(z, hp.mlp_slope).square()"
CURVED = (
    "F.gelu(z)",
    "F.gelu(z) if hp.num_layers == 2 else F.relu(z).square()",
    "F.elu(z).square()",
    "F.silu(z).square()",
    "F.relu(z)",
    "F.relu(z - 1).square()",
    "z**2 + 1",
)


@pytest.mark.parametrize("formula", [SQUARED, "z * z.abs()", "F.relu(z).square()", *CURVED])
def test_any_activation_reads_the_normalised_stream(formula, hyperparameters, with_activation):
    """README: edit `activation` alone. The norm was a factor after it, right for degree 2 only."""
    script = with_activation(formula)
    model = noise(made(hyperparameters(NUM_LAYERS=2)))
    model.homogeneous = script.is_homogeneous(model.hp)
    assert model.homogeneous is (formula not in CURVED)
    (_, layer), *_ = model.layers(train_gpt.ForwardConfig(model.hp.layer_order()), 1, {}, None)
    stream = 3 * torch.randn(2, 5, model.hp.model_dim, generator=torch.Generator().manual_seed(1))
    up, down = layer.up.weight.double(), layer.down.weight.double()
    expected = script.activation(norm(stream.double()) @ up.T, model.hp) @ down.T
    found = script.GPT.mlp(model, stream, layer).double()
    assert (found - expected).norm() < 2e-6 * expected.norm()


def test_an_import_starts_no_thread(with_activation):
    """A program that forks afterwards hung: a product in the child waited for a thread for ever."""
    folder = os.path.dirname(with_activation("F.gelu(z)").__file__)
    environ = os.environ | {"OMP_NUM_THREADS": "4", "PYTHONPATH": f"{folder}:{ROOT}"}
    counts = set()
    for name in ("edited", "train_gpt"):
        code = f"import os, {name}; print(len(os.listdir('/proc/self/task')))"
        counts.add(subprocess.check_output([sys.executable, "-c", code], env=environ))
    assert len(counts) == 1


def test_calibration_is_the_same_if_the_norm_comes_first(hyperparameters):
    model, found = random_model(hyperparameters()), []
    for model.homogeneous in (True, False):
        calibration = train_gpt.Calibration(model, 69)
        calibration.add(documents(model.hp))
        found.append(calibration.sums)
    for name, expected in found[0].items():
        assert expected.norm() > 0
        torch.testing.assert_close(found[1][name], expected, rtol=1e-3, atol=1e-3 * expected.std())


def test_the_seed_decides_the_initial_weights(hyperparameters):
    one, again, other = (made(hyperparameters(), seed=seed) for seed in (1, 1, 2))
    assert all(map(torch.equal, one.parameters(), again.parameters()))
    assert not torch.equal(one.qo_bank, other.qo_bank)


def test_only_banks_and_arithmetic_are_in_the_compute_dtype(hyperparameters):
    """Fault B9: bf16 embeddings lose most of their late updates."""
    model = random_model(hyperparameters(), torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.bfloat16 if name in train_gpt.BANKS else torch.float32)
    seen, embed = [], model.embed
    model.attend = lambda *qkv_band_document: seen.extend(qkv_band_document[:3]) or seen[-3]
    model.embed = lambda *inputs: seen.append(embed(*inputs)) or seen[-1]
    assert model(documents(model.hp)).dtype == torch.float32
    assert len(seen) == 1 + 3 * model.hp.num_layers
    assert {tensor.dtype for tensor in seen} == {torch.bfloat16}


def test_rope_does_not_depend_on_the_lengths(hyperparameters):
    """Fault B6: #399 rescales its base for every sequence longer than 1,024."""
    every = hyperparameters(), hyperparameters(EVAL_SEQ_LEN=4096), Hyperparameters()
    short, long, record = (GPT(hp, None, torch.float32) for hp in every)
    assert long.cos.size(0) == 4096
    for a, b in ((short.cos, long.cos), (short.sin, long.sin)):
        assert torch.equal(a, b[: len(a)])
    assert record.cos.shape == (2048, 1, 8)
    expected = math.cos(2047 * 10000 ** (-2 / 16))
    assert record.cos[2047, 0, 1].item() == pytest.approx(expected, abs=1e-6)


def test_a_value_of_zero_leaves_attention_as_it_is():
    y, v = torch.randn(1, 3, 4, 8), torch.randn(1, 3, 2, 8)
    v[0, 1] = 0
    found = train_gpt.xsa(y, v)
    assert torch.equal(found[0, 1], y[0, 1])
    assert (found.unflatten(2, (2, 2)) * v[:, :, :, None]).sum(dim=-1).abs().max() < 1e-5


def test_second_moments_alone_use_tensor_cores(hyperparameters):
    """Their fp32 sums use TF32 on a GPU. Afterwards all is as it was, also after an error."""
    hook, matmul = train_gpt.Calibration(made(hyperparameters()), 16), torch.backends.cuda.matmul
    before, seen = matmul.fp32_precision, []

    def addmm_(rows, columns):
        seen.append(matmul.fp32_precision)
        raise KeyboardInterrupt

    hook.sums["q"] = [SimpleNamespace(addmm_=addmm_)]
    with pytest.raises(KeyboardInterrupt):
        hook.observe(train_gpt.MATRICES[0], 0, torch.ones(2, 32))
    assert seen == ["tf32"] and matmul.fp32_precision == before != "tf32"


@pytest.mark.parametrize("compiled", [False, True])
def test_late_qat_acts_on_the_banks(hyperparameters, compiled):
    """Fault B1: in #399 the switch reaches no bank, and the compiled graph does not see it."""
    model = random_model(hyperparameters(NUM_LAYERS=1, XSA_LAST_N=1))
    ids, forward = documents(model.hp), model
    given = ids[:, :-1], ids[:, 1:], "none"
    if compiled:
        forward = torch.compile(model, backend="aot_eager", dynamic=False, fullgraph=True)
    plain = forward(*given)
    rounded = forward(*given, train_gpt.ForwardConfig(model.hp.layer_order(), qat=True))
    assert (plain - rounded).abs().mean() > 1e-2
    rounded.mean().backward()
    weights = weights_of(model)
    for kind in train_gpt.MATRICES:
        matrices = train_gpt.bank_part(weights[kind.bank], kind)
        codes, steps = quantised(matrices)
        matrices.copy_(codes * steps)
    model.load_state_dict(weights)
    error = (rounded - model(*given)).abs().mean()
    assert error < 1e-4, "training sees the weights that are exported"
    assert model.mlp_bank.grad[-1].norm() > 0, "gradients pass straight through"


@pytest.mark.parametrize("name", [name for name in train_gpt.KERNELS if name != "fa3"])
def test_only_the_chosen_kernels_of_torch_are_enabled(name, monkeypatch):
    """Else torch would silently fall back to another one than the log says."""
    given, kinds = [], ("cudnn", "flash", "mem_efficient", "math")
    q, k, v = (torch.randn(1, 900, heads, 8) for heads in (4, 2, 2))
    try:
        attend = train_gpt.load_attention(name)
        enabled = [kind for kind in kinds if getattr(torch.backends.cuda, f"{kind}_sdp_enabled")()]
        assert torch.compiler.config.cache_key_tag == name, "or a cached graph has another kernel"
    finally:
        train_gpt.load_attention("sdpa")
    assert enabled == (["flash", "mem_efficient"] if name == "sdpa" else [name])
    noted = lambda q, k, v, **how: given.append((k, how)) or q  # noqa: E731
    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    attend(q, k, v)
    attend(*(x.to("meta") for x in (q, k, v)))
    (keys, how), (elsewhere, _) = given
    assert how == {"attn_mask": None, "is_causal": True, "enable_gqa": True}
    assert torch.equal(keys, k.transpose(1, 2))
    # torch's kernel for fp32 or a mask on a GPU has no grouped-query form
    assert elsewhere.size(1) == (4 if name == "sdpa" else 2)


REPEATED = """if True:
    import sys; sys.path.insert(0, {root!r})
    import torch, torch._inductor.utils, train_gpt
    torch.set_num_threads(2)
    table = torch.randn(64, 32, requires_grad=True)
    ids, factors = torch.randint(0, 64, (64, 1024)), torch.randn(64, 1024, 32)
    hp = train_gpt.Hyperparameters(device="cpu", compile="1")
    with torch._inductor.utils.fresh_cache(), train_gpt.Runtime.start(hp):
        loss = train_gpt.compile_whole(lambda: (torch.nn.functional.embedding(ids, table) * factors).sum(), True)
        print(len({{torch.autograd.grad(loss(), table)[0].numpy().tobytes() for _ in range(10)}}))"""


def test_compiled_gradients_of_an_embedding_repeat_bit_for_bit(tmp_path):
    """Threads that add to one row as they arrive gave 6 results in 10 repetitions."""
    result = run(["-c", REPEATED.format(root=str(ROOT))], {}, tmp_path)
    assert result.stdout.split() == ["1"], result.stderr


def test_dtype_is_bf16_only_where_it_is_fast(monkeypatch):
    cpu = torch.device("cpu")
    assert train_gpt.choose_dtype("float32", cpu) is torch.float32
    assert train_gpt.choose_dtype("bfloat16", cpu) is torch.bfloat16
    for amx, avx in ((True, False), (False, True), (False, False)):
        for name, has in (("_is_amx_tile_supported", amx), ("_is_avx512_bf16_supported", avx)):
            monkeypatch.setattr(torch.cpu, name, lambda has=has: has, raising=False)
        expected = torch.bfloat16 if amx or avx else torch.float32
        assert train_gpt.choose_dtype("auto", cpu) is expected


def test_training_cuts_long_documents_and_evaluation_does_not(run_of, monkeypatch):
    """DOC_LEN is for the positions that training sees: also those that GPTQ calibrates on."""
    ids = torch.tensor([[5, 5, 5, 1, 5, 5, 5, 5, 1, 1]])
    assert train_gpt.number_documents(ids).tolist() == [[0, 0, 0, 1, 1, 1, 1, 1, 2, 3]]
    assert train_gpt.number_documents(ids, 2).tolist() == [[1, 1, 2, 3, 3, 4, 4, 5, 6, 7]]
    run, seen = run_of(val=True, DOC_ATTENTION=1, DOC_LEN=8, GPTQ_BATCHES=1), []
    real, attend = train_gpt.number_documents, run.model.attend
    noted = lambda ids, limit: seen.append(limit) or real(ids, limit)  # noqa: E731
    monkeypatch.setattr(train_gpt, "number_documents", noted)
    run.model.attend = lambda *given: seen.append(given[-1]) or attend(*given)  # the longest
    run.train_step(0, next(iter(train_gpt.phases(run.hp))))
    run.calibrate(range(1))
    assert set(seen) == {8} and len(seen) > 1
    train_gpt.validation_pass(run.hp).run(run.make_scorer, run.log, "score")
    assert seen[-1] == 0

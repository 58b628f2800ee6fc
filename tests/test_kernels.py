"""Which attention kernel and which form of the MLP a run takes, and the check of its gradients."""

import collections
import copy
import dataclasses
import math
import sys
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import train_gpt
from conftest import user_error


# ---- On a CPU ------------------------------------------------------------------------------------
@pytest.mark.parametrize("wanted, chosen", [("auto", "sdpa"), ("math", "math")])
def test_a_cpu_takes_the_first_kernel_that_runs(wanted, chosen, one_rank):
    """Fault B18: #399 cannot even be imported without flash_attn_interface."""
    _, runtime = one_rank(ATTENTION=wanted)
    assert runtime.attention == chosen and not runtime.notes
    for time in (6, train_gpt.PLAIN_ATTENTION, train_gpt.PLAIN_ATTENTION + 1):
        qkv = [torch.randn(1, time, heads, 8) for heads in (4, 2, 2)]
        torch.testing.assert_close(runtime.attend(*qkv), train_gpt.reference_attention(*qkv))


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=8)  # loads the next one
@torch._functorch.config.patch(autograd_cache_allow_custom_autograd_functions=False)
def test_a_warm_start_takes_graphs_with_our_own_backward_from_the_cache(monkeypatch):
    """torch does not keep them by default, so a warm start took half as long as a cold one."""
    x, gain = torch.randn(2, 8, 2, 4, requires_grad=True), torch.ones(2, 1, requires_grad=True)
    factors = torch.randn(2, 8, 1, 1).unbind()

    def caches() -> tuple[collections.Counter, torch.Tensor]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        forward = train_gpt.compile_whole(train_gpt.NormRotate.apply, True)
        (grad,) = torch.autograd.grad(forward(x, gain, *factors).square().sum(), x)
        return torch._dynamo.utils.counters["aot_autograd"], grad

    with torch._inductor.utils.fresh_cache():
        cold, expected = caches()
        assert cold["autograd_cache_saved"] == 1
        warm, grad = caches()
        assert warm["autograd_cache_hit"] == 1 and torch.equal(grad, expected)
        changed = staticmethod(lambda ctx, grad: (3 * grad, None, None, None))
        monkeypatch.setattr(train_gpt.NormRotate, "backward", changed)
        edited, grad = caches()
    assert edited["autograd_cache_miss"] == 1 and not torch.equal(grad, expected)


# ---- On a pretended GPU --------------------------------------------------------------------------
@pytest.fixture
def gpu(hyperparameters, hopper, monkeypatch):
    """A function of whether FlashAttention 3 is there, and of changed knobs: (hyperparameters,
    runtime without kernels). All ranks are alike."""
    zeros = torch.zeros

    def make(fa3=True, **changes):
        def attend(*qkv):
            assert [tuple(x.shape) for x in qkv] == [(1, 128, heads, 8) for heads in (4, 2, 2)]

        def load(name):
            train_gpt.require(fa3 or name != "fa3", "no fa3 here")
            return attend

        monkeypatch.setattr(torch, "zeros", lambda *shape, device, **like: zeros(*shape, **like))
        monkeypatch.setattr(train_gpt, "load_attention", load)
        monkeypatch.setattr(train_gpt, "load_fused_mlp", lambda slope, device: "the kernel")
        knobs = {"TRAIN_SEQ_LEN": 512, "TRAIN_BATCH_TOKENS": 2048, "EVAL_SEQ_LEN": 256}
        hp = hyperparameters(**{**knobs, "SHORT_SEQ_PARTS": 2, **changes})
        comm = train_gpt.Comm(0, 2)
        comm.gather = lambda value: [value] * 2
        return hp, train_gpt.Runtime(comm, torch.device("cuda"), torch.bfloat16, True, 1024)

    return make


@pytest.mark.parametrize(
    "fa3, changes, skipped, chosen",
    [
        (True, {}, "", "fa3"),
        (False, {"SHORT_SEQ_PARTS": 8}, "fa3 cudnn", "sdpa"),
        (False, {"EVAL_SEQ_LEN": 192}, "fa3 cudnn", "sdpa"),
        (False, {"ATTN_WINDOW": 100}, "fa3 cudnn", "sdpa"),
        (False, {"ATTN_WINDOW": 128}, "fa3", "cudnn"),
        (False, {"TTT_ENABLED": 1, "TTT_CHUNK_TOKENS": 96}, "fa3 cudnn", "sdpa"),
    ],
)
def test_the_first_kernel_that_fits_is_chosen(fa3, changes, skipped, chosen, gpu):
    """cuDNN needs multiples of its tile: its gradients were wrong at other lengths (pytorch
    #196678)."""
    found = train_gpt.choose_kernels(*gpu(fa3, **changes))
    assert found.attention == chosen and found.fused_mlp
    assert [note.split()[1] for note in found.notes] == skipped.split()
    assert ("no multiple of 128" in str(found.notes)) == ("cudnn" in skipped)


@pytest.mark.parametrize("name, why", [("fa3", "no fa3 here"), ("cudnn", ".* of .192. tokens .*")])
def test_a_kernel_that_was_asked_for_is_not_replaced(name, why, gpu):
    """A record run on rented GPUs would silently take several times as long."""
    with user_error(f"^attention {name} skipped: {why}: set ATTENTION=sdpa"):
        train_gpt.choose_kernels(*gpu(False, ATTENTION=name, EVAL_SEQ_LEN=192))


def test_all_ranks_take_the_same_kernel(gpu):
    hp, runtime = gpu()
    runtime.comm.gather = mock.Mock(side_effect=[["", "no fa3 there"], ["", ""]])
    found = train_gpt.choose_kernels(hp, runtime)
    assert found.attention == "cudnn" and found.notes == ("attention fa3 skipped: no fa3 there",)


def test_the_mlp_is_fused_where_that_runs(gpu):
    """Not with an activation that is not of degree 2."""
    hp, runtime = gpu()

    def fused(hp=hp, **parts):
        return train_gpt.choose_kernels(hp, dataclasses.replace(runtime, **parts)).fused_mlp

    assert fused() and not fused(gpu(FUSED_MLP=0)[0])
    assert not fused(gpu(MLP_MULT=2.9)[0]), "TMA needs rows of whole 16 bytes"
    assert not fused(dtype=torch.float32) and not fused(device=torch.device("cpu"))
    with mock.patch.object(train_gpt, "is_homogeneous", return_value=False):
        assert not fused()
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)):
        assert not fused()


# ---- The check of a start ------------------------------------------------------------------------
def mlp(x, scale, up, down):
    hidden = torch.nn.functional.leaky_relu(x @ up.mT, 0.5).square() * scale
    return hidden.to(x.dtype) @ down.mT


def steeper(t, factor=2.0):
    """t, with a gradient that is wrong by this factor."""
    t = t.clone()
    t.register_hook(lambda grad: factor * grad)
    return t


def attention_with(change, **more):
    def attend(q, k, v, band=0, document=None, longest=0):
        given = {"q": q, "k": k, "v": v, "band": band, "document": document}
        return train_gpt.reference_attention(**given | change(**given))

    return {"attend": attend, **more}


def mlp_with(wrong):
    """An MLP whose input at this place has a wrong gradient."""
    changed = lambda *inputs: [steeper(t) if i == wrong else t for i, t in enumerate(inputs)]  # noqa: E731
    return {"fused_mlp": lambda *inputs: mlp(*changed(*inputs))}


def as_heads_first(k, **_):
    """Keys (B, T, K, E) read with the strides of (B, K, T, E); in the first row they are right."""
    wrong = k.reshape(k.transpose(1, 2).shape).transpose(1, 2)
    return {"k": torch.cat((k[:1], wrong[1:]))}


def layers_with(name, factor):
    """A block of the compiled model with a wrong gradient of this parameter."""

    def block(model, *arguments):
        *rest, layer, document = arguments
        if (parameter := getattr(layer, name)) is not None:
            layer = layer._replace(**{name: steeper(parameter, factor)})
        return model.block(*rest, layer, document)

    return {"block": block}


PARTS = {"DOC_ATTENTION": 1, "EVAL_MODE": "banded", "MLP_GATE": 1, "ATTN_GATE": 1}
PARTS |= {"LANES_LAST_N": 1, "MUDD": 1}
LIMIT = PARTS | {"DOC_ATTENTION": 0, "DOC_LEN": 4}  # the plain form took it for a band
WINDOW = {"ATTN_WINDOW": 4, "DOC_ATTENTION": 1}  # of a kernel that the banded pass may not use


@pytest.fixture
def start(run_of, monkeypatch):
    """A function that makes a Run whose start is the check alone."""

    def make(dtype=torch.bfloat16, knobs=PARTS, **parts):
        compiled = {name: parts.pop(name) for name in ("block", "head") if name in parts}
        parts = {"dtype": dtype, "fused_mlp": mlp, **parts}
        run = run_of(val=True, parts=parts, WARMUP_STEPS=1, **knobs)
        for name, method in compiled.items():
            run.forward = copy.copy(run.model)
            setattr(run.forward, name, partial(method, run.model))
        batch = run.loader.batch(0)
        batch[:, 20] = train_gpt.BOS
        run.loader.batch = lambda step: batch
        run.log = mock.Mock()
        monkeypatch.setattr(train_gpt.Run, "train_step", lambda *_: None)
        monkeypatch.setattr(train_gpt, "warm_up_evaluation", lambda *_: None)
        return run

    return make


@pytest.mark.parametrize(
    "wrong, named",
    [
        (attention_with(as_heads_first), ""),
        (attention_with(lambda v, **_: {"v": steeper(v)}), ""),
        (attention_with(lambda q, **_: {"q": steeper(q, math.nan)}), ""),
        (attention_with(lambda **_: {"document": None}), ""),
        (attention_with(lambda band, **_: {"band": band and band + 1}, knobs=WINDOW), ""),
        (mlp_with(0), ""),
        (mlp_with(1), ""),
        (mlp_with(2), "mlp_bank"),
        (mlp_with(3), "mlp_bank"),
        (layers_with("q_gain", 2.0), "q_gain"),
        (layers_with("resid_mix", math.nan), "resid_mix"),
        (layers_with("lane_mix", 2.0), "lane_mix"),
        ({"head": lambda model, *rest: model.head(*rest) + 0.1}, "loss 0.0"),
    ],
)
def test_a_wrong_gradient_or_loss_ends_the_start(wrong, named, start):
    with user_error(f"^gradients .* of them: {named}.*: set ATTENTION=math, FUSED"):
        start(**wrong).warm_up()


@pytest.mark.parametrize(
    "parts",
    [{}, {"dtype": torch.float32}, attention_with(lambda **_: {}, knobs=WINDOW), {"knobs": LIMIT}],
)
def test_right_gradients_are_said_and_the_parameters_stay(parts, start):
    run = start(**parts)
    before = [p.clone() for p in run.model.parameters()]
    run.warm_up()
    assert "'warmup: gradients agree with fp32, to " in str(run.log.mock_calls)
    assert all(map(torch.equal, before, run.model.parameters()))


def test_a_wrong_rank_ends_the_start_of_all(start):
    run = start()
    run.comm.gather = lambda mine: [mine, ["tok_emb 2"]]
    with user_error("of them: tok_emb 2: set"):
        run.warm_up()


def test_windows_of_low_rank_training_and_chunks_of_a_band_are_whole_tiles(hyperparameters):
    # An eighth of 2,688 would be 336
    for widths in ({384, 768, 1408, 2688}, {256, 512, 1024, 2048}, {128, 256, 512}):
        window = max(widths)
        hp = hyperparameters(EVAL_SEQ_LEN=window, EVAL_STRIDE=8, MICRO_BATCH_TOKENS=16 * window)
        scorer = SimpleNamespace(hp=hp, runtime=SimpleNamespace(micro_batch_tokens=16 * window))
        stops = range(8, 3 * window, 8)
        shapes = {stop: train_gpt.lora_shape(scorer, stop - 8, stop) for stop in stops}
        assert {width for _, width, _ in shapes.values()} == widths
        assert all(width >= min(stop, window) for stop, (_, width, _) in shapes.items())
        rows = {rows for stop, (rows, *_) in shapes.items() if stop <= window}
        assert rows == {train_gpt.LORA_ROWS[0]}, "at their start, in one window"
    for band, queries, keys in ((2688, 768, 3456), (2048, 512, 2560), (12, 128, 140)):
        q = torch.zeros(1, 4 * band, 1, 2)
        attend = mock.Mock(side_effect=lambda q, *_: q)
        train_gpt.banded_attention(attend, q, q, q, band, None)
        assert [t.size(1) for t in attend.call_args.args[:2]] == [queries, keys]


# ---- FlashAttention 3's two packages -------------------------------------------------------------
def test_flash_attention_3_can_come_from_the_hub(hopper, monkeypatch):
    """Hugging Face's `kernels` downloads a build if there is no wheel."""
    found = mock.Mock(flash_attn_func=lambda q, k, v, **options: q + 1)
    build = SimpleNamespace(flash_attn_interface=found)  # some have the functions here only
    kernels = mock.Mock(get_kernel=mock.Mock(return_value=build))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # ImportError
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    attend = train_gpt.load_fa3()
    assert torch.equal(attend(*torch.zeros(3, 1, 4, 2, 8)), torch.ones(1, 4, 2, 8))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", found)
    train_gpt.load_fa3()  # an installed wheel comes first
    kernels.get_kernel.assert_called_once_with("kernels-community/flash-attn3", version=1)


@pytest.mark.parametrize(
    "capability, hip, error, why",
    [
        ((9, 0), None, ImportError, "kernels"),
        ((8, 0), None, train_gpt.UserError, "it needs a Hopper GPU"),
        ((9, 4), "6.4", train_gpt.UserError, "it needs a Hopper GPU"),  # an MI300
    ],
)
def test_without_a_package_or_a_hopper_there_is_none(
    capability, hip, error, why, hopper, monkeypatch
):
    """Nothing is downloaded for another GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    for package in ("kernels", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(error, match=why):
        train_gpt.load_fa3()

"""Which attention kernel and which form of the MLP a run takes, and the check of its gradients."""

import collections
import copy
import dataclasses
import math
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

import train_gpt
from conftest import user_error


# ---- On a CPU ------------------------------------------------------------------------------------
@pytest.mark.parametrize("wanted, chosen", [("auto", "sdpa"), ("math", "math")])
def test_a_cpu_takes_the_first_kernel_that_runs(wanted, chosen, hyperparameters):
    """Fault B18: #399 cannot even be imported without flash_attn_interface."""
    with train_gpt.Runtime.start(hyperparameters(ATTENTION=wanted)) as runtime:
        pass
    assert runtime.attention == chosen and not runtime.notes
    for time in (6, train_gpt.PLAIN_ATTENTION, train_gpt.PLAIN_ATTENTION + 1):
        q, k, v = torch.randn(1, time, 4, 8), torch.randn(1, time, 2, 8), torch.randn(1, time, 2, 8)
        expected = train_gpt.reference_attention(q, k, v)
        torch.testing.assert_close(runtime.attend(q, k, v), expected)


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
    shapes = []

    def make(fa3=True, **changes):
        def load(name):
            train_gpt.require(fa3 or name != "fa3", "no fa3 here")
            return lambda *qkv: shapes.append([tuple(x.shape) for x in qkv])

        zeros = torch.zeros
        on_cpu = lambda *shape, device=None, **like: zeros(*shape, **like)  # noqa: E731
        monkeypatch.setattr(torch, "zeros", on_cpu)
        monkeypatch.setattr(train_gpt, "load_attention", load)
        monkeypatch.setattr(train_gpt, "load_fused_mlp", lambda slope, device: "the kernel")
        knobs = {"TRAIN_SEQ_LEN": 512, "TRAIN_BATCH_TOKENS": 2048, "EVAL_SEQ_LEN": 256}
        hp = hyperparameters(**{**knobs, "SHORT_SEQ_PARTS": 2, **changes})
        comm = train_gpt.Comm(0, 2)
        comm.gather = lambda value: [value] * 2
        return hp, train_gpt.Runtime(comm, torch.device("cuda"), torch.bfloat16, True, 1024)

    yield make
    assert all(qkv == [(1, 128, 4, 8), (1, 128, 2, 8), (1, 128, 2, 8)] for qkv in shapes)


LONG = {"TRAIN_SEQ_LEN": 2048, "TRAIN_BATCH_TOKENS": 4096}


@pytest.mark.parametrize(
    "fa3, changes, chosen",
    [
        (True, {}, "cudnn"),
        (True, LONG, "fa3"),
        (True, {"DOC_ATTENTION": 1}, "fa3"),
        (True, {"ATTN_WINDOW": 128}, "fa3"),
        (False, LONG, "cudnn"),
        (True, {"SHORT_SEQ_PARTS": 8}, "fa3"),
        (False, {"SHORT_SEQ_PARTS": 8}, "sdpa"),
        (True, {"ATTENTION": "math"}, "math"),
    ],
)
def test_attention_is_chosen_by_the_length_of_sequences(fa3, changes, chosen, gpu):
    """cuDNN is faster at 512 tokens, FlashAttention 3 at 2,048 (measured, H100)."""
    hp, runtime = gpu(fa3, **changes)
    found = train_gpt.choose_kernels(hp, runtime)
    assert found.attention == chosen and found.fused_mlp
    skipped = [note.split(" skipped")[0].removeprefix("attention ") for note in found.notes]
    long = hp.train_seq_len >= 2048 or hp.doc_attention or hp.attn_window
    order = ["fa3", "cudnn", "sdpa"] if long else ["cudnn", "fa3", "sdpa"]
    assert skipped == ([] if "ATTENTION" in changes else order[: order.index(chosen)])


@pytest.mark.parametrize("name", ["fa3", "cudnn"])
def test_a_kernel_that_was_asked_for_is_not_replaced(name, gpu):
    """A record run on rented GPUs would silently take several times as long."""
    changes = {} if name == "fa3" else {"EVAL_SEQ_LEN": 192}
    hp, runtime = gpu(False, ATTENTION=name, **changes)
    why = {
        "fa3": "no fa3 here",
        "cudnn": "sequences or windows of .192. tokens are no multiple of 128",
    }
    with user_error(f"^attention {name} skipped: {why[name]}: set ATTENTION=sdpa"):
        train_gpt.choose_kernels(hp, runtime)


def test_all_ranks_take_the_same_kernel(gpu):
    hp, runtime = gpu(**LONG)
    answers = iter(["no fa3 there", ""])
    runtime.comm.gather = lambda mine: [mine, next(answers)]
    found = train_gpt.choose_kernels(hp, runtime)
    assert found.attention == "cudnn" and found.notes == ("attention fa3 skipped: no fa3 there",)


def test_the_mlp_is_fused_where_that_runs(gpu, monkeypatch):
    """Not with an activation that is not of degree 2."""
    hp, runtime = gpu()

    def fused(hp=hp, **parts):
        return train_gpt.choose_kernels(hp, dataclasses.replace(runtime, **parts)).fused_mlp

    assert fused() and not fused(gpu(FUSED_MLP=0)[0])
    assert not fused(gpu(MLP_MULT=2.9)[0]), "TMA needs rows of whole 16 bytes"
    assert not fused(dtype=torch.float32) and not fused(device=torch.device("cpu"))
    monkeypatch.setattr(train_gpt, "is_homogeneous", lambda hp: False)
    assert not fused()
    monkeypatch.setattr(train_gpt, "is_homogeneous", lambda hp: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    assert not fused()


@pytest.mark.parametrize(
    "changes, refused",
    [
        ({}, False),
        ({"TRAIN_SEQ_LEN": 320, "TRAIN_BATCH_TOKENS": 640, "SHORT_SEQ_PARTS": 1}, True),
        ({"EVAL_SEQ_LEN": 192}, True),
        ({"SHORT_SEQ_PARTS": 8}, True),
        ({"ATTN_WINDOW": 100}, True),
        ({"ATTN_WINDOW": 128}, False),
        ({"TTT_ENABLED": 1, "TTT_CHUNK_TOKENS": 96}, True),
        ({"TTT_ENABLED": 1, "TTT_MODE": "lora"}, False),  # windows of 128 and 256 positions
    ],
)
def test_cudnn_needs_multiples_of_its_tile(changes, refused, gpu):
    """Its gradients were wrong at other lengths (pytorch #196678)."""
    hp, runtime = gpu(False, **changes)
    found = train_gpt.choose_kernels(hp, runtime)
    assert found.attention == ("sdpa" if refused else "cudnn")
    assert any("no multiple of 128" in note for note in found.notes) == refused


# ---- The check of a start ------------------------------------------------------------------------
def mlp(x, scale, up, down):
    hidden = torch.nn.functional.leaky_relu(x @ up.mT, 0.5).square() * scale
    return hidden.to(x.dtype) @ down.mT


def steeper(t, factor=2.0):
    """t, with a gradient that is wrong by this factor."""
    t = t.clone()
    t.register_hook(lambda grad: factor * grad)
    return t


def attention_with(change):
    def attend(q, k, v, band=0, document=None, longest=0):
        given = {"q": q, "k": k, "v": v, "band": band, "document": document}
        given |= change(**given)
        return train_gpt.reference_attention(**given)

    return attend


def as_heads_first(k, **_):
    """Keys (B, T, K, E) read with the strides of (B, K, T, E); in the first row they are right."""
    batch, time, heads, width = k.shape
    wrong = k.reshape(batch, heads, time, width).transpose(1, 2)
    return {"k": torch.cat((k[:1], wrong[1:]))}


ATTENTION = {
    "strides": as_heads_first,
    "values": lambda v, **_: {"v": steeper(v)},
    "nan": lambda q, **_: {"q": steeper(q, math.nan)},
    "documents": lambda **_: {"document": None},
    "band": lambda band, **_: {"band": 2 * band},
}
MLP = {name: i for i, name in enumerate(("x", "scale", "up", "down"))}
COMPILED = {"q_gain": 2.0, "resid_mix": math.nan, "lane_mix": 2.0}
PARTS_OF_A_CHECK = {
    "DOC_ATTENTION": 1, "EVAL_MODE": "banded", "MLP_GATE": 1, "ATTN_GATE": 1, "LANES_LAST_N": 1,
    "MUDD": 1,
}  # fmt: skip


def start_with(run_of, monkeypatch, dtype, knobs=PARTS_OF_A_CHECK, **parts):
    run = run_of(val=True, parts={"dtype": dtype, **parts}, WARMUP_STEPS=1, **knobs)
    lines = []
    batch = run.loader.batch(0)
    batch[:, 20] = train_gpt.BOS
    run.loader.batch = lambda step: batch
    run.log = mock.Mock(side_effect=lambda line, *_, **__: lines.append(line))
    monkeypatch.setattr(train_gpt.Run, "train_step", lambda *_: None)
    monkeypatch.setattr(train_gpt, "warm_up_evaluation", lambda *_: None)
    return run, lines


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", [None, *ATTENTION, *MLP, *COMPILED])
def test_a_wrong_gradient_ends_the_start(fault, dtype, run_of, monkeypatch):
    """Each fault is named. Without one the start passes and leaves the parameters."""
    parts = {"fused_mlp": mlp}
    if fault in ATTENTION:
        parts["attend"] = attention_with(ATTENTION[fault])
    if fault in MLP:

        def wrong_mlp(*inputs):
            inputs = list(inputs)
            inputs[MLP[fault]] = steeper(inputs[MLP[fault]])
            return mlp(*inputs)

        parts["fused_mlp"] = wrong_mlp
    run, lines = start_with(run_of, monkeypatch, dtype, **parts)
    if fault in COMPILED:
        run.forward = copy.copy(run.model)

        def block(*arguments):
            *rest, layer, document = arguments
            if (parameter := getattr(layer, fault)) is not None:
                layer = layer._replace(**{fault: steeper(parameter, COMPILED[fault])})
            return run.model.block(*rest, layer, document)

        run.forward.block = block
    before = [p.clone() for p in run.model.parameters()]
    if fault is None:
        run.warm_up()
        assert any(line.startswith("warmup: gradients agree with fp32") for line in lines)
        assert all(map(torch.equal, before, run.model.parameters()))
        return
    named = {"up": "mlp_bank", "down": "mlp_bank", "band": "[a-z_]+ with a band"} | dict.fromkeys(
        COMPILED, fault
    )
    with user_error(f"^gradients .* allowed: {named.get(fault, '')}.*: set ATTENTION=math, FUSED"):
        run.warm_up()


@pytest.mark.parametrize("error", [0, 1])
def test_a_wrong_window_ends_the_start(error, run_of, monkeypatch):
    """By one position of four, in a kernel that the banded pass may not use."""
    wrong = attention_with(lambda band, **_: {"band": band and band + error})
    run, lines = start_with(
        run_of, monkeypatch, torch.float32, {"ATTN_WINDOW": 4, "DOC_ATTENTION": 1}, attend=wrong
    )
    with user_error("^gradients .* allowed: ") if error else nullcontext():
        run.warm_up()
    assert any("agree with fp32" in line for line in lines) != error


def test_a_length_of_documents_without_documents_is_no_fault(run_of, monkeypatch):
    """The plain form took DOC_LEN for a band and refused a correct run."""
    knobs = {**PARTS_OF_A_CHECK, "DOC_ATTENTION": 0, "DOC_LEN": 4}
    run, lines = start_with(run_of, monkeypatch, torch.float32, knobs)
    run.warm_up()
    assert any("agree with fp32" in line for line in lines)


def test_a_wrong_loss_with_right_gradients_ends_the_start(run_of, monkeypatch):
    run, _ = start_with(run_of, monkeypatch, torch.float32)
    run.forward = copy.copy(run.model)
    run.forward.head = lambda *arguments: run.model.head(*arguments) + 0.1
    with user_error("allowed: loss 1"):
        run.warm_up()


def test_a_wrong_rank_ends_the_start_of_all(run_of, monkeypatch):
    run, _ = start_with(run_of, monkeypatch, torch.float32)
    run.comm.gather = lambda mine: [mine, ["tok_emb 2"]]
    with user_error("allowed: tok_emb 2: set"):
        run.warm_up()


def test_windows_of_low_rank_training_and_chunks_of_a_band_are_whole_tiles(hyperparameters):
    def widths(window: int) -> set[int]:
        hp = hyperparameters(EVAL_SEQ_LEN=window, EVAL_STRIDE=8, MICRO_BATCH_TOKENS=16 * window)
        scorer = SimpleNamespace(hp=hp, runtime=SimpleNamespace(micro_batch_tokens=16 * window))
        stops = range(8, 3 * window, 8)
        shapes = {stop: train_gpt.lora_shape(scorer, stop - 8, stop) for stop in stops}
        assert all(width >= min(stop, window) for stop, (_, width, _) in shapes.items())
        rows = {rows for stop, (rows, *_) in shapes.items() if stop <= window}
        assert rows == {train_gpt.LORA_ROWS[0]}, "at their start, in one window"
        return {width for _, width, _ in shapes.values()}

    assert widths(2688) == {384, 768, 1408, 2688}, "an eighth would be 336"
    assert widths(2048) == {256, 512, 1024, 2048} and widths(512) == {128, 256, 512}
    seen = []

    def attend(q, k, v, band, document):
        seen.append((q.size(1), k.size(1)))
        return q

    for band in (2688, 2048, 12):
        q = torch.zeros(1, 4 * band, 1, 2)
        train_gpt.banded_attention(attend, q, q, q, band, None)
    assert seen == [(768, 3456), (512, 2560), (128, 140)]


# ---- FlashAttention 3's two packages -------------------------------------------------------------
def test_flash_attention_3_can_come_from_the_hub(hopper, monkeypatch):
    """Hugging Face's `kernels` downloads a build if there is no wheel."""
    asked, found = [], ModuleType("found")
    found.flash_attn_func = lambda q, k, v, **options: q + 1
    kernels = ModuleType("kernels")
    build = SimpleNamespace(flash_attn_interface=found)  # some have the functions here only
    kernels.get_kernel = lambda *name, **options: asked.append((name, options)) or build
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # ImportError
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    attend = train_gpt.load_fa3()
    assert asked == [(("kernels-community/flash-attn3",), {"version": 1})]
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(ImportError, match="kernels"):
        train_gpt.load_fa3()
    assert torch.equal(attend(*torch.zeros(3, 1, 4, 2, 8)), torch.ones(1, 4, 2, 8))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", found)
    train_gpt.load_fa3()
    assert len(asked) == 1, "an installed wheel comes first"


@pytest.mark.parametrize("capability, hip", [((8, 0), None), ((9, 4), "6.4")])
def test_nothing_is_downloaded_for_another_gpu(hopper, monkeypatch, capability, hip):
    """An MI300 has a capability of 9, too."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setitem(sys.modules, "kernels", None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with user_error("it needs a Hopper GPU"):
        train_gpt.load_fa3()

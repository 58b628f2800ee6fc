"""Which attention kernel and which form of the MLP a run takes: what is tried, compared and refused.
Without a GPU a pretended one makes its tensors on the CPU."""

import collections
import dataclasses
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import train_gpt
from conftest import user_error


# ---- On a CPU ------------------------------------------------------------------------------------
@pytest.mark.parametrize("wanted, chosen", [("auto", "flash"), ("math", "math")])
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


def test_a_cpu_does_not_compile_to_try(hyperparameters, monkeypatch):
    """It would take longer than what it could save."""
    compiled = []
    noted = lambda call, wanted: compiled.append(wanted) or call  # noqa: E731
    monkeypatch.setattr(train_gpt, "compile_whole", noted)
    with train_gpt.Runtime.start(hyperparameters(COMPILE=1)) as runtime:
        assert runtime.compiled and compiled == [False]
        assert runtime.fused_mlp is None and runtime.kernels()["mlp"] == "plain"


# ---- On a pretended GPU --------------------------------------------------------------------------
@pytest.fixture
def gpu(hyperparameters, monkeypatch):
    """A function of faults {kernel: "missing", "wrong", "nan", "first row", "last row", "wrong
    gradient" (of an MLP the number of the input), "band" or "documents"} and changed knobs:
    (hyperparameters, runtime without kernels, what was tried). All ranks have the same results."""

    def make(faults=None, ranks=1, **changes):
        faults, tried, compiled = faults or {}, [], []

        def wrong(y, fault):
            factor = {"wrong": 1.1, "nan": math.nan}.get(fault, 1.0)
            rows = torch.ones(len(y), *[1] * (y.dim() - 1))
            rows[{"first row": 0, "last row": -1}.get(fault, slice(0))] = 1.1
            return factor * y * rows

        def load(name: str):
            def attend(q, k, v, band=0, document=None):
                tried.append((name, attend in compiled, tuple(q.shape), tuple(k.shape)))
                fault = faults.get(name)
                train_gpt.require(fault != "missing", "it does not work")
                if fault == "another signature":
                    return 1, 2, 3
                assert torch.is_grad_enabled() == (band == 0), "only evaluations have a band"
                document = None if fault == "documents" else document
                band = band and band + 32 * (fault == "band")
                y = train_gpt.reference_attention(q, k, v, band, document)
                if fault == "wrong gradient":
                    y = y + 0.1 * (v.repeat_interleave(2, 2) - v.repeat_interleave(2, 2).detach())
                return wrong(y, fault)

            return attend

        def load_mlp(slope, device):
            fault = faults.get("fused")
            train_gpt.require(fault != "missing", "it does not work")

            def fused(*inputs):
                inputs = list(inputs)
                if isinstance(fault, int):  # its gradient is 1.2 times too large
                    inputs[fault] = inputs[fault] + 0.2 * (inputs[fault] - inputs[fault].detach())
                return wrong(train_gpt.plain_mlp(*inputs, SimpleNamespace(mlp_slope=slope)), fault)

            return fused

        def compile_whole(function, wanted):
            compiled.extend([function] * wanted)
            return function

        for name in ("randn", "arange"):
            made = getattr(torch, name)
            on_cpu = lambda *shape, made=made, device=None, **options: made(*shape, **options)  # noqa: E731
            monkeypatch.setattr(torch, name, on_cpu)
        monkeypatch.setattr(train_gpt, "load_attention", load)
        monkeypatch.setattr(train_gpt, "load_fused_mlp", load_mlp)
        monkeypatch.setattr(train_gpt, "compile_whole", compile_whole)
        knobs = {"TRAIN_SEQ_LEN": 256, "TRAIN_BATCH_TOKENS": 2048 * ranks, "EVAL_SEQ_LEN": 256}
        hp = hyperparameters(**{**knobs, "SHORT_SEQ_PARTS": 2, **changes})
        comm = train_gpt.Comm(0, ranks)
        comm.gather = lambda value: [value] * ranks
        return hp, train_gpt.Runtime(comm, torch.device("cuda"), torch.bfloat16, True, 1024), tried

    return make


@pytest.mark.parametrize("compiled", [False, True])
def test_the_first_kernel_that_works_is_taken(compiled, gpu):
    """The order is fixed, so all seeds have the same kernels. It is tried as the run uses it,
    compiled if the run compiles, with the run's heads and sequences."""
    hp, runtime, tried = gpu()
    chosen = train_gpt.choose_kernels(hp, dataclasses.replace(runtime, compiled=compiled))
    assert chosen.kernels() == {"attention": "fa3", "mlp": "plain"} and not chosen.notes
    assert tried == [("fa3", compiled, (2, 512, 4, 8), (2, 512, 2, 8))]


DIFFER = "its results differ from the plain form's"
FAULTS = {
    "missing": "it does not work",
    "another signature": "TypeError: ",
    "wrong": f"{DIFFER} by 0.1 of their norm",
    "first row": f"{DIFFER} by 0.0",
    "last row": f"{DIFFER} by 0.0",
    "wrong gradient": DIFFER,
    "nan": f"{DIFFER} by nan",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_that_cannot_be_used_is_in_the_log(fault, gpu):
    """Wrong strides can leave either row right. A kernel with another signature costs a note."""
    hp, runtime, _ = gpu({"fa3": fault, "cudnn": "missing"})
    chosen = train_gpt.choose_kernels(hp, runtime)
    assert chosen.attention == "flash"
    assert chosen.notes[0].startswith(f"attention fa3 skipped: {FAULTS[fault]}")
    assert chosen.notes[1:] == ("attention cudnn skipped: it does not work",)


@pytest.mark.parametrize(
    "fault, changes",
    [
        ("documents", {"DOC_ATTENTION": 1}),
        ("band", {"EVAL_MODE": "banded"}),
        ("band", {"EVAL_MODE": "banded", "DOC_ATTENTION": 1}),
    ],
)
def test_documents_and_bands_are_compared_if_the_run_has_them(fault, changes, gpu):
    hp, runtime, _ = gpu({"fa3": fault})
    assert train_gpt.choose_kernels(hp, runtime).attention == "fa3"
    hp, runtime, _ = gpu({"fa3": fault}, **changes)
    chosen = train_gpt.choose_kernels(hp, runtime)
    assert chosen.attention == "cudnn" and "fa3 skipped: its results differ" in chosen.notes[0]
    hp, runtime, _ = gpu(**changes)
    assert train_gpt.choose_kernels(hp, runtime).attention == "fa3"


@pytest.mark.parametrize("fault", ["missing", "wrong", "first row", "last row", "nan", *range(4)])
def test_a_fused_mlp_that_cannot_be_used_is_an_error(fault, gpu):
    """Its output and the gradients of all four inputs are compared."""
    hp, runtime, _ = gpu({"fused": fault}, FUSED_MLP=1)
    with user_error(f"^MLP fused skipped: {FAULTS.get(fault, DIFFER)}.*: set FUSED_MLP=0$"):
        train_gpt.choose_kernels(hp, runtime)
    hp, runtime, _ = gpu(FUSED_MLP=1)
    assert train_gpt.choose_kernels(hp, runtime).kernels()["mlp"] == "fused"
    with user_error("on a GPU it needs COMPUTE_DTYPE=bfloat16"):
        train_gpt.choose_kernels(hp, dataclasses.replace(runtime, dtype=torch.float32))


def test_a_kernel_must_work_on_all_ranks(gpu):
    hp, runtime, tried = gpu(ranks=2, FUSED_MLP=1)
    runtime.comm.gather = lambda mine: [mine, next(answers)]
    answers = iter(["no fa3 here", "", "", "no fa3 here", "", "no Triton here"])
    chosen = train_gpt.choose_kernels(hp, runtime)
    assert chosen.attention == "cudnn" and chosen.notes == ("attention fa3 skipped: no fa3 here",)
    with user_error("^MLP fused skipped: no Triton here: set FUSED_MLP=0$"):
        train_gpt.choose_kernels(hp, runtime)


def test_a_failing_rank_joins_each_gather(gpu):
    """Else the other ranks would wait, or take its answer about the next kernel for this one's."""
    hp, runtime, _ = gpu({"fa3": "missing", "cudnn": "missing"}, ranks=2)
    gathered = []
    runtime.comm.gather = lambda mine: gathered.append(mine) or [mine, ""]
    assert train_gpt.choose_kernels(hp, runtime).attention == "flash"
    assert gathered == ["it does not work", "it does not work", ""]


@pytest.mark.parametrize(
    "changes, refused",
    [
        ({}, False),
        ({"TRAIN_SEQ_LEN": 320, "TRAIN_BATCH_TOKENS": 640, "SHORT_SEQ_PARTS": 1}, True),
        ({"EVAL_SEQ_LEN": 192}, True),
        ({"SHORT_SEQ_PARTS": 4}, True),
        ({"TTT_ENABLED": 1, "TTT_CHUNK_TOKENS": 96}, True),
        ({"TTT_ENABLED": 1, "TTT_MODE": "lora"}, False),  # windows of 128 and 256 positions
    ],
)
def test_cudnn_needs_multiples_of_its_tile(changes, refused, gpu):
    """Its gradients were wrong at other lengths (pytorch #196678)."""
    hp, runtime, _ = gpu({"fa3": "missing"}, **changes)
    chosen = train_gpt.choose_kernels(hp, runtime)
    assert chosen.attention == ("flash" if refused else "cudnn")
    assert any("no multiple of 128" in note for note in chosen.notes) == refused


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


@pytest.mark.parametrize(
    "wanted, works, sentence",
    [
        ("auto", (), "^attention fa3 .* mem_efficient skipped: .*ATTENTION=math"),
        ("cudnn", ("flash",), "^attention cudnn skipped: it does not work"),
    ],
)
def test_a_gpu_does_not_fall_back_to_slow_attention(wanted, works, sentence, gpu):
    """A record run on rented GPUs would silently take several times as long."""
    faults = {name: "missing" for name in train_gpt.KERNELS[:-1] if name not in works}
    hp, runtime, _ = gpu(faults, ATTENTION=wanted)
    with user_error(sentence):
        train_gpt.choose_kernels(hp, runtime)
    hp, runtime, _ = gpu(faults, ATTENTION="math")
    assert train_gpt.choose_kernels(hp, runtime).attention == "math"


# ---- FlashAttention 3's two packages -------------------------------------------------------------
def test_flash_attention_3_can_come_from_the_hub(hopper, monkeypatch):
    """Hugging Face's `kernels` downloads a build if there is no wheel."""
    asked, found = [], ModuleType("found")
    found.flash_attn_func = lambda q, k, v, **options: q + 1
    kernels = ModuleType("kernels")
    build = SimpleNamespace(flash_attn_interface=found)  # some have the functions here only
    kernels.get_kernel = lambda *name, **options: asked.append((name, options)) or build
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # ImportError
    monkeypatch.setattr(train_gpt, "find_spec", lambda name: name == "kernels")
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    attend = train_gpt.load_fa3()
    assert asked == [(("kernels-community/flash-attn3",), {"version": 1})]
    monkeypatch.setattr(train_gpt, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="flash_attn_interface"):
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
    monkeypatch.setattr(train_gpt, "find_spec", None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with user_error("it needs a Hopper GPU"):
        train_gpt.load_fa3()

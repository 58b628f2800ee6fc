"""Which attention kernel and which form of the MLP a run takes: what is tried, timed, compared and
refused. Without a GPU a pretended one makes its tensors on the CPU and has a clock of its own."""

import dataclasses
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import train_gpt
from conftest import ROOT, run

MS = {"fa3": 2.9, "cudnn": 3.4, "flash": 4.1, "mem_efficient": 9.5, "math": 30.0}
MS |= {"plain": 5.2, "fused": 4.9}


# ---- On a CPU ------------------------------------------------------------------------------------
@pytest.mark.parametrize("wanted, chosen", [("auto", "flash"), ("math", "math")])
def test_a_cpu_takes_the_first_kernel_that_runs(wanted, chosen, hyperparameters):
    """Fault B18: #399 cannot even be imported without flash_attn_interface. A choice by times would
    not repeat a run bit for bit."""
    with train_gpt.Runtime.start(hyperparameters(ATTENTION=wanted)) as runtime:
        pass
    assert runtime.attention == chosen and not runtime.notes and not runtime.kernel_ms
    for time in (6, train_gpt.PLAIN_ATTENTION, train_gpt.PLAIN_ATTENTION + 1):
        q, k, v = torch.randn(1, time, 4, 8), torch.randn(1, time, 2, 8), torch.randn(1, time, 2, 8)
        heads = [
            t.transpose(1, 2) for t in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))
        ]
        expected = F.scaled_dot_product_attention(*heads, torch.ones(time, time).tril().bool())
        torch.testing.assert_close(runtime.attend(q, k, v), expected.transpose(1, 2))


def test_a_kernel_that_raises_anything_is_skipped(hyperparameters, monkeypatch):
    """A kernel with another signature costs a note, not the run."""
    real, broken = train_gpt.load_attention, lambda q, k, v, *_, **__: (1, 2, 3, 4, 5)
    monkeypatch.setattr(
        train_gpt, "load_attention", lambda name: broken if name == "flash" else real(name)
    )
    with train_gpt.Runtime.start(hyperparameters()) as runtime:
        assert runtime.attention == "math"
        assert runtime.notes[0].startswith("attention flash skipped: AssertionError: ")


def test_a_kernel_that_was_asked_for_is_not_replaced(hyperparameters):
    sentence = "ATTENTION=fa3: attention fa3 skipped: it needs a Hopper GPU: install one"
    with (
        pytest.raises(train_gpt.UserError, match=sentence),
        train_gpt.Runtime.start(hyperparameters(ATTENTION="fa3")),
    ):
        pass


def test_other_ranks_hear_of_the_kept_kernels_from_rank_0(hyperparameters):
    """They may have no such file."""
    comm = train_gpt.Comm(1, 2)
    comm.share = lambda value: {"attention": "math"} if value == {} else None
    hp = hyperparameters(RESUME="auto", RUN_ID="kept")
    assert train_gpt.kernels_of_checkpoint(hp, comm) == {"attention": "math"}


def test_a_cpu_does_not_compile_to_try(hyperparameters, monkeypatch):
    """It would take longer than what it could save."""
    compiled = []
    real = train_gpt.compile_whole
    monkeypatch.setattr(
        train_gpt,
        "compile_whole",
        lambda call, wanted: compiled.append(wanted) or real(call, False),
    )
    with train_gpt.Runtime.start(hyperparameters(COMPILE=1)) as runtime:
        assert runtime.compiled and compiled == [False]


def test_a_cpu_has_the_plain_mlp_without_trying(hyperparameters, monkeypatch):
    monkeypatch.setattr(train_gpt, "mlp_trial", None)
    with train_gpt.Runtime.start(hyperparameters()) as runtime:
        assert runtime.fused_mlp is None and runtime.kernels()["mlp"] == "plain"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_keeps_its_kernels(ranks, env, tmp_path):
    """The first run's ATTENTION=math is not set any more, and a damaged checkpoint has its kernels,
    too. Only rank 0 reads them."""
    changes = {"RUN_ID": "kept", "CHECKPOINT_EVERY": 4, "RESUME": "auto"}
    knobs = env(**changes, ITERATIONS=8, ATTENTION="math")
    first = run([ROOT / "train_gpt.py"], knobs, tmp_path, ranks)
    assert first.returncode == 0, first.stderr
    (tmp_path / "logs" / "kept.jsonl").unlink()
    newest = sorted((tmp_path / "checkpoints" / "kept").iterdir())[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    second = run([ROOT / "train_gpt.py"], env(**changes, ITERATIONS=12), tmp_path, ranks)
    assert second.returncode == 0, second.stderr
    assert "resumed: step:4" in second.stdout and " attention:math mlp:plain " in second.stdout
    (tmp_path / "logs" / "kept.jsonl").unlink()
    third = run([ROOT / "train_gpt.py"], env(**changes, ITERATIONS=16, ATTENTION="flash"), tmp_path)
    assert " attention:flash mlp:plain " in third.stdout, "a knob that is set decides"


# ---- On a pretended GPU --------------------------------------------------------------------------
@pytest.fixture
def gpu(hyperparameters, monkeypatch):
    """A function of faults {kernel: "missing", "wrong", "nan", "wrong gradient" (of an MLP the number
    of the input), "band" or "documents"} and changed knobs: (hyperparameters, runtime without
    kernels, names of the kernels that were tried). The clock has MS, and all ranks have the results
    of this one."""

    def make(faults=None, ranks=1, **changes):
        faults, loaded, tried = faults or {}, [], []

        def load(name: str):
            loaded.append(name)

            def attend(q, k, v, band=0, document=None):
                tried.append((name, attend in compiled, tuple(q.shape), tuple(k.shape)))
                fault = faults.get(name)
                train_gpt.require(fault != "missing", "it does not work")
                assert torch.is_grad_enabled() == (band == 0), "only evaluations have a band"
                document = None if fault == "documents" else document
                y = train_gpt.attend_last(q, k, v, band and band + 32 * (fault == "band"), document)
                if fault == "wrong gradient":
                    y = y + 0.1 * (v.repeat_interleave(2, 2) - v.repeat_interleave(2, 2).detach())
                return {"wrong": 1.1 * y, "nan": y * math.nan}.get(fault, y)

            return attend

        def load_mlp(slope, device):
            loaded.append("fused")
            fault = faults.get("fused")
            train_gpt.require(fault != "missing", "it does not work")
            factor = {"wrong": 1.1, "nan": math.nan}.get(fault, 1.0)

            def fused(*inputs):
                inputs = list(inputs)
                if isinstance(fault, int):  # its gradient is 1.2 times too large
                    inputs[fault] = inputs[fault] + 0.2 * (inputs[fault] - inputs[fault].detach())
                return factor * train_gpt.plain_mlp(*inputs, slope)

            return fused

        def compile_whole(function, wanted):
            compiled.extend([function] * wanted)
            if getattr(function, "func", None) is train_gpt.plain_mlp:
                loaded.append("plain")
            return function

        compiled = []
        for name in ("randn", "arange"):
            made = getattr(torch, name)
            on_cpu = lambda *shape, made=made, device=None, **options: made(*shape, **options)  # noqa: E731
            monkeypatch.setattr(torch, name, on_cpu)
        torch.use_deterministic_algorithms(False)  # as on a GPU
        monkeypatch.setattr(train_gpt, "load_attention", load)
        monkeypatch.setattr(train_gpt, "load_fused_mlp", load_mlp)
        monkeypatch.setattr(train_gpt, "compile_whole", compile_whole)
        monkeypatch.setattr(train_gpt, "milliseconds", lambda call, runtime: MS[loaded[-1]])
        knobs = {"TRAIN_SEQ_LEN": 256, "TRAIN_BATCH_TOKENS": 2048 * ranks, "EVAL_SEQ_LEN": 256}
        hp = hyperparameters(**{**knobs, "SHORT_SEQ_PARTS": 2, **changes})
        comm = train_gpt.Comm(0, ranks)
        comm.gather = lambda value: [value] * ranks
        device = torch.device("cuda")
        return hp, train_gpt.Runtime(comm, device, torch.bfloat16, True, 1024), tried

    yield make
    torch.use_deterministic_algorithms(True)


def test_the_fastest_kernels_are_taken_and_their_times_are_told(gpu):
    hp, runtime, _ = gpu()
    runtime = train_gpt.choose_mlp(hp, train_gpt.choose_attention(hp, runtime))
    assert runtime.kernels() == {"attention": "fa3", "mlp": "fused"} and not runtime.notes
    assert runtime.kernel_lines() == [
        "attention: fa3 2.90 ms, cudnn 3.40, flash 4.10, mem_efficient 9.50",
        "mlp: fused 4.90 ms, plain 5.20",
    ]


@pytest.mark.parametrize("name, kind", [("flash", "attention"), ("plain", "mlp")])
def test_the_times_decide_and_not_the_order(name, kind, gpu, monkeypatch):
    monkeypatch.setitem(MS, name, 1.0)
    hp, runtime, _ = gpu()
    runtime = train_gpt.choose_mlp(hp, train_gpt.choose_attention(hp, runtime))
    assert runtime.kernels()[kind] == name


@pytest.mark.parametrize("compiled", [False, True])
def test_kernels_are_tried_as_the_run_uses_them(compiled, gpu):
    """Compiled if the run compiles, with the run's heads, sequences and micro-batches. A kernel can
    fail in just one of these ways."""
    hp, runtime, tried = gpu(ranks=2)
    train_gpt.choose_attention(hp, dataclasses.replace(runtime, compiled=compiled))
    shapes = {(compiled, q, k) for _, compiled, q, k in tried}
    assert shapes == {(compiled, (4, 256, 4, 8), (4, 256, 2, 8))}
    assert list(dict.fromkeys(name for name, *_ in tried)) == list(train_gpt.KERNELS[:-1])


FAULTS = {
    "missing": "it does not work",
    "wrong": "its results differ from the plain form's by 0.1 of their norm",
    "wrong gradient": "its results differ from the plain form's",
    "nan": "its results differ from the plain form's by nan",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_that_cannot_be_used_is_in_the_log(fault, gpu):
    hp, runtime, _ = gpu({"fa3": fault, "mem_efficient": "missing"})
    runtime = train_gpt.choose_attention(hp, runtime)
    assert runtime.attention == "cudnn"
    assert runtime.notes[0].startswith(f"attention fa3 skipped: {FAULTS[fault]}")
    assert runtime.kernel_ms["attention"] == {"cudnn": 3.4, "flash": 4.1}


@pytest.mark.parametrize("checked, faults", [(64, {}), (256, {"fa3": "documents"})])
def test_documents_and_a_part_of_long_sequences_are_compared(checked, faults, gpu, monkeypatch):
    """A right kernel passes, although the gradients of its whole output differ."""
    monkeypatch.setattr(train_gpt, "CHECKED", checked)
    hp, runtime, _ = gpu(faults, DOC_ATTENTION=1)
    assert train_gpt.choose_attention(hp, runtime).attention == ("cudnn" if faults else "fa3")


@pytest.mark.parametrize("number", range(4))
def test_all_gradients_of_the_fused_mlp_are_compared(number, gpu):
    hp, runtime, _ = gpu({"fused": number})
    (note,) = train_gpt.choose_mlp(hp, runtime).notes
    assert note.startswith("mlp fused skipped: its results differ from the plain form's")


def test_times_that_are_nearly_equal_do_not_decide(gpu, monkeypatch):
    """Seeds of a sweep should have the same kernels."""
    monkeypatch.setitem(MS, "cudnn", 2.86)
    hp, runtime, _ = gpu()
    assert train_gpt.choose_attention(hp, runtime).attention == "fa3"
    monkeypatch.setitem(MS, "cudnn", 2.80)
    assert train_gpt.choose_attention(hp, runtime).attention == "cudnn"


@pytest.mark.parametrize("fault", ["missing", "wrong", "nan"])
def test_a_fused_mlp_that_cannot_be_used_is_in_the_log(fault, gpu):
    """With FUSED_MLP=auto the plain form runs; a kernel that was asked for is not replaced."""
    hp, runtime, _ = gpu({"fused": fault})
    chosen = train_gpt.choose_mlp(hp, runtime)
    assert chosen.fused_mlp is None and not chosen.kernel_ms
    assert chosen.notes[0].startswith(f"mlp fused skipped: {FAULTS[fault]}")
    hp = dataclasses.replace(hp, fused_mlp="1")
    with pytest.raises(train_gpt.UserError, match="^FUSED_MLP=1: mlp fused skipped: .*FUSED_MLP=0"):
        train_gpt.choose_mlp(hp, runtime)


def test_the_fused_mlp_needs_bf16_on_a_gpu(gpu):
    hp, runtime, _ = gpu()
    runtime = dataclasses.replace(runtime, dtype=torch.float32)
    (note,) = train_gpt.choose_mlp(hp, runtime).notes
    assert note == "mlp fused skipped: on a GPU it needs COMPUTE_DTYPE=bfloat16"


def test_a_kernel_is_compared_in_a_band_if_the_run_evaluates_in_one(gpu):
    hp, runtime, _ = gpu({"fa3": "band"})
    assert train_gpt.choose_attention(hp, runtime).attention == "fa3"
    hp, runtime, _ = gpu({"fa3": "band"}, EVAL_MODE="banded", DOC_ATTENTION=1)
    chosen = train_gpt.choose_attention(hp, runtime)
    assert chosen.attention == "cudnn" and "fa3 skipped: its results differ" in chosen.notes[0]


def test_the_band_ends_within_what_is_compared(gpu, monkeypatch):
    monkeypatch.setattr(train_gpt, "CHECKED", 128)
    hp, runtime, _ = gpu({"fa3": "band"}, EVAL_MODE="banded")
    assert train_gpt.choose_attention(hp, runtime).attention == "cudnn"


@pytest.mark.parametrize("kind, name", [("attention", "flash"), ("mlp", "plain")])
def test_a_kept_kernel_is_taken_without_times(kind, name, gpu):
    hp, runtime, tried = gpu()
    choose = {"attention": train_gpt.choose_attention, "mlp": train_gpt.choose_mlp}[kind]
    chosen = choose(hp, runtime, name)
    assert chosen.kernels()[kind] == name and not chosen.kernel_ms
    assert {name for name, *_ in tried} <= {"flash"}


def test_a_kept_kernel_that_is_missing_here_is_replaced_by_the_fastest(gpu):
    """A run can be resumed on another kind of GPU."""
    hp, runtime, _ = gpu({"fa3": "missing", "cudnn": "missing"})
    chosen = train_gpt.choose_attention(hp, runtime, "fa3")
    assert chosen.attention == "flash"
    assert chosen.notes[0] == "attention fa3 skipped: it does not work"


def test_a_kernel_must_run_on_all_ranks_and_rank_0_decides(gpu):
    hp, runtime, _ = gpu(ranks=2)
    others = {"fa3": (9.0, ""), "cudnn": (0.0, "no cuDNN here"), "flash": (1.0, "")}
    names = iter(train_gpt.KERNELS)
    runtime.comm.gather = lambda mine: [mine, others.get(next(names), (9.0, ""))]
    chosen = train_gpt.choose_attention(hp, runtime)
    assert chosen.attention == "fa3" and chosen.notes == ("attention cudnn skipped: no cuDNN here",)
    assert chosen.kernel_ms["attention"] == {"fa3": 2.9, "flash": 4.1, "mem_efficient": 9.5}
    theirs = dict(zip(train_gpt.KERNELS, (9.0, 9.0, 1.0, 9.0), strict=False))
    names = iter(train_gpt.KERNELS)
    runtime.comm.gather = lambda mine: [(theirs[next(names)], ""), mine]
    assert train_gpt.choose_attention(hp, runtime).attention == "flash", "this is rank 1"


def test_a_run_that_repeats_bit_for_bit_does_not_choose_by_time(gpu):
    hp, runtime, tried = gpu()
    torch.use_deterministic_algorithms(True)
    chosen = train_gpt.choose_mlp(hp, train_gpt.choose_attention(hp, runtime))
    assert chosen.kernels() == {"attention": "fa3", "mlp": "plain"} and not chosen.kernel_ms
    assert {name for name, *_ in tried} == {"fa3"}


def test_a_time_is_the_best_of_three_rounds(monkeypatch):
    """The first round takes 3 s, the others 2 s; five calls each, and the device is waited for."""
    now, calls, waits = [0.0], [], []
    monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: now[0])

    def synchronize():
        waits.append(len(calls))
        if len(waits) % 2 == 0:
            now[0] += 3.0 if len(waits) == 2 else 2.0

    runtime = SimpleNamespace(synchronize=synchronize)
    assert train_gpt.milliseconds(lambda: calls.append(1), runtime) == 400.0
    assert waits == [0, 5, 5, 10, 10, 15]


@pytest.mark.parametrize(
    "changes, refused",
    [
        ({}, False),
        ({"TRAIN_SEQ_LEN": 320, "TRAIN_BATCH_TOKENS": 640, "SHORT_SEQ_PARTS": 1}, True),
        ({"EVAL_SEQ_LEN": 192}, True),
        ({"SHORT_SEQ_PARTS": 4}, True),
        ({"TTT_ENABLED": 1, "TTT_CHUNK_TOKENS": 96}, True),
        ({"TTT_CHUNK_TOKENS": 96}, False),
        ({"TTT_ENABLED": 1, "TTT_MODE": "lora"}, True),  # windows of 32 positions
        ({"TTT_ENABLED": 1, "TTT_MODE": "lora", "EVAL_SEQ_LEN": 1024}, False),
    ],
)
def test_cudnn_needs_whole_tiles(changes, refused, gpu):
    """Its gradients were wrong at other lengths (pytorch #196678)."""
    hp, runtime, _ = gpu({"fa3": "missing"}, **changes)
    chosen = train_gpt.choose_attention(hp, runtime)
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
    assert widths(2048) == {256, 512, 1024, 2048} and widths(512) == {64, 128, 256, 512}
    seen = []

    def attend(q, k, v, band, document):
        seen.append((q.size(1), k.size(1)))
        return q

    for band in (2688, 2048, 12):
        q = torch.zeros(1, 4 * band, 1, 2)
        train_gpt.attend_chunks(attend, q, q, q, band, None)
    assert seen == [(2688, 2688), (768, 3456), (2048, 2048), (512, 2560), (12, 12), (3, 15)]


@pytest.mark.parametrize(
    "wanted, works, sentence",
    [
        ("auto", (), "ATTENTION=auto: attention fa3 .* mem_efficient skipped: .*ATTENTION=math"),
        ("cudnn", ("flash",), "ATTENTION=cudnn: attention cudnn skipped: it does not work"),
    ],
)
def test_a_gpu_does_not_fall_back_to_slow_attention(wanted, works, sentence, gpu):
    """A record run on rented GPUs would silently take several times as long."""
    faults = {name: "missing" for name in train_gpt.KERNELS[:-1] if name not in works}
    hp, runtime, _ = gpu(faults, ATTENTION=wanted)
    with pytest.raises(train_gpt.UserError, match=sentence) as raised:
        train_gpt.choose_attention(hp, runtime)
    assert "ROCM" not in str(raised.value)
    hp, runtime, _ = gpu(faults, ATTENTION="math")
    assert train_gpt.choose_attention(hp, runtime).attention == "math"


def test_rocm_has_a_switch_for_its_kernels(gpu, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    hp, runtime, _ = gpu(dict.fromkeys(train_gpt.KERNELS, "missing"))
    with pytest.raises(train_gpt.UserError, match="TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1"):
        train_gpt.choose_attention(hp, runtime)


# ---- FlashAttention 3's two packages -------------------------------------------------------------
@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


def test_flash_attention_3_can_come_from_the_hub(hopper, monkeypatch):
    """Hugging Face's `kernels` downloads a build if there is no wheel."""
    asked, found = [], ModuleType("found")
    found.flash_attn_func = lambda q, k, v, **options: q + 1
    kernels = ModuleType("kernels")
    kernels.get_kernel = lambda *name, **options: asked.append((name, options)) or found
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # ImportError
    monkeypatch.setattr(train_gpt, "find_spec", lambda name: name == "kernels")
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    attend = train_gpt.load_fa3()
    assert asked == [(("kernels-community/flash-attn3",), {"version": 1})]
    assert torch.equal(attend(*torch.zeros(3, 1, 4, 2, 8)), torch.ones(1, 4, 2, 8))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", found)
    train_gpt.load_fa3()
    assert len(asked) == 1, "an installed wheel comes first"


def test_flash_attention_3_without_a_package_names_it(hopper, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setattr(train_gpt, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="flash_attn_interface"):
        train_gpt.load_fa3()


@pytest.mark.parametrize("capability, hip", [((8, 0), None), ((9, 4), "6.4")])
def test_nothing_is_downloaded_for_another_gpu(hopper, monkeypatch, capability, hip):
    """An MI300 has a capability of 9, too."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(train_gpt, "import_fa3", None)
    with pytest.raises(train_gpt.UserError, match="it needs a Hopper GPU"):
        train_gpt.load_fa3()

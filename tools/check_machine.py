#!/usr/bin/env python3
"""Check a machine before an expensive run: a minute of measurements on all ranks, and a verdict.

    ./run.sh check                                    # all GPUs, or the CPU
    env $(grep -v '^#' configs/one_gpu.env) ./run.sh check      # for the run of that file
    torchrun --standalone --local-addr=127.0.0.1 --nproc_per_node=8 tools/check_machine.py

The knobs are those of the run. It reads the data, measures products, copies, collectives and
kernels at the run's sizes, and does real training steps and an evaluation batch, as a run would. It
prints what it found, what is slower than it should be, the steps to expect, and one line of knobs
to paste; logs/check.json has the same. The exit status is 0 only if all is ready to run. Compiling
takes minutes the first time; a run then finds it in the cache.
"""

import argparse
import dataclasses
import functools
import importlib
import itertools
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "data")]

import program
import flops
import shards
import train_gpt
from train_gpt import Hyperparameters, Runtime, UserError, require

# isort: split
import torch

REPORT = Path("logs/check.json")
# How much slower than the others a rank may be: of a GPU, and of a CPU, which others use as well.
SLOW_RANK, SLOW_CPU = 0.08, 0.25
SLOW = 0.85  # of what is usual
# Of the data sheet's peak, what large products and copies reach: 586 of 989 TFLOP/s were measured on
# a healthy H100 at its power limit (docs/log.md).
PRODUCTS, COPIES = 0.6, 0.9
# FLOP/s of FlashAttention 3 for heads of 64 dimensions and 2,048 causal positions on an H100, forward
# and backward (published, arXiv:2407.08608), and what a backward computes of a forward's.
FA3_FORWARD, FA3_BACKWARD, BACKWARD = 371e12, 422e12, 2.5
HOPPER = ("H100", "H200", "H20", "H800", "GH200")  # GPUs that it needs
MUCH = 1.1  # times as long as with it, to be worth a line
# Its builds, and the line after which a run takes that one. `kernels` 0.14 and later refuse the third
# one, whose publisher they do not trust; earlier ones no longer find the second (published).
WHEEL, HUB = "flash_attn_interface", "kernels-community/flash-attn3"
OTHER = "varunneal/flash-attention-3"
FA3_SOURCES = {
    WHEEL: "pip install --no-deps flash-attn-3 --find-links "
    "https://download.pytorch.org/whl/flash-attn-3/",
    HUB: "pip uninstall -y flash-attn-3; pip install -U kernels",
    OTHER: "pip uninstall -y flash-attn-3; pip install 'kernels<0.14'; hf download "
    f"{OTHER} --local-dir fa3; export LOCAL_KERNELS={HUB}=$PWD/fa3",
}
DRIVER = 580  # an older one makes steps slower (published, modded-nanogpt)
STEP_399 = 0.08187  # seconds of #399's step on 8 x H100 (published)
# Milliseconds of a step without depth recurrence on one of 8 H100s, with the plain and the fused
# MLP: a lower bound (modelled by bench/h100.py, torch 2.9.1), by file of configs/.
BOUNDS = {
    "defaults": (48.78, 44.36),
    "399": (48.77, 44.35),
    "2135": (59.16, 52.93),
    "frontier": (60.07, 53.79),
}
EVALUATION_CAP = 600.0  # seconds, by the rules of the challenge
STEPS, MORE_STEPS = 10, 3  # timed steps with whole sequences, and of each other kind
BATCHES = 8  # of each rank that are scored
SGD_CHUNKS = 8  # of test-time training that are timed; it trains on all but the last
REPEATS = 5  # of the time of a kernel; the median counts
CLEARLY = 0.02  # a kernel that is faster by this share than the automatic choice is advised
SUSTAINED = 1.0  # seconds of products before those of a GPU that count, as it may become slower


# ---- Measurements on each rank -------------------------------------------------------------------
def machine(runtime: Runtime) -> dict:
    """What the rank runs on."""
    found = {"device": runtime.device_name(), "host": socket.gethostname()}
    found["torch"] = torch.__version__
    if runtime.device.type == "cuda":
        properties = torch.cuda.get_device_properties(runtime.device)
        found |= {"cuda": torch.version.cuda, "memory_mib": properties.total_memory >> 20}
        nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else "none"
        driver = ask_driver(runtime.device, "driver_version,power.limit,clocks.max.sm")
        libraries = f"cudnn {torch.backends.cudnn.version()}, nccl {nccl}"
        found["driver, power limit, clock"] = f"{driver}, {libraries}"
        found["packages"] = train_gpt.package_versions()
    return found


def ask_driver(device: torch.device, query: str) -> str:
    """nvidia-smi's values of `query` for this GPU, or "unknown"."""
    gpu = torch.cuda.get_device_properties(device).uuid
    command = f"timeout 20 nvidia-smi --query-gpu={query} --format=csv,noheader --id=GPU-{gpu}"
    return subprocess.getoutput(f"{command} 2>/dev/null").strip() or "unknown"


def check_data(hp: Hyperparameters) -> dict:
    """Counts of the data. Raises UserError for what a run would refuse, and for files that are not
    as long as their manifest says."""
    folder = Path(hp.data_path)
    train_gpt.require_data(hp, "train", "val")
    streams = [train_gpt.TokenStream(hp.data_path, s, hp.vocab_size) for s in ("train", "val")]
    manifest = shards.read_manifest(folder)
    wrong = shards.problems(folder, manifest, hashes=False) if manifest else []
    require(not wrong, "; ".join(wrong[:3]))
    train_gpt.read_validation(hp, torch.device("cpu"))
    train, val = streams
    return {"shards": len(train.paths), "train_tokens": len(train), "val_tokens": len(val)}


def check_disk(hp: Hyperparameters) -> dict:
    """Free bytes, where rank 0 writes. Raises UserError if the run's files do not fit."""
    train_gpt.require_space(hp)
    return {"free_bytes": shutil.disk_usage(".").free}


def milliseconds(call: Callable[[], object], runtime: Runtime) -> float:
    """Of one call, from the fastest of three rounds of five that are queued together."""
    rounds = []
    for _ in range(3):
        runtime.synchronize()
        began = time.perf_counter()
        for _ in range(5):
            call()
        runtime.synchronize()
        rounds.append(time.perf_counter() - began)
    return 1000 * min(rounds) / 5


def product_speed(runtime: Runtime) -> float:
    """FLOP/s of a large matrix product; on a GPU after a second of them."""
    on_gpu = runtime.device.type == "cuda"
    n = 8192 if on_gpu else 1024
    a, b = torch.randn(2, n, n, device=runtime.device).to(runtime.dtype)
    end = time.perf_counter() + on_gpu * SUSTAINED
    while True:
        ms = milliseconds(lambda: a @ b, runtime)
        if time.perf_counter() > end:
            return 2e3 * n**3 / ms


def load(runtime: Runtime) -> str | None:
    """The state of a GPU right after the products."""
    on_gpu = runtime.device.type == "cuda"
    query = "clocks.sm,power.draw,temperature.gpu"
    return ask_driver(runtime.device, query) if on_gpu else None


def copy_speed(runtime: Runtime) -> float:
    """Bytes/s that a copy in the device's memory reads and writes."""
    count = 1 << (30 if runtime.device.type == "cuda" else 26)
    source, target = torch.zeros(2, count, dtype=torch.uint8, device=runtime.device)
    return 2e3 * count / milliseconds(lambda: target.copy_(source), runtime)


def communication(hp: Hyperparameters, runtime: Runtime) -> dict[str, dict]:
    """Milliseconds and bytes of a step's collectives, by name."""
    comm, banks, small = runtime.comm, [], 0
    for name, weights in train_gpt.meta_parameters(hp).items():
        if name not in train_gpt.BANKS:
            small += weights.numel()
            continue
        rows = math.ceil(len(weights) / comm.shard.size)
        options = {"dtype": runtime.dtype, "device": runtime.device}
        full = torch.zeros(comm.shard.size * rows, *weights.shape[1:], **options)
        banks.append((full, torch.zeros_like(full[:rows])))
    flat = torch.zeros(small + 4, device=runtime.device)

    def wait_for(collectives: Iterable[Callable[[], None]]) -> None:
        for arrived in list(collectives):
            arrived()

    nbytes = sum(full.nbytes for full, _ in banks)
    calls = {
        "reduce-scatter": (
            nbytes,
            lambda: wait_for(comm.shard.reduce_scatter(s, f) for f, s in banks),
        ),
        "all-gather": (nbytes, lambda: wait_for(comm.shard.all_gather(f, s) for f, s in banks)),
        "all-reduce": (flat.nbytes, lambda: wait_for([comm.all_reduce(flat)])),
    }
    if comm.replicate.size > 1:  # crosses nodes
        calls["all-reduce of rows"] = (
            sum(shard.nbytes for _, shard in banks),
            lambda: wait_for(comm.replicate.all_reduce(shard) for _, shard in banks),
        )
    found = {}
    for name, (size, call) in calls.items():
        call()  # the first one sets up the connection
        found[name] = {"ms": milliseconds(call, runtime), "bytes": size}
    return found


def forward_rows(hp: Hyperparameters, runtime: Runtime) -> int:
    """Rows of a training forward."""
    rows = max(1, hp.train_batch_tokens // hp.train_seq_len // runtime.comm.size)
    return rows // train_gpt.micro_batches(hp, rows, runtime.micro_batch_tokens)


def attention_times(hp: Hyperparameters, runtime: Runtime, names: Iterable[str]) -> dict[str, dict]:
    """What `kernel_times` finds for kernels of attention, or for FA3_SOURCES, at the run's sizes."""
    batch, options = (forward_rows(hp, runtime), hp.train_seq_len), {"device": runtime.device}
    heads = (hp.num_heads, hp.num_kv_heads, hp.num_kv_heads)
    qkv = [torch.randn(*batch, n, hp.head_dim, **options).to(runtime.dtype) for n in heads]
    document = None
    if hp.doc_attention:
        document = (torch.arange(batch[1], **options) >= 100).long().expand(batch[0], -1)

    def load(name: str) -> Callable[..., torch.Tensor]:
        if name in FA3_SOURCES:
            sys.modules[WHEEL] = fa3_build(name)  # what the script imports first
            name = "fa3"
        missing = train_gpt.why_not(name, hp, runtime)
        train_gpt.require(not missing, missing)
        attend = train_gpt.load_attention(name)
        prepared = document
        if document is not None and hasattr(attend, "prepare"):
            prepared = attend.prepare(document)
        attend = train_gpt.compile_whole(attend, runtime.compiled and runtime.device.type == "cuda")
        return functools.partial(attend, document=prepared)

    installed = sys.modules.get(WHEEL)
    found = kernel_times(load, names, qkv, runtime)
    if WHEEL in names:
        sys.modules.pop(WHEEL, None)
        if installed:
            sys.modules[WHEEL] = installed
    train_gpt.load_attention(runtime.attention)  # sets torch's switches
    return found


def fa3_build(source: str) -> ModuleType:
    """A build of FlashAttention 3, downloaded if it is not here. Raises if that cannot be."""
    if source == WHEEL:
        return importlib.import_module(WHEEL)
    from kernels import get_kernel

    version = {"version": 1} if source == HUB else {"revision": "main"}
    found = get_kernel(source, **version)
    return getattr(found, WHEEL, found)


def mlp_times(hp: Hyperparameters, runtime: Runtime) -> dict[str, dict]:
    """The same for the forms of the MLP."""
    _, hidden, dim = train_gpt.bank_shape("mlp_bank", hp)
    shapes = (forward_rows(hp, runtime), hp.train_seq_len, dim), (hidden, dim), (dim, hidden)
    inputs = [torch.randn(s, device=runtime.device, dtype=runtime.dtype) for s in shapes]

    def load(name: str) -> Callable[..., torch.Tensor]:
        fused = name == "fused" and train_gpt.load_fused_mlp(hp.mlp_slope, runtime.device)
        model = train_gpt.GPT(hp, None, runtime.dtype, fused).to(runtime.device)
        (layer, *_), *_ = model.layers(train_gpt.ForwardConfig(hp.layer_order()), {}, None)

        def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
            matrices = {"up": train_gpt.Matrix(up), "down": train_gpt.Matrix(down)}
            return model.mlp(x, layer._replace(**matrices))

        return train_gpt.compile_whole(mlp, runtime.compiled)

    names = ("plain", "fused") if train_gpt.is_hopper(runtime.device) else ("plain",)
    return kernel_times(load, names, inputs, runtime)


def kernel_times(
    load: Callable[[str], Callable[..., torch.Tensor]],
    names: Iterable[str],
    inputs: list[torch.Tensor],
    runtime: Runtime,
) -> dict[str, dict]:
    """Milliseconds of a forward and backward by kernel, and why others do not run here."""
    calls, refused = {}, {}
    inputs = [t.requires_grad_() for t in inputs]
    for name in names:
        try:
            kernel = load(name)
            grad = torch.randn_like(kernel(*inputs))

            def both_passes(kernel: Callable = kernel, grad: torch.Tensor = grad) -> None:
                torch.autograd.grad(kernel(*inputs), inputs, grad)

            both_passes()
            calls[name] = both_passes
        except Exception as error:  # a missing or unfit kernel can raise anything
            refused[name] = train_gpt.error_message(error)
    times = {name: [] for name in calls}
    for _ in range(REPEATS):  # in turn, so that other programs slow all of them alike
        for name, call in calls.items():
            if name in train_gpt.KERNELS:
                train_gpt.load_attention(name)  # sets torch's switches
            times[name].append(milliseconds(call, runtime))
    return {"ms": {name: statistics.median(ms) for name, ms in times.items()}, "refused": refused}


def seconds_of(work: Callable[[], object], runtime: Runtime) -> float:
    """Seconds on the device and the host."""
    runtime.synchronize()
    began = time.perf_counter()
    work()
    runtime.synchronize()
    return time.perf_counter() - began


def read_ms(loader: train_gpt.TrainingLoader) -> float:
    """Milliseconds to read the last batch of the data. A cold one if it is not in memory since its
    download."""
    last = max(0, loader.blocks // loader.step_rows - 1)
    began = time.perf_counter()
    loader.reader.submit(loader.read, last).result()
    return 1000 * (time.perf_counter() - began)


def training(run: train_gpt.Run) -> dict:
    """Real steps of each kind of the run: milliseconds, peak memory, the time of calibration and of
    reading. Raises UserError if the loss is not finite."""
    hp, runtime = run.hp, run.runtime
    if runtime.device.type == "cuda":  # products and kernels took memory, too
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    numbers, kinds, gradients_ms = itertools.count(), [], 0.0

    def steps(settings: train_gpt.StepSettings, count: int) -> float:
        reports = [run.train_step(n, settings) for n in itertools.islice(numbers, count)]
        loss = torch.stack(reports)[:, 0].sum().item() / count
        require(math.isfinite(loss), f"the mean training loss is {loss}: lower the learning rates")
        return loss

    loss = math.nan
    phases = train_gpt.phases(hp)
    for settings, places in phases.items():
        ordinary = settings.seq_len == hp.train_seq_len and not gradients_ms
        count = STEPS if ordinary else MORE_STEPS
        loss = steps(settings, 2)
        seconds = seconds_of(functools.partial(steps, settings, count), runtime)
        kind = {name: getattr(settings, name) for name in ("seq_len", "qat", "looping")}
        kinds.append({**kind, "share": places / sum(phases.values()), "ms": 1000 * seconds / count})
        if ordinary:  # without collectives, so each rank has its own time
            batch = run.loader.batch(next(numbers))
            work = functools.partial(run.backward, batch, settings)
            gradients_ms = 1000 * min(seconds_of(work, runtime) for _ in range(3))
            run.optimizer.step(0.0, 0.0)  # clears the gradients
    if hp.gptq_batches and hp.max_wallclock_seconds:
        run.reserve_for_calibration()
    found = {"kinds": kinds, "loss": loss, "gradients_ms": gradients_ms, "memory_mib": {}}
    found["read_ms"] = read_ms(run.loader)
    found["calibration_seconds"] = run.clock.reserve
    if runtime.device.type == "cuda":
        found["memory_mib"] = {
            "allocated": torch.cuda.max_memory_allocated() >> 20,
            "reserved": torch.cuda.max_memory_reserved() >> 20,
        }
    return found


def evaluation(run: train_gpt.Run) -> dict[str, float]:
    """Expected seconds of each final score, from a part of the text."""
    found = {}
    for name, way in train_gpt.final_passes(run.hp).items():
        if name.startswith("ttt"):
            found[name] = test_time_training(run, name, way)
        else:
            found[name] = scoring(run, way)
    return found


def scoring(run: train_gpt.Run, way: train_gpt.Pass) -> float:
    """Expected seconds, from a few batches of each rank."""
    scorer = run.make_scorer(way.config, way.stride)
    windows = scorer.windows()
    windows = windows[:, min(1, windows.shape[1] - 1) :]  # a span's first window has more targets
    batch = run.runtime.comm.size * scorer.rows
    scorer.score(windows[:, :batch])  # compiles
    some = windows[:, : BATCHES * batch]
    seconds = seconds_of(functools.partial(scorer.score, some), run.runtime)
    return seconds * math.ceil(windows.shape[1] / batch) / math.ceil(some.shape[1] / batch)


def test_time_training(run: train_gpt.Run, name: str, way: train_gpt.Pass) -> float:
    """Expected seconds, from the first documents or chunks. After EVAL_MAX_SECONDS the rest is
    scored with fixed weights."""
    hp, runtime, val = run.hp, run.runtime, run.val
    documents = train_gpt.LORA_BATCH * runtime.comm.size
    end = min(SGD_CHUNKS * hp.ttt_chunk_tokens, val.targets)
    if name == "ttt_lora":
        end = int([*val.documents, val.targets][: documents + 1][-1])
    tokens, nbytes = val.tokens[: end + 1].cpu().numpy(), val.nbytes[:end].cpu().numpy()
    part = train_gpt.Validation(tokens, nbytes, runtime.device)
    part.refused, part.hints = val.refused, val.hints
    make_scorer = functools.partial(train_gpt.Evaluator, run.eval_forward, part, hp, runtime)
    passes = train_gpt.final_passes(hp)
    train_gpt.warm_up_evaluation(make_scorer, passes, run.log, time.perf_counter())  # compiles
    work = functools.partial(way.score, make_scorer(way.config, way.stride))
    seconds = seconds_of(work, runtime)
    whole = seconds * val.targets / part.targets
    if name == "ttt_sgd" and val.targets > end:
        whole *= SGD_CHUNKS / (SGD_CHUNKS - 1)
    limit = hp.eval_max_seconds
    if not 0 < limit < whole:
        return whole
    return limit + (1 - limit / whole) * scoring(run, way)


# ---- The verdict ---------------------------------------------------------------------------------
# A report has {"ranks": one dictionary of results by section for each rank, "errors": sentences,
# "knobs": those of the run, "chosen": kernels and micro-batch}.
def values(report: dict, *path: str) -> list:
    """One result of every rank that has it."""
    found = []
    for result in report["ranks"]:
        for key in path:
            result = result.get(key) if isinstance(result, dict) else None
        found.append(result)
    return [value for value in found if value is not None]


def first(report: dict, *path: str):
    """The result of the first rank that has it, or None."""
    return next(iter(values(report, *path)), None)


def slow_ranks(report: dict) -> list[str]:
    """Ranks that hold up all others."""
    on_gpu = first(report, "machine", "memory_mib")
    speeds = {
        "multiplies": lambda rank: rank["products"],
        "copies": lambda rank: rank["copies"],
        "computes gradients": lambda rank: 1 / rank["training"]["gradients_ms"],
    }
    found = []
    for what, speed in speeds.items():
        for number, rank in enumerate(report["ranks"]):
            others = [speed(other) for other in report["ranks"] if other is not rank]
            behind = 1 - speed(rank) / statistics.median(others) if others else 0.0
            if behind > (SLOW_RANK if on_gpu else SLOW_CPU):
                where = rank["machine"]["host"]
                found.append(f"rank {number} ({where}) {what} {behind:.0%} slower than the others")
    return found


def slow_hardware(report: dict) -> list[str]:
    """What is far below the data sheet of the GPU, which has bf16 products."""
    name = first(report, "machine", "device")
    if report["chosen"]["dtype"] != "torch.bfloat16":
        return []
    sheet = {
        "large products reach": ("TFLOP/s", 1e12, "products", flops.PEAK_FLOPS, PRODUCTS),
        "copies reach": ("GB/s", 1e9, "copies", flops.BANDWIDTH, COPIES),
    }
    found = []
    for what, (unit, scale, section, peaks, part) in sheet.items():
        peak = flops.of_gpu(name, peaks)
        each = values(report, section)
        if peak and statistics.median(each) < SLOW * part * peak:
            here, usual = (
                f"{speed / scale:,.0f}" for speed in (statistics.median(each), part * peak)
            )
            found.append(f"{what} {here} {unit}; {usual} is usual: look at clocks and power limit")
    return found


def whole_step(hp: Hyperparameters, report: dict) -> dict:
    """The first kind of steps with whole sequences."""
    kinds = first(report, "training", "kinds")
    return next(kind for kind in kinds if kind["seq_len"] == hp.train_seq_len)


def bound(hp: Hyperparameters, report: dict) -> tuple[str, float] | None:
    """(configuration, modelled milliseconds of its step) if this is a run of ours on 8 H100s."""
    if len(report["ranks"]) != 8 or "H100" not in first(report, "machine", "device"):
        return None
    roles = [name for name in train_gpt.knobs_with("model", "training") if "seed" not in name]
    for name, times in BOUNDS.items():
        variables = program.read_env(ROOT / "configs" / f"{name}.env") if name != "defaults" else {}
        ours = Hyperparameters.from_env(variables)
        if all(getattr(hp, role) == getattr(ours, role) for role in roles):
            return name, times[report["chosen"]["mlp"] == "fused"]
    return None


def slow_step(hp: Hyperparameters, report: dict) -> list[str]:
    """A step that makes less of the GPU than #399's published one."""
    record = Hyperparameters(skips="scales", short_seq_parts=1)
    batch = record.train_batch_tokens * flops.flops_per_token(record, record.train_seq_len)
    usual = batch / 8 / STEP_399 / 790e12  # as bench/h100.py assumes
    step = whole_step(hp, report)
    model = hp if step["looping"] else dataclasses.replace(hp, loop_visits=1)
    work = hp.train_batch_tokens * flops.flops_per_token(model, hp.train_seq_len)
    speed = work / len(report["ranks"]) / step["ms"] * 1000
    reached = speed / statistics.median(values(report, "products"))
    if not first(report, "machine", "memory_mib") or reached > SLOW * usual:
        return []
    return [
        f"a step reaches {reached:.2f} of the speed of large products; #399's published step on 8 x "
        f"H100 reached {usual:.2f}: look at attention, the MLP and the collectives above"
    ]


def missing_fa3(hp: Hyperparameters, report: dict) -> list[str]:
    """What attention costs without FlashAttention 3 on a Hopper GPU."""
    gpu, found = first(report, "machine", "device"), first(report, "attention")
    ms, why = found["ms"], found["refused"].get("fa3", "")
    if not any(name in gpu for name in HOPPER) or not why or not ms:
        return []
    rows = report["chosen"]["rows"]
    forward = 2 * rows * hp.num_heads * hp.train_seq_len**2 * hp.head_dim
    published = 1000 * (forward / FA3_FORWARD + BACKWARD * forward / FA3_BACKWARD)
    times = min(ms.values()) / published
    if times < MUCH:
        return []
    fault = "is missing" if "No module" in why else f"was refused ({why})"
    return [
        f"FlashAttention 3 {fault}: attention takes {times:.1f} times as long as with it "
        "(published, H100)"
    ]


def best_fa3(report: dict) -> list[str]:
    """How to install the fastest build of FlashAttention 3, and what keeps others from being timed."""
    if not values(report, "fa3"):
        return []
    times, refused = slowest(report, "fa3"), first(report, "fa3", "refused")
    kernel, found = report["chosen"]["attention"], []
    ms = slowest(report, "attention").get(kernel, math.inf)
    taken = next(iter(times), None) if kernel == "fa3" else None
    best = min(times, key=times.get, default=None)
    if best != taken and times[best] < (1 - CLEARLY) * ms:
        text = f"{best} takes {times[best]:.2f} ms, and the run's attention, {taken or kernel}, {ms:.2f}"
        found.append(f"{text}: {FA3_SOURCES[best]}")
    why = refused.get(WHEEL, "")
    if "No module" in why and not times:
        found.append(f"install FlashAttention 3: {FA3_SOURCES[WHEEL]}")
    elif "No module" in why and best == HUB:
        text = (
            f"{HUB} was slower than another build on an H100 (published, nanochat #540): time the"
        )
        found.append(f"{text} official wheel, too: {FA3_SOURCES[WHEEL]}")
    elif "libcudart" in why:
        text = f"{why}: the official wheels want that of CUDA 12.6 (published, nanochat #737)"
        found.append(f"{text}: apt-get install cuda-cudart-12-6")
    for source, why in refused.items():
        if "401" in why:
            text = "kernels 0.16 and later may download an older repository only for known users"
            found.append(f"{source}: {text} (published, modded-nanogpt ANVIL2): hf auth login")
    return found


def published_faults(report: dict) -> dict[str, list[str]]:
    """What is known of the drivers and of torch on these GPUs, by the kind of sentence."""
    slow, advice = [], []
    for facts in values(report, "machine"):
        gpu, driver = facts["device"], facts.get("driver, power limit, clock", "").split(".")[0]
        if any(name in gpu for name in HOPPER) and driver.isdigit() and int(driver) < DRIVER:
            slow.append(
                f"the NVIDIA driver is {driver}: before {DRIVER}, a step took some 35 % longer on "
                "equal H100 nodes, without an error (published, modded-nanogpt ANVIL2)"
            )
        if "A100" in gpu and facts["torch"].startswith("2.10.") and report["chosen"]["compiled"]:
            advice.append(
                "torch 2.10 compiled to NaN on an A100 (published, modded-nanogpt #268): take "
                "another torch, or COMPILE=0"
            )
    return {"slow": list(dict.fromkeys(slow)), "advice": list(dict.fromkeys(advice))}


def limits(hp: Hyperparameters, report: dict) -> list[tuple[str, dict]]:
    """(sentence, knobs to set) where memory, reading, collectives or evaluation are at a limit."""
    found: list[tuple[str, dict]] = []
    total = first(report, "machine", "memory_mib")
    used = max(max(each.values(), default=0) for each in values(report, "training", "memory_mib"))
    if total and used > 0.95 * total:
        text = f"training reserves {used:,} of {total:,} MiB: run with half the micro-batch"
        found.append((text, {"MICRO_BATCH_TOKENS": report["chosen"]["micro_batch_tokens"] // 2}))
    step = whole_step(hp, report)["ms"]
    read = max(values(report, "training", "read_ms"))
    if read > step:
        text = (
            f"reading a batch takes {read:.0f} ms, longer than a step: copy the shards to a local"
        )
        found.append((f"{text} disk and set DATA_PATH", {}))
    waited = sum(part["ms"] for part in first(report, "collectives").values())
    if total and waited > 0.15 * step:
        text = f"collectives take {waited:.1f} ms, over 15 % of a step: look at the links between"
        found.append((f"{text} the GPUs (nvidia-smi topo -m) and at NCCL_DEBUG=INFO", {}))
    scored = report["expected"]["evaluation_seconds"]
    if scored > EVALUATION_CAP:
        text = f"evaluation takes {scored:.0f} s, over the challenge's {EVALUATION_CAP:.0f}: limit"
        knob = {"EVAL_MAX_SECONDS": 540} if hp.ttt_enabled else {"EVAL_MODE": "banded"}
        found.append((f"{text} test-time training, or evaluate in one banded pass", knob))
    return found


def scores(report: dict) -> dict[str, float]:
    """Expected seconds of the final scores; the slowest rank decides."""
    names = first(report, "evaluation")
    return {name: max(values(report, "evaluation", name)) for name in names}


def expected(hp: Hyperparameters, report: dict) -> dict[str, float]:
    """Steps and training seconds within the limits, and seconds of the scores."""
    kinds = first(report, "training", "kinds")
    reserve = first(report, "training", "calibration_seconds")
    mean = sum(kind["share"] * kind["ms"] / 1000 for kind in kinds)  # if ITERATIONS end the run
    steps, seconds = hp.iterations, hp.iterations * mean
    limit = hp.max_wallclock_seconds - reserve
    if hp.max_wallclock_seconds and seconds > limit:  # progress is then the used part of the time
        fitting = sum(1000 * kind["share"] * limit / kind["ms"] for kind in kinds)
        steps, seconds = min(steps, int(fitting)), limit
    found = {"steps": steps, "train_seconds": seconds + reserve}
    found["evaluation_seconds"] = sum(scores(report).values())
    found["step_ms"] = whole_step(hp, report)["ms"]
    tokens = steps * hp.train_batch_tokens
    return found | {"epochs": tokens / first(report, "data", "train_tokens")}


def advice(hp: Hyperparameters, report: dict) -> list[tuple[str, dict]]:
    """(sentence, knobs to set) that the expected run asks for."""
    found: list[tuple[str, dict]] = []
    run = report["expected"]
    if run["epochs"] > 1:
        text = f"the run reads the data {run['epochs']:.2f} times: download more shards"
        found.append((text, {}))
    cap, seconds = hp.max_wallclock_seconds, run["train_seconds"]
    if seconds < cap:
        text = f"ITERATIONS={hp.iterations} ends the run after {seconds:.0f} of {cap:g} s"
        steps = math.ceil(2 * hp.iterations * cap / seconds)
        found.append((f"{text}: set more, so that the time limit ends it", {"ITERATIONS": steps}))
    if not hp.warmdown_frac and hp.warmdown_iters > train_gpt.PHASE_LIMIT * run["steps"]:
        text = f"WARMDOWN_ITERS={hp.warmdown_iters} is over half of {run['steps']:,} steps"
        found.append((f"{text}: #399's warmdown is 0.41 of its run", {"WARMDOWN_FRAC": 0.41}))
    return found


def slowest(report: dict, kind: str) -> dict[str, float]:
    """Milliseconds of each kernel on the slowest rank, for which all others wait."""
    each = values(report, kind, "ms")
    return {name: max(rank.get(name, math.inf) for rank in each) for name in each[0]}


def fastest(report: dict) -> dict[str, object]:
    """The knobs that fix the kernels: the automatic choice, unless another one is clearly faster."""

    def best(kind: str) -> str:
        times, chosen = slowest(report, kind), report["chosen"][kind]
        name = min(times, key=times.get)
        return name if times[name] < (1 - CLEARLY) * times.get(chosen, math.inf) else chosen

    return {"ATTENTION": best("attention"), "FUSED_MLP": int(best("mlp") == "fused")}


def judge(hp: Hyperparameters, report: dict) -> dict:
    """The report with what is expected, slow and advised, and the line to paste."""
    parts = ("machine", "products", "copies", "attention", "mlp", "training", "evaluation")
    complete = all(len(values(report, part)) == len(report["ranks"]) for part in parts)
    complete = complete and first(report, "data") is not None
    report = report | published_faults(report)
    if complete:
        report |= {"expected": expected(hp, report), "bound": bound(hp, report)}
        report["slow"] += slow_ranks(report) + slow_hardware(report)
        report["slow"] += slow_step(hp, report) + missing_fa3(hp, report)
        limited, advised = limits(hp, report), advice(hp, report)
        report["slow"] += [sentence for sentence, _ in limited]
        report["advice"] += best_fa3(report) + [sentence for sentence, _ in advised]
        knobs = fastest(report)
        for _, changes in limited + advised:
            knobs |= changes
        report["paste"] = " ".join(f"{name}={value}" for name, value in knobs.items())
    return report | {"finished": True, "works": complete and not report["errors"]}


# ---- Text ----------------------------------------------------------------------------------------
def spread(each: list[float], form: str = ",.0f") -> str:
    """The lowest and highest of all ranks, or one number if they are close."""
    low, high = min(each), max(each)
    numbers = dict.fromkeys((f"{low:{form}}", f"{high:{form}}"))
    return " to ".join(numbers) if high > 1.01 * low else f"{high:{form}}"


def about_machines(report: dict) -> str:
    """A line for each kind of machine, with the number of its ranks."""
    each = values(report, "machine")
    texts = [", ".join(f"{key} {value}" for key, value in facts.items()) for facts in each]
    return "\n".join(f"{texts.count(text)} x {text}" for text in dict.fromkeys(texts))


def about_data(report: dict) -> str:
    data = first(report, "data")
    counts = f"{data['train_tokens']:,} training and {data['val_tokens']:,} validation tokens"
    return f"{data['shards']} training shards, {counts}; lengths are right"


def about_load(report: dict) -> str:
    """nvidia-smi's lines of all ranks, in their order if they differ."""
    return f"clock, power, temperature: {'; '.join(dict.fromkeys(values(report, 'load')))}"


def about_collectives(report: dict) -> str:
    parts = []
    for name, part in first(report, "collectives").items():
        ms = spread(values(report, "collectives", name, "ms"), ".2f")
        parts.append(f"{name} {part['bytes'] / 1e6:.1f} MB in {ms} ms")
    return ", ".join(parts) or "none, as there is one rank"


def about_kernels(report: dict, kind: str) -> str:
    found = first(report, kind)
    parts = []
    for name in sorted(found["ms"], key=found["ms"].get):
        parts.append(f"{name} {spread(values(report, kind, 'ms', name), '.2f')} ms")
    parts += [f"no {name} ({why})" for name, why in found["refused"].items()]
    return ", ".join(parts)


def about_training(report: dict) -> str:
    one, parts = first(report, "training"), []
    for kind in one["kinds"]:
        more = " looping" * kind["looping"] + " QAT" * kind["qat"]
        share = f"{kind['share']:.0%} of the run"
        parts.append(f"{kind['ms']:.1f} ms for T={kind['seq_len']}{more} ({share})")
    for what, name in (("gradients alone", "gradients_ms"), ("reading a batch", "read_ms")):
        parts.append(f"{what} {spread(values(report, 'training', name), '.1f')} ms")
    tokens = report["chosen"]["micro_batch_tokens"]
    parts.append(f"micro-batches of at most {tokens:,} tokens")
    parts.append(f"calibration {one['calibration_seconds']:.1f} s")
    if one["memory_mib"]:
        sizes = (f"{kind}: {size} MiB" for kind, size in one["memory_mib"].items())
        parts.append(f"peak memory {' '.join(sizes)}")
    return "; ".join(parts)


def about_evaluation(report: dict) -> str:
    return f"{', '.join(f'{name} {s:.1f} s' for name, s in scores(report).items())} (expected)"


LINES: dict[str, Callable[[dict], str]] = {
    "machine": about_machines,
    "data": about_data,
    "disk": lambda report: (
        f"{first(report, 'disk')['free_bytes'] / 1e9:,.0f} GB free; the run fits"
    ),
    "products": lambda report: f"{scaled(report, 'products', 1e12, ',.4g')} TFLOP/s",
    "load": about_load,
    "copies": lambda report: f"{scaled(report, 'copies', 1e9, ',.0f')} GB/s",
    "collectives": about_collectives,
    "attention": functools.partial(about_kernels, kind="attention"),
    "fa3": functools.partial(about_kernels, kind="fa3"),
    "mlp": functools.partial(about_kernels, kind="mlp"),
    "training": about_training,
    "evaluation": about_evaluation,
}


def scaled(report: dict, section: str, unit: float, form: str) -> str:
    return spread([speed / unit for speed in values(report, section)], form)


def print_verdict(report: dict) -> None:
    """The end of the text."""
    print()
    if "expected" in report:
        run = report["expected"]
        if report["bound"]:
            name, ms = report["bound"]
            print(
                f"step:     {run['step_ms']:.1f} ms, {run['step_ms'] / ms:.2f} times the modelled "
                f"bound of {name}, {ms} ms; #399's published step takes {1000 * STEP_399} ms"
            )
        print(
            f"expected: {run['steps']:,} steps in {run['train_seconds']:.0f} s of training, "
            f"{run['epochs']:.2f} epochs, {run['evaluation_seconds']:.0f} s of evaluation"
        )
    for kind in ("slow", "advice"):
        for sentence in report[kind]:
            print(f"{kind}: {sentence}")
    if report["works"]:
        print(f"set:      {report['paste']}")
        print(f"ready to run; {REPORT} has all figures")


# ---- The check -----------------------------------------------------------------------------------
class Check:
    """Runs sections on all ranks, and collects, prints and saves what they find on rank 0."""

    def __init__(self, hp: Hyperparameters, runtime: Runtime):
        self.comm = runtime.comm
        chosen = runtime.kernels() | {"dtype": str(runtime.dtype)}
        chosen["micro_batch_tokens"] = runtime.micro_batch_tokens
        chosen |= {"rows": forward_rows(hp, runtime), "compiled": runtime.compiled}
        self.report = unfinished() | {"knobs": dataclasses.asdict(hp), "chosen": chosen}
        self.report["ranks"] = [{} for _ in range(self.comm.size)]

    def __call__(self, section: str, measure: Callable, *arguments, alone: bool = True) -> None:
        """`alone`: the section has no collectives, so all ranks go on after an error."""
        result, error = None, ""
        try:
            result = measure(*arguments)
        except Exception as raised:  # whatever would end a run here
            error = sentence_of(raised)
            if not alone and self.comm.size > 1:
                raise UserError(f"{section} of rank {self.comm.rank}: {error}") from raised
        found = self.comm.gather((result, error))
        for rank, (part, why) in enumerate(found):
            if why:
                self.report["errors"].append(f"{section} of rank {rank}: {why}")
            elif part is not None:
                self.report["ranks"][rank][section] = part
        if self.comm.rank == 0:
            if any(part is not None for part, _ in found):
                print(f"{section + ':':12} {LINES[section](self.report)}", flush=True)
            save(self.report)


def sentence_of(error: Exception) -> str:
    """An error in the words of a report."""
    full = isinstance(error, torch.OutOfMemoryError)
    return train_gpt.error_message(error) + "; set a lower MICRO_BATCH_TOKENS" * full


def unfinished(*errors: str) -> dict:
    """A report as long as the check has not finished."""
    return {"finished": False, "works": False, "errors": list(errors)}


def save(report: dict) -> None:
    """Write what is known so far. Whatever ends this process later, a reader sees that it did."""
    if not report["finished"] and not report["errors"]:
        report = report | unfinished("the check did not finish")
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    with train_gpt.replacing(REPORT) as partial:
        partial.write_text(json.dumps(report, indent=1) + "\n")


def check(hp: Hyperparameters) -> dict:
    """All sections, on this rank. Returns the report of all ranks."""
    train_gpt.require_exportable(hp)
    with Runtime.start(hp) as runtime:
        section = Check(hp, runtime)
        first_of_node = train_gpt.PLACE_IN_NODE == 0
        section("machine", machine, runtime)
        section("data", lambda: check_data(hp) if first_of_node else None)
        section("disk", lambda: check_disk(hp) if runtime.comm.rank == 0 else None)
        section("products", product_speed, runtime)
        section("load", load, runtime)
        section("copies", copy_speed, runtime)
        section(
            "collectives",
            lambda: communication(hp, runtime) if runtime.comm.size > 1 else {},
            alone=False,
        )
        names = ("sdpa", "math") if runtime.device.type == "cpu" else train_gpt.KERNELS[:-1]
        section("attention", attention_times, hp, runtime, names)
        hopper = any(name in runtime.device_name() for name in HOPPER)
        section("fa3", lambda: attention_times(hp, runtime, FA3_SOURCES) if hopper else None)
        section("mlp", mlp_times, hp, runtime)
        if not runtime.comm.broadcast(section.report["errors"]):
            val = train_gpt.read_validation(hp, runtime.device)
            silent = dataclasses.replace(hp, checkpoint_every="")
            run = train_gpt.Run(silent, runtime, lambda *_, **__: None, val)
            section("training", training, run, alone=False)
            section("evaluation", evaluation, run, alone=False)
        report = judge(hp, section.report)
        if runtime.comm.rank == 0:
            save(report)
            print_verdict(report)
        return runtime.comm.broadcast(report)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    hp = Hyperparameters.from_env(dict(os.environ))
    none = {"resume": "", "eval_only": "", "run_id": hp.run_id or "check"}
    began = time.perf_counter()
    rank_0 = os.environ.get("RANK", "0") == "0"
    if rank_0:
        save(unfinished())
    try:
        report = check(dataclasses.replace(hp, **none))
        errors = report["errors"] or ["a section has no result"] * (not report["works"])
    except (UserError, torch.OutOfMemoryError) as error:
        errors = [sentence_of(error)]
        if rank_0:
            save(json.loads(REPORT.read_text()) | unfinished(*errors))
    if rank_0:
        print(f"the check took {time.perf_counter() - began:.0f} s", flush=True)
    if errors:
        raise UserError("; ".join(errors))


if __name__ == "__main__":
    program.run_program(main)

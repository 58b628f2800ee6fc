#!/usr/bin/env python3
"""Check a machine before an expensive run: a minute of measurements on all ranks, and a verdict.

    ./run.sh check                                    # all GPUs, or the CPU
    env $(grep -v '^#' configs/one_gpu.env) ./run.sh check      # for the run of that file
    torchrun --standalone --local-addr=127.0.0.1 --nproc_per_node=8 tools/check_machine.py

The knobs are those of the run. It reads the data, measures products, copies, collectives and
kernels at the run's sizes, trains and evaluates a little, and prints what is slower than it should
be, the steps to expect, and one line of knobs to paste; logs/check.json has all figures. The exit
status is 0 only if all is ready to run. Compiling takes minutes the first time.
"""

import dataclasses
import functools
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

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("", "tools", "bench", "data")]

import program
import flops
import shards
import train_gpt
from import_checkpoint import beginning
from train_gpt import Hyperparameters, Runtime, UserError, require

# isort: split
import torch
from torch.utils.benchmark import Timer

REPORT = Path("logs/check.json")
# How much slower than the others a rank may be: of a GPU, and of a CPU, which others use as well.
SLOW_RANK, SLOW_CPU = 0.08, 0.25
SLOW = 0.85  # of what is usual
# Of the data sheet's peak, what large products and copies reach: 586 of 989 TFLOP/s were measured on
# a healthy H100 at its power limit (docs/log.md).
PRODUCTS, COPIES = 0.6, 0.9
HOPPER = ("H100", "H200", "H20", "H800", "GH200")  # GPUs of FlashAttention 3
FA3 = "pip install -U kernels, or the official wheel (docs/pods.md)"
EVALUATION_CAP = 600.0  # seconds, by the rules of the challenge
STEPS, MORE_STEPS = 10, 3  # timed steps with whole sequences, and of each other kind
BATCHES = 8  # of each rank that are scored
SGD_CHUNKS = 8  # of test-time training that are timed; it trains on all but the last
CLEARLY = 0.02  # a kernel that is faster by this share than the automatic choice is advised


# ---- Measurements on each rank -------------------------------------------------------------------
def machine(runtime: Runtime) -> dict:
    """What the rank runs on."""
    found = {"device": runtime.device_name(), "host": socket.gethostname()}
    found["torch"] = torch.__version__
    if runtime.device.type == "cuda":
        properties = torch.cuda.get_device_properties(runtime.device)
        found |= {"cuda": torch.version.cuda, "memory_mib": properties.total_memory >> 20}
        query = "driver_version,power.limit,clocks.max.sm"
        command = f"timeout 20 nvidia-smi --query-gpu={query} --format=csv,noheader"
        told = subprocess.getoutput(f"{command} --id=GPU-{properties.uuid} 2>/dev/null").strip()
        found["driver, power limit, clock"] = told or "unknown"
        found["packages"] = train_gpt.package_versions()
    return found


def check_data(hp: Hyperparameters) -> dict:
    """Counts of the data. Raises UserError for what a run, or the data's manifest, would refuse."""
    folder = Path(hp.data_path)
    train, val = (train_gpt.TokenStream(folder, s, hp.vocab_size) for s in ("train", "val"))
    manifest = shards.read_manifest(folder)
    wrong = shards.problems(folder, manifest, hashes=False) if manifest else []
    require(not wrong, "; ".join(wrong[:3]))
    train_gpt.read_validation(hp, torch.device("cpu"))
    return {"shards": len(train.paths), "train_tokens": len(train), "val_tokens": len(val)}


def check_disk() -> dict:
    """Free space, where rank 0 writes. Raises UserError if it would not hold checkpoints."""
    free = shutil.disk_usage(".").free
    require(free > 1 << 31, f"the disk has {free >> 20} MiB of free space: free some")
    return {"free GB": free / 1e9}


def milliseconds(call: Callable[[], object], seconds: float = 0.2, calls: int = 0) -> float:
    """Of one call: the median over so many seconds, or the mean of so many calls."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    found = timer.timeit(calls) if calls else timer.blocked_autorange(min_run_time=seconds)
    return 1000 * found.median


def product_speed(runtime: Runtime) -> float:
    """TFLOP/s of a large matrix product, over seconds, in which a GPU may become slower."""
    n = 8192 if runtime.device.type == "cuda" else 1024
    a, b = torch.randn(2, n, n, device=runtime.device).to(runtime.dtype)
    return 2e-9 * n**3 / milliseconds(lambda: a @ b, seconds=2.0)


def copy_speed(runtime: Runtime) -> float:
    """GB/s that a copy in the device's memory reads and writes."""
    count = 1 << (30 if runtime.device.type == "cuda" else 26)
    source, target = torch.zeros(2, count, dtype=torch.uint8, device=runtime.device)
    return 2e-6 * count / milliseconds(lambda: target.copy_(source))


def communication(hp: Hyperparameters, runtime: Runtime) -> dict[str, dict]:
    """Milliseconds and bytes of a step's collectives, by name."""
    comm, banks, small = runtime.comm, [], 4
    for name, weights in train_gpt.meta_parameters(hp).items():
        if name in train_gpt.BANKS:
            rows, options = math.ceil(len(weights) / comm.shard.size), {"device": runtime.device}
            shape = comm.shard.size * rows, *weights.shape[1:]
            full = torch.zeros(shape, dtype=runtime.dtype, **options)
            banks.append((full, full[:rows].clone()))
        else:
            small += weights.numel()
    flat = torch.zeros(small, device=runtime.device)
    whole, part = (sum(t.nbytes for t in tensors) for tensors in zip(*banks, strict=True))
    calls = {  # each starts collectives
        "reduce-scatter": (whole, lambda: [comm.shard.reduce_scatter(s, f) for f, s in banks]),
        "all-gather": (whole, lambda: [comm.shard.all_gather(f, s) for f, s in banks]),
        "all-reduce": (flat.nbytes, lambda: [comm.all_reduce(flat)]),
    }
    if comm.replicate.size > 1:  # crosses nodes
        calls["all-reduce of rows"] = part, lambda: [comm.replicate.all_reduce(s) for _, s in banks]

    def finish(start: Callable[[], list[Callable]]) -> None:
        for arrived in start():
            arrived()

    # As many calls on all ranks, or some would wait for ever
    return {
        name: {"ms": milliseconds(functools.partial(finish, start), calls=15), "bytes": size}
        for name, (size, start) in calls.items()
    }


def forward_rows(hp: Hyperparameters, runtime: Runtime) -> int:
    """Rows of a training forward."""
    rows = max(1, hp.train_batch_tokens // hp.train_seq_len // runtime.comm.size)
    return rows // train_gpt.micro_batches(hp, rows, runtime.micro_batch_tokens)


def attention_times(hp: Hyperparameters, runtime: Runtime, names: Iterable[str]) -> dict[str, dict]:
    """What `kernel_times` finds for kernels of attention at the run's sizes."""
    batch, options = (forward_rows(hp, runtime), hp.train_seq_len), {"device": runtime.device}
    heads = (hp.num_heads, hp.num_kv_heads, hp.num_kv_heads)
    qkv = [torch.randn(*batch, n, hp.head_dim, **options).to(runtime.dtype) for n in heads]
    document = None
    if hp.doc_attention:
        document = (torch.arange(batch[1], **options) >= 100).long().expand(batch[0], -1)

    def load(name: str) -> Callable[..., torch.Tensor]:
        missing = train_gpt.why_not(name, hp, runtime)
        require(not missing, missing)
        attend = train_gpt.load_attention(name)
        prepared = document
        if document is not None and hasattr(attend, "prepare"):
            prepared = attend.prepare(document)
        attend = train_gpt.compile_whole(attend, runtime.compiled and runtime.device.type == "cuda")
        return functools.partial(attend, document=prepared)

    found = kernel_times(load, names, qkv)
    train_gpt.load_attention(runtime.attention)  # sets torch's switches
    return found


def mlp_times(hp: Hyperparameters, runtime: Runtime) -> dict[str, dict]:
    """The same for the forms of the MLP."""
    _, hidden, dim = train_gpt.bank_shape("mlp_bank", hp)
    shapes = (forward_rows(hp, runtime), hp.train_seq_len, dim), (hidden, dim), (dim, hidden)
    inputs = [torch.randn(s, device=runtime.device, dtype=runtime.dtype) for s in shapes]

    def load(name: str) -> Callable[..., torch.Tensor]:
        fused = name == "fused" and train_gpt.load_fused_mlp(hp.mlp_slope, runtime.device)
        model = train_gpt.GPT(hp, None, runtime.dtype, fused).to(runtime.device)
        (layer, *_), *_ = model.layers(train_gpt.ForwardConfig(hp.layer_order()), 1, {}, None)

        def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
            matrices = {"up": train_gpt.Matrix(up), "down": train_gpt.Matrix(down)}
            return model.mlp(x, layer._replace(**matrices))

        return train_gpt.compile_whole(mlp, runtime.compiled)

    names = ("plain", "fused") if train_gpt.is_hopper(runtime.device) else ("plain",)
    return kernel_times(load, names, inputs)


def kernel_times(
    load: Callable[[str], Callable[..., torch.Tensor]],
    names: Iterable[str],
    inputs: list[torch.Tensor],
) -> dict[str, dict]:
    """Milliseconds of a forward and backward by kernel, and why others do not run here."""
    found = {"ms": {}, "refused": {}}
    inputs = [t.requires_grad_() for t in inputs]

    def time_of(kernel: Callable[..., torch.Tensor]) -> float:
        grad = torch.randn_like(kernel(*inputs))
        both = lambda: torch.autograd.grad(kernel(*inputs), inputs, grad)  # noqa: E731
        both()  # compiles
        return milliseconds(both)

    for name in names:
        try:
            found["ms"][name] = time_of(load(name))
        except Exception as error:  # a missing or unfit kernel can raise anything
            found["refused"][name] = train_gpt.error_message(error)
    return found


def seconds_of(work: Callable[[], object], runtime: Runtime) -> float:
    """Seconds on the device and the host."""
    runtime.synchronize()
    began = time.perf_counter()
    work()
    runtime.synchronize()
    return time.perf_counter() - began


def training(run: train_gpt.Run) -> dict:
    """Real steps of each kind of the run: milliseconds, peak memory, the time of calibration and of
    reading. Raises UserError if the loss is not finite."""
    hp, cuda = run.hp, run.runtime.device.type == "cuda"
    if cuda:  # products and kernels took memory, too
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    numbers, found = itertools.count(), {"kinds": {}}

    def steps(settings: train_gpt.StepSettings, count: int) -> None:
        reports = [run.train_step(n, settings) for n in itertools.islice(numbers, count)]
        loss = torch.stack(reports)[:, 0].mean().item()
        require(math.isfinite(loss), f"the mean training loss is {loss}: lower the learning rates")

    phases = train_gpt.phases(hp)
    for settings, places in phases.items():
        ordinary = settings.seq_len == hp.train_seq_len and "gradients_ms" not in found
        count = STEPS if ordinary else MORE_STEPS
        steps(settings, 2)
        ms = 1000 * seconds_of(functools.partial(steps, settings, count), run.runtime) / count
        name = f"T={settings.seq_len}{' looping' * settings.looping}{' QAT' * settings.qat}"
        found["kinds"][name] = {"ms": ms, "share": places / sum(phases.values())}
        if ordinary:  # without collectives, so each rank has its own time
            batch = run.loader.batch(next(numbers))
            work = functools.partial(run.backward, batch, settings)
            found["step_ms"] = ms
            found["gradients_ms"] = 1000 * min(seconds_of(work, run.runtime) for _ in range(3))
            run.optimizer.step(0.0, 0.0)  # clears the gradients
    if hp.gptq_batches and hp.max_wallclock_seconds:
        run.reserve_for_calibration()
    # The last batch of the data is cold if it is not in memory since its download.
    last = max(0, run.loader.blocks // run.loader.step_rows - 1)
    read = run.loader.reader.submit(run.loader.read, last)
    found["read_ms"] = 1000 * seconds_of(read.result, run.runtime)
    found["calibration_seconds"] = run.clock.reserve
    if cuda:
        found["memory_mib"] = torch.cuda.max_memory_reserved() >> 20
    return found


def evaluation(run: train_gpt.Run) -> dict[str, dict]:
    """Expected seconds of each final score, from a part of the text."""
    return {
        "seconds": {
            name: test_time_training(run, name, way) if "ttt" in name else scoring(run, way)
            for name, way in train_gpt.final_passes(run.hp).items()
        }
    }


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
    """Expected seconds, from the first documents or chunks."""
    hp, runtime, val = run.hp, run.runtime, run.val
    documents = train_gpt.LORA_BATCH * runtime.comm.size
    end = min(SGD_CHUNKS * hp.ttt_chunk_tokens, val.targets)
    if name == "ttt_lora":
        end = int([*val.documents, val.targets][: documents + 1][-1])
    part = beginning(val, end)
    make_scorer = functools.partial(train_gpt.Evaluator, run.eval_forward, part, hp, runtime)
    passes = train_gpt.final_passes(hp)
    train_gpt.warm_up_evaluation(make_scorer, passes, run.log)  # compiles
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
    found = report["ranks"]
    for key in path:
        found = [result[key] for result in found if isinstance(result, dict) and key in result]
    return found


def first(report: dict, *path: str):
    """The result of the first rank that has it, or None."""
    return next(iter(values(report, *path)), None)


def slow_ranks(report: dict) -> list[str]:
    """Ranks that hold up all others."""
    limit = SLOW_RANK if first(report, "machine", "memory_mib") else SLOW_CPU
    speeds = {
        "multiplies": values(report, "products", "TFLOP/s"),
        "copies": values(report, "copies", "GB/s"),
        "computes gradients": [1 / ms for ms in values(report, "training", "gradients_ms")],
    }
    found = []
    for what, each in speeds.items():
        for rank, speed in enumerate(each):
            others = each[:rank] + each[rank + 1 :]
            behind = 1 - speed / statistics.median(others) if others else 0.0
            if behind > limit:
                where = report["ranks"][rank]["machine"]["host"]
                found.append(f"rank {rank} ({where}) {what} {behind:.0%} slower than the others")
    return found


def slow_hardware(report: dict) -> list[str]:
    """What is far below the data sheet of the GPU, which has bf16 products."""
    name, found = first(report, "machine", "device"), []
    for what, section, unit, peaks, scale in (
        ("large products", "products", "TFLOP/s", flops.PEAK_FLOPS, PRODUCTS / 1e12),
        ("copies", "copies", "GB/s", flops.BANDWIDTH, COPIES / 1e9),
    ):
        here = statistics.median(values(report, section, unit))
        usual = scale * (flops.of_gpu(name, peaks) or 0)
        if report["chosen"]["dtype"] == "torch.bfloat16" and here < SLOW * usual:
            text = f"{what} reach {here:,.0f} {unit}; {usual:,.0f} is usual"
            found.append(f"{text}: look at clocks and power limit")
    return found


def expected(hp: Hyperparameters, report: dict) -> dict[str, float]:
    """Steps and training seconds within the limits, and seconds of the scores."""
    kinds = first(report, "training", "kinds").values()
    reserve = first(report, "training", "calibration_seconds")
    mean = sum(kind["share"] * kind["ms"] / 1000 for kind in kinds)  # if ITERATIONS end the run
    steps, seconds = hp.iterations, hp.iterations * mean
    limit = hp.max_wallclock_seconds - reserve
    if hp.max_wallclock_seconds and seconds > limit:  # progress is then the used part of the time
        fitting = sum(1000 * kind["share"] * limit / kind["ms"] for kind in kinds)
        steps, seconds = min(steps, int(fitting)), limit
    found = {"steps": steps, "train_seconds": seconds + reserve}
    scores = values(report, "evaluation", "seconds")
    found["evaluation_seconds"] = sum(max(each[name] for each in scores) for name in scores[0])
    tokens = steps * hp.train_batch_tokens
    return found | {"epochs": tokens / first(report, "data", "train_tokens")}


def best(report: dict, section: str) -> str:
    """The automatic choice of a kernel, unless another is clearly faster on the slowest rank."""
    each, chosen = values(report, section, "ms"), report["chosen"][section]
    times = {name: max(rank.get(name, math.inf) for rank in each) for name in each[0]}
    name = min(times, key=times.get)
    return name if times[name] < (1 - CLEARLY) * times.get(chosen, math.inf) else chosen


def limits(hp: Hyperparameters, report: dict) -> tuple[list[str], list[str], dict]:
    """What is slow, what is advised, and the knobs to set."""
    slow, advice = slow_ranks(report) + slow_hardware(report), []
    knobs = {"ATTENTION": best(report, "attention")}
    knobs["FUSED_MLP"] = int(best(report, "mlp") == "fused")
    step, run = first(report, "training", "step_ms"), report["expected"]
    total = first(report, "machine", "memory_mib")
    why = first(report, "attention", "refused", "fa3")
    if why and any(name in first(report, "machine", "device") for name in HOPPER):
        advice.append(f"no FlashAttention 3 ({why}): {FA3}")
    used = max(values(report, "training", "memory_mib"), default=0)
    if total and used > 0.95 * total:
        slow.append(f"training reserves {used:,} of {total:,} MiB: run with half the micro-batch")
        knobs["MICRO_BATCH_TOKENS"] = report["chosen"]["micro_batch_tokens"] // 2
    read = max(values(report, "training", "read_ms"))
    if read > step:
        text = f"reading a batch takes {read:.0f} ms, longer than a step"
        slow.append(f"{text}: copy the shards to a local disk and set DATA_PATH")
    waited = sum(part["ms"] for part in first(report, "collectives").values())
    if total and waited > 0.15 * step:
        text = f"collectives take {waited:.1f} ms, over 15 % of a step: look at the links between"
        slow.append(f"{text} the GPUs (nvidia-smi topo -m) and at NCCL_DEBUG=INFO")
    scored = run["evaluation_seconds"]
    if scored > EVALUATION_CAP:
        text = f"evaluation takes {scored:.0f} s, over the challenge's {EVALUATION_CAP:.0f}: limit"
        slow.append(f"{text} test-time training, or evaluate in one banded pass")
        knobs |= {"EVAL_MAX_SECONDS": 540} if hp.ttt_enabled else {"EVAL_MODE": "banded"}
    if run["epochs"] > 1:
        text = f"the run reads the data {run['epochs']:.2f} times"
        advice.append(f"{text}: download more shards")
    cap, seconds = hp.max_wallclock_seconds, run["train_seconds"]
    if seconds < cap:
        text = f"ITERATIONS={hp.iterations} ends the run after {seconds:.0f} of {cap:g} s"
        advice.append(f"{text}: set more, so that the time limit ends it")
        knobs["ITERATIONS"] = math.ceil(2 * hp.iterations * cap / seconds)
    if not hp.warmdown_frac and hp.warmdown_iters > train_gpt.PHASE_LIMIT * run["steps"]:
        text = f"WARMDOWN_ITERS={hp.warmdown_iters} is over half of {run['steps']:,} steps"
        advice.append(f"{text}: #399's warmdown is 0.41 of its run")
        knobs["WARMDOWN_FRAC"] = 0.41
    return slow, advice, knobs


def judge(hp: Hyperparameters, report: dict) -> dict:
    """The report with what is expected, slow and advised, and the line to paste."""
    parts = ("machine", "products", "copies", "attention", "mlp", "training", "evaluation")
    complete = all(len(values(report, part)) == len(report["ranks"]) for part in parts)
    complete = complete and first(report, "data") is not None
    report = report | {"finished": True, "works": complete and not report["errors"]}
    if complete:
        report["expected"] = expected(hp, report)
        report["slow"], report["advice"], knobs = limits(hp, report)
        report["paste"] = " ".join(f"{name}={value}" for name, value in knobs.items())
    return report


# ---- Text ----------------------------------------------------------------------------------------
def figures(each: list) -> str:
    """One result of all ranks as text: numbers from the lowest to the highest."""
    if isinstance(each[0], dict):
        names = dict.fromkeys(name for one in each for name in one)
        parts = {name: [one[name] for one in each if name in one] for name in names}
        return ", ".join(
            f"{name} ({figures(part)})" if isinstance(part[0], dict) else f"{name} {figures(part)}"
            for name, part in parts.items()
        )
    if isinstance(each[0], str):
        return " / ".join(dict.fromkeys(each))
    texts = [f"{n:,}" if isinstance(n, int) else f"{n:,.4g}" for n in (min(each), max(each))]
    return " to ".join(dict.fromkeys(texts))


def print_verdict(report: dict) -> None:
    """The end of the text."""
    print()
    if run := report.get("expected"):
        trained = f"{run['steps']:,} steps in {run['train_seconds']:.0f} s of training"
        evaluated = f"{run['evaluation_seconds']:.0f} s of evaluation"
        print(f"expected: {trained}, {run['epochs']:.2f} epochs, {evaluated}")
    for kind in ("slow", "advice"):
        for sentence in report.get(kind, []):
            print(f"{kind}: {sentence}")
    if report["works"]:
        print(f"set:      {report['paste']}")
        print(f"ready to run; {REPORT} has all figures")


# ---- The check -----------------------------------------------------------------------------------
class Check:
    """Runs sections on all ranks, and collects, prints and saves what they find on rank 0."""

    def __init__(self, hp: Hyperparameters, runtime: Runtime):
        self.comm = runtime.comm
        names = ("attention", "micro_batch_tokens", "compiled")
        chosen = {name: getattr(runtime, name) for name in names} | {"dtype": str(runtime.dtype)}
        chosen["mlp"] = "fused" if runtime.fused_mlp else "plain"
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
            if values(self.report, section):
                print(f"{section + ':':12} {figures(values(self.report, section))}", flush=True)
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
        section("disk", lambda: check_disk() if runtime.comm.rank == 0 else None)
        section("products", lambda: {"TFLOP/s": product_speed(runtime)})
        section("copies", lambda: {"GB/s": copy_speed(runtime)})
        several = runtime.comm.size > 1
        section("collectives", lambda: communication(hp, runtime) if several else {}, alone=False)
        names = ("sdpa", "math") if runtime.device.type == "cpu" else train_gpt.KERNELS[:-1]
        section("attention", attention_times, hp, runtime, names)
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
    program.parser(__doc__).parse_args()
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

#!/usr/bin/env python3
"""Check a machine before an expensive run: a minute of measurements on all ranks, and a verdict.

    ./run.sh check                                                # all GPUs, or the CPU
    torchrun --standalone --nproc_per_node=8 tools/preflight.py   # the same; several nodes: docs/nodes.md

The knobs are those of the run. It reads the data, measures products, copies, collectives and
kernels at the run's sizes, and does real training steps and an evaluation batch, as a run would. It
prints what it found, what is slower than it should be, the steps to expect, and one line of knobs
to paste; logs/check.json has the same. The exit status is 0 only if a run would work. Compiling
takes minutes the first time; a run then finds it in the cache.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "data")]

import flops
import shards
import train_gpt
from train_gpt import Hyperparameters, Runtime, UserError, require

# isort: split
import torch

REPORT = Path("logs/check.json")
SLOW_RANK = 0.08  # how much slower than the others a rank may be
SLOW = 0.85  # of what is usual
# Of the data sheet's peak, what large products and copies reach. bench/h100.py takes 790 of 989
# TFLOP/s for its bound.
PRODUCTS, COPIES = 0.8, 0.9
# FLOP/s of FlashAttention 3 for heads of 64 dimensions and 2,048 causal positions on an H100, forward
# and backward (published, arXiv:2407.08608), and what a backward computes of a forward's.
FA3_FORWARD, FA3_BACKWARD, BACKWARD = 371e12, 422e12, 2.5
HOPPER = ("H100", "H200", "H20", "H800", "GH200")  # GPUs that it needs
STEP_399 = 0.08187  # seconds of #399's step on 8 x H100 (published)
# Milliseconds of a step without depth recurrence on one of 8 H100s, with the plain and the fused
# MLP: a lower bound (modelled by bench/h100.py, torch 2.9.1), by file of records/.
BOUNDS = {"defaults": (48.78, 44.36)}
EVALUATION_CAP = 600.0  # seconds, by the rules of the challenge
STEPS, MORE_STEPS = 10, 3  # timed steps with whole sequences, and of each other kind
SGD_CHUNKS = 8  # of test-time training that are timed


# ---- Measurements on each rank -------------------------------------------------------------------
def machine(runtime: Runtime) -> dict:
    """What the rank runs on."""
    found = {"device": runtime.device_name(), "host": socket.gethostname()}
    found["torch"] = torch.__version__
    if runtime.device.type == "cuda":
        properties = torch.cuda.get_device_properties(runtime.device)
        found |= {"cuda": torch.version.cuda, "memory_mib": properties.total_memory >> 20}
        found |= train_gpt.gpu_facts(runtime.device)
    return found


def check_data(hp: Hyperparameters) -> dict:
    """Counts of the data. Raises UserError for what a run would refuse, and for files that are not
    as long as their manifest says."""
    folder = Path(hp.data_path)
    streams = [train_gpt.TokenStream(hp.data_path, s, hp.vocab_size) for s in ("train", "val")]
    manifest = shards.read_manifest(folder)
    wrong = shards.problems(folder, manifest, hashes=False) if manifest else []
    require(not wrong, "; ".join(wrong[:3]))
    train_gpt.Validation(hp, torch.device("cpu"))
    train, val = streams
    return {"shards": len(train.paths), "train_tokens": len(train), "val_tokens": len(val)}


def check_disk(hp: Hyperparameters, runtime: Runtime) -> dict:
    """Free bytes. Raises UserError if the run's files do not fit."""
    name = argparse.Namespace(artifact=REPORT)  # in the folder of the log
    train_gpt.require_space(hp, train_gpt.Comm(), name)
    return {"free_bytes": shutil.disk_usage(".").free}


def product_speed(runtime: Runtime) -> float:
    """FLOP/s of a large matrix product."""
    n = 8192 if runtime.device.type == "cuda" else 1024
    a, b = torch.randn(2, n, n, device=runtime.device).to(runtime.dtype)
    return 2e3 * n**3 / train_gpt.milliseconds(lambda: a @ b, runtime)


def copy_speed(runtime: Runtime) -> float:
    """Bytes/s that a copy in the device's memory reads and writes."""
    count = 1 << (30 if runtime.device.type == "cuda" else 26)
    source, target = torch.zeros(2, count, dtype=torch.uint8, device=runtime.device)
    return 2e3 * count / train_gpt.milliseconds(lambda: target.copy_(source), runtime)


def communication(hp: Hyperparameters, runtime: Runtime) -> dict[str, dict]:
    """Milliseconds and bytes of a step's collectives, by name."""
    comm, banks, small = runtime.comm, [], 0
    for name, weights in train_gpt.outline(hp).items():
        if name not in train_gpt.BANKS:
            small += weights.numel()
            continue
        rows = math.ceil(len(weights) / comm.shard.size)
        sizes = dict(dtype=runtime.dtype, device=runtime.device)
        full = torch.zeros(comm.shard.size * rows, *weights.shape[1:], **sizes)
        banks.append((full, torch.zeros_like(full[:rows])))
    flat = torch.zeros(small + 3, device=runtime.device)

    def wait_for(collectives: Iterable[Callable[[], None]]) -> None:
        for arrived in list(collectives):
            arrived()

    calls = {
        "reduce-scatter": lambda: wait_for(comm.shard.reduce_scatter(s, f) for f, s in banks),
        "all-gather": lambda: wait_for(comm.shard.all_gather(f, s) for f, s in banks),
        "all-reduce": lambda: wait_for([comm.all_reduce(flat)]),
    }
    sizes = dict.fromkeys(calls, sum(full.nbytes for full, _ in banks)) | {
        "all-reduce": flat.nbytes
    }
    found = {}
    for name, call in calls.items():
        call()  # the first one sets up the connection
        found[name] = {"ms": train_gpt.milliseconds(call, runtime), "bytes": sizes[name]}
    return found


def kernels(trial: train_gpt.Trial, names: Iterable[str], runtime: Runtime) -> dict[str, dict]:
    """Milliseconds of a forward and backward by kernel, and why others do not run here."""
    ms, refused = {}, {}
    for name in names:
        try:
            ms[name] = train_gpt.milliseconds(trial(name), runtime)
        except Exception as error:  # a missing or unfit kernel can raise anything
            refused[name] = train_gpt.reason(error)
    train_gpt.load_attention(runtime.attention)  # a trial sets torch's switches
    return {"ms": ms, "refused": refused}


def seconds_of(work: Callable[[], object], runtime: Runtime) -> float:
    """Seconds on the device and the host."""
    runtime.synchronize()
    began = time.perf_counter()
    work()
    runtime.synchronize()
    return time.perf_counter() - began


def read_ms(loader: train_gpt.TrainingLoader) -> float:
    """Milliseconds to read the last batch of the data, which is in no cache yet."""
    last = max(0, loader.blocks // loader.step_rows - 1)
    began = time.perf_counter()
    loader.reader.submit(loader.read, last).result()
    return 1000 * (time.perf_counter() - began)


def training(run: train_gpt.Run) -> dict:
    """Real steps of each kind of the run: milliseconds, peak memory, the time of GPTQ and of
    reading. Raises UserError if the loss is not finite."""
    hp, runtime = run.hp, run.runtime
    numbers, kinds, gradients_ms = itertools.count(), [], 0.0

    def steps(settings: train_gpt.StepSettings, count: int) -> float:
        reports = [run.train_step(n, settings) for n in itertools.islice(numbers, count)]
        loss = torch.stack(reports)[:, 0].sum().item() / count
        require(math.isfinite(loss), f"the mean training loss is {loss}: lower the learning rates")
        return loss

    loss = math.nan
    for settings, share in train_gpt.phases(hp).items():
        ordinary = settings.seq_len == hp.train_seq_len and not gradients_ms
        count = STEPS if ordinary else MORE_STEPS
        loss = steps(settings, 2)
        seconds = seconds_of(functools.partial(steps, settings, count), runtime)
        kind = {name: getattr(settings, name) for name in ("seq_len", "qat", "looping")}
        kinds.append({**kind, "share": share, "ms": 1000 * seconds / count})
        if ordinary:  # without collectives, so each rank has its own time
            batch = run.loader.batch(next(numbers))
            work = functools.partial(run.trainer.backward, batch, settings)
            gradients_ms = 1000 * min(seconds_of(work, runtime) for _ in range(3))
            run.trainer.optimizer.step(0.0, 0.0)  # clears the gradients
            run.trainer.optimizer.finish()
    gptq = [run.calibrate(range(1))[1] for _ in range(2)] if hp.gptq_batches else [0.0]
    found = {"kinds": kinds, "loss": loss, "gradients_ms": gradients_ms}
    found["read_ms"] = read_ms(run.loader)
    found["gptq_seconds"] = 1.1 * hp.gptq_batches * gptq[-1]  # as Run.reserve_for_gptq
    return found | {"memory_mib": train_gpt.peak_memory(runtime.device)}


def evaluation(run: train_gpt.Run) -> dict[str, float]:
    """Expected seconds of each final score: a batch of each rank, or of test-time training a part
    of the text, times how often it fits the whole."""
    hp, runtime, found = run.hp, run.runtime, {}
    for name, (how, stride) in train_gpt.final_passes(hp).items():
        if name.startswith("ttt"):
            found[name] = test_time_training(run, name, how, stride)
            continue
        scorer = run.make_scorer(how, stride)
        windows = scorer.windows()
        windows = windows[:, windows[3] == windows[3, -1]]  # a span's first window has more targets
        batch = runtime.comm.size * train_gpt.eval_rows(hp, runtime, scorer.window)
        work = functools.partial(scorer.score, windows[:, :batch])
        work()  # compiles
        found[name] = seconds_of(work, runtime) * math.ceil(windows.shape[1] / batch)
    return found


def test_time_training(run: train_gpt.Run, name: str, how: train_gpt.Pass, stride: int) -> float:
    """Expected seconds, from the first documents or chunks."""
    hp, runtime, val = run.hp, run.runtime, run.val
    documents = train_gpt.LORA_BATCH * runtime.comm.size
    end = min(SGD_CHUNKS * hp.ttt_chunk_tokens, val.targets)
    if name == "ttt_lora":
        end = int([*val.documents, val.targets][: documents + 1][-1])
    tokens, nbytes = val.tokens[: end + 1].cpu().numpy(), val.nbytes[:end].cpu().numpy()
    part = train_gpt.Validation.of(tokens, nbytes, runtime.device)
    make_scorer = functools.partial(train_gpt.Evaluator, run.eval_forward, part, hp, runtime)
    train_gpt.warm_up_evaluation(make_scorer, hp)  # compiles
    adapt = {"ttt_sgd": train_gpt.ttt_sgd, "ttt_lora": train_gpt.ttt_lora}[name]
    work = functools.partial(adapt, run.trainer.model, make_scorer(how, stride))
    seconds = seconds_of(work, runtime)
    whole = seconds * val.targets / part.targets
    return min(whole, hp.eval_max_seconds) if hp.eval_max_seconds else whole


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
    speeds = {
        "multiplies": values(report, "products"),
        "copies": values(report, "copies"),
        "computes gradients": [1 / ms for ms in values(report, "training", "gradients_ms")],
    }
    found = []
    for what, each in speeds.items():
        for rank, speed in enumerate(each):
            others = [*each[:rank], *each[rank + 1 :]]
            behind = 1 - speed / statistics.median(others) if others else 0.0
            if behind > SLOW_RANK:
                where = first({"ranks": report["ranks"][rank : rank + 1]}, "machine", "host")
                found.append(f"rank {rank} ({where}) {what} {behind:.0%} slower than the others")
    return found


def slow_hardware(report: dict) -> list[str]:
    """What is far below the data sheet of the GPU."""
    name = first(report, "machine", "device")
    sheet = {
        "large products reach": ("TFLOP/s", 1e12, "products", flops.PEAK_FLOPS, PRODUCTS),
        "copies reach": ("GB/s", 1e9, "copies", flops.BANDWIDTH, COPIES),
    }
    found = []
    for what, (unit, scale, section, peaks, part) in sheet.items():
        peak = flops.of_gpu(name, peaks)
        each = values(report, section)
        if peak and each and statistics.median(each) < SLOW * part * peak:
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
        path = ROOT / "records" / f"{name}.env"
        lines = path.read_text().splitlines() if name != "defaults" else []
        words = [word for line in lines if not line.startswith("#") for word in line.split()]
        ours = Hyperparameters.from_env(dict(word.split("=") for word in words))
        if all(getattr(hp, role) == getattr(ours, role) for role in roles):
            return name, times[report["chosen"]["mlp"] == "fused"]
    return None


def slow_step(hp: Hyperparameters, report: dict) -> list[str]:
    """A step that makes less of the GPU than #399's published one."""
    published = Hyperparameters(skip_gates=False, short_seq_parts=1)
    batch = published.train_batch_tokens * flops.flops_per_token(published, published.train_seq_len)
    usual = batch / 8 / STEP_399 / (PRODUCTS * flops.PEAK_FLOPS["H100"])
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
    gpu, ms = first(report, "machine", "device"), first(report, "attention", "ms")
    if not any(name in gpu for name in HOPPER) or "fa3" in ms or not ms:
        return []
    rows = report["chosen"]["rows"]
    forward = 2 * rows * hp.num_heads * hp.train_seq_len**2 * hp.head_dim
    published = 1000 * (forward / FA3_FORWARD + BACKWARD * forward / FA3_BACKWARD)
    times = min(ms.values()) / published
    return [
        f"FlashAttention 3 is missing: attention takes {times:.1f} times as long as its published "
        "speed on an H100; docs/pods.md has the command that installs it"
    ]


def slow_rest(hp: Hyperparameters, report: dict) -> list[str]:
    """Memory, collectives and evaluation at their limits."""
    found = []
    used, total = first(report, "training", "memory_mib"), first(report, "machine", "memory_mib")
    if total and used["reserved"] > 0.95 * total:
        half = report["chosen"]["micro_batch_tokens"] // 2
        found.append(
            f"training reserves {used['reserved']:,} of {total:,} MiB: set MICRO_BATCH_TOKENS={half}"
        )
    read = max(values(report, "training", "read_ms"))
    if read > whole_step(hp, report)["ms"]:
        found.append(
            f"reading a batch takes {read:.0f} ms, longer than a step: copy the shards to a local "
            "disk and set DATA_PATH"
        )
    moved = first(report, "collectives") or {}
    waited = sum(part["ms"] for part in moved.values())
    if total and waited > 0.15 * whole_step(hp, report)["ms"]:
        found.append(
            f"collectives take {waited:.1f} ms, over 15 % of a step: look at the links between the "
            "GPUs (nvidia-smi topo -m) and at NCCL_DEBUG=INFO"
        )
    scored = sum(first(report, "evaluation").values())
    if scored > EVALUATION_CAP:
        found.append(
            f"evaluation takes {scored:.0f} s, over the challenge's {EVALUATION_CAP:.0f}: set "
            "EVAL_MODE=banded, or EVAL_MAX_SECONDS for test-time training"
        )
    return found


def expected(hp: Hyperparameters, report: dict) -> dict[str, float]:
    """Steps and training seconds within the limits, and seconds of the scores."""
    kinds = first(report, "training", "kinds")
    reserve = first(report, "training", "gptq_seconds")
    mean = sum(kind["share"] * kind["ms"] / 1000 for kind in kinds)  # if ITERATIONS end the run
    steps, seconds = hp.iterations, hp.iterations * mean
    limit = hp.max_wallclock_seconds - reserve
    if hp.max_wallclock_seconds and seconds > limit:  # progress is then the used part of the time
        steps = int(sum(1000 * kind["share"] * limit / kind["ms"] for kind in kinds))
        seconds = limit
    scores = sum(first(report, "evaluation").values())
    found = {"steps": steps, "train_seconds": seconds + reserve, "evaluation_seconds": scores}
    found["step_ms"] = whole_step(hp, report)["ms"]
    tokens = steps * hp.train_batch_tokens
    return found | {"epochs": tokens / first(report, "data", "train_tokens")}


def advice(hp: Hyperparameters, report: dict) -> list[str]:
    """Settings that the expected run asks for."""
    found = []
    run = report["expected"]
    if run["epochs"] > 1:
        found.append(f"the run reads the data {run['epochs']:.2f} times: download more shards")
    if not hp.warmdown_frac and hp.warmdown_iters > train_gpt.PHASE_LIMIT * run["steps"]:
        found.append(
            f"WARMDOWN_ITERS={hp.warmdown_iters} is over half of {run['steps']} steps: set "
            "WARMDOWN_FRAC=0.41, its part of #399's run"
        )
    return found


def judge(hp: Hyperparameters, report: dict) -> dict:
    """The report with what is expected, slow and advised, and the line to paste."""
    complete = all(first(report, part) for part in ("training", "evaluation", "products", "data"))
    report = report | {"slow": slow_ranks(report) + slow_hardware(report), "advice": []}
    if complete:
        report |= {"expected": expected(hp, report), "bound": bound(hp, report)}
        report["slow"] += slow_step(hp, report) + missing_fa3(hp, report) + slow_rest(hp, report)
        report["advice"] = advice(hp, report)
        chosen = report["chosen"]
        knobs = {"ATTENTION": chosen["attention"], "FUSED_MLP": int(chosen["mlp"] == "fused")}
        knobs["MICRO_BATCH_TOKENS"] = chosen["micro_batch_tokens"]
        report["paste"] = " ".join(f"{name}={value}" for name, value in knobs.items())
    report["works"] = complete and not report["errors"]
    return report


# ---- Text ----------------------------------------------------------------------------------------
def spread(each: list[float], form: str = ",.0f") -> str:
    """The lowest and highest of all ranks, or one number if they are close."""
    low, high = min(each), max(each)
    numbers = dict.fromkeys((f"{low:{form}}", f"{high:{form}}"))
    return " to ".join(numbers) if high > 1.01 * low else f"{high:{form}}"


def describe(section: str, report: dict) -> str:
    """A section's line: of all ranks, or of the first one that has it."""
    found = values(report, section)
    one = found[0]
    if section == "machine":
        machines = [", ".join(f"{key} {value}" for key, value in each.items()) for each in found]
        unlike = list(dict.fromkeys(machines))
        ranks = [f"{machines.count(text)} x {text}" for text in unlike]
        return "\n".join(ranks)
    if section == "data":
        counts = f"{one['train_tokens']:,} training and {one['val_tokens']:,} validation tokens"
        return f"{one['shards']} training shards, {counts}; lengths are right"
    if section == "disk":
        return f"{min(disk['free_bytes'] for disk in found) / 1e9:,.0f} GB free; the run fits"
    if section == "products":
        return f"{spread([speed / 1e12 for speed in found], ',.4g')} TFLOP/s"
    if section == "copies":
        return f"{spread([speed / 1e9 for speed in found])} GB/s"
    if section == "collectives":
        parts = []
        for name, part in one.items():
            ms = spread(values(report, section, name, "ms"), ".2f")
            parts.append(f"{name} {part['bytes'] / 1e6:.1f} MB in {ms} ms")
        return ", ".join(parts) or "none, as there is one rank"
    if section in ("attention", "mlp"):
        order = sorted(one["ms"], key=one["ms"].get)
        parts = [
            f"{name} {spread(values(report, section, 'ms', name), '.2f')} ms" for name in order
        ]
        parts += [f"no {name} ({why})" for name, why in one["refused"].items()]
        return ", ".join(parts)
    if section == "training":
        parts = []
        for kind in one["kinds"]:
            more = " looping" * kind["looping"] + " QAT" * kind["qat"]
            part = f"{kind['share']:.0%} of the run"
            parts.append(f"{kind['ms']:.1f} ms for T={kind['seq_len']}{more} ({part})")
        gradients = spread(values(report, section, "gradients_ms"), ".1f")
        memory = train_gpt.memory_line(one["memory_mib"])
        read = spread(values(report, section, "read_ms"), ".1f")
        parts += [f"gradients alone {gradients} ms", f"a batch is read in {read} ms"]
        return f"{'; '.join(parts)}; GPTQ {one['gptq_seconds']:.1f} s; {memory}"
    parts = [f"{name} {seconds:.1f} s" for name, seconds in one.items()]
    return f"{', '.join(parts)} (expected)"


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
        print(f"a run would work; {REPORT} has all figures")


# ---- The check -----------------------------------------------------------------------------------
class Check:
    """Runs sections on all ranks, and collects, prints and saves what they find on rank 0."""

    def __init__(self, hp: Hyperparameters, runtime: Runtime):
        self.comm = runtime.comm
        rows = train_gpt.trial_shape(hp, runtime)[0]
        chosen = {
            **runtime.kernels(),
            "micro_batch_tokens": runtime.micro_batch_tokens,
            "rows": rows,
        }
        self.report: dict = {"works": False, "knobs": dataclasses.asdict(hp), "chosen": chosen}
        self.report["errors"] = []
        self.report["ranks"] = [{} for _ in range(self.comm.size)]

    def __call__(self, section: str, measure: Callable, *arguments, alone: bool = True) -> None:
        """`alone`: the section has no collectives, so all ranks go on after an error."""
        result, error = None, ""
        try:
            result = measure(*arguments)
        except Exception as raised:  # whatever would end a run here
            if not alone and self.comm.size > 1:
                sentence = f"{section} of rank {self.comm.rank}: {train_gpt.reason(raised)}"
                raise UserError(sentence) from raised
            error = train_gpt.reason(raised)
            if isinstance(raised, torch.OutOfMemoryError):
                error += "; set a lower MICRO_BATCH_TOKENS"
        found = self.comm.gather((result, error))
        for rank, (part, why) in enumerate(found):
            if why:
                self.report["errors"].append(f"{section} of rank {rank}: {why}")
            elif part is not None:
                self.report["ranks"][rank][section] = part
        if self.comm.rank == 0:
            if any(part is not None for part, _ in found):
                print(f"{section + ':':12} {describe(section, self.report)}", flush=True)
            save(self.report)


def save(report: dict) -> None:
    """Write what is known so far."""
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    with train_gpt.replacing(REPORT) as partial:
        partial.write_text(json.dumps(report, indent=1) + "\n")


def check(hp: Hyperparameters) -> dict:
    """All sections, on this rank. Returns the report of all ranks."""
    if os.environ.get("RANK", "0") == "0":
        save({"works": False, "errors": ["the check did not finish"]})
    with Runtime.start(hp) as runtime:
        on_gpu = runtime.device.type == "cuda"
        section = Check(hp, runtime)
        first_of_node = os.environ.get("LOCAL_RANK", "0") == "0"
        section("machine", machine, runtime)
        section("data", lambda: check_data(hp) if first_of_node else None)
        section("disk", lambda: check_disk(hp, runtime) if first_of_node else None)
        section("products", product_speed, runtime)
        section("copies", copy_speed, runtime)
        section(
            "collectives",
            lambda: communication(hp, runtime) if runtime.comm.size > 1 else {},
            alone=False,
        )
        attention = train_gpt.KERNELS[:-1] if on_gpu else ("flash", "math")
        forms = ("plain", "fused") if on_gpu else ("plain",)
        section("attention", kernels, train_gpt.attention_trial(hp, runtime), attention, runtime)
        section("mlp", kernels, train_gpt.mlp_trial(hp, runtime), forms, runtime)
        if not runtime.comm.share(section.report["errors"]):
            val = train_gpt.Validation(hp, runtime.device)
            silent = dataclasses.replace(hp, checkpoint_every="")
            run = train_gpt.Run(silent, runtime, lambda *_, **__: None, val)
            section("training", training, run, alone=False)
            section("evaluation", evaluation, run, alone=False)
            run.loader.close()
        report = judge(hp, section.report)
        if runtime.comm.rank == 0:
            save(report)
            print_verdict(report)
        return runtime.comm.share(report)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    hp = Hyperparameters.from_env(dict(os.environ))
    none = {"resume": "", "profile": "", "eval_only": "", "run_id": "check"}
    began = time.perf_counter()
    try:
        report = check(dataclasses.replace(hp, **none))
    except UserError as error:
        train_gpt.complain(str(error))
        sys.exit(1)
    if os.environ.get("RANK", "0") == "0":
        print(f"the check took {time.perf_counter() - began:.0f} s")
    if not report["works"]:
        train_gpt.complain("; ".join(report["errors"]) or "a section has no result")
        sys.exit(1)


if __name__ == "__main__":
    train_gpt.run_program(main)

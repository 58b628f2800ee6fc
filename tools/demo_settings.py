#!/usr/bin/env python3
"""Choose the settings of ./run.sh's demonstration: the data's, and a model, processes and threads
for this machine.

    python tools/demo_settings.py          # DEMO_SIZE, NPROC and OMP_NUM_THREADS fix a choice

Prints NAME=VALUE lines of what the environment does not set, then a sentence that says what was
chosen and why. A run or sweep that is continued keeps what its log says. Else the model follows
from the speed of a matrix product of the large one, in the data type that a run would use, on all
cores; processes and threads from the speed of real training steps, on random tokens and not
compiled.
"""

import argparse
import contextlib
import json
import multiprocessing.connection
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("", "tools", "data")]

import program
import launch
import shards
import sweep
import train_gpt
from train_gpt import Hyperparameters, UserError

# isort: split
import numpy as np
import torch

# Tried on 2 cores with AMX, two seeds each: the small one scores 0.09 bits per byte better, in half
# a minute more. Without AMX the large one took 143 steps in 150 s and ended level with xz.
# Compiling the small one takes a minute of the five that a newcomer waits, and its steps do not
# make up for it (docs/log.md).
# fmt: off
SIZES = {
    "small": {
        "NUM_LAYERS": 4, "MODEL_DIM": 128, "NUM_HEADS": 4, "NUM_KV_HEADS": 2, "XSA_LAST_N": 2, "TRAIN_SEQ_LEN": 256,
        "EVAL_SEQ_LEN": 256, "TRAIN_BATCH_TOKENS": 2048, "COMPILE": 0, "MAX_WALLCLOCK_SECONDS": 230,
    },
    "large": {
        "NUM_LAYERS": 6, "MODEL_DIM": 256, "NUM_HEADS": 4, "NUM_KV_HEADS": 2, "XSA_LAST_N": 4, "TRAIN_SEQ_LEN": 512,
        "EVAL_SEQ_LEN": 512, "TRAIN_BATCH_TOKENS": 4096, "COMPILE": "auto", "MAX_WALLCLOCK_SECONDS": 150,
    },
}
# For some hundred steps: shorter averages and momentum warm-up, no extra graphs.
SHORT_RUN = {
    "ITERATIONS": 20000, "EMA_DECAY": 0.95, "MUON_MOMENTUM": 0.95, "MUON_MOMENTUM_WARMUP_START": 0.85,
    "MUON_MOMENTUM_WARMUP_STEPS": 50, "LATE_QAT": 0, "SHORT_SEQ_PARTS": 1, "WARMUP_STEPS": 2, "VAL_LOSS_EVERY": 200,
    "TRAIN_LOG_EVERY": 10,
}
MEASURED = {  # for the steps that are timed
    "COMPILE": "0", "CHECKPOINT_EVERY": "", "RESUME": "", "GPTQ_BATCHES": "0",
}
# fmt: on
SHAPE = ("NUM_LAYERS", "MODEL_DIM", "TRAIN_SEQ_LEN", "TRAIN_BATCH_TOKENS")  # tell sizes apart
# FLOP/s of products for the large model. Up to 2.8e12, on 2 idle cores with AMX, were too few; this
# is four times as much, not tried.
ENOUGH = 1.1e13
PATIENCE = 120.0  # seconds until what is timed counts as hanging


def positive(environ: Mapping[str, str], name: str) -> int | None:
    """The number of a variable, or None if it is not set. Raises UserError."""
    text = environ.get(name)
    try:
        return program.positive(text, int) if text else None
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{name}={error}: set for example {name}=2, or unset it") from error


# ---- Knobs ---------------------------------------------------------------------------------------
def data_knobs(environ: Mapping[str, str]) -> dict[str, object]:
    """The demonstration's data; or, for a DATA_PATH, what its manifest says of its tokenizer.
    Raises UserError."""
    folder = Path(environ.get("DATA_PATH") or "demo_data")
    if not environ.get("DATA_PATH"):
        return {"DATA_PATH": folder, "TOKENIZER_PATH": folder / "tokenizer.model"}
    if not folder.is_dir():
        raise UserError(
            f"DATA_PATH={folder} does not exist: set the folder of your shards, or unset it"
        )
    manifest = shards.read_manifest(folder)
    if manifest:
        tokenizer = manifest["tokenizer"]
        return {"TOKENIZER_PATH": folder / tokenizer["path"], "VOCAB_SIZE": tokenizer["vocab_size"]}
    if not environ.get("TOKENIZER_PATH"):
        raise UserError(
            f"DATA_PATH={folder} has no manifest.json that names its tokenizer: set TOKENIZER_PATH and VOCAB_SIZE"
        )
    return {}


def run_id(environ: Mapping[str, str], logs: Path) -> str:
    """The first of demo, demo2, ... that has no log. A sweep adds to the name, and a resumed run
    keeps it."""
    if environ.get("SEEDS") or environ.get("GRID") or environ.get("RESUME"):
        return "demo"
    number = 1
    while (logs / f"demo{number if number > 1 else ''}.txt").exists():
        number += 1
    return f"demo{number if number > 1 else ''}"


def knobs(environ: Mapping[str, str], size: str, logs: Path = Path("logs")) -> dict[str, str]:
    """What the environment does not set, for this size. Raises UserError if a run with it could not
    start."""
    chosen = {"RUN_ID": run_id(environ, logs), **data_knobs(environ), **SIZES[size], **SHORT_RUN}
    if not environ.get("WARMDOWN_ITERS") and not re.search(
        r"\bWARMDOWN_ITERS=", environ.get("GRID", "")
    ):
        chosen["WARMDOWN_FRAC"] = 0.5  # would replace WARMDOWN_ITERS
    return {name: str(value) for name, value in chosen.items() if not environ.get(name)}


# ---- The machine ---------------------------------------------------------------------------------
def physical_cores(cpus: set[int], system: Path = Path("/sys")) -> int:
    """Cores behind these logical CPUs: the hyperthreads of a core count once, and a container's
    quota is a limit."""
    cores = set()
    for cpu in cpus:
        siblings = system / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        cores.add(siblings.read_text() if siblings.exists() else cpu)
    count = len(cores)
    group = system / "fs/cgroup"
    # Versions 2, 1
    files = [[group / "cpu.max"], [group / "cpu/cpu.cfs_quota_us", group / "cpu/cpu.cfs_period_us"]]
    for paths in files:
        if all(path.exists() for path in paths):
            quota, period = " ".join(path.read_text() for path in paths).split()
            if quota.isdecimal():  # neither max nor -1
                count = min(count, max(1, int(quota) // int(period)))
    return count


def candidates(
    cores: int, rows: int, ranks: int | None, threads: int | None
) -> list[tuple[int, int]]:
    """(ranks, threads of each) to try for `rows` sequences per step: all cores by each number of
    ranks, and with most ranks fewer threads, too. `ranks` and `threads` fix one."""
    numbers = [ranks] if ranks else [n for n in range(1, min(cores, rows) + 1) if rows % n == 0]
    if threads:
        return [(n, threads) for n in numbers if n * threads <= cores] or [(numbers[0], threads)]
    pairs = [(n, max(1, cores // n)) for n in numbers]
    while pairs[-1][1] > 1:
        pairs.append((pairs[-1][0], pairs[-1][1] // 2))
    return pairs


def forked(calls: list[Callable[[], float]]) -> float:
    """The value of the first of these calls, each in a process of its own; 0 if one failed or hung.
    Only Linux can fork safely with torch loaded, as long as it has no threads."""
    if sys.platform != "linux":
        return calls[0]() if len(calls) == 1 else 0.0
    context = multiprocessing.get_context("fork")
    value = context.Value("d", 0.0, lock=False)

    def child(number: int) -> None:
        launch.end_with_parent(signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # which says that Ctrl-C has ended it
        os.dup2(2, 1)  # gloo of torch 2.9 prints what run.sh would take for a setting
        try:
            found = calls[number]()
        except Exception:
            os._exit(1)
        if number == 0:
            value.value = found
        os._exit(0)

    processes = [context.Process(target=child, args=(n,), daemon=True) for n in range(len(calls))]
    for process in processes:
        process.start()
    running = {process.sentinel: process for process in processes}
    while running:
        ended = [running.pop(s) for s in multiprocessing.connection.wait(running, PATIENCE)]
        for process in ended:
            process.join()
        if not ended or any(process.exitcode for process in ended):
            for process in processes:
                process.kill()
                process.join()
            return 0.0
    return value.value


def product_speed(dtype: torch.dtype, threads: int, seconds: float = 1.0) -> float:
    """FLOP/s of (4096, 256) x (256, 768), the median of repetitions that take about `seconds`."""
    torch.set_num_threads(threads)
    a, b = torch.randn(4096, 256).to(dtype), torch.randn(256, 768).to(dtype)
    speeds = []
    began = time.perf_counter()
    while len(speeds) < 5 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        a @ b
        speeds.append(2 * 4096 * 256 * 768 / (time.perf_counter() - start))
    return statistics.median(speeds)


def step_speed(
    hp: Hyperparameters, variables: dict[str, str], threads: int, seconds: float = 1.0
) -> float:
    """Training steps per second as one rank with these variables, by the lower quartile of their
    times: other work on the machine only adds to them."""
    os.environ.update(variables)
    torch.set_num_threads(threads)
    with train_gpt.Runtime.start(hp) as runtime:
        run = train_gpt.Run(hp, runtime, lambda *_, **__: None, None)
        (settings, *_) = (kind for kind in train_gpt.phases(hp) if kind.seq_len == hp.train_seq_len)
        times = []
        run.clock.start()
        while len(times) < 5 or times[-1] - times[1] < seconds:  # the clock of rank 0, on all ranks
            times.append(train_gpt.Report(*run.train_step(len(times), settings).tolist()).seconds)
    return 1 / float(np.quantile(np.diff(times[1:]), 0.25))


def measure(
    environ: Mapping[str, str], pairs: list[tuple[int, int]]
) -> dict[tuple[int, int], float]:
    """Steps per second of each (ranks, threads)."""
    with tempfile.TemporaryDirectory() as folder:
        hp = Hyperparameters.from_env({**environ, **MEASURED, "DATA_PATH": folder})
        tokens = np.random.default_rng(0).integers(hp.vocab_size, size=64 * hp.train_seq_len + 1)
        shards.write_shard(Path(folder, "fineweb_train_000000.bin"), tokens)
        found = {}
        for ranks, threads in pairs:
            common = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(launch.free_port()),
                "WORLD_SIZE": str(ranks),
            }
            each = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
            found[ranks, threads] = forked(
                [lambda v=v, t=threads: step_speed(hp, v, t) for v in each]
            )
    return found


# ---- Choices -------------------------------------------------------------------------------------
def begun(environ: Mapping[str, str], logs: Path = Path("logs")) -> tuple[Path, dict[str, str]]:
    """(log of the run or sweep that this one continues, the DEMO_SIZE, NPROC and OMP_NUM_THREADS
    that it began with and the environment does not set). Without such a log they are empty."""
    name = {"RUN_ID": environ.get("RUN_ID") or "demo"}
    ids = [name["RUN_ID"]] if environ.get("RESUME") else []
    grid = environ.get("GRID", "")
    if environ.get("SEEDS") or grid:
        ids = [one["RUN_ID"] for one in sweep.members({**environ, **name})]
    for path in (logs / f"{run_id}.jsonl" for run_id in ids):
        with contextlib.suppress(OSError, ValueError, LookupError):  # no log, or without its start
            with open(path, encoding="utf-8") as file:
                event = json.loads(file.readline())
            found, knobs = {}, event["hyperparameters"]
            for size, values in SIZES.items():
                own = [n for n in SHAPE if not environ.get(n) and not re.search(rf"\b{n}=", grid)]
                if own and all(knobs[n.lower()] == values[n] for n in own):
                    found["DEMO_SIZE"] = size
            if on_cpu := re.search(r"ranks:(\d+) .*, (\d+) threads ", event["runtime"]):
                found |= zip(("NPROC", "OMP_NUM_THREADS"), on_cpu.groups(), strict=True)
            return path, {n: value for n, value in found.items() if not environ.get(n)}
    return Path(), {}


def choose_size(environ: Mapping[str, str], cores: int) -> tuple[str, str]:
    """(name of the size, sentence). Raises UserError for an unknown name."""
    wanted = environ.get("DEMO_SIZE")
    if wanted:
        if wanted not in SIZES:
            raise UserError(
                f"DEMO_SIZE={wanted} is not one of {', '.join(SIZES)}: unset it or set one of them"
            )
        return wanted, f"using the {wanted} model, as DEMO_SIZE says"
    dtype = train_gpt.choose_dtype(environ.get("COMPUTE_DTYPE", "auto"), torch.device("cpu"))
    speed = forked([lambda: product_speed(dtype, cores)])
    name = "large" if speed >= ENOUGH else "small"
    found = f"{speed / 1e9:,.0f} GFLOP/s in {str(dtype)[6:]}, the large one wants"
    return name, (
        f"using the {name} model: this CPU makes {found} {ENOUGH / 1e9:,.0f} (DEMO_SIZE overrides)"
    )


def choose_ranks(environ: Mapping[str, str], cores: int) -> tuple[dict[str, str], str]:
    """(NPROC and OMP_NUM_THREADS, sentence). Raises UserError."""
    hp = Hyperparameters.from_env(dict(environ))
    fixed = [positive(environ, name) for name in ("NPROC", "OMP_NUM_THREADS")]
    pairs = candidates(cores, hp.train_batch_tokens // hp.train_seq_len, *fixed)
    sentence = f"{cores} cores"
    if len(pairs) > 1:
        speeds = measure(environ, pairs)
        pairs = sorted(pairs, key=lambda pair: -speeds[pair])
        tried = [f"{ranks} x {threads}: {speeds[ranks, threads]:.1f}" for ranks, threads in pairs]
        sentence += f", steps per second by processes x threads: {', '.join(tried)}"
    ranks, threads = pairs[0]
    return {
        "NPROC": str(ranks),
        "OMP_NUM_THREADS": str(threads),
    }, f"{sentence}; NPROC={ranks} OMP_NUM_THREADS={threads}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    environ = dict(os.environ)
    own = environ.get("RUN_SH", "NPROC DEMO_SIZE").split()
    train_gpt.refuse_misspelt(environ, own + [knob.name.upper() for knob in train_gpt.KNOBS])
    for size in SIZES:
        # Before the seconds that the choice takes
        Hyperparameters.from_env(environ | knobs(environ, size))
    log, kept = begun(environ)
    environ |= kept
    linux = sys.platform == "linux"
    cores = physical_cores(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1
    size, about_size = choose_size(environ, cores)
    settings = knobs(environ, size)
    ranks, about_ranks = choose_ranks(environ | settings, cores)
    settings |= {name: value for name, value in ranks.items() if not os.environ.get(name)}
    print(about_size, about_ranks, sep="\n")
    if kept:
        print(f"kept as {log} began:", *(f"{name}={value}" for name, value in kept.items()))
    sys.stdout.flush()
    for name, value in settings.items():
        sys.stdout.buffer.write(os.fsencode(f"{name}={value}\n"))  # paths as they are


if __name__ == "__main__":
    program.run_program(main)

#!/usr/bin/env python3
"""A model of the time of a step on W ranks; --check puts real runs of 1, 2 and 4 gloo ranks beside it.

    python bench/scaling.py --check

A step is forward and backward of the rank's tokens, then the update without overlap: all-reduce of the small gradients,
reduce-scatter and all-gather of each bank, Newton-Schulz of ceil(R / W) rows per bank. A collective of n bytes takes
alpha * hops + n * passes * (W - 1) / W / beta seconds: 1 pass for reduce-scatter and all-gather, 2 for all-reduce;
2 log2(W) hops for a tree (NCCL), passes * (W - 1) for a ring (gloo). --check fits alpha, beta and the work to this
machine. The figures of the H100s are not measured. The last line is JSON.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt
from common import SMALL, run
from train_gpt import BANKS, GPT, Hyperparameters

MODEL = {**SMALL, "TRAIN_BATCH_TOKENS": "8192", "COMPILE": "0"}
# Nodes of 8 GPUs with NVLink and a 400 Gb/s network card per GPU: alpha and beta within and between nodes. All figures
# are assumed, but 72.3 ms for 98,304 tokens are published. `floor` is launches and small parameters.
H100 = {"token": 72.3e-3 / 98_304, "flops": 400e12, "floor": 0.6e-3, "alpha": (8e-6, 20e-6), "beta": (325e9, 40e9)}
FIT_BYTES = (1024, 4 << 20)  # the all-reduces to which alpha and beta are fitted


def collective(machine: dict, nbytes: float, passes: int, ranks: int) -> float:
    """Seconds of a collective: on a tree if the machine has nodes, else on a ring."""
    nodes = len(machine["alpha"]) > 1
    far = int(nodes and ranks > 8)
    hops = 2 * math.log2(ranks) if nodes else passes * (ranks - 1)
    return machine["alpha"][far] * hops + nbytes * passes * (ranks - 1) / ranks / machine["beta"][far]


def modelled(hp: Hyperparameters, machine: dict, ranks: int, tokens: float) -> dict[str, float]:
    """Seconds of the parts of a step with this many tokens per rank. Banks travel in bf16, the rest in fp32."""
    with torch.device("meta"):
        small = sum(p.numel() for p in GPT(hp, None, torch.float32).parameters())
    work = communication = 0.0
    for rows, height, width in (train_gpt.bank_shape(bank, hp) for bank in BANKS):
        own = math.ceil(rows / ranks)  # the bank is padded to ranks * own rows
        short, long = sorted((height, width))
        work += own * hp.muon_backend_steps * 2 * (2 * short * short * long + short**3)
        communication += 2 * collective(machine, 2 * ranks * own * height * width, 1, ranks)
        small -= rows * height * width
    communication += collective(machine, 4 * small, 2, ranks)
    update = machine["floor"] + work / machine["flops"] + communication
    return {"passes": tokens * machine["token"], "update": update, "communication": communication}


def seconds(comm: train_gpt.Comm, function: Callable) -> float:
    """Seconds of a call that all ranks begin together."""
    if comm.size > 1:
        torch.distributed.barrier()
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def measure(hp: Hyperparameters, rounds: int, out: Path) -> None:
    """Time steps and collectives as one of the ranks. Rank 0 writes the medians to `out`."""
    with train_gpt.Runtime.start(hp) as runtime:
        comm, model = runtime.comm, GPT(hp, runtime.attend, runtime.dtype)
        optimizer = train_gpt.ParallelMuon(model, model.initialise(0), hp, comm)
        shape = (hp.train_batch_tokens // hp.train_seq_len // comm.size, hp.train_seq_len + 1)
        ids = torch.randint(hp.vocab_size, shape)
        found = {"passes": [], "update": [], **{str(nbytes): [] for nbytes in FIT_BYTES}}
        for _ in range(rounds + 2):
            found["passes"].append(seconds(comm, lambda: model(ids[:, :-1], ids[:, 1:]).backward()))
            found["update"].append(seconds(comm, lambda: (optimizer.step(1.0, 0.9), optimizer.finish())))
            for nbytes in FIT_BYTES:
                buffer = torch.zeros(nbytes // 4)
                found[str(nbytes)].append(seconds(comm, lambda buffer=buffer: comm.all_reduce(buffer)()))
        if comm.rank == 0:
            out.write_text(json.dumps({name: statistics.median(times[2:]) for name, times in found.items()}))


def run_ranks(ranks: int, rounds: int) -> dict[str, float]:
    """`measure` on this many gloo ranks with one thread each."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "DEVICE": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        subprocess.run([*launcher, __file__, f"--measure={out}", f"--rounds={rounds}"], check=True, env=environment)
        return json.loads(out.read_text())


def check(worlds: list[int], rounds: int) -> list[dict]:
    """Print gloo runs beside the model, which is fitted to the runs of 1 and 2 ranks."""
    hp, rows = Hyperparameters.from_env({**MODEL, **os.environ}), []
    measured = {ranks: run_ranks(ranks, rounds) for ranks in worlds}
    small, large = (measured[2][str(nbytes)] for nbytes in FIT_BYTES)  # 2 hops each
    alpha, beta = small / 2, FIT_BYTES[1] / max(1e-9, large - small)
    machine = {"token": 0.0, "flops": 1.0, "floor": 0.0, "alpha": (alpha,), "beta": (beta,)}
    machine["flops"] = modelled(hp, machine, 1, 0)["update"] / measured[1]["update"]
    print(f"{hp.train_batch_tokens} tokens per step, alpha {1e6 * alpha:.0f} us, beta {beta / 1e9:.2f} GB/s")
    print(f"{'ms':18}{'passes':>10}{'update':>10}{'step':>10}")
    for ranks in worlds:
        # Two ranks share the memory, so a token takes them longer; ranks beyond the cores take turns.
        turns, fitted = max(1, ranks / os.cpu_count()), min(ranks, 2)
        token = turns * fitted * measured[fitted]["passes"] / hp.train_batch_tokens
        own = machine | {"token": token, "flops": machine["flops"] / turns}
        model = modelled(hp, own, ranks, hp.train_batch_tokens / ranks)
        for label, parts in (("measured", measured[ranks]), ("model", model)):
            times = [1000 * parts["passes"], 1000 * parts["update"]]
            print(f"{ranks} ranks {label:10}" + "".join(f"{value:10.2f}" for value in (*times, sum(times))))
            rows.append({"ranks": ranks, "what": label, "passes_ms": times[0], "update_ms": times[1]})
    return rows


def curve(tokens: int = 98_304) -> list[dict]:
    """Print the model for 1 to 1024 H100s with this many tokens per rank."""
    print(f"\n{'H100s (assumed)':>16}{'step ms':>12}{'comm. ms':>12}{'Mtok/s':>12}")
    rows = []
    for ranks in (2**n for n in range(11)):
        parts = modelled(Hyperparameters(), H100, ranks, tokens)
        step = parts["passes"] + parts["update"]
        print(f"{ranks:16}{1000 * step:12.2f}{1000 * parts['communication']:12.2f}{tokens * ranks / step / 1e6:12.2f}")
        rows.append({"ranks": ranks, "step_ms": 1000 * step, "communication_ms": 1000 * parts["communication"]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="run 1, 2 and 4 gloo ranks here and compare")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        return measure(Hyperparameters.from_env({**MODEL, **os.environ}), arguments.rounds, arguments.measure)
    checked = check([1, 2, 4], arguments.rounds) if arguments.check else []
    print(json.dumps({"bench": "scaling", "check": checked, "model": curve()}))


if __name__ == "__main__":
    run(main)

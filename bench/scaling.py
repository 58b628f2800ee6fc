#!/usr/bin/env python3
"""A model, not a measurement, of a training step on W ranks; --check puts real runs of 1, 2 and 4
gloo ranks beside it.

    python bench/scaling.py --plot bench/scaling.png     # 1 to 1,024 H100s
    python bench/scaling.py --network 1.6                # the same with 1.6 GB/s per GPU between the nodes
    python bench/scaling.py --check

Bytes are counted. The real optimizer takes a step as one of W ranks of torch's fake process group,
on tensors without storage, and every collective is noted. Time is modelled: forward and backward of
the rank's tokens, then the update without any overlap, that is Newton-Schulz of the owned rows and
all collectives in turn. A collective of n bytes takes

    passes * (alpha * hops + n * (W - 1) / W / beta) seconds

with 2 passes for an all-reduce and 1 for a reduce-scatter or all-gather, and log2(W) hops for a
tree (NCCL) or W - 1 for a ring (gloo). A group with k ranks in each of several nodes has k network
cards per node. Stragglers and jitter, which grow with W, are not modelled. The last line is JSON.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import program
import train_gpt
from common import SMALL, Table, finish, image_file, take_turns
from train_gpt import BANKS, GPT, Comm, Hyperparameters, ParallelMuon

# isort: split
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

MODEL = {**SMALL, "TRAIN_BATCH_TOKENS": "8192", "COMPILE": "0"}
FIT_BYTES = (1024, 4 << 20)  # the all-reduces to which alpha and beta are fitted
PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
AIM = 0.95  # of one rank's speed, at 1,024 ranks with 98,304 tokens each
SHARE = 98_304  # tokens of a rank in weak scaling: an eighth of the record's batch
WORLDS = [2**n for n in range(11)]
WAYS: dict[str, Callable[[int], int]] = {  # SHARD_RANKS by the number of ranks
    # Every rank gets the sum of all gradients and updates all rows
    "DDP (SHARD_RANKS=1)": lambda ranks: 1,
    "SHARD_RANKS=W": lambda ranks: ranks,
    "SHARD_RANKS=8": lambda ranks: min(8, ranks),
}


class Machine(NamedTuple):
    """What the model assumes."""

    token: float  # seconds of forward and backward
    flops: float  # per second, of Newton-Schulz
    # Seconds of the update that do not depend on the number of ranks: launches, Adam, averaging
    floor: float
    node: int  # ranks of a node
    alpha: tuple[float, float]  # seconds of a hop, within a node and between nodes
    beta: tuple[float, float]  # bytes per second of a rank, the same
    tree: bool


# Forward and backward of 98,304 tokens in 72.3 ms are published for one GPU (#399). All other
# figures are assumed.
H100 = Machine(72.3e-3 / SHARE, 400e12, 0.6e-3, 8, (8e-6, 20e-6), (325e9, 40e9), True)


class Call(NamedTuple):
    """One collective, as one rank sees it."""

    kind: str
    group: str  # all, shard or replicate
    ranks: tuple[int, ...]  # of the group
    nbytes: int  # of the whole buffer

    @property
    def sent(self) -> float:
        """Bytes that a rank of a ring sends."""
        return PASSES[self.kind] * self.nbytes * (len(self.ranks) - 1) / len(self.ranks)

    def seconds(self, machine: Machine) -> float:
        """The collective's time by the formula above."""
        near = sum(rank // machine.node == self.ranks[0] // machine.node for rank in self.ranks)
        nodes = len(self.ranks) / near
        hops = (math.log2(near), math.log2(nodes)) if machine.tree else (len(self.ranks) - 1, 0)
        latency = sum(alpha * count for alpha, count in zip(machine.alpha, hops, strict=True))
        inside, between = machine.beta
        rate = inside if nodes == 1 else min(inside, near * between)
        return PASSES[self.kind] * latency + self.sent / rate


class Step(NamedTuple):
    """What one rank does in an update."""

    calls: list[Call]
    owned: list[tuple[int, int, int]]  # rows, height and width of its part of each bank
    iterations: int  # of Newton-Schulz

    def modelled(self, machine: Machine, tokens: float) -> dict[str, float]:
        """Seconds of the parts of a step with this many tokens per rank."""
        work = 0
        for rows, *matrix in self.owned:
            short, long = sorted(matrix)
            work += rows * self.iterations * 2 * (2 * short * short * long + short**3)
        communication = sum(call.seconds(machine) for call in self.calls)
        update = machine.floor + work / machine.flops + communication
        return {"passes": tokens * machine.token, "update": update, "communication": communication}


# ---- Bytes, counted ------------------------------------------------------------------------------
@contextlib.contextmanager
def pretended(rank: int, ranks: int, shard_ranks: int) -> Iterator[Comm]:
    """One of `ranks` ranks in torch's fake process group, whose collectives move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        comm = Comm(rank, ranks)
        comm.split(shard_ranks, torch.device("cpu"))
        yield comm
    finally:
        dist.destroy_process_group()


def count(
    hp: Hyperparameters, ranks: int, shard_ranks: int, dtype=torch.bfloat16, rank: int = 0
) -> Step:
    """A step of the real optimizer as one of `ranks` ranks, with its collectives."""
    calls: list[Call] = []
    start = Comm.start

    def noted(comm, collective, out, *source):
        if comm.size == 1:
            return start(comm, collective, out, *source)
        kind = next(kind for kind in PASSES if collective.__name__.startswith(kind))
        members = tuple(dist.get_process_group_ranks(comm.group or dist.group.WORLD))
        inner = "shard" if comm is whole.shard else "replicate"
        group = "all" if len(members) == ranks else inner
        nbytes = max(tensor.nbytes for tensor in (out, *source))
        calls.append(Call(kind, group, members, nbytes))
        # torch 2.9's fake group refuses meta tensors, which hold nothing anyway.
        return lambda: None

    patched = mock.patch.object(Comm, "start", noted)
    with pretended(rank, ranks, shard_ranks) as whole, torch.device("meta"), patched:
        weights = {bank: torch.empty(train_gpt.bank_shape(bank, hp)) for bank in BANKS}
        optimizer = ParallelMuon(GPT(hp, None, dtype), weights, hp, whole)
        optimizer.step(lr_scale=1.0, momentum=0.9)
    owned = [tuple(shard.master.shape) for shard in optimizer.banks.values()]
    return Step(calls, owned, hp.muon_backend_steps)


# ---- Curves --------------------------------------------------------------------------------------
def sequences(hp: Hyperparameters, ranks: int) -> int:
    """Sequences of each rank in a batch of TRAIN_BATCH_TOKENS; 0 where train_gpt.py refuses,
    because a rank would get less than one or some would get more than others."""
    each, rest = divmod(hp.train_batch_tokens // hp.train_seq_len, ranks)
    return 0 if rest else each


def curves(machine: Machine) -> dict[str, list[dict]]:
    """The rows of both curves: weak scaling, and a batch of a fixed size."""
    hp = Hyperparameters()
    batch = hp.train_batch_tokens
    found: dict[str, list[dict]] = {"weak": [], "fixed": []}
    alone = count(hp, 1, 1)
    for ranks in sorted({*WORLDS, batch // hp.train_seq_len}):  # at most a sequence each
        steps = {way: count(hp, ranks, shard_ranks(ranks)) for way, shard_ranks in WAYS.items()}
        weak = SHARE * (ranks in WORLDS)
        fixed = sequences(hp, ranks) * hp.train_seq_len
        for kind, tokens, whole in (("weak", weak, SHARE), ("fixed", fixed, batch)):
            if tokens:
                rates = {way: sum_up(steps[way], alone, machine, tokens, whole) for way in WAYS}
                found[kind].append({"ranks": ranks, "tokens": tokens, **rates})
    return found


def sum_up(step: Step, alone: Step, machine: Machine, tokens: int, batch: int) -> dict[str, float]:
    """A step in figures. `speed` is a rank's, relative to one that takes all of `batch` alone."""
    parts = step.modelled(machine, tokens)
    single = alone.modelled(machine, batch)
    total = parts["passes"] + parts["update"]
    return {
        "sent_bytes": sum(call.sent for call in step.calls),
        "communication_ms": 1000 * parts["communication"],
        "step_ms": 1000 * total,
        "speed": tokens / total / (batch / (single["passes"] + single["update"])),
    }


def print_calls(ranks: int, way: str) -> list[dict]:
    """The collectives of a step, counted."""
    sums: dict[tuple, list[Call]] = {}
    for call in count(Hyperparameters(), ranks, WAYS[way](ranks)).calls:
        sums.setdefault((call.kind, call.group, len(call.ranks)), []).append(call)
    forms = {"ranks": "8,", "calls": "8,", "bytes": "16,", "sent by a rank": "18,.0f"}
    table = Table(f"counted, {way}, {ranks:,} ranks", **forms)
    for (kind, group, size), calls in sums.items():
        found = {"ranks": size, "calls": len(calls), "bytes": sum(call.nbytes for call in calls)}
        found["sent by a rank"] = sum(call.sent for call in calls)
        table.row(f"{kind} {group}", **found)
    return table.rows


def print_curve(title: str, rows: list[dict]) -> None:
    """Print bytes that a rank sends, step and relative speed of a rank, for each way."""
    print(f"\nmodelled, {title}\n{'':16}" + "".join(f"{way:>32}" for way in WAYS))
    head = f"{'MB sent':>12}{'step ms':>10}{'speed':>10}" * len(WAYS)
    print(f"{'ranks':>6}{'tokens':>10}{head}")
    for row in rows:
        print(f"{row['ranks']:6,}{row['tokens']:10,}", end="")
        for step in map(row.get, WAYS):
            sent = step["sent_bytes"] / 1e6
            print(f"{sent:12,.1f}{step['step_ms']:10.2f}{step['speed']:10.3f}", end="")
        print()


def assumptions(machine: Machine) -> str:
    """What the times rest on, in words."""
    near, far = (1e6 * alpha for alpha in machine.alpha)
    inside, between = (beta / 1e9 for beta in machine.beta)
    return f"""\
Assumed: {1e3 * SHARE * machine.token:.1f} ms for forward and backward of {SHARE:,} tokens, \
proportional to tokens;
{machine.flops / 1e12:.0f} TFLOP/s in Newton-Schulz, {1e3 * machine.floor:.1f} ms for the rest of \
the update; no overlap; no stragglers;
nodes of {machine.node} GPUs; within a node {near:.0f} us per hop and {inside:.0f} GB/s per GPU, \
between nodes {far:.0f} us and {between:g} GB/s."""


def draw(found: dict[str, list[dict]], machine: Machine, output: Path) -> None:
    """Both curves, as speed per rank against the number of ranks."""
    from matplotlib.figure import Figure

    hp = Hyperparameters()
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    axes = figure.subplots(1, 2)
    titles = f"weak scaling: {SHARE:,} tokens per rank", f"{hp.train_batch_tokens:,} tokens in all"
    for axis, rows, title in zip(axes, found.values(), titles, strict=True):
        ranks = [row["ranks"] for row in rows]
        for way, marker in zip(WAYS, "sxo", strict=True):
            speeds = [row[way]["speed"] for row in rows]
            axis.plot(ranks, speeds, marker=marker, ms=4, lw=1.4, label=way)
        axis.set_xscale("log", base=2)
        axis.set(title=title, xlabel="ranks (H100s)", xlim=(0.8, 1280))
        axis.set(xticks=WORLDS, xticklabels=WORLDS)
        axis.grid(alpha=0.3)
    axes[0].axhline(AIM, ls="--", lw=1, color="gray", label=f"aim at 1,024 ranks: {AIM}")
    axes[0].set_ylabel("speed per rank, one rank = 1")
    axes[0].set_ylim(min(0.75, axes[0].get_ylim()[0]), 1.02)
    axes[1].set_ylim(0, 1.05)
    axes[0].legend(frameon=False, loc="lower left")
    most = found["fixed"][-1]["ranks"]
    axes[1].axvspan(most, 1280, color="gray", alpha=0.15, lw=0)
    note = f"under one sequence of {hp.train_seq_len:,}\nper rank: refused"
    axes[1].text((most * 1280) ** 0.5, 0.5, note, rotation=90, ha="center", va="center", fontsize=8)
    figure.suptitle("Modelled, not measured: bytes counted, times assumed", fontsize=11)
    figure.supxlabel(assumptions(machine), fontsize=7.5)
    figure.savefig(output, dpi=110)


# ---- Real runs -----------------------------------------------------------------------------------
def measure(hp: Hyperparameters, rounds: int, out: Path) -> None:
    """Time steps and collectives, which all ranks begin together. Rank 0 writes the medians."""
    with train_gpt.Runtime.start(hp) as runtime:
        comm, model = runtime.comm, GPT(hp, runtime.attend, runtime.dtype)
        optimizer = ParallelMuon(model, model.initialise(0), hp, comm)
        shape = (hp.train_batch_tokens // hp.train_seq_len // comm.size, hp.train_seq_len + 1)
        ids = torch.randint(hp.vocab_size, shape)
        variants = {
            "passes": lambda: model(ids[:, :-1], ids[:, 1:]).backward(),
            "update": lambda: optimizer.step(1.0, 0.9),
        }
        for nbytes in FIT_BYTES:
            buffer = torch.zeros(nbytes // 4)
            variants[str(nbytes)] = lambda buffer=buffer: comm.all_reduce(buffer)()
        times = take_turns(variants, rounds, dist.barrier if comm.size > 1 else lambda: None)
        if comm.rank == 0:
            medians = {name: statistics.median(found) for name, found in times.items()}
            out.write_text(json.dumps(medians))


def run_ranks(ranks: int, shard_ranks: int, rounds: int) -> dict[str, float]:
    """`measure` on this many gloo ranks with one thread each."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--local-addr=127.0.0.1", f"--nproc_per_node={ranks}"]
    knobs = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "DEVICE": "cpu"}
    knobs |= {"SHARD_RANKS": str(shard_ranks)}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [*launcher, __file__, f"--measure={out}", f"--rounds={rounds}"]
        subprocess.run(command, check=True, env=os.environ | knobs)
        return json.loads(out.read_text())


def check(rounds: int) -> list[dict]:
    """Print gloo runs beside the model, which is fitted to the runs of 1 and 2 ranks."""
    hp = Hyperparameters.from_env({**MODEL, **os.environ})
    dtype = train_gpt.choose_dtype(hp.compute_dtype, torch.device("cpu"))
    meshes = [(1, 1), (2, 2), (4, 4), (4, 2)]  # ranks, SHARD_RANKS
    measured = {mesh: run_ranks(*mesh, rounds) for mesh in meshes}
    small, large = (measured[2, 2][str(nbytes)] for nbytes in FIT_BYTES)  # 2 hops each
    alpha, beta = small / 2, FIT_BYTES[1] / max(1e-9, large - small)
    most = max(ranks for ranks, _ in meshes)
    machine = Machine(0.0, 1.0, 0.0, most, (alpha, 0.0), (beta, 0.0), tree=False)
    work = count(hp, 1, 1, dtype).modelled(machine, 0)["update"]
    machine = machine._replace(flops=work / measured[1, 1]["update"])
    fitted = f"alpha {1e6 * alpha:.0f} us, beta {beta / 1e9:.2f} GB/s"
    print(f"{hp.train_batch_tokens} tokens per step, {fitted}")
    table = Table("ms", passes="10.2f", update="10.2f", step="10.2f")
    for ranks, shard_ranks in meshes:
        # Two ranks share the memory, so a token takes them longer; ranks beyond the cores take
        # turns.
        turns, fitted = max(1, ranks / program.cores()), min(ranks, 2)
        token = turns * fitted * measured[fitted, fitted]["passes"] / hp.train_batch_tokens
        own = machine._replace(token=token, flops=machine.flops / turns)
        model = count(hp, ranks, shard_ranks, dtype).modelled(own, hp.train_batch_tokens / ranks)
        for label, parts in (("measured", measured[ranks, shard_ranks]), ("model", model)):
            found = {name: 1000 * parts[name] for name in ("passes", "update")}
            name = f"{ranks} ranks as {ranks // shard_ranks}x{shard_ranks} {label}"
            table.row(name, **found, step=sum(found.values()))
    return table.rows


def main() -> None:
    parser = program.parser(__doc__)
    add = parser.add_argument
    positive, usual = program.positive, "(default: %(default)s)"
    add("--network", type=positive, default=40, help=f"GB/s per GPU between nodes {usual}")
    add("--latency", type=positive, default=20, help=f"us per hop between nodes {usual}")
    text = f"ms of a forward and backward of 98,304 tokens {usual}"
    add("--passes", type=positive, default=72.3, help=text)
    add("--plot", type=image_file, help="draw both curves to this file")
    add("--check", action="store_true", help="run 1, 2 and 4 gloo ranks here and compare")
    add("--rounds", type=program.count, default=9)
    add("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        hp = Hyperparameters.from_env({**MODEL, **os.environ})
        return measure(hp, arguments.rounds, arguments.measure)
    machine = H100._replace(
        token=1e-3 * arguments.passes / SHARE,
        alpha=(H100.alpha[0], 1e-6 * arguments.latency),
        beta=(H100.beta[0], 1e9 * arguments.network),
    )
    checked = check(arguments.rounds) if arguments.check else []
    counted = {way: print_calls(WORLDS[-1], way) for way in WAYS}
    found = curves(machine)
    print_curve(f"weak scaling, {SHARE:,} tokens per rank", found["weak"])
    print_curve(f"{Hyperparameters().train_batch_tokens:,} tokens in all", found["fixed"])
    print(f"\n{assumptions(machine)}")
    if arguments.plot:
        with train_gpt.writing(arguments.plot):
            draw(found, machine, arguments.plot)
    finish("scaling", modelled=found, counted=counted, check=checked)


if __name__ == "__main__":
    program.run_program(main)

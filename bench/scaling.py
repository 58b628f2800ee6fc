#!/usr/bin/env python3
"""A model of the step's time for W = 1 .. 1024 ranks, ours beside DDP, checked against real runs of a few ranks.

    python bench/scaling.py --check              # 1, 2 and 4 gloo ranks on this machine: measured and modelled
    python bench/scaling.py --plot bench/scaling.png

The model: a step is forward and backward of the rank's tokens, communication, and the optimizer's work, one after the
other (with banks, whose gradients are complete only at the end of backward, nothing overlaps).

  ours   all-reduce (small) + reduce-scatter (banks) + all-reduce (scalar) + Newton-Schulz of ceil(R / W) rows a bank
         + all-gather (banks) + Adam (small), average of the own rows
  DDP    all-reduce (all) + Newton-Schulz of all rows + Adam (small), average of everything

A collective of n bytes costs alpha * hops + n * passes * (W-1)/W / beta: passes is 1 for reduce-scatter and all-gather
and 2 for all-reduce; hops is W-1 for a ring (gloo) and 2 log2 W for a tree (NCCL). Beyond one node of 8 GPUs alpha and
beta are those of the network. Work on banks costs a floor (launches) and then a time a row. The large machine's figures
are assumptions, printed with the table: forward and backward are the published 72.3 ms for 98,304 tokens on an H100,
not ours; none of it was run by us.
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt

SMALL_MODEL = {"NUM_LAYERS": "6", "MODEL_DIM": "256", "NUM_HEADS": "4", "NUM_KV_HEADS": "2", "TRAIN_SEQ_LEN": "512", "EVAL_SEQ_LEN": "512",
               "TRAIN_BATCH_TOKENS": "8192", "COMPILE": "0"}  # fmt: skip

COLLECTIVE_BYTES = (1024, 4 << 20)  # the sizes from which latency and bandwidth are fitted


@dataclasses.dataclass(frozen=True)
class Network:
    """Seconds of latency a hop and bytes a second of a collective, within a node and between nodes."""

    alpha: float
    beta: float
    tree: bool
    node: int = 1 << 30  # ranks of a node
    far_alpha: float = 0.0
    far_beta: float = 0.0

    def collective(self, nbytes: float, passes: int, ranks: int) -> float:
        """Seconds of one collective operation."""
        if ranks == 1:
            return 0.0
        alpha, beta = (self.alpha, self.beta) if ranks <= self.node else (self.far_alpha, self.far_beta)
        hops = 2 * math.log2(ranks) if self.tree else passes * (ranks - 1)
        return alpha * hops + nbytes * passes * (ranks - 1) / ranks / beta


@dataclasses.dataclass(frozen=True)
class Machine:
    """Seconds of one rank's work."""

    token: float  # forward and backward of one token
    fixed: float  # forward and backward, whatever the tokens
    rows: dict[str, float]  # Newton-Schulz and update, a row of each bank
    floor: float  # of the optimizer's work, whatever the rows
    small: float  # Adam and clip of the small parameters
    average: float  # of all banks and small parameters
    network: Network


def sizes(hp: train_gpt.Hyperparameters, wire: int) -> tuple[dict[str, int], dict[str, int], int]:
    """(rows of each bank, bytes of a row on the wire, bytes of the small gradients)."""
    shapes = {bank: train_gpt.bank_shape(bank, hp) for bank in train_gpt.BANKS}
    total = sum(p.numel() for p in train_gpt.GPT(hp, None, torch.float32).to("meta").parameters())
    small = 4 * (total - sum(math.prod(shape) for shape in shapes.values()) + train_gpt.REPORT)
    return (
        {bank: shape[0] for bank, shape in shapes.items()},
        {bank: wire * shape[1] * shape[2] for bank, shape in shapes.items()},
        small,
    )


def modelled(
    hp: train_gpt.Hyperparameters, machine: Machine, ranks: int, tokens: float, ddp: bool, wire: int = 2
) -> dict[str, float]:
    """Seconds of the parts of a step with so many tokens a rank."""
    rows, row_bytes, small = sizes(hp, wire)
    net, bank_bytes = machine.network, {bank: rows[bank] * row_bytes[bank] for bank in rows}
    passes = machine.fixed + tokens * machine.token
    if ddp:
        everything = sum(bank_bytes.values()) + small
        work = machine.floor + sum(rows[bank] * machine.rows[bank] for bank in rows)
        communication = net.collective(everything, 2, ranks)
        return {
            "passes": passes,
            "communication": communication,
            "banks": work,
            "small": machine.small,
            "average": machine.average,
        }
    own = {bank: math.ceil(rows[bank] / ranks) for bank in rows}
    padded = {bank: own[bank] * ranks * row_bytes[bank] for bank in rows}
    communication = net.collective(small, 2, ranks) + net.collective(4, 2, ranks)
    communication += 2 * sum(net.collective(nbytes, 1, ranks) for nbytes in padded.values())
    work = machine.floor + sum(own[bank] * machine.rows[bank] for bank in rows)
    share = sum(own[bank] * row_bytes[bank] for bank in rows) / sum(bank_bytes.values())
    return {
        "passes": passes,
        "communication": communication,
        "banks": work,
        "small": machine.small,
        "average": machine.average * share,
    }


# ---------------------------------------------------------------------------------------------- measured on this machine


def measure(hp: train_gpt.Hyperparameters, rounds: int, out: Path) -> None:
    """What each rank does: so many steps, parts timed; then collectives of two sizes. Rank 0 writes the medians to `out`."""
    with train_gpt.Runtime.start(hp) as runtime:
        ranks, names = (
            runtime.ranks,
            ("forward", "backward", "communication", "clip", "Newton-Schulz", "small parameters", "average"),
        )
        model = train_gpt.GPT(hp, runtime.attend, runtime.dtype)
        optimizers = train_gpt.Optimizers(model, model.initialise(0), hp, ranks)
        average = train_gpt.WeightAverage(optimizers.owned(), hp)
        ids = torch.randint(
            hp.vocab_size, (hp.train_batch_tokens // hp.train_seq_len // ranks.size, hp.train_seq_len + 1)
        )
        steps = []
        for _ in range(rounds + 2):
            marks: list[tuple[str, float]] = []
            mark = lambda part, marks=marks: marks.append((part, time.perf_counter()))  # noqa: E731
            if ranks.size > 1:
                dist.barrier()  # ranks that start together: the model knows no skew
            mark("forward")
            loss = model(ids[:, :-1], ids[:, 1:])
            mark("backward")
            loss.backward()
            mark("skew")
            if ranks.size > 1:
                dist.barrier()
            optimizers.step(1.0, 0.9, mark)
            mark("average")
            average.update(0, 1.0)
            mark("communication")
            optimizers.finish()
            mark("")
            spent = dict.fromkeys(names, 0.0)
            for (part, begin), (_, end) in zip(marks, marks[1:], strict=False):
                if part in spent:
                    spent[part] += end - begin
            steps.append(spent)
        medians = {name: statistics.median(step[name] for step in steps[2:]) for name in names}
        if ranks.rank == 0:
            out.write_text(json.dumps({"parts": medians, "collectives": []}))
        cases = [(n, passes) for n in COLLECTIVE_BYTES for passes in (1, 2) if ranks.size > 1]
        found = [(n, passes, timed_collective(ranks, n, passes, runtime.dtype)) for n, passes in cases]
        if ranks.rank == 0:
            out.write_text(json.dumps({"parts": medians, "collectives": found}))


def timed_collective(ranks: train_gpt.Ranks, nbytes: int, passes: int, dtype: torch.dtype) -> float:
    """Median seconds of a reduce-scatter (1 pass) or all-reduce (2 passes) of so many bytes."""
    full = torch.zeros(nbytes // dtype.itemsize, dtype=dtype)
    shard, times = full[: len(full) // ranks.size].clone(), []
    for _ in range(20):
        dist.barrier()
        begin = time.perf_counter()
        (ranks.reduce_scatter(shard, full) if passes == 1 else ranks.all_reduce(full))()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[3:])


def run_ranks(ranks: int, rounds: int) -> dict:
    """Measure with so many gloo ranks, one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "DEVICE": "cpu"}
        subprocess.run(
            [*launcher, __file__, "--measure", str(out), "--rounds", str(rounds)], check=True, env=environment
        )
        return json.loads(out.read_text())


def fitted(found: dict[int, dict], hp: train_gpt.Hyperparameters) -> tuple[Machine, float]:
    """(the machine as one rank shows it, with the network that the collectives show, how much slower two ranks compute)."""
    parts = found[1]["parts"]
    timed = {(n, ranks, passes): t for ranks, one in found.items() for n, passes, t in one["collectives"]}
    small, large = ({key[1:]: t for key, t in timed.items() if key[0] == n} for n in COLLECTIVE_BYTES)
    alpha = statistics.median(t / (passes * (ranks - 1)) for (ranks, passes), t in small.items())
    moved = {(ranks, passes): COLLECTIVE_BYTES[1] * passes * (ranks - 1) / ranks for ranks, passes in large}
    beta = statistics.median(moved[key] / max(1e-9, large[key] - small[key]) for key in large)
    rows = {bank: train_gpt.bank_shape(bank, hp) for bank in train_gpt.BANKS}
    flops = {
        bank: shape[0] * 2 * (2 * min(shape[1:]) * math.prod(shape[1:]) + min(shape[1:]) ** 3)
        for bank, shape in rows.items()
    }
    share = {bank: parts["Newton-Schulz"] * flops[bank] / sum(flops.values()) / rows[bank][0] for bank in rows}
    token = (parts["forward"] + parts["backward"]) / hp.train_batch_tokens
    machine = Machine(
        token,
        0.0,
        share,
        0.0,
        parts["small parameters"] + parts["clip"],
        parts["average"],
        Network(alpha, beta, tree=False),
    )
    two = found[2]["parts"]
    return machine, (two["forward"] + two["backward"]) / (token * hp.train_batch_tokens / 2)


def check(worlds: list[int], rounds: int) -> dict:
    """Real gloo runs beside the model. Ranks beyond the cores take turns: their work takes as much longer."""
    hp = train_gpt.Hyperparameters.from_env({**SMALL_MODEL, **os.environ})
    found = {ranks: run_ranks(ranks, rounds) for ranks in worlds}
    machine, slower = fitted(found, hp)
    cores = os.cpu_count() or 1
    print(f"torch {torch.__version__}, {cores} cores, gloo, {hp.train_batch_tokens} tokens a step of all ranks, one thread a rank, fitted: "
          f"alpha {1e6 * machine.network.alpha:.0f} us a hop, beta {machine.network.beta / 1e9:.2f} GB/s; two ranks compute "
          f"{slower:.2f} times as long as the tokens that each has")  # fmt: skip
    print(f"{'ms':26}{'passes':>10}{'comm.':>10}{'banks':>10}{'small':>10}{'average':>10}{'step':>10}")
    rows = []
    for ranks in worlds:
        part = found[ranks]["parts"]
        measured = {"passes": part["forward"] + part["backward"], "communication": part["communication"], "banks": part["Newton-Schulz"],
                    "small": part["small parameters"] + part["clip"], "average": part["average"]}  # fmt: skip
        crowd = (slower if ranks > 1 else 1.0) * max(1.0, ranks / cores)
        predicted = modelled(hp, machine, ranks, hp.train_batch_tokens / ranks, ddp=False)
        predicted = {name: value * (1.0 if name == "communication" else crowd) for name, value in predicted.items()}
        for label, times in (("measured", measured), ("model", predicted)):
            print(
                f"{ranks} ranks, {label:17}"
                + "".join(f"{1000 * value:10.2f}" for value in (*times.values(), sum(times.values())))
            )
            rows.append(
                {"ranks": ranks, "what": label, **{name: round(1000 * value, 3) for name, value in times.items()}}
            )
    return {"check": rows, "alpha_us": 1e6 * machine.network.alpha, "beta_gb_s": machine.network.beta / 1e9}


# ---------------------------------------------------------------------------------------------- the large machine


def h100(hp: train_gpt.Hyperparameters, arguments: argparse.Namespace) -> Machine:
    """Assumptions for H100s with NVLink in nodes of 8 and a 400 Gb/s network card a GPU; see --help for each."""
    rows = {bank: train_gpt.bank_shape(bank, hp) for bank in train_gpt.BANKS}
    flops = {
        bank: hp.muon_backend_steps * 2 * (2 * min(s[1:]) * math.prod(s[1:]) + min(s[1:]) ** 3)
        for bank, s in rows.items()
    }
    network = Network(
        arguments.alpha_us * 1e-6,
        arguments.beta * 1e9,
        True,
        8,
        arguments.far_alpha_us * 1e-6,
        arguments.far_beta * 1e9,
    )
    weights = 4 * sum(p.numel() for p in train_gpt.GPT(hp, None, torch.float32).to("meta").parameters())
    rows = {bank: f / (arguments.tflops * 1e12) for bank, f in flops.items()}
    return Machine(
        token=arguments.passes_ms * 1e-3 / 98_304,
        fixed=0.0,
        rows=rows,
        floor=arguments.floor_ms * 1e-3,
        small=arguments.small_ms * 1e-3,
        average=3 * weights / 2.9e12,
        network=network,
    )


def curves(arguments: argparse.Namespace) -> list[dict]:
    """Steps of the record's batch divided by W (while each rank has a sequence), and of 98,304 tokens a rank."""
    hp = train_gpt.Hyperparameters()
    machine = h100(hp, arguments)
    print(f"\nmodel of H100s, assumed: forward and backward {arguments.passes_ms} ms for 98,304 tokens (published), Newton-Schulz at "
          f"{arguments.tflops} TFLOP/s after {arguments.floor_ms} ms of launches, alpha {arguments.alpha_us} and beyond a node "
          f"{arguments.far_alpha_us} us a hop, beta {arguments.beta} and {arguments.far_beta} GB/s")  # fmt: skip
    names = ("ours ms", "of it comm.", "DDP ms", "of it comm.", "ours Mtok/s", "DDP Mtok/s")
    print(f"{'W':>5}{'tokens a rank':>15}" + "".join(f"{name:>14}" for name in names))
    rows = []
    for kind in ("98,304 tokens a rank", "786,432 tokens a step"):
        print(kind)
        for ranks in (2**n for n in range(11)):
            tokens = 98_304 if kind.endswith("rank") else 786_432 / ranks
            if tokens < hp.train_seq_len:
                continue
            ours, ddp = (modelled(hp, machine, ranks, tokens, ddp) for ddp in (False, True))
            totals = [sum(times.values()) for times in (ours, ddp)]
            values = (1e3 * totals[0], 1e3 * ours["communication"], 1e3 * totals[1], 1e3 * ddp["communication"],
                      *(1e-6 * tokens * ranks / total for total in totals))  # fmt: skip
            print(f"{ranks:5}{tokens:15,.0f}" + "".join(f"{value:14.2f}" for value in values))
            rows.append({"kind": kind, "ranks": ranks, "tokens": tokens, "ours_ms": values[0], "ddp_ms": values[2]})
    return rows


def draw(rows: list[dict], path: Path) -> None:
    """Efficiency (tokens a second a rank, in parts of one rank's own) and step time against W."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axis, kind in zip(axes, ("98,304 tokens a rank", "786,432 tokens a step"), strict=True):
        chosen = [row for row in rows if row["kind"] == kind]
        alone = chosen[0]["tokens"] / chosen[0]["ours_ms"]
        for name, label, style in (
            ("ours_ms", "Parallel Muon, banks sharded", "o-"),
            ("ddp_ms", "DDP, banks replicated", "s--"),
        ):
            axis.plot(
                [row["ranks"] for row in chosen],
                [row["tokens"] / row[name] / alone for row in chosen],
                style,
                label=label,
            )
        axis.set(
            xscale="log",
            xlabel="ranks W",
            ylabel="speed a rank, in parts of one rank alone",
            title=kind,
            ylim=(0, 1.05),
        )
        axis.set_xticks([row["ranks"] for row in chosen], [str(row["ranks"]) for row in chosen], minor=False)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle("model of H100 nodes, not a measurement (bench/scaling.py says what is assumed)")
    figure.savefig(path, dpi=110)
    print(f"drawn: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="run 1, 2 and 4 gloo ranks here and compare")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--plot", type=Path)
    parser.add_argument(
        "--passes-ms", type=float, default=72.3, help="forward and backward of 98,304 tokens (72.3: published, H100)"
    )
    parser.add_argument("--tflops", type=float, default=400.0, help="of Newton-Schulz (assumed)")
    parser.add_argument(
        "--floor-ms", type=float, default=0.45, help="launches of the update of three banks (estimated)"
    )
    parser.add_argument("--small-ms", type=float, default=0.15, help="clip and Adam (estimated)")
    parser.add_argument("--alpha-us", type=float, default=8.0, help="a hop within a node (assumed)")
    parser.add_argument(
        "--beta", type=float, default=325.0, help="GB/s within a node (300 to 350 are usual for NVLink)"
    )
    parser.add_argument("--far-alpha-us", type=float, default=20.0, help="a hop between nodes (assumed)")
    parser.add_argument("--far-beta", type=float, default=40.0, help="GB/s between nodes (400 Gb/s a GPU, 80 %%)")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        return measure(
            train_gpt.Hyperparameters.from_env({**SMALL_MODEL, **os.environ}), arguments.rounds, arguments.measure
        )
    checked = check([1, 2, 4], arguments.rounds) if arguments.check else {}
    rows = curves(arguments)
    if arguments.plot:
        draw(rows, arguments.plot)
    print(json.dumps({"bench": "scaling", "torch": torch.__version__, **checked, "model": rows}))


if __name__ == "__main__":
    main()

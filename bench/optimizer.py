#!/usr/bin/env python3
"""Time the update of the 66 block matrices beside other ways to compute it.

    python bench/optimizer.py                    # shapes of the record, on the GPU if there is one
    python bench/optimizer.py --layers 4 --dim 256 --rounds 5

  ours, compiled / eager      three banks, fp32 weights and momentum, Newton-Schulz as bmm + 2 baddbmm
  ours with MuonEq-R          the same with normalised rows, the default
  published arithmetic        four banks, bf16 momentum, `b*A + c*A@A` and `a*X + B@X` as separate passes (#399)
  gathered                    66 parameters, stacked into the four banks by the optimizer and split again
  sequential                  66 parameters, one Newton-Schulz each
  torch.optim.Muon            66 parameters, torch's own
  Newton-Schulz, products     on our three banks: the iteration from bf16, and its matrix products alone
  2 ranks                     ours, and banks whose gradients are all-reduced as in DDP, with gloo or NCCL

Gradients and weights are random. The variants take turns within a round. Prints medians in
milliseconds and `ratio`, the median over rounds of this row over the first one. The last line is
JSON. On a CPU set OMP_WAIT_POLICY=PASSIVE.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt
from common import positive, report, take_turns

# isort: split
import torch
import torch.distributed as dist

A, B, C = train_gpt.NEWTON_SCHULZ["quintic"][0]
MOMENTUM, RATE, DECAY = 0.95, 0.02, 0.04


def published_newton_schulz(x: torch.Tensor) -> torch.Tensor:
    """Five iterations in bf16 with elementwise passes between the products."""
    x = x.bfloat16()
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        poly = B * gram + C * (gram @ gram)
        x = A * x + poly @ x
    return x.mT if tall else x


def published_update(weight: torch.Tensor, momentum: torch.Tensor, grad: torch.Tensor) -> None:
    """Update weight (..., out, in) in fp32, with momentum and update in bf16."""
    grad = grad.bfloat16()
    momentum.mul_(MOMENTUM).add_(grad)
    update = published_newton_schulz(grad.add(momentum, alpha=MOMENTUM))
    weight.mul_(1 - RATE * DECAY)
    weight.add_(update.float(), alpha=-RATE * max(1.0, weight.size(-2) / weight.size(-1)) ** 0.5)


class Matrices:
    """The block matrices, in the four banks of #399 or separate: weights, bf16 momentum, fp32
    gradients."""

    def __init__(self, hp: train_gpt.Hyperparameters, device: torch.device, separate: bool):
        shapes = {}
        for kind in train_gpt.MATRICES:
            bank = kind.name if kind.name in ("up", "down") else kind.bank
            shapes.setdefault(bank, []).extend([kind.shape(hp)] * hp.num_layers)
        self.banks = [(len(members), *members[0]) for members in shapes.values()]
        shapes = (
            [shape[1:] for shape in self.banks for _ in range(shape[0])] if separate else self.banks
        )
        self.weights = [torch.randn(shape, device=device) for shape in shapes]
        self.momenta = [torch.zeros(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
        self.grads = [1e-3 * torch.randn(shape, device=device) for shape in shapes]

    def step(self) -> None:
        """Update the tensors one by one."""
        for tensors in zip(self.weights, self.momenta, self.grads, strict=True):
            published_update(*tensors)

    def gathered_step(self) -> None:
        """Stack separate matrices into banks, update the banks, and split them again."""
        start = 0
        for rows, *_ in self.banks:
            part = slice(start, start + rows)
            stacked = [
                torch.stack(column[part]) for column in (self.weights, self.momenta, self.grads)
            ]
            published_update(*stacked)
            for column, bank in zip((self.weights, self.momenta), stacked, strict=False):
                torch._foreach_copy_(column[part], list(bank.unbind(0)))
            start += rows


def torch_muon(hp: train_gpt.Hyperparameters, device: torch.device) -> Callable:
    """The step of torch.optim.Muon on the separate matrices."""
    matrices = Matrices(hp, device, separate=True)
    for weight, grad in zip(matrices.weights, matrices.grads, strict=True):
        weight.requires_grad_().grad = grad
    return torch.optim.Muon(
        matrices.weights, lr=RATE, momentum=MOMENTUM, weight_decay=DECAY, adjust_lr_fn="original"
    ).step


class Ours:
    """The bank part of `train_gpt.ParallelMuon.step`."""

    def __init__(self, hp: train_gpt.Hyperparameters, runtime: train_gpt.Runtime, compiled: bool):
        self.comm = runtime.comm
        device = runtime.device
        model = train_gpt.GPT(hp, runtime.attend, torch.bfloat16)
        weights = model.initialise(0)
        self.optimizer = train_gpt.ParallelMuon(
            model.to(device), weights, hp, runtime.comm, compiled=compiled
        )
        for shard in self.optimizer.banks.values():
            shard.grad.copy_(1e-3 * torch.randn_like(shard.grad))
        self.settings = [torch.full((), value, device=device) for value in (1.0, MOMENTUM, RATE)]

    def step(self) -> None:
        """Reduce-scatter, update of the owned rows, all-gather of the weights."""
        banks = self.optimizer.banks.values()
        for arrived in [
            self.comm.reduce_scatter(shard.grad_shard, shard.comm_buffer) for shard in banks
        ]:
            arrived()
        for shard in banks:
            self.optimizer.update_bank(shard, *self.settings)
        self.optimizer.finish()


class AllReduced(Matrices):
    """Banks with DDP's communication: every rank gets the whole mean gradient and updates all
    rows."""

    def step(self) -> None:
        works = [dist.all_reduce(grad, async_op=True) for grad in self.grads]
        for work in works:
            work.wait()
        super().step()


def iterations(hp: train_gpt.Hyperparameters, device: torch.device) -> tuple[Callable, Callable]:
    """(Newton-Schulz on our banks from bf16, its fifteen products per bank alone)."""
    banks = []
    for bank in train_gpt.BANKS:
        rows = torch.randn(train_gpt.bank_shape(bank, hp), device=device)
        # Larger values overflow, and NaN has another speed
        norm = torch.linalg.matrix_norm(rows, keepdim=True)
        banks.append((rows / norm).bfloat16())

    def products() -> None:
        for bank in banks:
            x, tall = bank, bank.size(-2) > bank.size(-1)
            for _ in range(hp.muon_backend_steps):
                gram = x.mT @ x if tall else x @ x.mT
                x = x @ (gram @ gram) if tall else (gram @ gram) @ x

    return (lambda: [train_gpt.newton_schulz(bank, torch.bfloat16) for bank in banks]), products


@torch.no_grad()
def one_rank(hp: train_gpt.Hyperparameters, rounds: int) -> dict[str, list[dict]]:
    """Print the tables of a single rank. Returns their rows."""
    with train_gpt.Runtime.start(hp) as runtime:
        device = runtime.device
        print(f"torch {torch.__version__} {runtime.describe()} rounds:{rounds}")
        kinds = (("compiled", True), ("eager", False)) if runtime.compiled else (("eager", False),)
        variants = {f"ours, {name}": Ours(hp, runtime, compiled).step for name, compiled in kinds}
        variants["ours with MuonEq-R"] = Ours(
            dataclasses.replace(hp, muon_eq=True), runtime, runtime.compiled
        ).step
        banks, gathered, sequential = (
            Matrices(hp, device, separate) for separate in (False, True, True)
        )
        variants |= {
            "published arithmetic": banks.step,
            "gathered": gathered.gathered_step,
            "sequential": sequential.step,
            "torch.optim.Muon": torch_muon(hp, device),
        }
        found = {
            "step": report(
                "update of all block matrices, 1 rank",
                take_turns(variants, rounds, runtime.synchronize),
            )
        }
        whole, products = iterations(hp, device)
        times = take_turns(
            {"products alone": products, "Newton-Schulz": whole}, rounds, runtime.synchronize
        )
        return {**found, "newton_schulz": report("five iterations on the three banks", times)}


@torch.no_grad()
def several_ranks(hp: train_gpt.Hyperparameters, rounds: int, out: str) -> None:
    """Time the comparison as one of the ranks. Rank 0 writes the times to `out`."""
    with train_gpt.Runtime.start(hp) as runtime:
        ours, all_reduced = (
            Ours(hp, runtime, runtime.compiled),
            AllReduced(hp, runtime.device, separate=False),
        )
        variants = {"ours": ours.step, "all-reduced banks": all_reduced.step}
        times = take_turns(variants, rounds, lambda: (runtime.synchronize(), dist.barrier()))
        if runtime.comm.rank == 0:
            Path(out).write_text(json.dumps(times))


def launch(arguments: argparse.Namespace) -> list[dict]:
    """Run `several_ranks` under torchrun and print its table. Returns its rows."""
    ranks = arguments.ranks
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "times.json")
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={ranks}",
        ]
        options = {
            "layers": arguments.layers,
            "dim": arguments.dim,
            "rounds": arguments.rounds,
            "out": out,
        }
        command = [*launcher, __file__, *(f"--{name}={value}" for name, value in options.items())]
        threads = str(max(1, (os.cpu_count() or 1) // ranks))
        subprocess.run(command, check=True, env={"OMP_NUM_THREADS": threads, **os.environ})
        return report(f"the same on {ranks} ranks with communication", json.loads(out.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=positive, default=11)
    parser.add_argument("--dim", type=positive, default=512)
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument(
        "--ranks",
        type=int,
        default=2,
        help="ranks of the comparison with all-reduce; 0: leave it out",
    )
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    hp = train_gpt.Hyperparameters.from_env(dict(os.environ))
    hp = dataclasses.replace(
        hp, num_layers=arguments.layers, model_dim=arguments.dim, muon_eq=False
    )
    if arguments.out:
        return several_ranks(hp, arguments.rounds, arguments.out)
    found = one_rank(hp, arguments.rounds)
    gpus = torch.cuda.device_count()
    if arguments.ranks > 1 and (gpus == 0 or gpus >= arguments.ranks):
        found[f"{arguments.ranks}_ranks"] = launch(arguments)
    print(
        json.dumps(
            {"bench": "optimizer", "torch": torch.__version__, "rounds": arguments.rounds, **found}
        )
    )


if __name__ == "__main__":
    train_gpt.run_program(main)

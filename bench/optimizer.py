#!/usr/bin/env python3
"""Time the update of the block matrices, 66 in the record's model, beside other ways to compute it.

    OMP_WAIT_POLICY=PASSIVE python bench/optimizer.py
    NUM_LAYERS=4 MODEL_DIM=256 python bench/optimizer.py --rounds 5
    torchrun --standalone --local-addr=127.0.0.1 --nproc_per_node=2 bench/optimizer.py

  ours                ParallelMuon.step without Adam: three banks, fp32 weights and momentum
  ours, MuonEq-R      the same with normalised rows, the default
  ours, all-reduced   of several ranks: gradients all-reduced as by DDP, each rank updates all rows
  four banks (#399)   its arithmetic: momentum in the compute dtype, `b*A + c*A@A` in passes
  stacked and split   the same for separate parameters, whose gradients the optimizer stacks
  one call each       the same for separate parameters, one after the other
  torch.optim.Muon    torch's own for separate parameters; its products in the compute dtype, too

All get the same random numbers and take turns within a round. Several ranks use NCCL on GPUs, else
gloo, and time what communicates. `ratio` is the median over rounds of a row's time over the first
row's. The last line is JSON.
"""

import dataclasses
import itertools
import os
import sys
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]

import program
import train_gpt
from common import finish, print_machine, report, take_turns
from train_gpt import BANKS, MATRICES, Comm, Hyperparameters, Runtime, Tensors, bank_part

# isort: split
import torch


def random_banks(hp: Hyperparameters, device: torch.device) -> tuple[Tensors, Tensors]:
    """(weights, gradients): fp32 tensors by bank; the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda shape: 1e-3 * torch.randn(shape, generator=generator).to(device)  # noqa: E731
    shapes = {bank: train_gpt.bank_shape(bank, hp) for bank in BANKS}
    return tuple({bank: draw(shape) for bank, shape in shapes.items()} for _ in range(2))


def matrices(banks: Tensors) -> list[torch.Tensor]:
    """All block matrices (out, in), kind by kind."""
    return [m.contiguous() for kind in MATRICES for m in bank_part(banks[kind.bank], kind)]


def stacks(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """(R, out, in) of matrices with equal shapes: query and output, key and value, up, down."""
    return [torch.stack(list(equal)) for _, equal in itertools.groupby(tensors, lambda t: t.shape)]


class Ours:
    """`ParallelMuon.step` without Adam; it keeps the gradients."""

    def __init__(self, hp: Hyperparameters, runtime: Runtime, comm: Comm):
        weights, grads = random_banks(hp, runtime.device)
        model = train_gpt.GPT(hp, runtime.attend, runtime.dtype).to(runtime.device)
        self.optimizer = train_gpt.ParallelMuon(model, weights, hp, comm, compiled=runtime.compiled)
        self.optimizer.update_small = self.optimizer.clear = lambda *_: None
        for bank, shard in self.optimizer.banks.items():
            shard.grad[: shard.rows] = grads[bank] / comm.size  # the sum is the mean
        self.step = lambda: self.optimizer.step(1.0, hp.muon_momentum)


def newton_schulz(x: torch.Tensor) -> torch.Tensor:
    """#399's five iterations on (..., out, in), with elementwise passes between the products."""
    ((a, b, c),) = train_gpt.NEWTON_SCHULZ["quintic"]
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        poly = b * gram + c * (gram @ gram)
        x = a * x + poly @ x
    return x.mT if tall else x


class Separate:
    """#399's arithmetic, one matrix (out, in) after the other. Newton-Schulz is compiled as there."""

    stacked = False

    def __init__(self, hp: Hyperparameters, runtime: Runtime, comm: Comm):
        self.hp, self.dtype, self.comm = hp, runtime.dtype, comm
        self.weights, self.grads = map(matrices, random_banks(hp, runtime.device))
        self.newton_schulz = train_gpt.compile_whole(newton_schulz, runtime.compiled)
        momenta = stacks(self.weights) if self.stacked else self.weights
        self.momenta = [torch.zeros_like(weight, dtype=self.dtype) for weight in momenta]

    def direction(self, grad: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        momentum.mul_(self.hp.muon_momentum).add_(grad)
        return self.newton_schulz(grad.add(momentum, alpha=self.hp.muon_momentum))

    def apply(self, weight: torch.Tensor, update: torch.Tensor) -> None:
        scale = max(1.0, weight.size(-2) / weight.size(-1)) ** 0.5
        weight.mul_(1 - self.hp.matrix_lr * self.hp.muon_wd)
        weight.add_(update.float(), alpha=-self.hp.matrix_lr * scale)

    def step(self) -> None:
        for weight, grad, momentum in zip(self.weights, self.grads, self.momenta, strict=True):
            self.apply(weight, self.direction(grad.to(self.dtype), momentum))


class Stacked(Separate):
    """Separate matrices, whose gradients are stacked and whose updates are split."""

    stacked = True

    def step(self) -> None:
        grads = [grad.to(self.dtype) for grad in stacks(self.grads)]
        updates = map(self.direction, grads, self.momenta)
        for weight, update in zip(self.weights, itertools.chain(*updates), strict=True):
            self.apply(weight, update)


class FourBanks(Separate):
    """#399's banks: gradients reduce-scattered, updates gathered, all weights changed on all ranks.
    As there, the all-gather of a bank ends before the next bank's Newton-Schulz."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        ranks, self.banks = self.comm.size, []
        for weight, grad in zip(stacks(self.weights), stacks(self.grads), strict=True):
            owned = -(-len(weight) // ranks)
            padded = grad.new_zeros(ranks * owned, *grad.shape[1:], dtype=self.dtype)
            shard = padded[:owned].clone() if ranks > 1 else padded
            # A sum of these gradients is their mean.
            self.banks.append((weight, grad / ranks, padded, shard, torch.zeros_like(shard)))
        self.weights = [weight for weight, *_ in self.banks]

    def step(self) -> None:
        scattered = []
        for _, grad, padded, shard, _ in self.banks:
            padded[: len(grad)] = grad
            scattered.append(self.comm.reduce_scatter(shard, padded))
        for wait, bank in zip(scattered, self.banks, strict=True):
            weight, _, padded, shard, momentum = bank
            wait()
            update = self.direction(shard, momentum)
            if self.comm.size > 1:
                self.comm.all_gather(padded, update.contiguous())()
                update = padded[: len(weight)]
            self.apply(weight, update)


class TorchMuon(Separate):
    """The step of torch.optim.Muon on the separate matrices."""

    def __init__(self, hp: Hyperparameters, *arguments):
        super().__init__(hp, *arguments)
        for weight, grad in zip(self.weights, self.grads, strict=True):
            weight.grad = grad
        self.optimizer = torch.optim.Muon(self.weights, hp.matrix_lr, hp.muon_wd, hp.muon_momentum)

    def step(self) -> None:
        # It casts to bf16, which CPUs without units for it multiply 20 times slower than fp32.
        cast = lambda tensor: tensor.to(self.dtype, copy=True)  # noqa: E731
        with mock.patch.object(torch.Tensor, "bfloat16", cast):
            self.optimizer.step()


SEPARATE = {"stacked and split": Stacked, "one call each": Separate, "torch.optim.Muon": TorchMuon}


def updates(hp: Hyperparameters, runtime: Runtime, separate: bool) -> dict[str, Ours | Separate]:
    """The ways by name, as this rank; `separate`: also those without communication."""
    comm, normed = runtime.comm, dataclasses.replace(hp, muon_eq=True)
    ways = {"ours": Ours(hp, runtime, comm), "ours, MuonEq-R": Ours(normed, runtime, comm)}
    if comm.size > 1:
        replicas = Comm(comm.rank, comm.size)
        replicas.shard, replicas.replicate = Comm(), comm  # as SHARD_RANKS=1
        ways["ours, all-reduced"] = Ours(hp, runtime, replicas)
    ways["four banks (#399)"] = FourBanks(hp, runtime, comm)
    return ways | {name: way(hp, runtime, comm) for name, way in SEPARATE.items() if separate}


def main() -> None:
    parser = program.parser(__doc__)
    parser.add_argument("--rounds", type=program.count, default=9)
    rounds = parser.parse_args().rounds
    as_399 = {"MUON_EQ": "0", "MUON_COEFFS": "quintic", "MUON_BACKEND_STEPS": "5"}
    hp = Hyperparameters.from_env({"MLP_MULT": "3", **os.environ, **as_399, "GRAD_CLIP_NORM": "0"})
    with Runtime.start(hp) as runtime, torch.no_grad():
        alone = runtime.comm.size == 1
        wait = lambda: (runtime.synchronize(), alone or torch.distributed.barrier())  # noqa: E731
        ways = {name: way.step for name, way in updates(hp, runtime, separate=alone).items()}
        times = take_turns(ways, rounds, wait)
        if runtime.comm.rank == 0:
            print_machine(runtime, rounds=rounds)
            finish("optimizer", update=report("update", times))


if __name__ == "__main__":
    program.run_program(main)

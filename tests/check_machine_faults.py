"""`check_machine_faults.py FAULT`: tools/check_machine.py on a machine with a fault.

slow     rank 1 multiplies and computes gradients at half speed
disk     the disk is full
nan      the loss is not finite
memory   training needs more memory than there is
died     rank 1 fails in a step
none     nothing
"""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch

import check_machine
import train_gpt
from program import run_program


def main() -> None:
    fault = sys.argv.pop()
    rank = int(os.environ.get("RANK", 0))
    product_speed, step = check_machine.product_speed, train_gpt.Run.train_step
    backward = train_gpt.Run.backward

    def slow_product(runtime):
        return product_speed(runtime) / 2 if rank == 1 else 1e3

    def slow_backward(run, *arguments):
        backward(run, *arguments)
        time.sleep(0.2 if rank == 1 else 0.0)

    def faulty_step(run, *arguments):
        if fault == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        if fault == "died" and rank == 1:
            raise RuntimeError("an illegal memory access was encountered")
        return step(run, *arguments) * (float("nan") if fault == "nan" else 1.0)

    train_gpt.Run.train_step = faulty_step
    if fault == "slow":
        check_machine.product_speed, check_machine.STEPS = slow_product, 2
        train_gpt.Run.backward = slow_backward
    if fault == "disk":
        check_machine.shutil.disk_usage = lambda path: SimpleNamespace(free=1 << 20)
    check_machine.main()


if __name__ == "__main__":
    run_program(main)

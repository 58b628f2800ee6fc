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

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / name) for name in ("", "tools")]

import torch

import check_machine
import train_gpt
from program import run_program


def main() -> None:
    fault, rank = sys.argv.pop(), int(os.environ.get("RANK", 0))
    product_speed, step = check_machine.product_speed, train_gpt.Run.train_step
    backward = train_gpt.Run.backward

    def slow_backward(run, *arguments):
        backward(run, *arguments)
        time.sleep(0.2 * rank)

    def faulty_step(run, *arguments):
        if fault == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        if fault == "died" and rank == 1:
            raise RuntimeError("an illegal memory access was encountered")
        return step(run, *arguments) * (float("nan") if fault == "nan" else 1.0)

    train_gpt.Run.train_step = faulty_step
    if fault == "slow":
        check_machine.STEPS, train_gpt.Run.backward = 2, slow_backward
        check_machine.product_speed = lambda runtime: product_speed(runtime) / 2 if rank else 1e3
    if fault == "disk":
        check_machine.shutil.disk_usage = lambda path: SimpleNamespace(free=1 << 20)
    check_machine.main()


if __name__ == "__main__":
    run_program(main)

#!/usr/bin/env python3
"""Choose a model for the demonstration by the speed of this machine.

    python tools/demo_size.py          # DEMO_SIZE=small (or large) fixes the choice

Prints two lines: knobs as NAME=VALUE words, then a sentence that says which size was chosen and why. The speed is that
of a matrix product of the large model, in the data type that a run would use, with all threads.
"""

import os
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt
from train_gpt import UserError

# Tried for 150 s, one seed each: the large one on 2 cores with AMX (350 to 410 steps), both on 2 without it, where
# the large one took 143 steps and ended level with xz. The small one was not tried with AMX. Compiling the small one
# takes a minute of the five that a newcomer waits, and its steps do not make up for it (bench/README.md, which also has
# the run of the large one behind ENOUGH).
# fmt: off
SIZES = {
    "small": {
        "NUM_LAYERS": 4, "MODEL_DIM": 128, "NUM_HEADS": 4, "NUM_KV_HEADS": 2, "XSA_LAST_N": 2, "TRAIN_SEQ_LEN": 256,
        "EVAL_SEQ_LEN": 256, "TRAIN_BATCH_TOKENS": 2048, "COMPILE": 0, "MAX_WALLCLOCK_SECONDS": 230,
    },
    "large": {
        "NUM_LAYERS": 6, "MODEL_DIM": 256, "NUM_HEADS": 4, "NUM_KV_HEADS": 2, "XSA_LAST_N": 4, "TRAIN_SEQ_LEN": 512,
        "EVAL_SEQ_LEN": 512, "TRAIN_BATCH_TOKENS": 4096, "COMPILE": "train", "MAX_WALLCLOCK_SECONDS": 150,
    },
}
# fmt: on
ENOUGH = 1.2e12  # FLOP/s of products for the large model; 867e9, on 2 idle cores with AVX512-BF16, were too few


def product_speed(dtype: torch.dtype, seconds: float = 1.0) -> float:
    """FLOP/s of (4096, 256) x (256, 768), the median of repetitions that take about `seconds`."""
    a, b = torch.randn(4096, 256).to(dtype), torch.randn(256, 768).to(dtype)
    speeds = []
    began = time.perf_counter()
    while len(speeds) < 5 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        a @ b
        speeds.append(2 * 4096 * 256 * 768 / (time.perf_counter() - start))
    return statistics.median(speeds)


def choose(wanted: str) -> tuple[str, str]:
    """(name of the size, sentence). Raises UserError for an unknown name."""
    if wanted:
        if wanted not in SIZES:
            raise UserError(f"DEMO_SIZE={wanted} is not one of {', '.join(SIZES)}: unset it or set one of them")
        return wanted, f"the demonstration's model is {wanted}, as DEMO_SIZE says"
    dtype = train_gpt.choose_dtype(os.environ.get("COMPUTE_DTYPE", "auto"), torch.device("cpu"))
    speed = product_speed(dtype)
    name = "large" if speed >= ENOUGH else "small"
    found = f"matrix products run at {speed / 1e9:.0f} GFLOP/s in {str(dtype)[6:]}, and {ENOUGH / 1e9:.0f} are enough"
    return name, f"the demonstration's model is {name}: {found} for the large one; DEMO_SIZE fixes the choice"


def main() -> None:
    try:
        name, sentence = choose(os.environ.get("DEMO_SIZE", ""))
    except UserError as error:
        sys.exit(f"error: {error}")
    print(" ".join(f"{knob}={value}" for knob, value in SIZES[name].items()))
    print(sentence)


if __name__ == "__main__":
    main()

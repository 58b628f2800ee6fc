"""What the benchmarks share: the small model, and how a program ends after a user's mistake."""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from train_gpt import UserError

SMALL = {  # 4.1 million parameters, for a CPU
    "NUM_LAYERS": "6",
    "MODEL_DIM": "256",
    "NUM_HEADS": "4",
    "NUM_KV_HEADS": "2",
    "TRAIN_SEQ_LEN": "512",
    "EVAL_SEQ_LEN": "512",
    "TRAIN_BATCH_TOKENS": "16384",
}


def run(main: Callable[[], None]) -> None:
    """Call `main`. A UserError ends the program with its sentence and status 1."""
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")

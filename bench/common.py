"""What the benchmarks share: the small model, turns between variants, another script, and the file
of a plot."""

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from program import output_file
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


def image_file(text: str) -> Path:
    """The path of a plot, as the type of an argument; with a format that can be drawn."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise argparse.ArgumentTypeError(f"{error}: pip install -r requirements-dev.txt") from error
    path, formats = output_file(text), FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower()[1:] not in formats:
        raise argparse.ArgumentTypeError(
            f"{text} has no known format: end it in one of .{', .'.join(sorted(formats))}"
        )
    return path


def run_of(script: ModuleType, hp, runtime, log):
    """A training by this or another version of the script."""
    return script.Run(hp, runtime, log, None)


def evaluator_of(script: ModuleType, forward: Callable, val, hp, runtime, stride: int):
    """An evaluator with windows `stride` apart; 0: of a banded pass. The previous version of the
    script had other names."""
    make = script.ForwardConfig if hasattr(script, "ForwardConfig") else script.Pass
    order = hp.layer_order() if hasattr(hp, "layer_order") else hp.visits()
    config = make(order, band=0 if stride else hp.eval_seq_len)
    return script.Evaluator(forward, val, hp, runtime, config, stride or script.band_block(hp)[1])


def score_of(*arguments):
    """The score of all targets by such an evaluator."""
    scorer = evaluator_of(*arguments)
    scorer.score(scorer.windows())
    return scorer.result()


def load_script(path: Path) -> ModuleType:
    """Another version of train_gpt.py as a module. Raises UserError if it cannot be imported."""
    name = f"against_{path.stem}"
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or not path.is_file():
        raise UserError(
            f"--against {path} is not a Python file: give another version of train_gpt.py"
        )
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # dataclasses look up their module
    try:
        specification.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise UserError(f"--against {path} cannot be imported: {error}") from error
    if not hasattr(module, "Hyperparameters"):
        raise UserError(
            f"--against {path} has no Hyperparameters: give another version of train_gpt.py"
        )
    module.UserError = UserError  # so that `run_program` reports its errors too
    return module


def take_turns(
    variants: dict[str, Callable[[], object]], rounds: int, synchronize: Callable, warm: int = 2
) -> dict[str, list[float]]:
    """Seconds of every variant in every round, after `warm` rounds that are not timed."""
    times = {name: [] for name in variants}
    for turn in range(warm + rounds):
        for name, variant in variants.items():
            synchronize()
            began = time.perf_counter()
            variant()
            synchronize()
            if turn >= warm:
                times[name].append(time.perf_counter() - began)
    return times


def report(title: str, times: dict[str, list[float]]) -> list[dict]:
    """Print medians, and median, minimum and maximum over rounds of each row's time over the first
    one's. Returns the rows."""
    print(f"\n{title:42}{'median ms':>11}{'ratio':>8}{'min':>8}{'max':>8}")
    first = next(iter(times.values()))
    rows = []
    for name, seconds in times.items():
        median = 1000 * statistics.median(seconds)
        ratios = sorted(b / a for a, b in zip(first, seconds, strict=True))
        found = {"ratio": statistics.median(ratios), "min": ratios[0], "max": ratios[-1]}
        columns = "".join(f"{ratio:8.3f}" for ratio in found.values())
        print(f"  {name:40}{median:11.2f}{columns}", flush=True)
        rounded = {name: round(ratio, 4) for name, ratio in found.items()}
        rows.append({"variant": name, "median_ms": round(median, 3), **rounded})
    return rows

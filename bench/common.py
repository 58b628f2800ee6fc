"""What the benchmarks share: the small model, turns between variants, another script, and the file
of a plot."""

import argparse
import importlib.util
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from program import output_file
from train_gpt import UserError, as_user_error, require

# 4.1 million parameters, for a CPU
SMALL = {"NUM_LAYERS": "6", "MODEL_DIM": "256", "NUM_HEADS": "4", "NUM_KV_HEADS": "2"}
SMALL |= {"TRAIN_SEQ_LEN": "512", "EVAL_SEQ_LEN": "512", "TRAIN_BATCH_TOKENS": "16384"}


def image_file(text: str) -> Path:
    """The path of a plot, as the type of an argument; with a format that can be drawn."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise argparse.ArgumentTypeError(f"{error}: pip install -r requirements-dev.txt") from error
    path, formats = output_file(text), FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower()[1:] not in formats:
        known = f"end it in one of .{', .'.join(sorted(formats))}"
        raise argparse.ArgumentTypeError(f"{text} has no known format: {known}")
    return path


def score_of(script: ModuleType, forward: Callable, val, hp, runtime, stride: int):
    """The score of all targets in windows `stride` apart; 0: in a banded pass."""
    config = script.ForwardConfig(hp.layer_order(), band=0 if stride else hp.eval_seq_len)
    step = stride or script.band_block(hp)[1]
    scorer = script.Evaluator(forward, val, hp, runtime, config, step)
    scorer.score(scorer.windows())
    return scorer.result()


def load_script(path: Path) -> ModuleType:
    """Another version of train_gpt.py as a module. Raises UserError if it cannot be imported."""
    name, advice = f"against_{path.stem}", "give another version of train_gpt.py"
    specification = importlib.util.spec_from_file_location(name, path)
    file = specification and path.is_file()
    require(file, f"--against {path} is not a Python file: {advice}")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # dataclasses look up their module
    with as_user_error(f"--against {path} cannot be imported", advice, ImportError, SyntaxError):
        specification.loader.exec_module(module)
    known = hasattr(module, "compile_blocks")
    require(known, f"--against {path} has no compile_blocks: {advice} of 2026-11-28 or later")
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


class Table:
    """Prints rows as they are measured. `columns` has the format of each number, with its width."""

    def __init__(self, title: str, **columns: str):
        self.columns, self.rows = columns, []
        widths = {name: re.match(r"[+]?(\d+)", form)[1] for name, form in columns.items()}
        print(f"\n{title:40}" + "".join(f"{name:>{width}}" for name, width in widths.items()))

    def row(self, name: str, **values: float) -> None:
        """Print a row, and keep it for the line of JSON."""
        numbers = (f"{values[column]:{form}}" for column, form in self.columns.items())
        print(f"{name:40}" + "".join(numbers), flush=True)
        self.rows.append({"variant": name, **values})


def finish(bench: str, **found: object) -> None:
    """Print the last line, which is JSON."""
    print(json.dumps({"bench": bench, "torch": version("torch"), **found}))


def report(title: str, times: dict[str, list[float]]) -> list[dict]:
    """Print and return medians, and of the ratios to the first one median, minimum and maximum."""
    first = next(iter(times.values()))
    table = Table(title, median_ms="12.2f", ratio="8.3f", min="8.3f", max="8.3f")
    for name, seconds in times.items():
        ratios = [b / a for a, b in zip(first, seconds, strict=True)]
        medians = 1000 * statistics.median(seconds), statistics.median(ratios)
        table.row(name, median_ms=medians[0], ratio=medians[1], min=min(ratios), max=max(ratios))
    return table.rows

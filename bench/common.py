"""What the benchmarks share: knobs, turns between variants, another script, tables, and the file of
a plot."""

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt
from program import output_file
from train_gpt import UserError, as_user_error, require

# isort: split
import torch

# 4.1 million parameters, for a CPU
SMALL = {"NUM_LAYERS": "6", "MODEL_DIM": "256", "NUM_HEADS": "4", "NUM_KV_HEADS": "2"}
SMALL |= {"TRAIN_SEQ_LEN": "512", "EVAL_SEQ_LEN": "512", "TRAIN_BATCH_TOKENS": "16384"}
RANK = {"TRAIN_BATCH_TOKENS": "98304"}  # of the record's step, for one of 8 GPUs


def knobs() -> dict[str, str]:
    """The environment, and what it does not set: the small model, or on a GPU the record's."""
    return (RANK if torch.cuda.is_available() else SMALL) | os.environ


def image_file(text: str) -> Path:
    """The path of a plot, as the type of an argument; with a format that can be drawn."""
    from matplotlib.backend_bases import FigureCanvasBase

    path, formats = output_file(text), FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower()[1:] not in formats:
        known = f"end it in one of .{', .'.join(sorted(formats))}"
        raise argparse.ArgumentTypeError(f"{text} has no known format: {known}")
    return path


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


def compare(
    title: str, other: Path, prepare: Callable, rounds: int, warm: int = 2, **environ: str
) -> list[dict]:
    """Time the script at `other` and this one in turns. `prepare(script, its hyperparameters, its
    runtime)` returns the function to time. Prints and returns the table."""
    scripts = {str(other): load_script(other), "this train_gpt.py": train_gpt}
    variants = {}
    with contextlib.ExitStack() as stack:
        for name, script in scripts.items():
            hp = script.Hyperparameters.from_env(knobs() | environ)
            runtime = stack.enter_context(script.Runtime.start(hp))
            variants[name] = prepare(script, hp, runtime)
        print_machine(runtime, rounds=rounds)
        return report(title, take_turns(variants, rounds, runtime.synchronize, warm))


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


def print_machine(runtime: train_gpt.Runtime, **settings: object) -> None:
    """Print the versions and the device, then these settings."""
    words = (f"{name}:{value}" for name, value in settings.items())
    print(f"torch {torch.__version__} {runtime.describe()}", *words)


class Table:
    """Prints rows as they are measured. `columns` has the format of each number, with its width."""

    def __init__(self, title: str, **columns: str):
        self.columns, self.rows = columns, []
        widths = {name: form.partition(".")[0].strip(",f") for name, form in columns.items()}
        print(f"\n{title:40}" + "".join(f"{name:>{width}}" for name, width in widths.items()))

    def row(self, name: str, **values: float) -> None:
        """Print a row, and keep it for the line of JSON."""
        numbers = (f"{values[column]:{form}}" for column, form in self.columns.items())
        print(f"{name:40}" + "".join(numbers), flush=True)
        self.rows.append({"variant": name, **values})


def report(title: str, times: dict[str, list[float]]) -> list[dict]:
    """Print and return medians, and of the ratios to the first one median, minimum and maximum."""
    first = next(iter(times.values()))
    table = Table(title, median_ms="12.2f", ratio="8.3f", min="8.3f", max="8.3f")
    for name, seconds in times.items():
        ratios = [b / a for a, b in zip(first, seconds, strict=True)]
        medians = 1000 * statistics.median(seconds), statistics.median(ratios)
        table.row(name, median_ms=medians[0], ratio=medians[1], min=min(ratios), max=max(ratios))
    return table.rows


def finish(bench: str, **found: object) -> None:
    """Print the last line, which is JSON."""
    print(json.dumps({"bench": bench, "torch": torch.__version__, **found}))

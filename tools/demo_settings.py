#!/usr/bin/env python3
"""Print the settings of ./run.sh's demonstration that the environment does not set, as NAME=VALUE
lines: those of configs/cpu.env, the data's, and a process for each core.
"""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("", "data")]

import program
import shards
from train_gpt import Hyperparameters, require

CPU = program.read_env(ROOT / "configs" / "cpu.env")


def data_knobs(environ: Mapping[str, str]) -> dict[str, object]:
    """The demonstration's data; or what the manifest of DATA_PATH says of its tokenizer."""
    folder = Path(environ.get("DATA_PATH") or "demo_data")
    if not environ.get("DATA_PATH"):
        return {"DATA_PATH": folder, "TOKENIZER_PATH": folder / "tokenizer.model"}
    missing = f"DATA_PATH={folder} does not exist: set the folder of your shards, or unset it"
    require(folder.is_dir(), missing)
    if manifest := shards.read_manifest(folder):
        tokenizer = manifest["tokenizer"]
        return {"TOKENIZER_PATH": folder / tokenizer["path"], "VOCAB_SIZE": tokenizer["vocab_size"]}
    unnamed = f"DATA_PATH={folder} has no manifest.json that names its tokenizer"
    require(environ.get("TOKENIZER_PATH"), f"{unnamed}: set TOKENIZER_PATH and VOCAB_SIZE")
    return {}


def run_id(environ: Mapping[str, str], logs: Path = Path("logs")) -> str:
    """The first of demo, demo2, ... without a log. Sweeps and resumed runs keep theirs."""
    name, number = "demo", 1
    again = any(environ.get(variable) for variable in ("SEEDS", "GRID", "RESUME"))
    while not again and (logs / f"{name}.txt").exists():
        number += 1
        name = f"demo{number}"
    return name


def settings(environ: Mapping[str, str], cores: int) -> dict[str, str]:
    """What the environment does not set. Raises UserError if a run with it could not start."""
    chosen = {"RUN_ID": run_id(environ), **data_knobs(environ), **CPU}
    if environ.get("WARMDOWN_ITERS") or re.search(r"\bWARMDOWN_ITERS=", environ.get("GRID", "")):
        del chosen["WARMDOWN_FRAC"]  # would replace it
    layers = environ.get("NUM_LAYERS", "")
    if layers.isdecimal():
        chosen["XSA_LAST_N"] = min(int(layers), int(chosen["XSA_LAST_N"]))
    chosen = {name: str(value) for name, value in chosen.items() if not environ.get(name)}
    hp = Hyperparameters.from_env({**environ, **chosen})
    rows = hp.train_batch_tokens // hp.train_seq_len
    ranks = max(n for n in range(1, cores + 1) if rows % n == 0)
    return {"NPROC": environ.get("NPROC") or str(ranks)} | chosen


def main() -> None:
    program.parser(__doc__).parse_args()
    for name, value in settings(os.environ, program.cores()).items():
        sys.stdout.buffer.write(os.fsencode(f"{name}={value}\n"))  # paths as they are


if __name__ == "__main__":
    program.run_program(main)

#!/usr/bin/env python3
"""Kill small runs at random moments and let them go on, until so many kills are survived.

    python data/demo_corpus.py demo_data                      # the data, once
    python bench/soak.py demo_data --kills 100

One run is left alone. Then runs of the same configuration are killed (SIGKILL, of all their processes) again and
again at random moments after their start, imports, warm-up, writing of checkpoints, export and evaluation included, and
started again with RESUME=auto, until each has come to its end. Every run must end with the losses and scores of the one
that was left alone, digit by digit, and leave nothing behind but its log, its artifact and two checkpoints.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KNOBS = {
    "VOCAB_SIZE": 1024, "NUM_LAYERS": 3, "MODEL_DIM": 64, "NUM_HEADS": 4, "NUM_KV_HEADS": 2, "ROPE_DIMS": 8, "XSA_LAST_N": 2,
    "BIGRAM_VOCAB_SIZE": 64, "BIGRAM_DIM": 16, "TRAIN_SEQ_LEN": 64, "TRAIN_BATCH_TOKENS": 1024, "EVAL_SEQ_LEN": 64, "EVAL_STRIDE": 64,
    "ITERATIONS": 80, "WARMDOWN_ITERS": 20, "WARMUP_STEPS": 1, "MAX_WALLCLOCK_SECONDS": 0, "VAL_LOSS_EVERY": 0, "LATE_QAT": 0,
    "COMPILE": 0, "TRAIN_LOG_EVERY": 1, "RESUME": "auto", "CHECKPOINT_EVERY": 3,
}  # fmt: skip


def started(name: str, folder: Path, data: Path, ranks: int) -> subprocess.Popen:
    """The run of that name."""
    knobs = {
        **KNOBS,
        "RUN_ID": name,
        "DATA_PATH": data,
        "TOKENIZER_PATH": data / "tokenizer.model",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    return subprocess.Popen(
        [sys.executable, *launcher, ROOT / "train_gpt.py"], cwd=folder, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ | {key: str(value) for key, value in knobs.items()},
    )  # fmt: skip


def kill_all(pid: int) -> None:
    """SIGKILL a process and all that it has started; the ranks of a launcher are in process groups of their own."""
    os.kill(pid, signal.SIGSTOP)  # so that it starts no more while they are counted
    parents, family = {}, {pid}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    for member in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)


def outcome(name: str, folder: Path) -> dict[str, str]:
    """Every loss and every final score of a log; of a step that was done again the last."""
    text = (folder / "logs" / f"{name}.txt").read_text().partition("\n" + "=" * 100 + "\n")[2]
    return dict(re.findall(r"^(step:\d+/\d+|final_\w+_exact) (?:train_loss|val_loss):(\S+)", text, re.M))


def left_behind(name: str, folder: Path) -> list[str]:
    """What a finished run should not leave."""
    found = [str(path.relative_to(folder)) for path in folder.rglob("*.partial")]
    checkpoints = sorted(path.name for path in (folder / "checkpoints" / name).iterdir())
    return found + checkpoints[:-2]


def survive(name: str, folder: Path, data: Path, ranks: int, longest: float, kills_left: int) -> tuple[int, int]:
    """Kill that run until it ends or no kills are left, then let it end. Returns (kills, starts)."""
    kills = starts = 0
    while True:
        process, starts = started(name, folder, data, ranks), starts + 1
        try:
            error = process.communicate(timeout=random.uniform(0, longest) if kills < kills_left else None)[1]
        except subprocess.TimeoutExpired:
            kill_all(process.pid)
            process.communicate()
            kills += 1
            continue
        if process.returncode:
            sys.exit(
                f"error: start {starts} of {name} ended with status {process.returncode}: {error.strip().splitlines()[-1:]}"
            )
        return kills, starts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with shards and tokenizer.model of 1,024 pieces")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    data, begun = arguments.data.resolve(), time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        survive("calm", folder, data, arguments.ranks, 0.0, 0)
        longest, calm = time.perf_counter() - begun, outcome("calm", folder)
        print(f"left alone: {len(calm)} losses and scores in {longest:.1f} s")
        total = passed_over = number = 0
        faults = left_behind("calm", folder)
        while total < arguments.kills:
            name, number = f"run{number}", number + 1
            # Moments within imports and within the last evaluation, but most of them before the end.
            kills, starts = survive(name, folder, data, arguments.ranks, 0.8 * longest, arguments.kills - total)
            total += kills
            text = (folder / "logs" / f"{name}.txt").read_text()
            passed = text.count(" passed over: ")
            passed_over += passed
            unlike = {key for key in calm | outcome(name, folder) if calm.get(key) != outcome(name, folder).get(key)}
            faults += [f"{name}: {key}" for key in sorted(unlike)] + [
                f"{name}: {what}" for what in left_behind(name, folder)
            ]
            resumed = text.count("\nresumed: ")
            print(f"{name}: {kills} kills, {starts} starts, {resumed} resumed in the last log, {passed} checkpoints passed over, "
                  f"{'equal' if not unlike else f'{len(unlike)} of {len(calm)} figures differ'}", flush=True)  # fmt: skip
    for fault in faults:
        print(f"fault: {fault}")
    print(f"survived {total} kills in {number} runs of {arguments.ranks} rank(s), {len(faults)} faults")
    print(json.dumps({"kills": total, "runs": number, "ranks": arguments.ranks, "passed_over": passed_over, "faults": len(faults),
                      "seconds": round(time.perf_counter() - begun, 1)}))  # fmt: skip
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()

"""Kill small runs at random moments and resume them; each must end like one that was not killed.

    python -m pytest tests/test_soak.py -m slow                       # 6 kills for each number of ranks
    SOAK_KILLS=100 python -m pytest tests/test_soak.py -m slow -s     # prints a line per run

The kills are SIGKILL to all processes of the run, at any time after its start: during imports,
warm-up, training, the writing of a checkpoint, export or evaluation.
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from conftest import ROOT, processes_in, start

KILLS = int(os.environ.get("SOAK_KILLS", 6))
KNOBS = dict(ITERATIONS=80, WARMDOWN_ITERS=20, TRAIN_LOG_EVERY=1, CHECKPOINT_EVERY=3, RESUME="auto")


def kill_all(folder: Path) -> None:
    """SIGKILL all processes in this folder, also those that they start meanwhile."""
    while members := processes_in(folder):
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(member), signal.SIGKILL)


def outcome(name: str, folder: Path) -> dict[str, str]:
    """Every loss and every final score in a log; the last entry counts for a repeated step."""
    text = (folder / "logs" / f"{name}.txt").read_text().partition("\n" + "=" * 100 + "\n")[2]
    return dict(re.findall(r"(?m)^(step:\d+/\d+|final_\w+_exact) (?:train|val)_loss:(\S+)", text))


@pytest.fixture
def survive(env, tmp_path):
    """A function: kill a run up to `kills` times within `longest` seconds of a start, and let it
    finish. Returns the number of kills."""

    def go(name: str, ranks: int, longest: float, kills: int, moments: random.Random) -> int:
        done, log = 0, tmp_path / "logs" / f"{name}.jsonl"
        while True:
            knobs = env(**KNOBS, RUN_ID=name)
            process = start([ROOT / "train_gpt.py"], knobs, tmp_path, ranks, fresh=True)
            timeout = moments.uniform(0, longest) if done < kills else None
            try:
                error = process.communicate(timeout=timeout)[1]
                assert process.returncode == 0, f"start {done + 1} of {name}: {error}"
                return done
            except subprocess.TimeoutExpired:
                kill_all(tmp_path)
                process.communicate()
                done += 1
                if log.exists() and '{"event": "finished"' in log.read_text():
                    return done  # it was killed while it ended, and its RUN_ID is refused

    return go


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_runs_end_like_one_that_was_not(survive, tmp_path, ranks):
    moments = random.Random(ranks)
    began = time.perf_counter()
    survive("undisturbed", ranks, 0.0, 0, moments)
    seconds = time.perf_counter() - began
    expected = outcome("undisturbed", tmp_path)
    assert len(expected) == 83, "80 steps and three scores"
    total = number = 0
    while total < KILLS:
        name = f"run{number}"
        # Some moments fall into imports and the last evaluation, most into the training.
        kills = survive(name, ranks, 0.8 * seconds, KILLS - total, moments)
        total, number = total + kills, number + 1
        assert outcome(name, tmp_path) == expected, name
        assert not list(tmp_path.rglob("*.partial")), name
        assert len(list((tmp_path / "checkpoints" / name).iterdir())) == 2, name
        resumed = (tmp_path / "logs" / f"{name}.txt").read_text().count("\nresumed: ")
        print(f"{name} on {ranks} rank(s): {kills} kills, {resumed} resumed", flush=True)

"""tools/sweep.py: a run per seed and combination."""

import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

import pack_code
import sweep
import train_gpt
from conftest import ROOT, run, start, user_error
from lib import runs
from sample_logs import SWEEP, counted, logs_of

SCORE = "final_int6_sliding_window_exact"


def test_sweep_runs_every_combination_and_ends_with_a_table(swept):
    output, logs = (swept / "out.txt").read_text(), swept / "logs"
    names = [f"t_MATRIX_LR={rate}_seed{seed}" for rate in ("0.005", "0.025") for seed in (1, 2)]
    expected = {f"{name}{suffix}" for name in names for suffix in (".txt", ".jsonl", ".npz")}
    assert {path.name for path in logs.iterdir()} == expected
    table = output[output.index("\nMATRIX_LR=0.025\n") :]
    found = [runs.read_run(path) for path in logs_of(swept)]
    for row in found:
        figures = f"{row.score.bpb:.5f}", f"{row.total_bytes:,}", f"{row.step_ms:.2f}"
        (line,) = re.findall(rf"(?m)^seed {row.seed} .*", table)
        assert all(part in line for part in figures)
        assert (logs / f"{names[1 + row.seed]}.npz").stat().st_size == row.model_bytes
    scores = np.array([row.score.bpb for row in found])
    assert re.search(rf"^mean .* {scores.mean():.5f} ", table, re.M)
    assert re.search(rf"^std .* {scores.std(ddof=1):.5f} ", table, re.M)
    assert re.search(r"^n +2$", table, re.M)


def test_the_next_comparison_does_not_mix_configurations(swept, monkeypatch):
    monkeypatch.chdir(swept)
    planned = sweep.plan({"GRID": "MATRIX_LR=0.005,0.025", "SEEDS": "1 2", "RUN_ID": "t"})
    assert all(run["RESUME"] == "auto" for run in planned), "also a trained, unscored one"
    words = shlex.split(sweep.patterns(planned))
    rates = [{run.settings["MATRIX_LR"] for run in runs.read_group(word)} for word in words]
    assert rates == [{"0.005"}, {"0.025"}]
    for grid, first in (("", "logs/run_*.txt"), ("MATRIX_LR=1", "logs/run_MATRIX_LR=1_*.txt")):
        words = shlex.split(sweep.patterns(sweep.plan({"GRID": grid, "SEEDS": "1 2"})))
        assert words == [first, "logs/OTHER_*.txt"]


@pytest.fixture
def sweeping(copied, sweep_knobs, monkeypatch):
    """A function that sweeps in this process where a sweep has finished: the exit status."""
    monkeypatch.chdir(copied)

    def go(command="false", **knobs):
        environ = {**sweep_knobs, "GRID": "MATRIX_LR=0.025", "SEEDS": "1", **knobs}
        monkeypatch.setattr(sweep.os, "environ", environ)
        return sweep.sweep([command])

    return go


@pytest.mark.parametrize("edited", [False, True])
def test_what_is_done_is_not_repeated(edited, sweeping, copied, monkeypatch, capsys):
    """Also a sweep whose script is edited meanwhile ends with its table."""
    log, started = logs_of(copied)[1], []
    text = log.read_text()
    log.write_text(text[: text.rindex(SCORE)])  # killed in its last evaluation

    def execute(command, environ):
        started.append(environ["RUN_ID"])
        log.write_text("edited = 1\n" * edited + text)

    monkeypatch.setattr(sweep, "execute", execute)
    with user_error("another train_gpt.py") if edited else nullcontext():
        assert sweeping(GRID="MATRIX_LR=0.005,0.025", SEEDS="1 2") == 0
    said = capsys.readouterr().out
    assert said.count("is done already") == 3 and started == [log.stem]
    assert re.search(r"\nMATRIX_LR=0.025\n.*\nseed 1 ", said)
    assert (f"not finished: {log.stem}; start" in said) == edited


def test_a_log_of_another_experiment_is_refused(sweeping, copied):
    log = logs_of(copied)[0]
    files = f"logs/{log.stem}.txt logs/{log.stem}.jsonl"
    advice = f"set another RUN_ID, or move its files away: {files}"
    with user_error(rf"another configuration \(ITERATIONS=12, now 10\): {advice}$"):
        sweeping(ITERATIONS="10")
    log.write_text("changed = 1\n" + log.read_text())
    with user_error("another train_gpt.py"):
        sweeping()


def test_a_run_of_the_packed_script_is_done(sweeping, copied):
    log = logs_of(copied)[0]
    source = pack_code.without_comments((ROOT / "train_gpt.py").read_bytes())
    log.write_text(counted(1000, source)(log.read_text()))
    assert sweeping() == 0


@pytest.mark.parametrize("limit", ["bytes", "time"])
def test_a_run_over_a_limit_is_not_done(limit, sweeping, copied, monkeypatch, capsys):
    """It ended with an error after its scores, so a sweep must not count it as a result."""
    log, knobs, part = logs_of(copied)[0], {}, "over the limit of 50000"
    if limit == "bytes":
        monkeypatch.setattr(train_gpt, "SUBMISSION_CAP", 50_000)
    else:
        knobs, part = {"MAX_WALLCLOCK_SECONDS": "600"}, "took 600.00 s, over the limit of 600"
        text = re.sub(r"(?m)^. (MAX_WALLCLOCK_SECONDS)=.*", r"* \1=600.0", log.read_text())
        log.write_text(re.sub(r"(?m)^(calibration: .*train_time):\d+ms", r"\1:600001ms", text))
    (copied / "checkpoints" / log.stem).mkdir(parents=True)
    assert sweeping(**knobs) == 1
    said = capsys.readouterr().out
    assert "== " not in said, "it was started again"
    assert f"failed: {log.stem}: error: " in said and part in said and "no run finished" in said
    # Its checkpoint is of the end of the training, so the repeated run would only score it again.
    files = f"logs/{log.stem}.txt logs/{log.stem}.jsonl checkpoints/{log.stem}"
    assert f"To repeat the run: rm -r {files}\n" in said


def test_a_sweep_goes_on_after_a_failed_run_and_from_checkpoints(sweep_knobs, tmp_path):
    knobs = {**sweep_knobs, "GRID": "VOCAB_SIZE=500,400", "SEED": "7", "CHECKPOINT_EVERY": "5"}
    said = run(SWEEP, knobs, tmp_path, status=1).stdout
    assert "failed: t_VOCAB_SIZE=500_seed7: error: TOKENIZER_PATH=" in said
    assert re.search(r"VOCAB_SIZE=500\nno run finished\n\nVOCAB_SIZE=400\n.*\nseed 7 +12 ", said)
    log = tmp_path / "logs" / "t_VOCAB_SIZE=400_seed7.txt"
    text = log.read_text()
    log.write_text(text[: text.rindex(SCORE)])
    log.with_suffix(".jsonl").write_text("")
    run(SWEEP, {**knobs, "GRID": "VOCAB_SIZE=400"}, tmp_path)
    assert re.search(r"(?m)^resumed: step:12 ", log.read_text())


def test_a_sweep_without_checkpoints_does_not_resume_old_ones(sweeping, copied):
    """They are of an earlier sweep, perhaps of another train_gpt.py. RESUME asks for them."""
    folder = copied / "checkpoints" / "u_MATRIX_LR=0.025_seed1"
    folder.mkdir(parents=True)
    assert sweeping("true", RUN_ID="u") == 1, "it wrote no log"
    (folder / "step_00000005.npz").touch()
    path = f"checkpoints/{folder.name}"
    with user_error(f"^{path} holds an earlier run: rm -r {path}, or set"):
        sweeping(RUN_ID="u")
    for more in ({"RESUME": "auto"}, {"CHECKPOINT_EVERY": "5"}):
        assert sweeping("true", RUN_ID="u", **more) == 1
    (copied / "checkpoints" / "t_MATRIX_LR=0.025_seed1").mkdir()
    (copied / "checkpoints" / "t_MATRIX_LR=0.025_seed1" / "step_00000012.npz").touch()
    assert sweeping() == 0, "it is done already"


def test_values_of_a_list_are_not_taken_apart():
    targets = "TTT_LORA_TARGETS"
    assert sweep.combinations(f"{targets}=k,out,mlp,head") == [{targets: "k,out,mlp,head"}]
    found = sweep.plan({"GRID": f"{targets}=k|k,out MATRIX_LR=0.1,0.2", "SEEDS": "1"})
    assert [one[targets] for one in found] == ["k", "k", "k,out", "k,out"]
    assert found[-1]["RUN_ID"] == f"run_{targets}=k+out_MATRIX_LR=0.2_seed1"


def test_a_run_goes_on_if_nobody_reads_its_messages(tmp_path, monkeypatch):
    code = "import sys; print('x', file=sys.stderr, flush=True); open('end', 'w')"
    broken = SimpleNamespace(write=mock.Mock(side_effect=BrokenPipeError))
    monkeypatch.setattr(sys, "stderr", broken)
    assert sweep.execute([sys.executable, "-c", code], dict(os.environ), folder=tmp_path) == ""
    assert broken.write.called and (tmp_path / "end").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_sweep_with_what_is_there(number, copied, sweep_knobs):
    for path in copied.glob("logs/t_MATRIX_LR=0.025_seed2.*"):
        path.unlink()
    code = "import time; print('it runs', flush=True); time.sleep(60)"
    knobs = {**sweep_knobs, "SEEDS": "1 2 3", "GRID": "MATRIX_LR=0.025"}
    process = start([*SWEEP[:2], sys.executable, "-c", code], knobs, copied, fresh=True)
    said = ""
    while "it runs" not in said:
        said += process.stdout.readline()
    process.send_signal(number)
    if number == signal.SIGINT:  # a terminal sends it to both
        subprocess.run(["pkill", "-INT", "-P", str(process.pid)], check=True)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "seed 1 " in out
    missing = "t_MATRIX_LR=0.025_seed2 t_MATRIX_LR=0.025_seed3"
    assert f"not finished: {missing}; start again to go on\n" in out


@pytest.mark.parametrize(
    "variables, part",
    [
        ({"GRID": "MATRIX_LRR=1"}, "GRID: MATRIX_LRR is not a knob"),
        ({"GRID": "matrix_lr=1"}, "GRID: matrix_lr is not a knob"),
        ({"GRID": "MATRIX_LR"}, "GRID has 'MATRIX_LR', which is not KNOB=value"),
        ({"SEED": "1 2", "GRID": "MATRIX_LR=1"}, "SEED='1 2' has several seeds: set SEEDS='1 2'"),
        ({"SEEDS": "1 1"}, "names a seed twice"),
        ({"GRID": f"MATRIX_LR=0.{'0' * 210}1"}, "begin with a dot, or exceed 230 bytes"),
        ({"GRID": "NUM_HEADS=5"}, "MODEL_DIM=32 is not a multiple"),
    ],
)
def test_sweep_errors(env, variables, part):
    with user_error(re.escape(part)):
        sweep.plan({**env(), **variables})

"""tools/sweep.py: a run per seed and combination."""

import os
import re
import shlex
import signal
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

import pack_code
import sweep
import train_gpt
from conftest import ROOT, assert_mistake, run, start, user_error
from lib import runs
from sample_logs import SWEEP, counted, logs_of


def test_sweep_runs_every_combination_and_ends_with_a_table(swept):
    output = (swept / "out.txt").read_text()
    names = [f"t_MATRIX_LR={rate}_seed{seed}" for rate in ("0.005", "0.025") for seed in (1, 2)]
    expected = {f"{name}{suffix}" for name in names for suffix in (".txt", ".jsonl", ".npz")}
    assert {path.name for path in (swept / "logs").iterdir()} == expected
    table = output[output.index("\nMATRIX_LR=0.025\n") :]
    found = [runs.read_run(path) for path in logs_of(swept)]
    for row in found:
        line = next(line for line in table.splitlines() if line.startswith(f"seed {row.seed} "))
        for part in (f"{row.score.bpb:.5f}", f"{row.total_bytes:,}", f"{row.step_ms:.2f}"):
            assert part in line
        artifact = swept / "logs" / f"t_MATRIX_LR=0.025_seed{row.seed}.npz"
        assert artifact.stat().st_size == row.model_bytes
    mean, std = np.mean([r.score.bpb for r in found]), np.std([r.score.bpb for r in found], ddof=1)
    assert re.search(rf"^mean .* {mean:.5f} ", table, re.M)
    assert re.search(rf"^std .* {std:.5f} ", table, re.M)
    assert re.search(r"^n +2$", table, re.M)


def test_the_next_comparison_does_not_mix_configurations(copied, monkeypatch):
    planned = sweep.plan({"GRID": "MATRIX_LR=0.005,0.025", "SEEDS": "1 2", "RUN_ID": "t"})
    assert all(variables["RESUME"] == "auto" for variables in planned), (
        "also a trained, unscored one"
    )
    words = shlex.split(sweep.patterns(planned))
    assert words == ["logs/t_MATRIX_LR=0.005_*.txt", "logs/t_MATRIX_LR=0.025_*.txt"]
    result = run([ROOT / "tools" / "compare.py", *words], {}, copied, status=None)
    assert result.returncode in (0, 3) and "B - A: " in result.stdout, result.stderr
    for grid, first in (("", "logs/run_*.txt"), ("MATRIX_LR=1", "logs/run_MATRIX_LR=1_*.txt")):
        words = shlex.split(sweep.patterns(sweep.plan({"GRID": grid, "SEEDS": "1 2"})))
        assert words == [first, "logs/OTHER_*.txt"]


def test_sweep_does_not_repeat_what_is_done(copied, sweep_knobs):
    cut = copied / "logs" / "t_MATRIX_LR=0.025_seed2.txt"
    whole = cut.read_text()
    # As if the run had been killed in its last evaluation
    cut.write_text(whole[: whole.rindex("final_int6_sliding_window_exact")])
    cut.with_suffix(".jsonl").write_text("")
    others = {p: p.stat().st_mtime_ns for p in copied.glob("logs/*.txt") if p != cut}
    result = run(SWEEP, {**sweep_knobs, "SEEDS": "1 2", "GRID": "MATRIX_LR=0.005,0.025"}, copied)
    assert result.stdout.count("is done already") == 3
    assert {p: p.stat().st_mtime_ns for p in others} == others
    assert "final_int6_sliding_window_exact" in cut.read_text()


def test_sweep_refuses_a_log_of_another_experiment(copied, sweep_knobs):
    knobs = {**sweep_knobs, "SEEDS": "1", "GRID": "MATRIX_LR=0.025"}
    result = run(SWEEP, {**knobs, "ITERATIONS": "10"}, copied, status=1)
    files = " ".join(f"logs/{logs_of(copied)[0].stem}{end}" for end in (".txt", ".jsonl"))
    assert f"set another RUN_ID, or move its files away: {files}\n" in result.stderr
    assert "another configuration (ITERATIONS=12, now 10)" in result.stderr
    changed = logs_of(copied)[0]
    changed.write_text("changed = 1\n" + changed.read_text())
    assert_mistake(SWEEP, copied, "another train_gpt.py", **knobs)


def test_a_run_of_the_packed_script_is_done(copied, sweep_knobs, monkeypatch):
    log = logs_of(copied)[0]
    source = pack_code.without_comments((ROOT / "train_gpt.py").read_bytes())
    log.write_text(counted(1000, source)(log.read_text()))
    variables = {**sweep_knobs, "MATRIX_LR": "0.025", "SEED": "1", "RUN_ID": log.stem}
    monkeypatch.chdir(copied)
    assert sweep.finished(variables, log.stem).source == source


@pytest.mark.parametrize("limit", ["bytes", "time"])
def test_a_run_over_a_limit_is_not_done(limit, copied, sweep_knobs, monkeypatch, capsys):
    """It ended with an error after its scores, so a sweep must not count it as a result."""
    monkeypatch.chdir(copied)
    log = logs_of(copied)[0]
    for name, value in {**sweep_knobs, "GRID": "MATRIX_LR=0.025", "SEEDS": "1"}.items():
        monkeypatch.setenv(name, value)
    assert sweep.sweep(["false"]) == 0
    part = "training took 600.00 s, over the limit of 600"
    if limit == "bytes":
        monkeypatch.setattr(train_gpt, "SUBMISSION_CAP", 50_000)
        part = "over the limit of 50000"
    else:
        # ITERATIONS decides there
        monkeypatch.setenv("MAX_WALLCLOCK_SECONDS", "600")
        text = re.sub(r"(?m)^. (MAX_WALLCLOCK_SECONDS)=.*", r"* \1=600.0", log.read_text())
        log.write_text(re.sub(r"(?m)^(calibration: .*train_time):\d+ms", r"\1:600001ms", text))
    capsys.readouterr()
    checkpoints = copied / "checkpoints" / log.stem
    checkpoints.mkdir(parents=True)
    (checkpoints / "step_00000012.npz").touch()
    assert sweep.sweep(["false"]) == 1, "it was started again"
    said = capsys.readouterr().out
    assert f"failed: {log.stem}: error: " in said and part in said and "no run finished" in said
    # Its checkpoint is of the end of the training, so the repeated run would only score it again.
    files = f"logs/{log.stem}.txt logs/{log.stem}.jsonl checkpoints/{log.stem}"
    assert f"To repeat the run: rm -r {files}\n" in said


def test_a_sweep_with_checkpoints_goes_on(sweep_knobs, tmp_path):
    knobs = {**sweep_knobs, "SEEDS": "1", "CHECKPOINT_EVERY": "5"}
    run(SWEEP, knobs, tmp_path)
    log = tmp_path / "logs" / "t_seed1.txt"
    text = log.read_text()
    log.write_text(text[: text.rindex("final_int6_sliding_window_exact")])
    log.with_suffix(".jsonl").write_text("")
    run(SWEEP, knobs, tmp_path)
    assert re.search(r"(?m)^resumed: step:12 ", log.read_text())
    assert "is done already" in run(SWEEP, {**knobs, "CHECKPOINT_EVERY": ""}, tmp_path).stdout


def test_a_sweep_without_checkpoints_does_not_resume_old_ones(sweep_knobs, tmp_path, monkeypatch):
    """They are of an earlier sweep, perhaps of another train_gpt.py. RESUME asks for them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep.os, "environ", {**sweep_knobs, "SEEDS": "1"})
    folder = tmp_path / "checkpoints" / "t_seed1"
    folder.mkdir(parents=True)
    assert sweep.sweep(["true"]) == 1, "it wrote no log"
    (folder / "step_00000005.npz").touch()
    with user_error("^checkpoints/t_seed1 holds an earlier run: rm -r checkpoints/t_seed1, or set"):
        sweep.sweep(["false"])
    for name, value in (("RESUME", "auto"), ("CHECKPOINT_EVERY", "5")):
        monkeypatch.setattr(sweep.os, "environ", {**sweep_knobs, "SEEDS": "1", name: value})
        assert sweep.sweep(["true"]) == 1


def test_values_of_a_list_are_not_taken_apart():
    targets = "TTT_LORA_TARGETS"
    assert sweep.combinations(f"{targets}=k,out,mlp,head") == [{targets: "k,out,mlp,head"}]
    found = sweep.plan({"GRID": f"{targets}=k|k,out MATRIX_LR=0.1,0.2", "SEEDS": "1"})
    assert [one[targets] for one in found] == ["k", "k", "k,out", "k,out"]
    assert found[-1]["RUN_ID"] == f"run_{targets}=k+out_MATRIX_LR=0.2_seed1"


def test_sweep_goes_on_after_a_failed_run(sweep_knobs, tmp_path):
    knobs = {**sweep_knobs, "GRID": "VOCAB_SIZE=500,400", "SEED": "7"}
    result = run(SWEEP, knobs, tmp_path, status=1)
    assert "failed: t_VOCAB_SIZE=500_seed7: error: TOKENIZER_PATH=" in result.stdout
    table = r"VOCAB_SIZE=500\nno run finished\n\nVOCAB_SIZE=400\n.*\nseed 7 +12 "
    assert re.search(table, result.stdout)


def test_a_sweep_whose_script_is_edited_ends_with_its_table(
    copied, sweep_knobs, monkeypatch, capsys
):
    monkeypatch.chdir(copied)
    knobs = {**sweep_knobs, "GRID": "MATRIX_LR=0.025", "SEEDS": "1 2"}
    monkeypatch.setattr(sweep.os, "environ", knobs)
    log = logs_of(copied)[1]
    text = log.read_text()
    log.write_text("")
    monkeypatch.setattr(sweep, "execute", lambda *_: log.write_text(f"edited = 1\n{text}") and "")
    with user_error("another train_gpt.py"):
        sweep.sweep(["train"])
    said = capsys.readouterr().out
    assert re.search(r"\nseed 1 ", said) and f"not finished: {log.stem}; start" in said


def test_a_run_goes_on_if_nobody_reads_its_messages(tmp_path, monkeypatch):
    code = (
        "import pathlib, sys; print('x', file=sys.stderr, flush=True); pathlib.Path('end').touch()"
    )
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
    assert process.returncode == 130
    assert "seed 1 " in out
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
        ({"GRID": f"MATRIX_LR=0.{'0' * 210}1"}, " has 236 bytes: set one of at most 230"),
        ({"GRID": "NUM_HEADS=5"}, "MODEL_DIM=32 is not a multiple"),
    ],
)
def test_sweep_errors(env, variables, part):
    with user_error(re.escape(part)):
        sweep.plan({**env(), **variables})

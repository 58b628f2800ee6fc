"""tools/: sweeps, logs in both formats, significance, submission folders and their check,
ablations, plots."""

import argparse
import ast
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch

import forks
import train_gpt
from conftest import ROOT, TINY, run, start

sys.path.insert(0, str(ROOT / "tools"))

import ablate
import check_record
import compare
import flops
import make_record
import pack_code
import plot
import runs
import sweep
from train_gpt import UserError

SWEEP = [ROOT / "tools" / "sweep.py", "--", forks.python(), ROOT / "train_gpt.py"]
CHECK = ROOT / "tools" / "check_record.py"


@pytest.fixture(scope="module")
def knobs(data):
    values = {
        **TINY,
        "DATA_PATH": data,
        "TOKENIZER_PATH": data / "tokenizer.model",
        "RUN_ID": "t",
        "TRAIN_LOG_EVERY": 2,
        "VAL_LOSS_EVERY": 4,
        "EVAL_STRIDE": 32,
    }
    return {name: str(value) for name, value in values.items()}


@pytest.fixture(scope="module")
def swept(knobs, tmp_path_factory):
    """A finished sweep of two learning rates with two seeds: (folder, its output)."""
    folder = tmp_path_factory.mktemp("sweep")
    result = run(SWEEP, {**knobs, "SEEDS": "1 2", "GRID": "MATRIX_LR=0.005,0.025"}, folder)
    assert result.returncode == 0, result.stderr
    return folder, result.stdout


def logs_of(swept, rate: str = "0.025") -> list[Path]:
    return sorted((swept[0] / "logs").glob(f"t_MATRIX_LR={rate}_seed*.txt"))


# Sweep


def test_sweep_runs_every_combination_and_ends_with_a_table(swept):
    folder, output = swept
    names = [f"t_MATRIX_LR={rate}_seed{seed}" for rate in ("0.005", "0.025") for seed in (1, 2)]
    expected = sorted(
        f"{name}{suffix}" for name in names for suffix in (".txt", ".jsonl", ".int6.xz")
    )
    assert sorted(path.name for path in (folder / "logs").iterdir()) == expected
    table = output[output.index("\nMATRIX_LR=0.025\n") :]
    found = [runs.read_run(path) for path in logs_of(swept)]
    for row in found:
        line = next(line for line in table.splitlines() if line.startswith(f"seed {row.seed} "))
        assert f"{row.score.bpb:.5f}" in line
        assert f"{row.total_bytes:,}" in line
        assert f"{row.step_ms:.2f}" in line
    mean, std = np.mean([r.score.bpb for r in found]), np.std([r.score.bpb for r in found], ddof=1)
    assert re.search(rf"^mean .* {mean:.5f} ", table, re.M)
    assert re.search(rf"^std .* {std:.5f} ", table, re.M)
    assert re.search(r"^n +2$", table, re.M)


def test_an_artifact_is_kept_for_each_run(swept):
    sizes = {path.stem: runs.read_run(path).model_bytes for path in logs_of(swept)}
    assert {name: (swept[0] / "logs" / f"{name}.int6.xz").stat().st_size for name in sizes} == sizes
    last = (swept[0] / "logs" / "t_MATRIX_LR=0.025_seed2.int6.xz").read_bytes()
    assert (swept[0] / "final_model.int6.xz").read_bytes() == last, "the sweep moved it away"


def copy_of(swept, tmp_path) -> Path:
    shutil.copytree(swept[0], tmp_path / "sweep")
    return tmp_path / "sweep"


def test_sweep_does_not_repeat_what_is_done(swept, knobs, tmp_path):
    folder = copy_of(swept, tmp_path)
    cut = folder / "logs" / "t_MATRIX_LR=0.025_seed2.txt"
    whole = cut.read_text()
    cut.write_text(whole[: whole.index("final_average_exact")])  # as if the run had been killed
    cut.with_suffix(".jsonl").write_text("")
    others = {p: p.stat().st_mtime_ns for p in folder.glob("logs/*.txt") if p != cut}
    result = run(SWEEP, {**knobs, "SEEDS": "1 2", "GRID": "MATRIX_LR=0.005,0.025"}, folder)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("is done already") == 3
    assert {p: p.stat().st_mtime_ns for p in others} == others
    assert "final_int6_sliding_window_exact" in cut.read_text()


def test_sweep_refuses_a_log_of_another_experiment(swept, knobs, tmp_path):
    folder = copy_of(swept, tmp_path)
    result = run(
        SWEEP, {**knobs, "SEEDS": "1 2", "GRID": "MATRIX_LR=0.025", "ITERATIONS": "10"}, folder
    )
    assert result.returncode == 1
    assert "another configuration (ITERATIONS=12, now 10)" in result.stderr
    assert "RUN_ID" in result.stderr
    changed = logs_of((folder, ""))[0]
    changed.write_text("# changed\n" + changed.read_text())
    assert (
        "another train_gpt.py"
        in run(SWEEP, {**knobs, "SEEDS": "1", "GRID": "MATRIX_LR=0.025"}, folder).stderr
    )


def test_a_run_of_the_packed_script_is_done(swept, knobs, tmp_path, monkeypatch):
    folder = copy_of(swept, tmp_path)
    log = logs_of((folder, ""))[0]
    source = pack_code.without_comments((ROOT / "train_gpt.py").read_bytes())
    log.write_text(counted(1000, source)(log.read_text()))
    variables = {**knobs, "MATRIX_LR": "0.025", "SEED": "1", "RUN_ID": log.stem}
    monkeypatch.chdir(folder)
    assert sweep.finished(variables, log.stem).source == source


def test_an_oversized_run_is_not_done(swept, knobs, monkeypatch):
    """It ended with an error after its scores, so a sweep must not count it as a result."""
    monkeypatch.chdir(swept[0])
    variables = {**knobs, "MATRIX_LR": "0.025", "SEED": "1", "RUN_ID": "t_MATRIX_LR=0.025_seed1"}
    assert sweep.finished(variables, variables["RUN_ID"]).seed == 1
    monkeypatch.setattr(sweep, "SUBMISSION_CAP", 50_000)
    assert sweep.finished(variables, variables["RUN_ID"]) is None


def test_sweep_goes_on_after_a_failed_run(knobs, tmp_path):
    result = run(SWEEP, {**knobs, "GRID": "VOCAB_SIZE=500,400", "SEED": "7"}, tmp_path)
    assert result.returncode == 1
    assert re.search(
        r"failed: t_VOCAB_SIZE=500_seed7: error: TOKENIZER_PATH=\S+ has 400 pieces", result.stdout
    )
    assert re.search(
        r"VOCAB_SIZE=500\nno run finished\n\nVOCAB_SIZE=400\n.*\nseed 7 +12 ", result.stdout
    )


def test_ctrl_c_ends_a_sweep_with_what_is_there(swept, knobs, tmp_path):
    folder = copy_of(swept, tmp_path)
    for path in folder.glob("logs/t_MATRIX_LR=0.025_seed2.*"):
        path.unlink()
    endless = [
        *SWEEP[:2],
        sys.executable,
        "-c",
        "import time; print('it runs', flush=True); time.sleep(60)",
    ]
    process = start(
        endless,
        {**knobs, "SEEDS": "1 2 3", "GRID": "MATRIX_LR=0.025", "ITERATIONS": "12"},
        folder,
        fresh=True,
    )
    said = ""
    while "it runs" not in said:
        said += process.stdout.readline()
    process.send_signal(signal.SIGINT)
    # A terminal sends it to both
    subprocess.run(["pkill", "-INT", "-P", str(process.pid)], check=True)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "seed 1 " in out and re.search(
        r"not run yet: t_MATRIX_LR=0.025_seed2 t_MATRIX_LR=0.025_seed3", out
    )


@pytest.mark.parametrize(
    "variables, part",
    [
        ({"GRID": "MATRIX_LRR=1"}, "GRID has 'MATRIX_LRR=1'"),
        ({"GRID": "matrix_lr=1"}, "GRID has 'matrix_lr=1'"),
        ({"GRID": "MATRIX_LR"}, "not KNOB=value"),
        ({"SEEDS": "1 1"}, "names a seed twice"),
        ({"GRID": "NUM_HEADS=5"}, "MODEL_DIM=32 is not a multiple"),
    ],
)
def test_sweep_errors(env, variables, part):
    with pytest.raises(UserError, match=re.escape(part)):
        sweep.plan({**env(), **variables})


# Logs

PUBLISHED = """\
train_batch_tokens:786432 train_seq_len:2048 iterations:9000 warmup_steps:20 max_wallclock_seconds:600.000
world_size:8 grad_accum_steps:1
seed:42
step:0/9000 val_loss:6.9304 val_bpb:4.1046 train_time:0ms step_avg:0.01ms
step:1/9000 train_loss:6.9322 train_time:133ms step_avg:132.54ms
step:7000/9000 train_loss:1.7889 train_time:584853ms step_avg:83.55ms
step:7179/9000 val_loss:1.9214 val_bpb:1.1379 train_time:600128ms step_avg:83.59ms
stopping_early: wallclock_cap train_time:600128ms step:7179/9000
DIAGNOSTIC post_ema val_loss:1.9196 val_bpb:1.1369 eval_time:1971ms
Serialized model: 106027446 bytes
Code size: 89458 bytes
Serialized model int6+lzma: 15887928 bytes
Total submission size int6+lzma: 15977386 bytes
final_int6_roundtrip val_loss:1.9336 val_bpb:1.1452 eval_time:6562ms
final_int6_roundtrip_exact val_loss:1.93358885 val_bpb:1.14518023
final_int6_sliding_window val_loss:1.8939 val_bpb:1.1217 stride:64 eval_time:74066ms
final_int6_sliding_window_exact val_loss:1.89385556 val_bpb:1.12165091
final_int8_zlib_roundtrip_exact val_loss:1.89385556 val_bpb:1.12165091
"""
LEGAL = """\
ttt_sliding:done val_loss=1.889768 val_bpb=1.119230 elapsed=409.8s
legal_ttt val_loss:1.8898 val_bpb:1.1192 eval_time:410268ms
legal_ttt_exact val_loss:1.88976776 val_bpb:1.11922988
"""
LATER = """\
Hyperparameters:
  matrix_lr: 0.026
  seed: 42
  world_size: 8
1/20000 train_loss: 9.0087 train_time: 0.0m tok/s: 17921784
4500/20000 train_loss: 2.2771 train_time: 9.0m tok/s: 6589668
4945/20000 val_loss: 2.3539 val_bpb: 1.0756
stopping_early: wallclock_cap train_time: 599592ms step: 4945/20000
diagnostic pre-quantization post-ema val_loss:2.32848665 val_bpb:1.06395844 eval_time:6718ms
Code size (uncompressed): 157868 bytes
Code size (compressed): 31999 bytes
Serialized model quantized+pergroup: 15865260 bytes
Total submission size quantized+pergroup: 15897259 bytes
diagnostic quantized val_loss:2.34727563 val_bpb:1.07254371 eval_time:49995ms
quantized_ttt_phased val_loss:2.31944212 val_bpb:1.05989454 eval_time:508785ms
"""


def written(folder: Path, text: str, name: str = "train_seed42.log") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def test_published_logs_are_read(tmp_path):
    found = runs.read_run(written(tmp_path, PUBLISHED))
    assert (found.seed, found.ranks, found.steps, found.train_seconds) == (42, 8, 7179, 600.128)
    assert found.score == runs.Score(1.89385556, 1.12165091, 74.066, None, None)
    assert found.score_name == "final_int6_sliding_window"
    assert (found.before_export.bpb, found.after_export.bpb) == (1.1369, 1.14518023)
    assert (found.code_bytes, found.model_bytes, found.total_bytes) == (89458, 15887928, 15977386)
    assert found.train[-1].seconds == pytest.approx(584.853)
    assert found.val[0].fields["val_bpb"] == 4.1046
    assert found.configuration["ITERATIONS"] == "9000"
    learning = runs.read_run(written(tmp_path, PUBLISHED + LEGAL))
    assert learning.score == runs.Score(1.88976776, 1.11922988, 410.268, None, None)


@pytest.mark.parametrize("names", [("roundtrip", "banded"), ("roundtrip", "banded", "ttt_sgd")])
def test_a_banded_pass_is_the_score_without_test_time_training(tmp_path, names):
    lines = [
        f"final_int6_{name}_exact val_loss:2.0 val_bpb:1.{place}"
        for place, name in enumerate(names)
    ]
    text = "step:9/9 val_loss:2.1 val_bpb:1.2 train_time:9ms\n" + "\n".join(lines) + "\n"
    found = runs.read_run(written(tmp_path, text))
    assert (
        found.score_name == f"final_int6_{names[-1]}"
        and found.score.bpb == 1 + (len(names) - 1) / 10
    )


def test_later_published_logs_are_read(tmp_path):
    found = runs.read_run(written(tmp_path, LATER))
    assert (found.seed, found.ranks, found.steps, found.train_seconds) == (42, 8, 4945, 599.592)
    assert found.score == runs.Score(2.31944212, 1.05989454, 508.785, None, None)
    bits = (found.before_export.bpb, found.after_export.bpb, found.val[-1].fields["val_bpb"])
    assert bits == (1.06395844, 1.07254371, 1.0756)
    assert (found.code_bytes, found.total_bytes, found.train[-1].seconds) == (
        31999,
        15897259,
        540.0,
    )
    assert found.configuration == {"MATRIX_LR": "0.026", "WORLD_SIZE": "8"}


def test_scores_of_baselines_with_their_stride_in_the_middle(tmp_path):
    text = "step:9/9 val_loss:2.1 val_bpb:1.2 train_time:9ms\nfinal_quant_roundtrip_exact val_loss:2.01 val_bpb:1.195\n"
    sliding = "final_sliding_window_exact stride:64 val_loss:1.96172269 val_bpb:1.16184369\n"
    found = runs.read_run(written(tmp_path, text + sliding))
    assert found.score.bpb == 1.16184369
    assert found.after_export.bpb == 1.195


def test_our_log_is_read_whole(swept):
    path = logs_of(swept)[0]
    found = runs.read_run(path)
    events = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    last, artifact = events[-2], next(event for event in events if event["event"] == "artifact")
    assert found.source == (ROOT / "train_gpt.py").read_bytes()
    assert found.ranks == 1
    assert found.device.startswith("CPU")
    assert found.started == events[0]["started"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found.started)
    names = ("val_loss", "val_bpb", "eval_seconds", "val_tokens", "val_bytes")
    assert found.score == pytest.approx(tuple(last[name] for name in names), abs=1e-3)
    assert (found.model_bytes, found.code_bytes) == (
        artifact["model_bytes"],
        artifact["code_bytes"],
    )
    assert found.settings["NUM_LAYERS"] == "3"
    assert "NUM_LAYERS" in found.changed and "MUON_WD" not in found.changed
    assert [point.step for point in found.train] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12]
    assert [point.step for point in found.val] == [0, 4, 8, 12]
    assert found.versions["torch"] == events[0]["versions"].split("torch ")[1].split(",")[0]
    assert "constriction" in found.versions


def test_steps_that_a_resumed_run_did_not_reach_again_do_not_count(tmp_path):
    losses = {1: 5.0, 2: 4.0, 3: 3.0, 4: 2.0}
    lines = [
        f"step:{step}/9 train_loss:{loss} train_time:{step}00ms" for step, loss in losses.items()
    ]
    lines.append("resumed: step:1 train_time:100ms from:checkpoints/r/step_00000001.safetensors")
    lines.append("step:2/9 train_loss:4.5 train_time:210ms")
    found = runs.read_run(written(tmp_path, "\n".join(lines)))
    assert [(point.step, point.fields["train_loss"]) for point in found.train] == [
        (1, 5.0),
        (2, 4.5),
    ]
    assert (found.steps, found.resumed) == (2, 1)


def test_what_is_not_a_single_run_is_refused(tmp_path):
    for text, part in (
        (PUBLISHED + PUBLISHED, "holds several runs"),
        ("hello\n", "neither steps nor scores"),
    ):
        with pytest.raises(UserError, match=part):
            runs.read_run(written(tmp_path, text))
    with pytest.raises(UserError, match="did not finish"):
        _ = runs.read_run(written(tmp_path, PUBLISHED[: PUBLISHED.index("DIAG")])).score
    (tmp_path / "x.jsonl").write_text("{}")
    for name, part in (("none.txt", "cannot read"), ("x.jsonl", "give x.txt instead")):
        with pytest.raises(UserError, match=part):
            runs.read_run(tmp_path / name)


# Significance


def group(
    folder: Path,
    values: dict[int, float],
    rate: float = 1.7,
    step: float = 83.0,
    text: str = PUBLISHED,
) -> list:
    """Logs that look published, with these losses by seed."""
    for seed, loss in values.items():
        log = text.replace("seed:42", f"seed:{seed}").replace(
            "600128", f"{step * 7179 + 99 * seed:.0f}"
        )
        log = log.replace("1.89385556 val_bpb:1.12165091", f"{loss:.8f} val_bpb:{loss / rate:.8f}")
        written(folder, log, f"train_seed{seed}.log")
    return runs.read_group(str(folder))


def test_welch_is_the_textbook_one(tmp_path):
    a, b = [1.90, 1.91, 1.92, 1.905], [1.88, 1.882, 1.885]
    test = compare.welch(a, b, 0.005)
    variance = [np.var(side, ddof=1) / len(side) for side in (a, b)]
    assert test.t == pytest.approx((np.mean(a) - np.mean(b) - 0.005) / sum(variance) ** 0.5)
    assert test.df == pytest.approx(
        sum(variance) ** 2 / (variance[0] ** 2 / 3 + variance[1] ** 2 / 2)
    )
    least = compare.smallest(a, b, 0.005)
    shifted = [value - (least - (np.mean(a) - np.mean(b))) for value in b]
    assert compare.welch(a, shifted, 0.005).p == pytest.approx(compare.LEVEL), (
        "the smallest gain is just significant"
    )
    cauchy = 0.5 - np.arctan(21) / np.pi  # t with one degree of freedom
    assert compare.paired([1.9, 1.92], [1.8, 1.81]).p == pytest.approx(cauchy)
    assert compare.welch([1.0], b) is None and compare.welch([1.0, 1.0], [0.5, 0.5]) is None


@pytest.mark.parametrize(
    "losses, counts, part",
    [
        ({1: 1.880, 2: 1.8802, 3: 1.8801}, True, "would count: B is better by 0.0199 nats"),
        ({1: 1.896, 2: 1.8962, 3: 1.8961}, False, "better by 0.0039 nats, and at least 0.005"),
        ({1: 1.910, 2: 1.9102, 3: 1.9101}, False, "worse by 0.0101 nats"),
        ({1: 1.880, 2: 1.9, 3: 1.886}, False, "run more seeds"),
        ({1: 1.880}, False, "3 and 1 seeds cannot show it"),
    ],
)
def test_the_rule_for_records(tmp_path, losses, counts, part):
    a, b = group(tmp_path / "a", {1: 1.9, 2: 1.9001, 3: 1.8999}), group(tmp_path / "b", losses)
    assert compare.verdict(a, b, speed=False)[0] is counts
    result = run([ROOT / "tools" / "compare.py", tmp_path / "a", tmp_path / "b"], {}, tmp_path)
    assert result.returncode == (0 if counts else 3) and part in result.stdout
    assert ("paired by seed (1 2 3)" in result.stdout) == (len(losses) == 3)


def test_the_rule_for_speed(tmp_path):
    a = group(tmp_path / "a", {1: 1.9, 2: 1.9001, 3: 1.8999})
    faster = group(tmp_path / "b", {1: 1.9, 2: 1.9002, 3: 1.9}, step=80.0)
    counts, why = compare.verdict(a, faster, speed=True)
    assert counts and "waived" in why
    assert not compare.verdict(a, faster, speed=False)[0]
    assert not compare.verdict(faster, a, speed=True)[0]
    worse = group(tmp_path / "c", {1: 1.91, 2: 1.9102, 3: 1.9101}, step=80.0)
    assert "the loss is worse by 0.0101" in compare.verdict(a, worse, speed=True)[1]


def test_other_tokenizers_are_compared_by_bits(tmp_path):
    a, b = (
        group(tmp_path / "a", {1: 1.9, 2: 1.91}, rate=1.7),
        group(tmp_path / "b", {1: 2.4, 2: 2.41}, rate=2.2),
    )
    of_a, of_b, note = compare.losses(a, b)
    assert of_a == pytest.approx([1.9 / 1.7 * 2.2, 1.91 / 1.7 * 2.2], rel=1e-6)
    assert of_b == [2.4, 2.41]
    assert "tokenizers differ" in note


def test_groups_that_cannot_be_compared(tmp_path, swept):
    first = logs_of(swept)[0]
    mixed = ",".join(str(logs_of(swept, rate)[0]) for rate in ("0.005", "0.025"))
    with pytest.raises(UserError, match=r"MATRIX_LR=0.005 and 0.025"):
        runs.read_group(mixed)
    with pytest.raises(UserError, match="seed 1 more than once"):
        runs.read_group(f"{first},{first}")
    with pytest.raises(UserError, match="there are no logs in"):
        runs.read_group(str(tmp_path / "no*"))
    unfinished = written(tmp_path / "unfinished", PUBLISHED[: PUBLISHED.index("DIAG")])
    with pytest.raises(UserError, match="did not finish"):
        runs.read_group(str(unfinished))
    other = written(
        tmp_path,
        re.sub(r"val_tokens:\d+", "val_tokens:77", logs_of(swept)[1].read_text()),
        "other.txt",
    )
    with pytest.raises(UserError, match="were scored on 77 and"):
        compare.losses(runs.read_group(str(first)), runs.read_group(str(other)))


def test_a_failed_run_is_left_out(tmp_path, capsys):
    """A run without a score, and one that ended before its first step."""
    group(tmp_path / "a", {1: 1.9, 2: 1.91})
    cut = PUBLISHED.replace("seed:42", "seed:3")
    failed = written(tmp_path / "a", cut[: cut.index("DIAG")], "train_seed3.log")
    dead = written(tmp_path / "a", cut[: cut.index("step:0")], "train_seed4.log")
    assert [found.seed for found in runs.read_group(str(tmp_path / "a"))] == [1, 2]
    assert capsys.readouterr().err.splitlines() == [
        f"left out: {failed} has no final score: the run did not finish; run it again or leave it out",
        f"left out: {dead} has neither steps nor scores; give logs/<RUN_ID>.txt or train_seed<N>.log",
    ]
    with pytest.raises(UserError, match="cannot read"):
        runs.read_group(f"{tmp_path / 'a'},nothing.log")


def test_the_same_runs_are_equal(tmp_path):
    group(tmp_path / "a", {1: 1.9, 2: 1.91, 3: 1.92})
    one = tmp_path / "a" / "train_seed1.log"
    for a, b, status, part in (
        (tmp_path / "a", f"{tmp_path}/a/*.log", 3, "B is equal to A: both are the same runs"),
        (tmp_path / "a", one, 1, f"error: {one} is on both sides: leave it out of one of them"),
    ):
        result = run([ROOT / "tools" / "compare.py", a, b], {}, tmp_path)
        assert result.returncode == status and part in result.stdout + result.stderr
        assert "Welch" not in result.stdout


def test_logs_are_found_by_folder_pattern_and_list(tmp_path):
    names = [
        written(tmp_path, PUBLISHED, name)
        for name in ("a1.txt", "a2.txt", "a[1].txt", "b,1.txt", "c.log")
    ]
    for text, expected in (
        (f"{tmp_path}/a?.txt", names[:2]),
        (f"{tmp_path}", names),
        (f"{tmp_path}/c.log,{tmp_path}/a?.txt", [names[4], *names[:2]]),
        (f"{tmp_path}/a[1].txt", [names[2]]),
        (f"{tmp_path}/b,1.txt", [names[3]]),
        ("nothing.txt", [Path("nothing.txt")]),
    ):
        assert runs.find_logs(text) == expected
    with pytest.raises(UserError, match="there are no logs in"):
        runs.find_logs(f"{tmp_path}/x*.txt")


# Submission folders


@pytest.fixture
def made(swept, tmp_path):
    """A function: a submission folder made from the sweep's logs, with its README filled in."""

    def make(*options: str, track: str = "non_record_16mb", change=lambda text: text) -> Path:
        logs = [
            written(tmp_path / "logs", change(path.read_text()), path.name)
            for path in logs_of(swept)
        ]
        about = [
            "--track",
            track,
            "--name",
            "A tiny, first one",
            "--author",
            "Ada",
            "--blurb",
            "Small.",
        ]
        pattern = logs[0].parent / "*.txt"
        command = [
            ROOT / "tools" / "make_record.py",
            *about,
            "--root",
            tmp_path / "records",
            *options,
            pattern,
        ]
        result = run(command, {}, tmp_path)
        assert result.returncode == 0, result.stderr
        folder = next((tmp_path / "records" / f"track_{track}").iterdir())
        (folder / "README.md").write_text(
            re.sub(r"\(to fill: .*\)", "none", (folder / "README.md").read_text())
        )
        return folder

    return make


def checked(folder: Path, *options) -> tuple[int, dict[str, list[str]]]:
    """(exit status, lines by verdict) of check_record.py."""
    result = run([CHECK, folder, *options], {}, folder.parent)
    assert "Traceback" not in result.stderr, result.stderr
    lines = {
        status: [line for line in result.stdout.splitlines() if line.startswith(status)]
        for status in ("ok", "FAIL", "n/a")
    }
    assert sum(map(len, lines.values())) >= 10
    return result.returncode, lines


FILES = [
    "README.md",
    "requirements.txt",
    "submission.json",
    "train_gpt.py",
    "train_seed1.log",
    "train_seed2.log",
]


def test_a_folder_has_everything_from_the_logs(made, swept):
    folder = made()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_A_tiny_first_one", folder.name)
    assert sorted(p.name for p in folder.iterdir()) == FILES
    assert (folder / "train_gpt.py").read_bytes() == (ROOT / "train_gpt.py").read_bytes()
    found = [runs.read_run(path) for path in logs_of(swept)]
    given = json.loads((folder / "submission.json").read_text())
    assert given["val_bpb"] == pytest.approx(np.mean([r.score.bpb for r in found]), abs=1e-8)
    assert given["val_loss"] == pytest.approx(np.mean([r.score.loss for r in found]), abs=1e-8)
    assert given["val_bpb_std"] == pytest.approx(
        np.std([r.score.bpb for r in found], ddof=1), abs=1e-8
    )
    assert given["seeds"] == [1, 2]
    assert given["bytes_total"] == max(r.total_bytes for r in found)
    assert given["github_id"] == "Ada"
    assert given["track"] == "non_record_16mb", "the folder is called track_..., the field is not"
    assert given["seed_results"]["2"]["val_loss"] == found[1].score.loss
    assert given["compliance"]["three_seeds"] is False
    text = (folder / "README.md").read_text()
    for part in (
        f"**val_bpb {given['val_bpb']:.5f}**",
        "This is not a record",
        "NUM_LAYERS=3",
        "LATE_QAT=0",
    ):
        assert part in text
    assert (
        f"torch=={train_gpt.torch.__version__.split('+')[0]}\n"
        in (folder / "requirements.txt").read_text()
    )


def test_a_good_folder_passes(made, swept, data):
    folder = made()
    artifact = swept[0] / "logs" / "t_MATRIX_LR=0.025_seed1.int6.xz"
    status, lines = checked(
        folder,
        "--legality",
        "--artifact",
        artifact,
        "--data-path",
        data,
        "--tokenizer",
        data / "tokenizer.model",
    )
    assert status == 0 and not lines["FAIL"], lines
    assert len(lines["n/a"]) == 2
    assert any("8xH100" in line and "a non-record" in line for line in lines["n/a"])
    assert any("C1 causal" in line for line in lines["ok"])
    assert any("gives the score again" in line for line in lines["ok"])
    assert sorted(p.name for p in folder.iterdir()) == FILES, "the check leaves nothing behind"


def counted(size: int, source: bytes):
    """A change of a log: as if the script that ran had this source and `size` bytes."""

    def change(text: str) -> str:
        text = source.decode() + text[text.index(f"\n{runs.RULER}\n") :]
        code, model = (
            int(re.search(rf"^{name}: (\d+) b", text, re.M)[1])
            for name in ("Code size", SERIALIZED)
        )
        text = text.replace(f"Code size: {code} bytes", f"Code size: {size} bytes")
        return re.sub(
            r"^(Total submission size.*): \d+ bytes", rf"\1: {model + size} bytes", text, flags=re.M
        )

    return change


SERIALIZED = r"Serialized model [^:]+"


@pytest.mark.parametrize("comments", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_packed_script_that_ran_is_submitted(made, comments):
    source = (ROOT / "train_gpt.py").read_bytes()
    source = source if comments else pack_code.without_comments(source)
    packed = pack_code.pack(source)
    folder = made(change=counted(len(packed), source))
    assert (folder / "train_gpt.py").read_bytes() == packed
    assert (folder / "train_gpt.readable.py").read_bytes() == source
    assert json.loads((folder / "submission.json").read_text())["bytes_code"] == len(packed)
    status, lines = checked(folder)
    assert status == 0, lines
    assert any(
        f"is the script that the logs show: packed, {len(packed):,} bytes" in line
        for line in lines["ok"]
    )


def test_a_packed_script_and_its_source_belong_together(made, tmp_path, monkeypatch):
    source = pack_code.without_comments((ROOT / "train_gpt.py").read_bytes())
    packed = pack_code.pack(source)
    folder = made(change=counted(len(packed), source))
    for name, content, part in (
        ("train_gpt.readable.py", source + b"x", "train_gpt.readable.py is not its source"),
        ("train_gpt.py", source, f"it has {len(source)} bytes, the code that ran {len(packed)}"),
        ("train_gpt.py", pack_code.pack(source + b"#"), "begins with another one"),
    ):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        line = check_record.same_script(check_record.Folder(folder))
        assert line.status == "FAIL" and part in line.detail
        (folder / name).write_bytes(before)
    assert check_record.same_script(check_record.Folder(folder)).status == "ok"
    shutil.rmtree(folder)
    # Another compressor gives another size.
    monkeypatch.delitem(pack_code.COMPRESS, "bz2")
    other = pack_code.pack(source)
    assert len(other) != len(packed)
    (tmp_path / "other.py").write_bytes(other)
    with pytest.raises(AssertionError, match="give the file that ran with --script"):
        made(change=counted(len(other), source))
    with pytest.raises(AssertionError, match="other.py is not the script that ran"):
        made("--script", tmp_path / "other.py", change=counted(len(packed), source))
    folder = made("--script", tmp_path / "other.py", change=counted(len(other), source))
    assert (folder / "train_gpt.py").read_bytes() == other


def as_record(text: str) -> str:
    """The log as if from the challenge's machine."""
    return re.sub(
        r"^runtime: ranks:1 (.*?) device:.*?(?= compute)",
        r"runtime: ranks:8 \1 device:NVIDIA H100 80GB HBM3",
        text,
        flags=re.M,
    )


def test_a_record_needs_its_machine_and_its_significance(made, tmp_path):
    folder = made(track="10min_16mb", change=as_record)
    status, lines = checked(folder, "--against", folder)
    assert status == 1 and len(lines["FAIL"]) == 1, lines
    assert "0.005 nats" in lines["FAIL"][0]
    assert "n/a   a record" in "".join(checked(folder)[1]["n/a"])


def edit(name: str, old: str, new: str):
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        changed = re.sub(old, new, text, count=1, flags=re.M)
        assert changed != text
        (folder / name).write_text(changed)

    return change


def remove(name: str):
    return lambda folder: (folder / name).unlink()


def swap_loss(folder: Path) -> None:
    given = json.loads((folder / "submission.json").read_text())
    (folder / "submission.json").write_text(json.dumps(given | {"val_loss": given["val_bpb"]}))


def fatten(folder: Path) -> None:
    """Each of code and artifact is under the limit, their sum is over it."""
    with open(folder / "train_gpt.py", "a") as file:
        file.write("#" * (15_999_000 - (folder / "train_gpt.py").stat().st_size))


def seed_twice(folder: Path) -> None:
    shutil.copy(folder / "train_seed1.log", folder / "train_seed3.log")


def without_logs(folder: Path) -> None:
    for log in folder.glob("*.log"):
        log.unlink()


def damaged_packing(folder: Path) -> None:
    (folder / "train_gpt.py").write_bytes(pack_code.pack(b"pass")[:-60])


def edit_import(new: str):
    return edit("train_gpt.py", r"^import argparse$", new)


# fmt: off
BROKEN = {
    "no readme": (remove("README.md"), "no README.md"),
    "no json": (remove("submission.json"), "no submission.json"),
    "bad json": (edit("submission.json", r"\{", "{,"), "is not JSON"),
    "no script": (remove("train_gpt.py"), "no train_gpt.py"),
    "no logs": (without_logs, "no log"),
    "unfinished log": (edit("train_seed1.log", r"final_int6_\w+_exact.*\n.*", ""), "did not finish"),
    "no author": (edit("submission.json", r'"author": "Ada"', '"author": ""'), "without author"),
    "unfilled readme": (edit("README.md", "none", "(to fill: x)"), "still to fill"),
    "a wrong bpb": (edit("submission.json", r'"val_bpb": \d+\.\d', '"val_bpb": 0.9'), "val_bpb is"),
    "bpb as loss": (swap_loss, "val_loss is nats per token"),
    "a wrong std": (edit("submission.json", r'"val_bpb_std": [\d.e-]+', '"val_bpb_std": 0.5'), "val_bpb_std is 0.5"),
    "a seed invented": (edit("submission.json", r'"seeds": \[\n *1', '"seeds": [\n 9'), "seeds are"),
    "a seed left out": (remove("train_seed2.log"), "seed_results has seed 2, which has no log"),
    "a seed's figure": (
        edit("submission.json", r'"artifact_bytes": \d+', '"artifact_bytes": 5'), "artifact_bytes 5 for seed"
    ),
    "bytes wrong": (edit("submission.json", r'"bytes_total": \d+', '"bytes_total": 5'), "bytes_total is 5"),
    "code bytes wrong": (edit("submission.json", r'"bytes_code": \d+', '"bytes_code": 5'), "bytes_code is 5"),
    "mixed settings": (
        edit("train_seed2.log", r"^[* ] MATRIX_LR=0\.025", "* MATRIX_LR=0.03"), "MATRIX_LR=0.025 and 0.03"
    ),
    "a seed twice": (seed_twice, "one occurs twice"),
    "other text": (
        edit("train_seed2.log", r"(final_int6_sl.*)val_tokens:\d+", r"\1val_tokens:99"), "tokens and bytes are"
    ),
    "another script": (edit_import("import argparse  # changed"), "begins with another one"),
    "too large": (fatten, "too many"),
    "trained too long": (
        edit("train_seed1.log", r"^gptq: (.*)train_time:\d+ms", r"gptq: \1train_time:600001ms"), "seed 1: 600.00 s"
    ),
    "evaluated too long": (
        edit("train_seed1.log", r"(final_int6_sl.*)eval_time:\d+ms", r"\1eval_time:700000ms"), "seed 1: 700.00 s"
    ),
    "damaged packing": (damaged_packing, "train_gpt.py cannot be read: the packed script is incomplete"),
    "no python": (edit_import("import argparse argparse"), "invalid syntax"),
    "no help": (edit("train_gpt.py", r"^    main\(\)$", '    sys.exit("error: no")'), "exit status 1: error: no"),
    "an import": (edit_import("import argparse\nimport pytest"), "pytest is not in requirements.txt"),
    "a network module": (edit_import("import argparse\nimport urllib.request"), "it imports urllib"),
    "a secret": (
        edit("train_seed1.log", r"^changed from", "HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz0123456789\nchanged from"),
        "key or password",
    ),
}
# fmt: on


def test_each_breakage_is_found(made, tmp_path, monkeypatch):
    good = made()
    starts = check_record.starts
    for name, (damage, part) in BROKEN.items():
        # Starting the script takes seconds, so it is left out where it does not matter.
        skipped = check_record.Verdict("ok", check_record.STARTS, "")
        monkeypatch.setattr(
            check_record,
            "starts",
            starts if name == "no help" else lambda folder, line=skipped: line,
        )
        folder = tmp_path / "broken" / "track_non_record_16mb" / good.name
        shutil.copytree(good, folder)
        damage(folder)
        found = [
            line
            for line in check_record.check(check_record.Folder(folder))
            if line.status == "FAIL"
        ]
        assert any(part in line.detail for line in found), (name, found)
        shutil.rmtree(folder)


def test_exit_status_of_a_broken_folder(made):
    folder = made()
    remove("submission.json")(folder)
    status, lines = checked(folder)
    assert status == 1 and "no submission.json" in lines["FAIL"][0]


CHEATS = {
    "import socket; socket.create_connection(('localhost', 9))": "makes a network call",
    "open('/nowhere/fineweb_train_000000.bin')": "opens training data",
}


@pytest.mark.parametrize("line", CHEATS)
def test_a_rescore_that_cheats_is_caught(made, swept, data, line):
    artifact = swept[0] / "logs" / "t_MATRIX_LR=0.025_seed1.int6.xz"
    folder = made()
    edit("train_gpt.py", r"^( +)return evaluate_only\(", rf"\1{line}\n\1return evaluate_only(")(
        folder
    )
    status, lines = checked(
        folder, "--artifact", artifact, "--data-path", data, "--tokenizer", data / "tokenizer.model"
    )
    assert any(CHEATS[line] in text for text in lines["FAIL"])


def test_make_refuses(made, swept, tmp_path):
    folder = made()
    with pytest.raises(AssertionError, match="exists already"):
        made()
    assert folder.is_dir()
    first, second = logs_of(swept)
    other_rate = logs_of(swept, "0.005")[1]
    altered, other = (
        written(tmp_path / "altered", f"#{n}\n" + path.read_text(), f"{n}.txt")
        for n, path in enumerate((first, second))
    )
    cases = {
        (first, first): "each log needs its own seed",
        (first, other_rate): "MATRIX_LR=0.025 and 0.005",
        (altered,): "the log was altered",
        (first, other): "begin with different scripts",
        (written(tmp_path, PUBLISHED),): "does not begin with the script",
    }
    given = dict.fromkeys(("name", "author", "github_id", "blurb", "summary", "date"), "x")
    for logs, part in cases.items():
        with pytest.raises(UserError, match=part):
            make_record.make(
                [runs.read_run(path) for path in logs], given, "t", tmp_path, None, None
            )


AGREES = "ok    submission.json says what the logs say"
BPB_AS_LOSS = (
    "FAIL  submission.json says what the logs say: val_loss is 1.1217, which is the bits per byte"
)
SEED_42 = {"42": {"val_bpb": 1.05989454, "artifact_bytes": 15897259}}


@pytest.mark.parametrize(
    "log, given, parts",
    [
        (PUBLISHED + LEGAL, {"val_bpb": 1.1192, "bytes_total": 15977386, "blurb": "x"}, [AGREES]),
        (PUBLISHED, {"val_loss": 1.1217, "val_bpb": 1.1217}, [BPB_AS_LOSS]),
        (
            LATER,
            {"val_loss": 2.31944212, "val_bpb": 1.05989454, "seeds": [42], "seed_results": SEED_42},
            ["ok    evaluation takes at most 10 minutes: 508.8 s", AGREES],
        ),
    ],
)
def test_published_folders_get_sane_messages(tmp_path, log, given, parts):
    """Like merged folders: fewer fields, no requirements.txt, another script, logs without
    source."""
    folder = tmp_path / "track_10min_16mb" / "2026-03-23_Someone"
    written(folder, log)
    code = runs.read_run(folder / "train_seed42.log").code_bytes
    script = "import glob\nimport numpy as np\nfrom flash_attn_interface import flash_attn_func\nimport torch\n"
    written(folder, script + "#" * (code - len(script)), "train_gpt.py")
    written(folder, "# A published record\n" + "text " * 60, "README.md")
    about = {"author": "a", "github_id": "a", "name": "n", "date": "2026-03-23", **given}
    written(folder, json.dumps(about), "submission.json")
    status, lines = checked(folder)
    text = "\n".join(line for kind in lines.values() for line in kind)
    for part in parts:
        assert part in text, text
    assert (
        "n/a   train_gpt.py is the script that the logs show: the logs do not begin with the script"
        in text
    )
    assert "flash_attn_interface is not installed here" in text
    assert "ok    train_gpt.py imports what requirements.txt lists" in text
    slow = "FAIL  training takes at most 10 minutes: seed 42: 600.13 s"
    assert (slow in text) == (log is not LATER), "fault B20: the published system overran its clock"
    assert status == (1 if lines["FAIL"] else 0)


def test_our_own_records_hold():
    """Every folder under records/ passes the check."""
    folders = sorted(path.parent for path in (ROOT / "records").glob("*/*/submission.json"))
    assert folders
    for path in folders:
        broken = [
            line for line in check_record.check(check_record.Folder(path)) if line.status == "FAIL"
        ]
        assert not broken, (path, broken)


@pytest.mark.parametrize("mode", ["sgd", "lora"])
def test_the_probes_know_the_scripts_that_they_fit(mode):
    """Ours of today; our records have older ones."""
    for path in sorted((ROOT / "records").glob("*/*/submission.json")):
        folder = check_record.Folder(path.parent)
        folder.runs[0].settings.update(TTT_ENABLED="True", TTT_MODE=mode)
        fits = b"def final_passes" in folder.source
        (probed,) = check_record.probes(folder)
        assert probed.status == ("ok" if fits else "n/a"), (path, probed)
        assert fits or "a later version of the script" in probed.detail
    folder.source = (ROOT / "train_gpt.py").read_bytes()
    (probed,) = check_record.probes(folder)
    assert probed.status == "ok", probed


# Ablations


ABLATE = ROOT / "tools" / "ablate.py"


@pytest.fixture
def ablate_twice(knobs, tmp_path):
    """A function: run ablate.py twice, the second time on finished runs. Returns the two
    results."""
    environment = {name: value for name, value in knobs.items() if name != "RUN_ID"} | {
        "EMA_ENABLED": "0"
    }

    def go(options: list, variants: list):
        command = [ABLATE, *options, "--steps", 6, "--folder", tmp_path / "a", *variants]
        first, second = (run(command, environment, tmp_path) for _ in range(2))
        assert first.returncode == second.returncode == 0, first.stderr
        assert "== " not in second.stdout and first.stdout.endswith(second.stdout)
        return first, second

    return go


def test_ablations_compare_with_the_base(ablate_twice, data, tmp_path):
    """Two seeds of a base and of a variant with equal bytes, also scored on other data; no run is
    repeated."""
    shutil.copytree(data, tmp_path / "other")
    (tmp_path / "other" / "fineweb_val_000001.bin").unlink()
    options = ["--seeds", 1, 2, "--bytes", 20_000, "--also", tmp_path / "other"]
    first, second = ablate_twice(
        options, ["still: MATRIX_LR=0.001 SCALAR_LR=0.001 TIED_EMBED_LR=0.001"]
    )
    assert first.stdout.count("== ") == 8
    found = json.loads(second.stdout.splitlines()[-1])
    for title, suffix in (("score", ""), ("on other", "_also")):
        scores = {
            name: [
                runs.read_run(tmp_path / f"a/logs/{name}_seed{seed}{suffix}.txt").score.bpb
                for seed in (1, 2)
            ]
            for name in ("base", "still")
        }
        base, still = found[title]
        assert (base["variant"], base["difference"], still["variant"], still["n"]) == (
            "base",
            0,
            "still",
            2,
        )
        assert still["difference"] == pytest.approx(
            np.mean(scores["still"]) - np.mean(scores["base"])
        )
        assert still["difference"] > 0.01
        welch = scipy.stats.ttest_ind(
            scores["base"], scores["still"], equal_var=False, alternative="greater"
        )
        assert still["p"] > 0.5
        assert still["p"] == pytest.approx(welch.pvalue)
        assert still["std"] == pytest.approx(np.std(scores["still"], ddof=1))
        assert (still["before"] is None) == (title != "score"), (
            "an artifact that is only scored has no such weights"
        )
    early = {
        name: [
            runs.read_run(tmp_path / f"a/logs/{name}_seed{seed}.txt").before_export.bpb
            for seed in (1, 2)
        ]
        for name in ("base", "still")
    }
    assert found["score"][1]["before"] == pytest.approx(
        np.mean(early["still"]) - np.mean(early["base"])
    )
    assert found["score"][1]["before"] != found["score"][1]["difference"]
    assert all(19_000 < line["bytes"] <= 20_000 for line in found["score"])
    assert found["score"][0] != found["on other"][0]


def small_arguments(**changes):
    """The options of ablate.py for the record in small, and no others."""
    chosen = dict(
        steps=0,
        seconds=0,
        tokens_per_weight=50,
        width=16,
        bytes=0,
        seeds=[1],
        jobs=2,
        also=None,
    )
    return argparse.Namespace(**chosen | changes)


@pytest.mark.parametrize("width", [32, 48, 64, 96])
def test_the_record_in_small_keeps_its_proportions(width, monkeypatch):
    """Only size and batch differ from the record; weight decay, average and warm-ups act over the
    same steps."""
    for name in runs.KNOBS:
        monkeypatch.delenv(name, raising=False)
    environ = ablate.environment(
        small_arguments(tokens_per_weight=200, width=width), ablate.Variant({})
    )
    hp = train_gpt.Hyperparameters.from_env({"RUN_ID": "t", **environ})
    record = train_gpt.Hyperparameters()
    parameters = sum(p.numel() for p in train_gpt.GPT(hp, None, torch.float32).parameters())
    assert hp.iterations == 7000
    assert hp.iterations * hp.train_batch_tokens / parameters == pytest.approx(200, rel=0.02)
    assert hp.target_bytes - (ROOT / "train_gpt.py").stat().st_size == ablate.record_bytes(hp)
    for ratio in (
        lambda hp: hp.train_seq_len / hp.model_dim,
        lambda hp: hp.eval_seq_len / hp.model_dim,
        lambda hp: hp.num_heads / hp.num_kv_heads,
        lambda hp: hp.bigram_dim / hp.model_dim,
        lambda hp: hp.bigram_vocab_size / hp.model_dim,
    ):
        assert ratio(hp) == ratio(record)
    assert record.rope_dims >= hp.rope_dims >= 8, (
        "with one pair all frequencies are 1, and bits per byte rise by 0.07"
    )
    size = {
        "num_heads",
        "num_kv_heads",
        "model_dim",
        "rope_dims",
        "bigram_vocab_size",
        "bigram_dim",
    }
    size |= {"train_seq_len", "train_batch_tokens", "run_id"}
    for name in train_gpt.knobs_with("training", "model"):
        assert name in size or getattr(hp, name) == getattr(record, name), name


def test_an_artifact_at_the_records_steps_has_its_size():
    """The rule that gives the record in small its bytes gives the record those of the challenge."""
    assert ablate.record_bytes(train_gpt.Hyperparameters()) == pytest.approx(
        train_gpt.SUBMISSION_CAP, rel=0.02
    )


def test_priced_variants_get_fewer_steps(knobs, tmp_path, monkeypatch, capsys):
    """Two runs of the record in small side by side; the variant costs twice as much, so it does
    half of the steps."""
    for name in ("DATA_PATH", "TOKENIZER_PATH", "VOCAB_SIZE", "DEVICE", "COMPILE"):
        monkeypatch.setenv(name, knobs[name])
    monkeypatch.setenv("SHORT_SEQ_PARTS", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ablate, "RECORD_STEPS", 6)
    variants = {"base": ablate.Variant({})} | dict([ablate.variant("dear: QK_GAIN_INIT=4 @2.0")])
    arguments = small_arguments(tokens_per_weight=0.2)
    ablate.comparison(variants, arguments)
    first = capsys.readouterr().out
    ablate.comparison(variants, arguments)
    again = capsys.readouterr().out
    assert first.count("== ") == 2 and "== " not in again
    report = json.loads(again.splitlines()[-1])["score"]
    assert [line["steps"] for line in report] == [6, 3]
    assert re.search(
        r"^base: [\d,]+ tokens/s, [\d.]+ GFLOP/s, \d+% of the [\d.]+ GFLOP/s of its matrix",
        again,
        re.M,
    )
    assert not list(Path("work").iterdir()) and Path("logs/dear_seed1.int6.xz").is_file()


@pytest.mark.parametrize("parts", [1, 4])
def test_the_speed_of_a_run_counts_the_operations_of_its_lengths(parts):
    settings = {
        "SHORT_SEQ_PARTS": str(parts),
        "TRAIN_SEQ_LEN": "256",
        "TRAIN_BATCH_TOKENS": "1024",
        "MODEL_DIM": "128",
    }
    hp = train_gpt.Hyperparameters.from_env(settings)
    line = ablate.speed(SimpleNamespace(settings=settings, step_ms=2.0))
    rate, speed = (
        float(word.replace(",", ""))
        for word in re.match(r"(\S+) tokens/s, (\S+) GFLOP/s", line).groups()
    )
    whole, short = (flops.flops_per_token(hp, length) for length in (256, 256 // parts))
    assert rate == 512_000
    assert 1e9 * speed == pytest.approx(rate * (0.6 * whole + 0.4 * short), rel=1e-2)


def test_an_interrupted_ablation_keeps_its_folder(tmp_path, monkeypatch):
    """The next call finds checkpoints where the interrupted run left them. Other runs of the pool
    do not start."""
    monkeypatch.chdir(tmp_path)
    started = []

    def execute(command, environ, quiet, folder):
        started.append(environ["RUN_ID"])
        # The pool's thread may take one more run before it learns of the failure
        time.sleep(0.2 * (len(started) > 1))
        Path(folder, "checkpoints").mkdir()
        return "error: stopped by SIGTERM"

    monkeypatch.setattr(sweep, "execute", execute)
    variants = {
        "base": ablate.Variant({}),
        "x": ablate.Variant({"SEED": "2"}),
        "y": ablate.Variant({"SEED": "3"}),
    }
    with pytest.raises(UserError, match="base_seed1 failed: error: stopped by SIGTERM"):
        ablate.measure(variants, small_arguments(steps=3, tokens_per_weight=0, jobs=1))
    assert started[0] == "base_seed1" and "y_seed1" not in started
    assert Path("work/base_seed1/checkpoints").is_dir()


def test_side_by_side_runs_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(ablate.os, "cpu_count", lambda: 8)
    for jobs, threads in ((1, None), (2, "4"), (16, "1")):
        arguments = small_arguments(steps=3, tokens_per_weight=0, jobs=jobs)
        assert ablate.environment(arguments).get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(
    "options, part",
    [
        (["x: MATRIX_LRR=1"], "is not a variant: write"),
        ([": SEED=1"], "is not a variant: write"),
        (["x: MATRIX_LR="], "is not a variant: write"),
        (["a: SEED=1", "a: SEED=2"], "two variants have one name"),
        (["base: SEED=1"], 'called "base"'),
        (["--jobs", "0", "x: SEED=1"], "--jobs: 0 is not a whole number above 0"),
        (["x: SEED=1 @fast"], "has the price 'fast'"),
        (["x: SEED=1 @-1"], "has the price '-1'"),
        (["--seeds", "1", "2", "x: SEED=1"], "write the variants before --seeds"),
    ],
)
def test_ablations_name_a_mistake(tmp_path, options, part):
    result = run([ABLATE, "--steps", 6, *options], {}, tmp_path)
    # Argparse exits with 2
    assert result.returncode == (2 if {"--seeds", "--jobs"} & set(options) else 1)
    assert part in result.stderr and "Traceback" not in result.stderr


# Plots


def test_runs_of_one_configuration_are_one_curve(swept):
    members = [runs.read_run(path) for rate in ("0.005", "0.025") for path in logs_of(swept, rate)]
    found = plot.groups(members)
    assert {name: len(group) for name, group in found.items()} == {
        "t_MATRIX_LR=0.005 (2 seeds)": 2,
        "t_MATRIX_LR=0.025 (2 seeds)": 2,
    }
    x, y = plot.together(
        [
            (np.array([0.0, 10.0]), np.array([0.0, 1.0])),
            (np.array([5.0, 20.0]), np.array([2.0, 5.0])),
        ]
    )
    assert x.tolist() == [5.0, 10.0] and y.tolist() == [[0.5, 1.0], [2.0, 3.0]]
    steps, ms = plot.step_times(members[0].train)
    a, b = members[0].train[-2:]
    assert steps[-1] == 12 and ms[-1] == pytest.approx(1000 * (b.seconds - a.seconds) / 2)


def test_plots_are_drawn(swept, tmp_path):
    published = written(tmp_path, PUBLISHED)
    artifact = swept[0] / "logs" / "t_MATRIX_LR=0.025_seed1.int6.xz"
    for name, options in (
        ("runs", [swept[0] / "logs" / "*seed?.txt", published]),
        ("bytes", ["--artifact", artifact]),
    ):
        result = run(
            [ROOT / "tools" / "plot.py", *options, "-o", tmp_path / f"{name}.png"], {}, tmp_path
        )
        assert result.returncode == 0, result.stderr
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert sum(plot.byte_shares(str(artifact)).values()) == artifact.stat().st_size


@pytest.mark.parametrize("validations", [2, 3, 21])
def test_all_drawn_points_are_in_range(validations, tmp_path, monkeypatch):
    """A short curve is drawn whole; the first 5 % of a long one, which would flatten the rest, are
    not drawn."""
    steps = range(101)
    lines = [
        f"step:{step}/100 train_loss:{7 - step / 100} train_time:{step}00ms" for step in steps[1:]
    ]
    lines += [
        f"step:{step}/100 val_loss:2 val_bpb:{4 - step / 100} train_time:{step}00ms"
        for step in steps[:: 100 // (validations - 1)]
    ]
    figures = []
    monkeypatch.setattr(plot.plt.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    log = written(
        tmp_path, "\n".join(sorted(lines, key=lambda line: int(line[5 : line.index("/")])))
    )
    plot.draw_runs([runs.read_run(log)], tmp_path / "x.png")
    for axis, points in zip(figures[0].axes, (96, 96, *[min(validations, 20)] * 2), strict=False):
        (line,) = axis.lines
        x, y = line.get_data()
        assert len(x) == points
        for values, (low, high) in ((x, axis.get_xlim()), (y, axis.get_ylim())):
            assert low <= values.min() and values.max() <= high


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git repository")
def test_plots_at_the_top_are_ignored_by_git():
    """And those of the documents are not."""
    for name, status in (("runs.png", 0), ("bench/scaling.png", 1)):
        assert (
            subprocess.run(
                ["git", "check-ignore", "--quiet", "--no-index", name], cwd=ROOT
            ).returncode
            == status
        )


def test_scaling_is_drawn_for_different_ranks(swept, tmp_path):
    path = logs_of(swept)[0]
    two = written(
        tmp_path, path.read_text().replace("runtime: ranks:1", "runtime: ranks:2"), "two.txt"
    )
    plot.draw_scaling([runs.read_run(path), runs.read_run(two)], tmp_path / "s.png")
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    for members, part in (
        ([runs.read_run(path)], "with different numbers of ranks"),
        ([runs.read_run(written(tmp_path, LATER))], "lacks ranks"),
    ):
        with pytest.raises(UserError, match=part):
            plot.draw_scaling(members, tmp_path / "s.png")


def test_plot_errors(tmp_path):
    for options, part in (
        (["x.txt"], "cannot read x.txt"),
        (["--artifact", "x.xz"], "x.xz"),
        ([], "give either logs or --artifact"),
        (["x*.txt"], "there are no logs in x*.txt"),
        (["x.txt", "-o", "x.xyz"], "x.xyz has no known format: end it in one of ."),
        (["x.txt", "-o", "x"], "x has no known format: end it in one of ."),
        (["x.txt", "-o", "nowhere/x.png"], "nowhere/x.png is in no folder: make nowhere first"),
    ):
        result = run([ROOT / "tools" / "plot.py", *options], {}, tmp_path)
        assert result.returncode and part in result.stderr and "Traceback" not in result.stderr


# Packages that are missing


PROGRAMS = [
    path
    for folder in ("bench", "data", "tools")
    for path in sorted((ROOT / folder).glob("*.py"))
    if "__main__" in path.read_text() and path.name != "launch.py"  # which needs none
]


@pytest.mark.parametrize("path", [ROOT / "train_gpt.py", *PROGRAMS], ids=lambda path: path.stem)
def test_a_python_without_packages_is_one_sentence(path, tmp_path):
    """As after ./run.sh without `source .venv/bin/activate`. -S hides the packages."""
    result = subprocess.run(
        [sys.executable, "-SE", path, "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    expected = "error: No module named 'numpy': run `source .venv/bin/activate`, or `pip install -r requirements.txt`\n"
    assert result.stderr == expected and result.returncode == 1


@pytest.mark.parametrize("program, package", [("compare", "scipy"), ("plot", "matplotlib")])
def test_a_missing_package_of_a_tool_is_one_sentence(program, package, tmp_path):
    (tmp_path / f"{package}.py").write_text("raise ModuleNotFoundError('No module named it')")
    result = run(
        [ROOT / "tools" / f"{program}.py", "--help"], {"PYTHONPATH": str(tmp_path)}, tmp_path
    )
    install = "`pip install -r requirements-dev.txt`"
    outside = sys.prefix == sys.base_prefix  # of a virtual environment
    advice = f"run {'`source .venv/bin/activate`, or ' * outside}{install}"
    assert result.stderr == f"error: No module named it: {advice}\n" and result.returncode == 1


def test_packages_that_a_script_imports_at_its_top_must_be_listed(tmp_path):
    """Also inside a `with` that explains a failed import, as train_gpt.py has it."""
    (tmp_path / "requirements.txt").write_text("torch==2.13.0\n")
    for code, status in (
        ("import torch", "ok"),
        ("with a():\n    import torch\n    import numpy", "FAIL"),
    ):
        found = next(iter(check_record.packages(SimpleNamespace(path=tmp_path), ast.parse(code))))
        assert found.status == status, found

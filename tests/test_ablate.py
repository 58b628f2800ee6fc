"""tools/ablate.py: variants beside a base."""

import argparse
import dataclasses
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

import ablate
import shards
import sweep
import train_gpt
from conftest import ROOT, run, start, user_error
from lib import runs
from sample_logs import logs_of

ABLATE = ROOT / "tools" / "ablate.py"


def test_ablations_compare_with_the_base(sweep_knobs, tmp_path):
    """Two seeds of a base and of a variant with equal bytes, whose step costs twice as much, so that
    it does half of the steps; no run is repeated."""
    code = (ROOT / "train_gpt.py").stat().st_size
    environment = {**sweep_knobs, "EMA_ENABLED": "0", "TARGET_BYTES": str(code + 12_700)}
    still = "still: MATRIX_LR=0.001 SCALAR_LR=0.001 TIED_EMBED_LR=0.001 @2.0"
    command = [ABLATE, "--seeds", 1, 2, "--jobs", 2, "--steps", 6, "--folder", "a", still]
    first, second = (run(command, environment, tmp_path).stdout for _ in range(2))
    assert first.count("== ") == 4 and "== " not in second and first.endswith(second)
    log = tmp_path / "a" / "work" / "base_seed1" / "logs" / "base_seed1.txt"
    assert f"== base_seed1: progress in {log}\n" in first, "nothing is compiled"
    assert not list((tmp_path / "a" / "work").iterdir())
    assert (tmp_path / "a" / "logs" / "still_seed2.npz").is_file()
    base, still = json.loads((tmp_path / "a" / "ablation.json").read_text())["score"]
    assert json.loads(second.splitlines()[-1])["score"] == [base, still]
    logs = tmp_path / "a" / "logs"
    found = [runs.read_run(logs / f"{x}_seed{n}.txt") for x in ("base", "still") for n in (1, 2)]
    scores = np.reshape([one.score.bpb for one in found], (2, 2))
    early = np.reshape([one.before_export.bpb for one in found], (2, 2))
    assert (base["variant"], base["difference"], base["steps"]) == ("base", 0, 6)
    assert (still["variant"], still["n"], still["steps"]) == ("still", 2, 3)
    welch = scipy.stats.ttest_ind(*scores, equal_var=False, alternative="greater")
    expected = {"difference": np.diff(scores.mean(1))[0], "before": np.diff(early.mean(1))[0]}
    expected |= {"std": scores[1].std(ddof=1), "p": welch.pvalue}
    assert {name: still[name] for name in expected} == pytest.approx(expected)
    assert still["difference"] > 0.01 and still["p"] > 0.5
    assert still["before"] != still["difference"]
    # The chance of p below 0.05 at that gain
    limit, effect = scipy.stats.t.ppf(0.95, welch.df), still["detectable"] / welch._standard_error
    assert scipy.stats.nct.sf(limit, welch.df, effect) == pytest.approx(0.8, abs=0.05)
    assert f"with 2 seeds only a gain of {still['detectable']:.4f} or more" in second
    assert f"still: no gain was seen (Welch's p = {welch.pvalue:.4g}; a" in second
    assert all(12_550 < line["bytes"] <= 12_700 for line in (base, still)), (base, still)


@pytest.fixture
def compared(tmp_path, monkeypatch, capsys):
    """A function that compares runs by variant: (what is printed, rows)."""
    monkeypatch.chdir(tmp_path)

    def compare(members):
        monkeypatch.setattr(ablate, "measure", lambda *_: members)
        ablate.comparison({}, arguments())
        printed = capsys.readouterr().out
        return printed, json.loads(printed.splitlines()[-1])["score"]

    return compare


def test_the_p_of_several_variants_are_corrected(swept, compared):
    """By Holm's method. A variant alone keeps its p."""
    assert ablate.holm([0.01, None, 0.04, 0.03, 0.9]) == [0.04, None, 0.09, 0.09, 0.9]
    assert ablate.holm([0.3]) == [0.3] and ablate.holm([0.6, 0.7]) == [1.0, 1.0]
    slow, fast = ([runs.read_run(log) for log in logs_of(swept, r)] for r in ("0.005", "0.025"))
    printed, (base, alone) = compared({"base": slow, "x": fast})
    assert "(Holm)" not in printed and base["p"] == 0.5
    printed, (_, one, *_) = compared({"base": slow, "x": fast, "y": fast, "z": fast})
    assert "corrected for 3 variants (Holm)" in printed
    for name in ("p", "p_paired"):
        assert one[name] == pytest.approx(min(1, 3 * alone[name])) != alone[name]
    assert one["detectable"] > alone["detectable"]
    ratios = [b.step_ms / a.step_ms for a, b in zip(slow, fast, strict=True)]
    assert alone["time_ratio"] == pytest.approx(np.median(ratios))


@pytest.mark.parametrize(
    "factors, why",
    [
        ([1, 1.05], ""),
        ([0.42, 1.7], "the seeds have 0.42 to 1.70: repeat it on an idle machine"),
        ([1], "one seed does not show how much the machine's speed varied"),
    ],
)
def test_a_ratio_of_times_has_a_mark_if_it_is_the_machines(factors, why, swept, compared):
    base = [runs.read_run(log) for log in logs_of(swept)][: len(factors)]
    times = [{"step_seconds": x * b.step_seconds} for x, b in zip(factors, base, strict=True)]
    slower = [dataclasses.replace(b, **time) for b, time in zip(base, times, strict=True)]
    printed, (_, row) = compared({"base": base, "x": slower})
    assert (f"{row['time_ratio']:.3f}?" in printed) == bool(why) == printed.count("?")
    assert printed.count("time_ratio is uncertain") == bool(why)
    assert not why or f"\nx: time_ratio is uncertain, as {why}\n" in printed


def arguments(**changes):
    """The options of ablate.py."""
    chosen = dict(steps=3, seconds=0, tokens_per_weight=0, seeds=[1], jobs=1)
    return argparse.Namespace(**chosen | changes)


@pytest.mark.parametrize("width", [32, 48, 96])
def test_the_record_in_small_keeps_its_proportions(width, monkeypatch):
    """Only size and batch differ from the record; decay, average and warm-ups act as there."""
    for name in runs.KNOBS:
        monkeypatch.delenv(name, raising=False)
    environ = ablate.environment(arguments(tokens_per_weight=200, width=width))
    hp = train_gpt.Hyperparameters.from_env({"RUN_ID": "t", **environ})
    record = train_gpt.Hyperparameters()
    weights = sum(tensor.numel() for tensor in train_gpt.meta_parameters(hp).values())
    assert hp.iterations == 7000
    assert hp.iterations * hp.train_batch_tokens / weights == pytest.approx(200, rel=0.02)
    assert hp.target_bytes - (ROOT / "train_gpt.py").stat().st_size == ablate.record_bytes(hp)
    # The rule gives the record the bytes of the challenge
    assert ablate.record_bytes(record) == pytest.approx(train_gpt.SUBMISSION_CAP, rel=0.02)
    assert hp.num_heads / hp.num_kv_heads == record.num_heads / record.num_kv_heads
    for name in ("train_seq_len", "eval_seq_len", "bigram_dim", "bigram_vocab_size"):
        assert getattr(hp, name) / hp.model_dim == getattr(record, name) / record.model_dim
    # With one pair all frequencies are 1, and bits per byte rise by 0.07
    assert record.rope_dims >= hp.rope_dims >= 8
    size = {"num_heads", "num_kv_heads", "model_dim", "rope_dims", "bigram_vocab_size"}
    size |= {"bigram_dim", "train_seq_len", "train_batch_tokens", "run_id"}
    for name in train_gpt.knobs_with("training", "model"):
        assert name in size or getattr(hp, name) == getattr(record, name), name


def test_the_stride_follows_a_variants_window(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    for text, stride in (("EVAL_SEQ_LEN=64", "64"), ("EVAL_SEQ_LEN=64 EVAL_STRIDE=32", "32")):
        _, one = ablate.variant(f"x: {text}")
        assert ablate.environment(arguments(), one)["EVAL_STRIDE"] == stride


@pytest.mark.parametrize(
    "text, why",
    [
        ("x: EVAL_SEQ_LEN=far", "EVAL_SEQ_LEN='far' is not a whole number"),
        ("x/y: QK_GAIN_INIT=4", "RUN_ID=x/y_seed1 must not have a slash"),
    ],
)
def test_what_no_run_can_have_is_refused_before_the_first_one(text, why, monkeypatch):
    monkeypatch.setattr(ablate, "finish", None)
    with user_error(why):
        ablate.measure({"base": ablate.Variant({})} | dict([ablate.variant(text)]), arguments())


def test_the_demonstrations_data_are_made_unless_a_folder_is_given(tmp_path, monkeypatch):
    def build(folder):
        entry = {"path": "t.model", "sha256": "0", "vocab_size": 400}
        shards.write_manifest(folder, files={}, tokenizer=entry)
        monkeypatch.setattr(ablate.demo_corpus, "build", None)

    (tmp_path / "demo_data").mkdir()
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(ablate, "ROOT", tmp_path)
    monkeypatch.setattr(ablate.demo_corpus, "build", build)
    for _ in range(2):  # the second time, the folder is given
        ablate.choose_data()
    folder = str(tmp_path / "demo_data")
    assert list(os.environ.values()) == [folder, f"{folder}/t.model", "400"]


def test_an_interrupted_ablation_keeps_its_folder(tmp_path, monkeypatch):
    """The next call finds its checkpoints. Other runs of the pool do not start."""
    monkeypatch.chdir(tmp_path)
    started = []

    def execute(command, environ, quiet, folder):
        started.append(environ["RUN_ID"])
        assert environ["RESUME"] == "auto"  # else an artifact that was not scored would protect it
        # The pool's thread may take one more run before it learns of the failure
        time.sleep(0.2 * (len(started) > 1))
        Path(folder, "checkpoints").mkdir()
        return "error: stopped by SIGTERM"

    monkeypatch.setattr(sweep, "execute", execute)
    variants = {name: ablate.Variant({"SEED": n}) for n, name in enumerate(("base", "x", "y"))}
    with user_error("base_seed1 failed: error: stopped by SIGTERM"):
        ablate.measure(variants, arguments())
    assert started[0] == "base_seed1" and "y_seed1" not in started
    assert Path("work/base_seed1/checkpoints").is_dir()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_trainings(number, sweep_knobs, tmp_path, nothing_is_left_running):
    """A terminal sends Ctrl-C to all of them. They say nothing of their own."""
    command = [ABLATE, "--steps", 1_000_000, "--folder", "a", "x: SEED=2"]
    process = start(command, sweep_knobs, tmp_path, fresh=True, start_new_session=True)
    log = tmp_path / "a" / "work" / "base_seed1" / "logs" / "base_seed1.txt"
    while not (log.exists() and "step:1/" in log.read_text()):
        assert process.poll() is None
        time.sleep(0.2)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    _, said = process.communicate(timeout=60)
    assert said == "error: interrupted; the same command continues\n"
    assert process.returncode == 130

"""tools/ablate.py: variants beside a base."""

import argparse
import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

import ablate
import shards
import sweep
import train_gpt
import warm_python
from conftest import ROOT, run, start, user_error
from lib import runs
from sample_logs import logs_of

ABLATE = ROOT / "tools" / "ablate.py"


def test_ablations_compare_with_the_base(sweep_knobs, tmp_path):
    """Two seeds of a base and of a variant with equal bytes; no run is repeated."""
    code = (ROOT / "train_gpt.py").stat().st_size
    environment = {**sweep_knobs, "EMA_ENABLED": "0", "TARGET_BYTES": str(code + 12_400)}
    still = "still: MATRIX_LR=0.001 SCALAR_LR=0.001 TIED_EMBED_LR=0.001"
    command = [ABLATE, "--seeds", 1, 2, "--steps", 6, "--folder", tmp_path / "a", still]
    first, second = (run(command, environment, tmp_path) for _ in range(2))
    assert first.stdout.count("== ") == 4 and "== " not in second.stdout
    assert first.stdout.endswith(second.stdout)
    log = tmp_path / "a" / "work" / "base_seed1" / "logs" / "base_seed1.txt"
    assert f"== base_seed1: progress in {log}\n" in first.stdout, "nothing is compiled"
    base, still = json.loads(second.stdout.splitlines()[-1])["score"]
    scores, early = ([], []), ([], [])
    for side, name in enumerate(("base", "still")):
        for seed in (1, 2):
            found = runs.read_run(tmp_path / f"a/logs/{name}_seed{seed}.txt")
            scores[side].append(found.score.bpb)
            early[side].append(found.before_export.bpb)
    named = base["variant"], base["difference"], still["variant"], still["n"]
    assert named == ("base", 0, "still", 2)
    assert still["difference"] == pytest.approx(np.mean(scores[1]) - np.mean(scores[0]))
    welch = scipy.stats.ttest_ind(*scores, equal_var=False, alternative="greater")
    assert still["difference"] > 0.01 and still["p"] > 0.5
    # The chance of p below 0.05 at that gain
    limit, effect = scipy.stats.t.ppf(0.95, welch.df), still["detectable"] / welch._standard_error
    assert scipy.stats.nct.sf(limit, welch.df, effect) == pytest.approx(0.8, abs=0.05)
    assert f"with 2 seeds only a gain of {still['detectable']:.4f} or more" in second.stdout
    assert f"still: no gain was seen (Welch's p = {welch.pvalue:.4g}; a" in second.stdout
    assert json.loads((tmp_path / "a" / "ablation.json").read_text())["score"] == [base, still]
    assert still["p"] == pytest.approx(welch.pvalue)
    assert still["std"] == pytest.approx(np.std(scores[1], ddof=1))
    assert still["before"] == pytest.approx(np.mean(early[1]) - np.mean(early[0]))
    assert still["before"] != still["difference"]
    assert all(12_250 < line["bytes"] <= 12_400 for line in (base, still)), (base, still)


def test_the_p_of_several_variants_are_corrected(swept, tmp_path, monkeypatch, capsys):
    """By Holm's method. A variant alone keeps its p."""
    assert ablate.holm([0.01, None, 0.04, 0.03, 0.9]) == [0.04, None, 0.09, 0.09, 0.9]
    assert ablate.holm([0.3]) == [0.3] and ablate.holm([0.6, 0.7]) == [1.0, 1.0]
    monkeypatch.chdir(tmp_path)
    slow, fast = ([runs.read_run(log) for log in logs_of(swept, r)] for r in ("0.005", "0.025"))
    found = {}
    for names in (["x"], ["x", "y", "z"]):
        members = {"base": slow} | dict.fromkeys(names, fast)
        monkeypatch.setattr(ablate, "measure", lambda *_, members=members: members)
        ablate.comparison({}, small_arguments(tokens_per_weight=0))
        printed = capsys.readouterr().out
        base, found[len(names)], *_ = json.loads(printed.splitlines()[-1])["score"]
        assert ("corrected for 3 variants (Holm)" in printed) == (len(names) == 3)
        assert base["p"] == 0.5
    for name in ("p", "p_paired"):
        assert found[3][name] == pytest.approx(min(1, 3 * found[1][name])) != found[1][name]
    assert found[3]["detectable"] > found[1]["detectable"]
    ratios = [b.step_ms / a.step_ms for a, b in zip(slow, fast, strict=True)]
    assert found[1]["time_ratio"] == pytest.approx(np.median(ratios))


@pytest.mark.parametrize(
    "factors, why",
    [
        ([1, 1.05], ""),
        ([0.42, 1.7], "the seeds have 0.42 to 1.70: repeat it on an idle machine"),
        ([1], "one seed does not show how much"),
    ],
)
def test_a_ratio_of_times_has_a_mark_if_it_is_the_machines(
    factors, why, swept, tmp_path, monkeypatch, capsys
):
    base = [runs.read_run(log) for log in logs_of(swept)][: len(factors)]
    slower = [
        dataclasses.replace(one, step_seconds=factor * one.step_seconds)
        for one, factor in zip(base, factors, strict=True)
    ]
    rows = [ablate.row(name, side, base, 1) for name, side in (("base", base), ("x", slower))]
    found = ablate.unsure(rows[1])
    assert bool(found) == bool(why) and why in found and not ablate.unsure(rows[0])
    _, plain, marked = ablate.table(rows).splitlines()
    assert "?" not in plain and (f"{rows[1]['time_ratio']:.3f}?" in marked) == bool(why)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ablate, "measure", lambda *_: {"base": base, "x": slower})
    ablate.comparison({}, small_arguments(tokens_per_weight=0))
    line = f"\nx: time_ratio is uncertain, as {found}\n" if why else "is uncertain"
    assert (line in capsys.readouterr().out) == bool(why)


def small_arguments(**changes):
    """The options of ablate.py for the record in small, and no others."""
    chosen = dict(steps=0, seconds=0, tokens_per_weight=50, width=16, seeds=[1], jobs=2)
    return argparse.Namespace(**chosen | changes)


@pytest.mark.parametrize("width", [32, 48, 96])
def test_the_record_in_small_keeps_its_proportions(width, monkeypatch):
    """Only size and batch differ from the record; decay, average and warm-ups act as there."""
    for name in runs.KNOBS:
        monkeypatch.delenv(name, raising=False)
    arguments = small_arguments(tokens_per_weight=200, width=width)
    environ = ablate.environment(arguments, ablate.Variant({}))
    hp = train_gpt.Hyperparameters.from_env({"RUN_ID": "t", **environ})
    record = train_gpt.Hyperparameters()
    parameters = sum(p.numel() for p in train_gpt.GPT(hp, None, torch.float32).parameters())
    assert hp.iterations == 7000
    assert hp.iterations * hp.train_batch_tokens / parameters == pytest.approx(200, rel=0.02)
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
    arguments = small_arguments(tokens_per_weight=0)
    for text, stride in (("EVAL_SEQ_LEN=64", "64"), ("EVAL_SEQ_LEN=64 EVAL_STRIDE=32", "32")):
        _, one = ablate.variant(f"x: {text}")
        assert ablate.environment(arguments, one)["EVAL_STRIDE"] == stride
    with user_error("EVAL_SEQ_LEN='far' is not a whole number"):
        ablate.measure({"x": ablate.Variant({"EVAL_SEQ_LEN": "far"})}, arguments)


def test_a_name_that_no_run_can_have_is_refused_before_the_first_one(monkeypatch):
    monkeypatch.setattr(ablate, "finish", None)
    variants = {"base": ablate.Variant({}), "x/y": ablate.Variant({"QK_GAIN_INIT": "4"})}
    with user_error("RUN_ID=x/y_seed1 must not have a slash"):
        ablate.measure(variants, small_arguments(steps=3, tokens_per_weight=0))


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


def test_priced_variants_get_fewer_steps(sweep_knobs, tmp_path, monkeypatch, capsys):
    """The variant costs twice as much, so it does half of the steps."""
    for name in ("DATA_PATH", "TOKENIZER_PATH", "VOCAB_SIZE", "DEVICE", "COMPILE"):
        monkeypatch.setenv(name, sweep_knobs[name])
    monkeypatch.setenv("SHORT_SEQ_PARTS", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", warm_python.python())
    monkeypatch.setattr(ablate, "RECORD_STEPS", 6)
    variants = {"base": ablate.Variant({})} | dict([ablate.variant("dear: QK_GAIN_INIT=4 @2.0")])
    arguments = small_arguments(tokens_per_weight=0.2)
    ablate.comparison(variants, arguments)
    first = capsys.readouterr().out
    ablate.comparison(variants, arguments)
    again = capsys.readouterr().out
    assert first.count("== ") == 2 and "== " not in again
    assert [line["steps"] for line in json.loads(again.splitlines()[-1])["score"]] == [6, 3]
    assert not list(Path("work").iterdir()) and Path("logs/dear_seed1.npz").is_file()


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
        ablate.measure(variants, small_arguments(steps=3, tokens_per_weight=0, jobs=1))
    assert started[0] == "base_seed1" and "y_seed1" not in started
    assert Path("work/base_seed1/checkpoints").is_dir()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_trainings(number, sweep_knobs, tmp_path, nothing_is_left_running):
    """A terminal sends Ctrl-C to all of them. They say nothing of their own."""
    command = [ABLATE, "--steps", 1_000_000, "--folder", tmp_path / "a", "x: SEED=2"]
    process = start(command, sweep_knobs, tmp_path, fresh=True, start_new_session=True)
    log = tmp_path / "a" / "work" / "base_seed1" / "logs" / "base_seed1.txt"
    while not (log.exists() and "step:1/" in log.read_text()):
        assert process.poll() is None
        time.sleep(0.2)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    _, said = process.communicate(timeout=60)
    assert said == "error: interrupted; the same command continues\n"
    assert process.returncode == 130

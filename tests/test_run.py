"""The script as a user starts it: the run, its log, its artifact, and errors as one sentence."""

import collections
import contextlib
import copy
import fcntl
import functools
import hashlib
import io
import itertools
import json
import math
import operator
import os
import re
import runpy
import shlex
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import train_gpt
from conftest import PARTS, exported, made, run, script_after, sentence, user_error
from lib import runs

SCRIPT = Path(train_gpt.__file__)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, env):
    """A finished tiny run: its folder, artifact, output, log and events."""
    folder = tmp_path_factory.mktemp("run")
    knobs = env(RUN_ID="tiny", TRAIN_LOG_EVERY=1, LATE_QAT=1, QAT_THRESHOLD=0.6, MUDD=1)
    out = run([SCRIPT], knobs, folder).stdout
    log, events = ((folder / "logs" / f"tiny.{kind}").read_text() for kind in ("txt", "jsonl"))
    artifact = folder / "final_model.npz"
    return SimpleNamespace(folder=folder, artifact=artifact, out=out, log=log, events=events)


def evaluating(env, path, **changes) -> dict[str, str]:
    """The environment that scores the artifact at `path`, which has the model's shape."""
    of_model = train_gpt.knobs_with("model")
    knobs = env(EVAL_ONLY=path, **changes)
    return {name: value for name, value in knobs.items() if name.lower() not in of_model}


def events_of(text: str) -> dict[str, dict]:
    """The last event of each kind in a log."""
    return {event["event"]: event for event in map(json.loads, text.splitlines())}


def test_log_lines_are_those_that_tools_read(finished):
    out, log = finished.out, finished.log
    for result in (r"train_loss:\d+\.\d{4}", r"val_loss:\d+\.\d{4} val_bpb:\d+\.\d{4}"):
        line = rf"(?m)^step:12/12 {result} train_time:\d+ms step_avg:\d+\.\d\dms \w+:\d+"
        assert re.search(line, out) and re.search(line, log)
    assert log.startswith(SCRIPT.read_text()), "the log begins with the source"
    losses = [float(x) for x in re.findall(r"train_loss:(\S+)", out)]
    assert len(losses) == 12 and losses[0] == pytest.approx(math.log(400), abs=0.3)
    assert losses[-1] < losses[0] - 0.5, "it learns"
    assert "\n* NUM_LAYERS=3\n" in log and "\n  EMA_DECAY=0.997\n" in log
    assert re.search(r"\nchanged from the defaults: DATA_PATH=.* NUM_LAYERS=3 ", log)
    assert f"torch {version('torch')}" in log and f"cuda {torch.version.cuda}" in log
    # Fault B1b: #399 announces late QAT although nothing changes.
    switched = re.findall(r"lr_scale:(\S+) momentum:\S+ qat:(\d)", log)
    assert [flag for _, flag in switched] == [str(int(float(scale) < 0.6)) for scale, _ in switched]
    assert ("0.2500", "1") in switched


def test_the_average_is_what_is_scored_and_exported(finished):
    """The default decay of 0.997 keeps the initial weights for hundreds of steps."""
    note = "note: initial weights still make up 96% of the average: lower EMA_DECAY"
    assert f"\nexporting EMA of 12 samples\n{note}\n" in finished.log
    events = events_of(finished.events)
    names = ("val", "final_average_exact", "final_int6_roundtrip_exact")
    last, averaged, exported = (events[name]["val_loss"] for name in names)
    assert averaged > last + 0.3 and exported == pytest.approx(averaged, abs=0.02)


def test_events_are_json_with_the_scores_of_the_log(finished):
    """Fault D2: the loss is in nats and bpb in bits per byte, everywhere."""
    kinds = [json.loads(line)["event"] for line in finished.events.splitlines()]
    assert " ".join(dict.fromkeys(kinds)) == (
        "start graph warmup train val calibration final_average_exact rounding artifact "
        "final_int6_roundtrip_exact final_int6_sliding_window_exact evaluation finished"
    )
    assert kinds.count("train") == 12
    tokens, nbytes = map(int, re.search(r"val_tokens:(\d+) val_bytes:(\d+)", finished.out).groups())
    for name in ("final_int6_roundtrip_exact", "final_int6_sliding_window_exact"):
        event = events_of(finished.events)[name]
        nats, bpb = event["val_loss"], event["val_bpb"]
        assert f"\n{name} val_loss:{nats:.8f} val_bpb:{bpb:.8f} " in finished.out
        assert bpb == pytest.approx(nats / math.log(2) * tokens / nbytes)


def test_the_artifact_has_the_size_in_the_log_and_describes_the_run(finished):
    blob, code = finished.artifact.read_bytes(), SCRIPT.stat().st_size
    events = events_of(finished.events)
    assert (finished.folder / events["artifact"]["path"]).read_bytes() == blob
    digest, total = hashlib.sha256(blob).hexdigest(), len(blob) + code
    sizes = f"int6+ans: {len(blob)} bytes sha256:{digest}\nCode size: {code} bytes\n"
    assert f"{sizes}Total submission size int6+ans: {total} bytes\n" in finished.out
    assert sorted(p.name for p in finished.folder.iterdir()) == ["final_model.npz", "logs"]
    header = train_gpt.open_artifact(blob)[0]
    assert header["coder"] == "ans" and header["knobs"]["ROUNDING"] == "sensitivity"
    facts = header["training"]
    assert f"val_bpb:{facts.pop('val_bpb'):.8f}" in finished.out
    # Calibration is training time. More digits would take room from the codes, so repeats would differ.
    seconds = round(events["calibration"]["train_seconds"], 1)
    of_run = {"steps": 12, "weights": "EMA of 12 samples", "seed": 1337, "ranks": 1}
    assert facts == of_run | {"train_seconds": seconds, "tokens_per_step": 768}


def scores(out: str) -> dict[str, float]:
    """The losses of the artifact, by the way of scoring."""
    form = r"(?m)^final_int6_(\w+)_exact val_loss:(\S+) .* val_tokens:\d+ val_bytes:\d+"
    return {way: float(nats) for way, nats in re.findall(form, out)}


def test_a_run_ends_with_score_size_files_and_the_next_command(finished, tmp_path):
    """The command works as it is printed. An evaluation ends in the same way."""
    end, files, following = finished.out.splitlines()[-3:]
    bpb = float(re.findall(r"final_int6_sliding_window_exact .* val_bpb:(\S+)", finished.out)[0])
    size = finished.artifact.stat().st_size + SCRIPT.stat().st_size
    score = f"{bpb:.4f} bits per byte (sliding_window)"
    assert end == f"finished: {score}, {size:,} of 16,000,000 bytes"
    assert files == "files: logs/tiny.*"
    command = re.fullmatch(rf"next: (.*) python {SCRIPT}", following)[1]
    shutil.copytree(finished.folder / "logs", tmp_path / "logs")
    settings = dict(word.split("=") for word in command.split())
    again = run([SCRIPT], settings, tmp_path).stdout
    assert scores(again) == pytest.approx(scores(finished.out), abs=1e-7)
    assert len(scores(again)) == 2 and again.splitlines()[-2] == end
    used = run([SCRIPT], settings | {"RUN_ID": "tiny"}, tmp_path, status=1)
    assert "RUN_ID=tiny is used by an earlier run" in sentence(used)


def test_the_artifact_has_all_that_a_score_depends_on(hyperparameters, tmp_path, monkeypatch):
    """A masked or banded score was repeated as another one. A variable that is set wins."""
    monkeypatch.setattr(train_gpt.sys, "argv", ["my code/train_gpt.py"])
    modes = {"EVAL_MODE": "banded", "CANONICAL_MASK": 1, "NGRAM_TILT": 1, "EVAL_MAX_SECONDS": 9}
    learning = {"TTT_ENABLED": 1, "TTT_MODE": "lora", "TTT_LORA_CHUNK": 7, "TTT_LR": 0.25}
    hp = hyperparameters(DATA_PATH="my data", **modes, **learning)
    names = train_gpt.knobs_with("score")
    assert all(knob in names for knob in vars(hp) if knob.startswith(("ttt_", "eval_m")))
    path = tmp_path / "a b.npz"
    path.write_bytes(exported(made(hp).initialise(0), hp))
    stored = train_gpt.open_artifact(path.read_bytes())[0]["knobs"]
    others = "DATA_PATH TOKENIZER_PATH EVAL_SEQ_LEN EVAL_STRIDE VAL_BATCH_SIZE COMPUTE_DTYPE DEVICE"
    assert {n for n in stored if n.lower() in names} == {*others.split(), *modes, *learning}
    again = train_gpt.read_artifact(str(path), {})[1]
    assert all(getattr(again, name) == getattr(hp, name) for name in names)
    others = {"DATA_PATH": "mine", "NGRAM_TILT": "0", "EVAL_STRIDE": "3", "TTT_LR": "0.002"}
    other = train_gpt.read_artifact(str(path), others)[1]
    read = dict(data_path="mine", ngram_tilt=False, eval_stride=3, ttt_lr=0.002)
    assert vars(other) == vars(again) | read
    # Each rank hands on what its own documents taught.
    many = ["torchrun", "--standalone", "--local-addr=127.0.0.1", "--nproc_per_node=4"]
    for ranks, launcher in ((1, ["python"]), (4, many)):
        command = shlex.split(train_gpt.evaluation_command(path, ranks))
        assert command == [f"EVAL_ONLY={path}", *launcher, "my code/train_gpt.py"]


def test_run_sh_says_what_comes_next(hyperparameters, tmp_path, monkeypatch, capsys):
    log = train_gpt.Log(hyperparameters(RUN_ID="t"), train_gpt.Comm(), tmp_path)
    files = f"files: {tmp_path}/t.*\n"
    for variables, last in (({}, "next: sleep\n"), ({"RUN_SH": "GRID"}, files)):
        monkeypatch.setattr(train_gpt.os, "environ", variables)
        log.finish("a score", 1, advice="sleep")
        assert capsys.readouterr().out.endswith(last)


@pytest.mark.parametrize("compiles, mode", [("1", "sliding"), ("auto", "banded")])
def test_no_timed_evaluation_compiles(compiles, mode, finished, env, tmp_path, monkeypatch, capsys):
    """It took minutes of EVAL_MAX_SECONDS. A CPU compiles only if COMPILE=1 asks for it."""
    shapes, before, asked, real = set(), [], [], train_gpt.score_artifact

    def recorded(model, compiled):
        asked.append(compiled)
        return lambda x, y, *a, **b: shapes.add((x.shape, y.shape)) or model(x, y, *a, **b)

    scored = lambda *a: before.append(set(shapes)) or real(*a)  # noqa: E731
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_gpt, "compile_blocks", recorded)
    monkeypatch.setattr(train_gpt, "score_artifact", scored)
    changes = dict(EVAL_SEQ_LEN=128, EVAL_STRIDE=16, VAL_BATCH_SIZE=1024, COMPILE=compiles)
    changes |= {"EVAL_MODE": mode, "ATTENTION": "math"}
    path = finished.artifact
    train_gpt.evaluate_only(evaluating(env, path, **changes), str(path))
    assert before == [shapes] and len(shapes) >= 2 and asked[-1] == (compiles == "1")
    printed = capsys.readouterr().out
    assert f" compile:{int(compiles == '1')}\n" in printed  # the log said 1 for an eager score
    # The artifact has no mode, and a banded pass replaces sliding windows
    ways = {"roundtrip", {"sliding": "sliding_window", "banded": "banded"}[mode]}
    assert scores(printed).keys() == ways


def test_over_the_cap_fails_after_the_scores(finished, env, tmp_path, monkeypatch, capsys):
    """Fault D3: an evaluation, like a run, is scored, then it fails."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_gpt, "SUBMISSION_CAP", 50_000)
    with user_error("over the limit of 50000.* train with TARGET_BYTES=50000"):
        train_gpt.evaluate_only(evaluating(env, finished.artifact), str(finished.artifact))
    assert "final_int6_sliding_window_exact" in capsys.readouterr().out


def test_an_artifact_that_cannot_be_read_back(hyperparameters, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_gpt, "load_artifact", lambda blob: {}["q"])
    hp = hyperparameters(RUN_ID="t", WARMUP_STEPS=0, ITERATIONS=1, GPTQ_BATCHES=0)
    with user_error("artifact logs/t.npz cannot be used: KeyError: 'q'; "):
        train_gpt.train_and_score(hp)


def test_the_time_of_an_evaluation(env, hyperparameters, tmp_path, monkeypatch):
    """It is of all that is needed: hints of the text were in no figure, for 60 million tokens 29 s.
    Both logs have the line."""
    monkeypatch.chdir(tmp_path)
    for name in ("ngram_hints", "load_artifact"):
        real = getattr(train_gpt, name)
        slow = lambda *a, real=real: time.sleep(1) or real(*a)  # noqa: E731
        monkeypatch.setattr(train_gpt, name, slow)
    hp, path = hyperparameters(NGRAM_TILT=1, RUN_ID="t", WARMUP_STEPS=0, ITERATIONS=2), "logs/t.npz"
    train_gpt.train_and_score(hp)
    train_gpt.evaluate_only(evaluating(env, path, NGRAM_TILT=1, RUN_ID="e"), path)
    for name in ("t", "e"):
        found, text = runs.read_run(Path(f"logs/{name}.txt")), Path(f"logs/{name}.txt").read_text()
        assert found.artifact == train_gpt.sha256_of(path) and found.prepare_seconds > 2
        event = events_of(Path(f"logs/{name}.jsonl").read_text())["evaluation"]
        assert event["eval_seconds"] == pytest.approx(found.eval_seconds, abs=2e-3)
        assert event["prepare_seconds"] == pytest.approx(found.prepare_seconds, abs=1e-3)
        total = found.score.seconds + found.prepare_seconds
        line = re.search(r"(?m)^evaluation: eval_time:(\d+)ms", text)
        assert int(line[1]) == pytest.approx(1000 * total, abs=2)


@pytest.mark.parametrize(
    "events, knobs, used",
    [
        ("", "", False),
        ("start train", "", False),
        ("start train artifact final_int6_roundtrip_exact", "", True),
        ("start train artifact", "RESUME=auto", False),
        ("start train finished", "RESUME=auto", True),
        ("start artifact", "EVAL_ONLY=x.xz", True),
        ("start train artifact", "EVAL_ONLY=x.xz RESUME=auto", True),
        ("start final_int6_roundtrip_exact finished", "EVAL_ONLY=x.xz", True),
    ],
)
def test_which_logs_may_be_replaced(hyperparameters, tmp_path, events, knobs, used):
    """By the events of an earlier run and its artifact."""
    if "artifact" in events:
        (tmp_path / "r.npz").touch()
    lines = [json.dumps({"event": kind, "seconds": 1}) + "\n" for kind in events.split()]
    (tmp_path / "r.jsonl").write_text("".join(lines))
    hp = hyperparameters(RUN_ID="r", **dict(word.split("=") for word in knobs.split()))
    sentence = "RUN_ID=r is used by an earlier run: set another, or delete "
    with user_error(sentence) if used else contextlib.nullcontext():
        train_gpt.Log(hp, train_gpt.Comm(), tmp_path).require_unused()


def test_a_folder_without_locks_can_be_written(hyperparameters, tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError("no locks")))
    train_gpt.Log(hyperparameters(RUN_ID="r"), train_gpt.Comm(), tmp_path)("first")
    assert fcntl.flock.called and (tmp_path / "r.txt").read_text() == "first\n"


def test_other_ranks_end_by_what_the_first_found(hyperparameters, monkeypatch):
    """Only rank 0 has a log. Without its answer they would wait for it in a collective."""
    log = train_gpt.Log(hyperparameters(RUN_ID="r"), train_gpt.Comm(1, 2))
    monkeypatch.setattr(log.comm, "broadcast", mock.Mock(side_effect=[True, "the disk was full"]))
    with user_error("RUN_ID=r is used by an earlier run"):
        log.require_unused()
    with user_error("the disk was full"):
        log.finish("1.0 bits per byte", 5)


def test_a_line_that_cannot_be_written_does_not_end_the_run(hyperparameters, tmp_path, capsys):
    """The console has it. The run ends with the reason, not as finished."""
    log = train_gpt.Log(hyperparameters(RUN_ID="r"), train_gpt.Comm(), tmp_path)
    log("first")
    log.files[0] = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    log("second")
    assert capsys.readouterr().out == "first\nsecond\n"
    with user_error("cannot write /dev/full: No space left on device; free space"):
        log.finish("1.0 bits per byte", 5)
    assert "finished" not in (tmp_path / "r.jsonl").read_text()


def test_of_a_target_that_cannot_be_met_the_smallest_artifact_is_kept(script, tmp_path):
    result = script(TARGET_BYTES=SCRIPT.stat().st_size + 2000, RUN_ID="small", status=1)
    blob = (tmp_path / "logs" / "small.npz").read_bytes()
    kept = f"{len(blob)} bytes, kept as logs/small.npz; 2000 are available"
    assert f"the smallest artifact has {kept}" in sentence(result)
    assert train_gpt.load_artifact(blob)


def test_a_run_without_optional_parts_whose_names_have_any_bytes(script, data, tmp_path):
    """The steps of #399's rule are fixed; its script does not enforce the size either. Nothing in a
    run needs UTF-8 names, and what is printed has an escape for each such byte."""
    name = os.fsdecode(b"caf\xe9")
    shutil.copytree(data, tmp_path / name)
    names = {"RUN_ID": name, "DATA_PATH": name, "TOKENIZER_PATH": f"{name}/tokenizer.model"}
    off = {"WARMUP_STEPS": 0, "EMA_ENABLED": 0, "GPTQ_BATCHES": 0}
    small = {"ROUNDING": 399, "TARGET_BYTES": SCRIPT.stat().st_size + 2000, "COMPRESSOR": "lzma"}
    out = script(CANONICAL_MASK=1, **names, **off, **small).stdout
    assert "weights, no calibration" in out and "calibration:" not in out
    assert "\nTotal submission size int6+lzma" in out and "\nexporting the last weights\n" in out
    assert "\nfinal_int6_sliding_window_exact" in out and "\nfinished: " in out
    assert r"files: logs/caf\udce9.*" in out
    log = (tmp_path / "logs" / f"{name}.txt").read_text(encoding="utf-8")
    assert r"* DATA_PATH=caf\udce9" in log


def test_a_model_that_no_artifact_may_hold_is_refused_before_training(hyperparameters, monkeypatch):
    """Its own script would refuse to load what it exports, also without a limit of its bytes."""
    monkeypatch.setattr(train_gpt.Runtime, "start", lambda hp: pytest.fail("the run has begun"))
    with user_error("weights and rotary factors exceed the limit of 67108864 of an art"):
        train_gpt.train_and_score(hyperparameters(MODEL_DIM=2048, NUM_LAYERS=6, TARGET_BYTES=0))


@pytest.mark.parametrize("mode", ["sgd", "lora"])
def test_test_time_training_is_the_same_on_two_ranks(finished, env, data, tmp_path, mode):
    """And so is all that EVAL_ONLY does. Ranks have equal weights (sgd) or share the documents."""
    (tmp_path / "half").mkdir()
    shutil.copy(data / "fineweb_val_000000.bin", tmp_path / "half")
    changes = {"TTT_ENABLED": 1, "TTT_MODE": mode, "TTT_CHUNK_TOKENS": 256, "TTT_LORA_CHUNK": 8}
    knobs = evaluating(env, finished.artifact, **changes, DATA_PATH="half")
    one, two = (scores(run([SCRIPT], knobs, tmp_path, ranks).stdout) for ranks in (1, 2))
    # No training data, no new artifact
    assert {p.name for p in tmp_path.iterdir()} == {"half", "logs"}
    assert list(one) == ["roundtrip", "sliding_window", f"ttt_{mode}"]
    assert two == pytest.approx(one, abs=2e-6)


def test_the_expected_loss_of_rounding_has_a_sentence(run_of, monkeypatch):
    training = run_of(val=True)
    monkeypatch.setattr(train_gpt, "make_quantisers", lambda *_: {})
    monkeypatch.setattr(train_gpt, "fit_bytes", lambda *_: bytes(1000))
    expected = {"q": 0.25, "k": 0.5}
    monkeypatch.setattr(train_gpt, "open_artifact", lambda _: ({"expected_loss": expected},))
    training.log = mock.Mock(artifact=Path("a"))
    train_gpt.export(training, {}, {})
    lines = [call.args[0] for call in training.log.call_args_list]
    bits = 8000 / train_gpt.count_numbers(training.model.parameters())
    said = f"export: {bits:.2f} bits per weight, expected loss of rounding 0.7500 nats"
    assert lines[1] == said


def test_time_for_calibration_is_reserved(run_of, monkeypatch):
    """A tenth more than what the warm-up measured for all its batches."""
    ticks = itertools.count(0, 0.25)
    monkeypatch.setattr(train_gpt, "perf_counter", lambda: next(ticks))
    training = run_of(val=True, MAX_WALLCLOCK_SECONDS=3, GPTQ_BATCHES=4)
    training.warm_up()
    limit = 3 * (1 - train_gpt.MARGIN)
    assert training.clock.time_left(0) == pytest.approx(limit - 1.1)
    needed = "MAX_WALLCLOCK_SECONDS=1 is less than the 1.1 s for calibration: set GPTQ_BATCHES=0"
    with user_error(needed):
        run_of(val=True, MAX_WALLCLOCK_SECONDS=1, GPTQ_BATCHES=4).warm_up()


def test_calibration_is_training_time(run_of, monkeypatch):
    """The clock runs until the sums are there."""
    training, now = run_of(GPTQ_BATCHES=4), [1.0]
    queued = []  # seconds of a GPU's work, for which the host has to wait
    batch = training.loader.batch

    def finished(runtime):
        now[0] += sum(queued)
        queued.clear()

    monkeypatch.setattr(train_gpt, "perf_counter", lambda: now[0])
    monkeypatch.setattr(train_gpt.Runtime, "synchronize", finished)
    training.loader.batch = lambda step: queued.append(2) or batch(step)
    training.comm.all_reduce = lambda total: lambda: queued.append(0)
    training.log = mock.Mock()
    training.finish()
    assert not queued
    line = "calibration: 4 batches took 8000ms train_time:8000ms"
    times = {"train_seconds": 8, "wall_seconds": 8}
    assert training.log.call_args == mock.call(line, "calibration", batches=4, **times)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_bf16_compiled_run_is_a_run(backend, env, tmp_path):
    """The path of a GPU at toy size: bf16, compiled, late QAT, validation during training. There
    are graphs for three kinds of calls: training with short sequences, with whole sequences,
    evaluation. The switch to QAT adds one of the matrices alone, the ends of windows one of the head.
    #399 recompiles at step 1, at the switch to QAT and in the last evaluation. The graphs are the
    same without Inductor, which takes minutes."""
    compiling = "torch.compile = lambda f, c=torch.compile, **rest: c(f, backend={!r}, **rest)"
    knobs = {"LATE_QAT": 1, "QAT_THRESHOLD": 0.5, "VAL_LOSS_EVERY": 5, "NUM_LAYERS": 1}
    knobs |= {"XSA_LAST_N": 1, "COMPUTE_DTYPE": "bfloat16", "COMPILE": 1}
    environment = env(**knobs, TORCH_LOGS="recompiles")
    code = script_after(f"import torch; {compiling.format(backend)}")
    result = run(code, environment, tmp_path)
    again = collections.Counter(re.findall(r"Recompiling function (\w+)", result.stderr))
    del again["muon_update"]
    assert again == {"embed": 2, "add": 1, "block": 2, "head": 3, "matrices": 2}
    assert "compute_dtype:bfloat16" in result.stdout
    assert len(re.findall(r"(?m)^step:\d+/12 val_loss", result.stdout)) == 4


def test_warm_up_leaves_no_trace(run_of, monkeypatch):
    """Faults B19, B21: the warm-up runs real steps, then restores all state."""
    knobs = {**PARTS, "LATE_QAT": 1, "LOOP_START": 0.3}
    runs = [run_of(val=True, WARMUP_STEPS=steps, **knobs) for steps in (0, 3)]
    taken = []
    monkeypatch.setattr(train_gpt.Runtime, "synchronize", lambda _: taken.append("waited"))
    real, kind = train_gpt.Run.train_step, operator.attrgetter("seq_len", "looping", "qat")
    noted = lambda run, step, settings: taken.append(kind(settings)) or real(run, step, settings)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt.Run, "train_step", noted)
        for one in runs:
            one.warm_up()
    kinds = [(8, False, False), (8, True, False), (32, True, False)]
    assert taken == kinds + [(32, True, True)] * 3 + ["waited"]
    state = runs[1].optimizer.tensors()
    assert not any(tensor.any() for name, tensor in state.items() if not name.endswith(".weight"))
    for one, step in itertools.product(runs, range(4)):
        one.train_step(step, train_gpt.StepSettings(1.0, 0.9, False, 32))
    for find in (lambda one: one.model.parameters(), lambda one: one.average.mean.values()):
        assert all(torch.equal(a, b) for a, b in zip(*map(find, runs), strict=True))


@torch._dynamo.config.patch(recompile_limit=64)  # loads it
def test_a_run_with_all_parts_has_no_more_graphs_than_torch_allows(run_of, monkeypatch):
    """One more was an error of torch in the warm-up, after minutes."""
    knobs = {"NUM_LAYERS": 11, "XSA_LAST_N": 4, "LOOP_VISITS": 2, "LANES_LAST_N": 3, "MUDD": 1}
    knobs |= {"ATTN_WINDOW": 16, "TTT_ENABLED": 1, "TTT_MODE": "lora", "TTT_LORA_CHUNK": 16}
    knobs |= {"EVAL_MODE": "banded", "EVAL_MAX_SECONDS": 99, "EVAL_SEQ_LEN": 1024}
    parts = {"attend": lambda q, k, v, *_: q + (k + v).repeat_interleave(2, 2)}
    training = run_of(val=True, parts=parts, VAL_LOSS_EVERY=4, **knobs)
    training.val.documents = training.val.documents[:1]  # longer than a window
    monkeypatch.setattr(train_gpt, "check_kernels", lambda *_: None)  # of the last steps' graph
    monkeypatch.setattr(train_gpt, "BAND_TARGETS", 1)
    model = training.forward = copy.copy(training.model)
    inputs = training.val, training.hp, training.runtime
    training.make_scorer = functools.partial(train_gpt.Evaluator, model, *inputs)
    graphs = set()

    def block(*arguments):
        leaves, structure = torch.utils._pytree.tree_flatten(arguments)
        leaves = [str(getattr(leaf, "shape", leaf)) for leaf in leaves]
        graphs.add((torch.is_grad_enabled(), str(structure), *leaves))
        return training.model.block(*arguments)

    model.block = block
    training.warm_up()
    train_gpt.compile_whole(block, True)  # sets the limit
    assert 64 < len(graphs) <= torch._dynamo.config.recompile_limit


@pytest.mark.parametrize("mode, steps", [("sgd", 1), ("lora", 2)])
def test_the_log_names_each_graph_before_it_is_compiled(mode, steps, run_of, monkeypatch):
    """Slow and stuck looked alike. No validation compiles later."""
    knobs = {**PARTS, "TTT_ENABLED": 1, "TTT_MODE": mode, "TTT_CHUNK_TOKENS": 112, "LATE_QAT": 1}
    knobs |= {"TTT_LORA_CHUNK": 8, "EVAL_SEQ_LEN": 256, "EVAL_MAX_SECONDS": 9, "VAL_LOSS_EVERY": 4}
    training = run_of(val=True, WARMUP_STEPS=steps, VAL_BATCH_SIZE=512, **knobs)
    happened, forward = [], train_gpt.GPT.forward

    def noted(model, x, y, reduction="mean", config=None, adapter=None, hook=None, **rest):
        graph = x.shape, y.shape, config, adapter is None
        plain = model.attend is train_gpt.plain_attention  # compiles nothing
        if hook is None and not plain and graph not in happened:
            happened.append(graph)
        return forward(model, x, y, reduction, config, adapter, hook, **rest)

    monkeypatch.setattr(train_gpt.GPT, "forward", noted)
    training.log = mock.Mock(side_effect=lambda line, *_, **__: happened.append(line))
    training.warm_up()
    warm = list(happened)
    training.validate(0, looping=False)
    training.validate(4, looping=True)
    assert not [graph for graph in happened if graph not in warm and type(graph) is tuple]
    # A line and then its first graph; QAT's forward is that of the gradients.
    before = [a for a, b in itertools.pairwise(warm) if type(a) is str and type(b) is tuple]
    kinds = ["seq_len:8 looping:0", "seq_len:8 looping:1", "seq_len:32 looping:1"]
    names = ["gradients", *(f"step qat:0 {kind}" for kind in kinds), "roundtrip"]
    names += ["sliding_window", f"ttt_{mode}", "validation"]
    assert before == [f"warmup: {name}" for name in names] and before[0] == warm[0]
    assert "warmup: step qat:1 seq_len:32 looping:1" in warm


def test_short_sequences_are_parts_of_the_long_ones(run_of):
    """A step reads the same tokens in the same order; a part sees nothing before itself."""
    knobs = dict(val=True, ITERATIONS=5, WARMUP_STEPS=1)
    short, whole = (run_of(**knobs, SHORT_SEQ_PARTS=parts) for parts in (4, 1))
    short.warm_up()  # also compiles short sequences
    seen, forward = [], short.forward
    short.forward = lambda x, y, **options: seen.append((x, y)) or forward(x, y, **options)
    settings = [train_gpt.schedule(short.hp, step, 0.0, math.inf) for step in range(3)]
    losses = [short.train_step(step, each)[0] for step, each in enumerate(settings)]
    rows = whole.loader.batch(0).long()
    parts = [torch.cat(t.split(8, dim=1)) for t in (rows[:, :-1], rows[:, 1:])]
    assert [tuple(x.shape) for x, _ in seen] == [(96, 8), (96, 8), (24, 32)]
    assert torch.equal(seen[0][0].view(24, 32), rows[:, :-1])
    assert torch.equal(seen[0][1].view(24, 32), rows[:, 1:])
    with torch.no_grad():
        assert losses[0].item() == pytest.approx(whole.model(*parts).item(), rel=1e-6)


def test_the_host_never_waits_for_the_step_that_it_queued(run_of):
    """As on a GPU: its loss and clock are read two steps later. tests/test_device.py has no value
    that a step could read."""
    run = run_of(val=True, ITERATIONS=8, TRAIN_LOG_EVERY=1)
    run.clock.ahead, waiting, step = 2, [], run.train_step

    def noted(*arguments):
        waiting.append([number for number, *_ in run.in_flight])
        return step(*arguments)

    run.train_step = noted
    run.train()
    assert waiting[:3] == [[]] * 3 and waiting[4:] == [[s - 2, s - 1] for s in range(4, 8)]
    assert not run.in_flight


def test_micro_batches_do_not_change_the_step(run_of):
    """Fault B17: accumulation follows from batch, ranks and micro-batch."""
    runs = [run_of(val=True, MICRO_BATCH_TOKENS=n) for n in (768, 96, 50, 1)]
    assert [one.accumulation for one in runs] == [1, 8, 24, 24]
    reports = [one.train_step(0, train_gpt.StepSettings(1.0, 0.9, False, 32)) for one in runs]
    bank = runs[0].model.qo_bank
    for one, report in zip(runs[1:], reports[1:], strict=True):
        assert report[0].item() == pytest.approx(reports[0][0].item(), rel=1e-6)
        assert (one.model.qo_bank - bank).norm() / bank.norm() < 1e-5


def test_import_has_no_side_effects(tmp_path):
    """Fault B18: no GPU, no flash-attn, no process group, no files."""
    code = """import sys, train_gpt, torch
assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()
assert not {"flash_attn_interface", "triton"} & set(sys.modules)"""
    run(["-c", code], {"PYTHONPATH": str(SCRIPT.parent), "PATH": ""}, tmp_path, fresh=True)
    assert not list(tmp_path.iterdir())


def test_what_only_newer_versions_of_torch_have_is_asked_for(monkeypatch):
    """The script supports torch 2.9 to 2.15."""
    for name in ("reduce_scatter_single", "all_gather_single"):
        monkeypatch.delattr(torch.distributed, name, raising=False)
    config, comm = SimpleNamespace(triton=SimpleNamespace()), mock.Mock()
    monkeypatch.setattr(torch._inductor, "config", config)
    monkeypatch.setattr(torch, "compile", mock.Mock())
    train_gpt.Comm.reduce_scatter(comm, "rows", "all")
    train_gpt.Comm.all_gather(comm, "all", "rows")
    train_gpt.compile_whole(print, True)
    assert comm.start.call_count == 2 and not vars(config.triton) and torch.compile.called


# ---- Errors: the last line of stderr is one sentence, and there is no traceback ------------------
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 6.00 GiB.\nmore")
# What torch raises for a graph in its cache that a killed run left
CUT = torch._inductor.exc.InductorError(OSError("/c/x.so: file too short"), None)
TOLD = [
    (FULL, r"a GPU's memory is full .*6.00 GiB.\): set a lower MICRO_BATCH_TOKENS, such as 49152"),
    (CUT, r"torch.compile failed \(/c/x.so: .*short\): set COMPILE=0, which is slower"),
]


@pytest.mark.parametrize("error, told", TOLD)
def test_an_error_of_torch_is_one_sentence(error, told, monkeypatch, capsys):
    """Also without docstrings, as with python -OO."""
    monkeypatch.setattr(train_gpt, "__doc__", None)
    monkeypatch.setattr(train_gpt, "train_and_score", mock.Mock(side_effect=error))
    monkeypatch.setattr(sys, "argv", ["train_gpt.py"])
    with pytest.raises(SystemExit, match="1"):
        train_gpt.main()
    assert re.fullmatch(f"error: {told}\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    "changes, part",
    [
        ({"DATA_PATH": "/nowhere"}, "DATA_PATH=/nowhere has no fineweb_val_NNNNNN.bin"),
        ({"TARGET_BYTES": 1000}, "TARGET_BYTES=1000 is no more than the "),
        ({"EVAL_ONLY": "nothing.xz"}, "artifact nothing.xz cannot be used: No such file or dir"),
        ({"EVAL_ONLY": "a.xz", "DATA_PATH": "/nowhere"}, "DATA_PATH=/nowhere has no"),
        # Bounds of the defaults came first: XSA_LAST_N=4 is not at most NUM_LAYERS=1.
        ({"EVAL_ONLY": "a.xz", "NUM_LAYERS": 1, "XSA_LAST_N": 4}, "NUM_LAYERS=1 is set, but a.xz"),
        ({"SCALAR_LR": 4e9, "GRAD_CLIP_NORM": 0}, "the training loss of step"),
        ({"DEVICE": "cuda"}, "DEVICE=cuda, but torch finds 0 GPUs on this node for LOCAL_RANK=0"),
        ({"WORLD_SIZE": 2}, "WORLD_SIZE=2: the ranks cannot meet: "),
    ],
)
def test_mistakes_end_with_one_sentence(script, finished, tmp_path, changes, part):
    if changes.get("DEVICE") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    shutil.copy(finished.artifact, tmp_path / "a.xz")
    assert part in sentence(script(**changes, status=1))
    assert (tmp_path / "logs").exists() == bool({"SCALAR_LR", "DATA_PATH"} & changes.keys())


@pytest.mark.parametrize("ranks", ["LOCAL_WORLD_SIZE", "WORLD_SIZE"])  # a launcher may set only one
def test_other_ranks_wait_for_the_sentence_of_the_first(ranks, monkeypatch, capsys):
    """A launcher ends the others as soon as the first has printed."""
    waited = []
    sleep = lambda seconds: waited.append((seconds, capsys.readouterr().err))  # noqa: E731
    monkeypatch.setattr(train_gpt.time, "sleep", sleep)
    monkeypatch.setenv(ranks, "2")
    monkeypatch.setenv("LOCAL_RANK", "0")  # of all ranks, with torchrun --virtual-local-rank
    for rank, before in (("2", []), ("1", [(5, "")])):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit, match="1"):
            runpy.run_path(train_gpt.__file__)["end"]("it failed")
        assert waited == before and capsys.readouterr().err == "error: it failed\n"


REPEATED = f"""
import os, sys
from unittest import mock
sys.path.append({str(SCRIPT.parent)!r})
import train_gpt
end = train_gpt.end

def repeat(*_):
    for number in 15, 15, 2, 10, 1:
        os.kill(os.getpid(), number)

def read_validation(*_):
    train_gpt.Log.show = repeat
    if {{number}}:
        try:
            os.kill(os.getpid(), {{number}})
        finally:
            repeat()
            print("cleaned up")
    raise train_gpt.UserError("it failed")

train_gpt.read_validation = read_validation
train_gpt.end = lambda *sentence: (repeat(), end(*sentence))
sys.stderr = mock.Mock(write=lambda text: (repeat(), os.write(2, text.encode())))
train_gpt.main()
"""


@pytest.mark.parametrize(
    "number, status, logged, said",
    [
        (2, 130, "KeyboardInterrupt: SIGINT", "interrupted by SIGINT; what "),
        (15, 143, "KeyboardInterrupt: SIGTERM", "interrupted by SIGTERM; what "),
        (0, 1, "it failed", "it failed\n"),
        (0, 1, "", "NUM_LAYERS=0 is not at least 1\n"),
    ],
)
def test_no_signal_disturbs_an_error(number, status, logged, said, env, tmp_path):
    """A launcher repeats signals: during the cleanup, and while the error is logged and printed."""
    code, knobs = REPEATED.format(number=number), env(RUN_ID="r", NUM_LAYERS=3 if logged else 0)
    result = run(["-c", code], knobs, tmp_path, status=status)
    assert result.stderr.startswith(f"error: {said}") and result.stderr.count("\n") == 1
    assert ("cleaned up\n" in result.stdout) == (number > 0)
    if logged:
        assert (tmp_path / "logs" / "r.txt").read_text().endswith(f"\nerror: {logged}\n")


def test_a_rank_that_waits_for_the_sentence_of_another_ends_quietly(env, tmp_path):
    code = script_after("import os, time; time.sleep = lambda _: os.kill(os.getpid(), 2)")
    knobs = env(NUM_LAYERS=0, RANK=1, WORLD_SIZE=2)
    assert not run(code, knobs, tmp_path, status=130).stderr


NO_READER = "import os; out, target = os.pipe(); os.close(out); os.dup2(target, {})"
NO_SPACE = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), {})"


@pytest.mark.parametrize("target", [NO_READER, NO_SPACE])
def test_a_run_needs_no_standard_output(target, env, tmp_path):
    """As with `| head`, a `tee` that has died, a lost terminal. A run ended with a traceback."""
    result = run(script_after(target.format(1)), env(RUN_ID="r"), tmp_path)
    assert not result.stderr
    lines = (tmp_path / "logs" / "r.txt").read_text().splitlines()
    assert lines[-3].startswith("finished: ") and lines[-1].startswith("next: ")


NOHUP = "import os, signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"


@pytest.mark.parametrize("before, status", [(NO_SPACE.format(2), 129), (NOHUP, 0)])
def test_a_lost_terminal_ends_a_run_that_does_not_ignore_it(before, status, env, tmp_path):
    """With its status, although the error cannot be printed."""
    hangup = "fcntl.flock = lambda *_: os.kill(os.getpid(), 1)"
    result = run(script_after(f"{before}; import fcntl; {hangup}"), env(), tmp_path, status=status)
    assert ("\nfinished: " in result.stdout) == (status == 0) and not result.stderr


def test_full_disk(env, tmp_path):
    """A limit on the size of files makes the operating system refuse the write of the log."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    result = run(script_after(limit), env(RUN_ID="full"), tmp_path, status=1)
    assert "cannot write logs/full.txt: File too large" in sentence(result)


def test_full_disk_at_the_export(env, tmp_path):
    """The artifact goes to the temporary folder, as the last line says; the scores follow."""
    (tmp_path / "final_model.npz").write_bytes(b"of an earlier run")
    (tmp_path / "spare").mkdir()
    knobs = env(RUN_ID="full", TMPDIR=tmp_path / "spare")
    # A fork keeps another TMPDIR. The disk is full when the copy is synced.
    full = "os.fsync = mock.Mock(side_effect=[None, OSError(28, 'No space left on device')])"
    prepared = f"import os, tempfile; from unittest import mock; tempfile.tempdir = None; {full}"
    result = run(script_after(prepared), knobs, tmp_path, status=1)
    (spare,) = (tmp_path / "spare").glob("*/full.npz")
    assert sentence(result).startswith("error: cannot write final_model.npz: No space left")
    assert sentence(result).endswith(f"; the artifact is {spare}")
    assert train_gpt.load_artifact(spare.read_bytes())
    assert "final_int6_sliding_window_exact" in result.stdout
    assert (tmp_path / "final_model.npz").read_bytes() == b"of an earlier run"
    assert not list(tmp_path.glob("*.partial"))
    assert "finished" not in events_of((tmp_path / "logs" / "full.jsonl").read_text())


def test_progress_is_one_line_in_a_terminal(hyperparameters, tmp_path, monkeypatch):
    """There a bar replaces the lines of progress; the log file has all lines."""
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.chdir(tmp_path)
    knobs = dict(GPTQ_BATCHES=1, VAL_LOSS_EVERY=6, TTT_ENABLED=1, TTT_CHUNK_TOKENS=2000)
    train_gpt.train_and_score(hyperparameters(**knobs, RUN_ID="bar"))
    log, shown = Path("logs/bar.txt").read_text(), screen.getvalue()
    assert "\nstep:10/12 train_loss" in log and "\nstep:10/12 train" not in shown
    assert "\x1b[K\rfinished: " in shown, "the bar is removed"
    stages = re.findall(r"\r  0% \| +\| ([\w ]+)\x1b", shown)
    order = "validation calibration averaged_weights roundtrip sliding_window ttt_sgd"
    assert " ".join(stage.replace(" ", "_") for stage in dict.fromkeys(stages)) == order
    assert re.search(r"\r 83% \|#{16} {4}\| step:10/12 train_loss:", shown)

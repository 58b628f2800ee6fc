"""tools/track.py: a log in TensorBoard and in modules with the interface of trackio and wandb."""

import json
import math
import os
import re
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import track
from program import run_program
from conftest import ROOT, run, start

tensorboard = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator",
    reason="tensorboard is not installed: pip install -r requirements-dev.txt",
)


def event(kind: str, **fields) -> str:
    """A line of a log."""
    return json.dumps({"event": kind, "seconds": fields.get("step", 0) / 2, **fields}) + "\n"


def settings(run_id="r", started="2026-11-24T10:00:00Z", **knobs) -> str:
    facts = {"versions": "python 3", "runtime": "runtime: ranks:1"}
    knobs = {"num_layers": 3, "compile": "0", "tie_embeddings": True, **knobs}
    return event("start", run_id=run_id, started=started, hyperparameters=knobs, **facts)


def step(number: int, loss: float) -> str:
    return event("train", step=number, train_loss=loss, lr_scale=0.5, train_seconds=number / 4)


FINISHED = event("finished", bytes=9000)
LOG = settings() + step(1, 6.5) + step(2, 6.25) + event("val", step=2, val_bpb=2.5) + FINISHED


class Recorder(ModuleType):
    """A module with the interface that trackio and wandb share. `fails` raises in this call."""

    def __init__(self, name: str, fails: str = ""):
        super().__init__(name)
        self.fails, self.calls, self.summary = fails, [], {}

    def record(self, call: str, what) -> None:
        self.calls.append((call, what))
        if call == self.fails:
            raise RuntimeError("the network is down\nand more")

    def init(self, project, name, config, **options):
        assert not options or self.__name__ == "wandb"
        self.record("init", {"project": project, "name": name, "config": config, **options})
        return self if self.__name__ == "wandb" else None  # the run, which has the summary

    def log(self, values, step) -> None:
        self.record("log", (step, values))

    def finish(self) -> None:
        self.record("finish", None)

    def logged(self, name: str) -> list[tuple[int, float]]:
        rows = [what for call, what in self.calls if call == "log"]
        return [(step, values[name]) for step, values in rows if name in values]


@pytest.fixture
def program(tmp_path, monkeypatch, capsys):
    """A function that runs track.py here, to TensorBoard or a Recorder, with `actions` while it waits.
    It returns the exit status, or instead of 1 what was said."""
    monkeypatch.chdir(tmp_path)
    Path("logs").mkdir()

    def go(to, *actions) -> int | str:
        if isinstance(to, Recorder):
            monkeypatch.setitem(sys.modules, to.__name__, to)
            to = to.__name__
        left = iter(actions)
        clock = SimpleNamespace(sleep=lambda _: next(left)(), strptime=time.strptime)
        monkeypatch.setattr(track, "time", clock)
        monkeypatch.setattr(sys, "argv", ["track.py", "logs/r.jsonl", "--to", to])
        try:
            run_program(track.main)
        except SystemExit as ended:
            return capsys.readouterr().err if ended.code == 1 else ended.code
        assert next(left, None) is None, "it ended too early"
        return 0

    return go


def written(text: str, mode: str = "w") -> None:
    with open("logs/r.jsonl", mode) as file:
        file.write(text)


def shown(folder: str | Path = "") -> tuple[dict[str, list], "tensorboard.EventAccumulator"]:
    """(what TensorBoard shows: (step, value) by name, the reader)."""
    path = Path(folder, "logs", "tensorboard", "r")
    reader = tensorboard.EventAccumulator(str(path), size_guidance={"scalars": 0})
    reader.Reload()
    names = reader.Tags()["scalars"]
    return {name: [(e.step, e.value) for e in reader.Scalars(name)] for name in names}, reader


SCORES = ("average", "roundtrip", "sliding_window")
NAMES = {f"{kind}/{name}" for kind in ("score", "score_loss", "score_s") for name in SCORES}
NAMES |= {"train/loss", "train/lr_scale", "train/tokens_per_second", "train/qat", "train/seq_len"}
NAMES |= {"val/loss", "val/bpb", "train_seconds", "bytes/model", "bytes/code", "bytes/total"}


def test_a_real_run_is_followed(tmp_path, env):
    """From before its start to its end, by another process."""
    command = [ROOT / "tools" / "track.py", "logs/r.jsonl", "--to", "tensorboard"]
    follower = start(command, {}, tmp_path)
    try:
        assert follower.stdout.readline() == "waiting for logs/r.jsonl; Ctrl-C ends\n"
        run([ROOT / "train_gpt.py"], env(RUN_ID="r", VAL_LOSS_EVERY=6, EVAL_STRIDE=32), tmp_path)
        out, err = follower.communicate(timeout=100)
    finally:
        follower.kill()
    assert (follower.returncode, err) == (0, ""), err
    places = "logs/r.jsonl to tensorboard, logs/tensorboard/r"
    assert out == f"sending {places}\nsent to tensorboard up to step 12\n"
    expected, last = {}, 0
    for line in (tmp_path / "logs" / "r.jsonl").read_text().splitlines():
        last = json.loads(line).get("step", last)
        for name, value in track.metrics(json.loads(line)).items():
            expected.setdefault(name, {})[last] = pytest.approx(value, rel=1e-6)  # fp32
    found, reader = shown(tmp_path)
    assert set(expected) == NAMES
    assert {name: dict(points) for name, points in found.items()} == expected
    (text,) = reader.Tensors("configuration/text_summary")
    assert b"| num_layers | 3 |" in text.tensor_proto.string_val[0]


@pytest.mark.parametrize("to", ["trackio", "wandb"])
def test_a_finished_log_is_sent(to, program):
    written(LOG)
    assert program(module := Recorder(to)) == 0
    (_, options), *_, last = module.calls
    config = options.pop("config")
    own = {"id": "r-2026-11-24T10-00-00Z", "resume": "allow", "dir": Path("logs")}
    assert options == {"project": "parameter-golf", "name": "r"} | (own if to == "wandb" else {})
    assert config["num_layers"] == 3 and config["runtime"] == "runtime: ranks:1"
    assert module.logged("train/loss") == [(1, 6.5), (2, 6.25)]
    assert module.logged("train_seconds") == [(1, 0.25), (2, 0.5)]
    assert module.logged("bytes/total") == [(2, 9000)]
    shown = ("train/loss", "val/bpb", "bytes/total")  # wandb ignores steps that are sent again
    expected = [6.25, 2.5, 9000] if to == "wandb" else [None] * 3
    assert [module.summary.get(name) for name in shown] == expected
    assert last == ("finish", None)


def test_a_growing_log_is_read_by_whole_lines(program, capsys):
    half = len(LOG) // 2
    assert LOG[half - 1] != "\n"
    actions = [lambda: None, lambda: written(""), lambda: written(LOG[:half], "a"), lambda: None]
    actions += [lambda: written(LOG[half:], "a")]
    assert program(module := Recorder("wandb"), *actions) == 0
    assert module.logged("train/loss") == [(1, 6.5), (2, 6.25)]
    assert capsys.readouterr().out.count("waiting for logs/r.jsonl") == 1


@pytest.mark.parametrize("to", ["tensorboard", "wandb"])
def test_a_run_that_replaces_the_log_is_another(to, program):
    """Also if the file has the same length or is for a moment empty or gone."""
    old = settings() + step(1, 6.5) + step(2, 6.25)
    new = old.replace("10:00", "11:00").replace("6.25", "4.25")
    newer = settings(started="2026-11-24T12:00:00Z") + event("peak_memory", reserved=7)
    newer += step(1, 6.5) + step(2, 2.25) + FINISHED
    written(old)
    module, seen = to == "wandb" and Recorder(to), []  # at once
    look = lambda: module or seen.append(shown()[0])  # noqa: E731
    actions = [look, lambda: written(new), lambda: None, lambda: written("")]
    actions += [lambda: os.remove("logs/r.jsonl"), lambda: written(newer)]
    assert program(module or to, *actions) == 0
    if module:
        calls = [call for call, _ in module.calls]
        assert calls.count("init") == calls.count("finish") == 3
        assert calls[:4] == ["init", "log", "log", "finish"]
        assert module.logged("train/loss")[1::2] == [(2, 6.25), (2, 4.25), (2, 2.25)]
    else:
        assert seen[0]["train/loss"] == [(1, 6.5), (2, 6.25)]
        found, _ = shown()
        assert found["train/loss"] == [(1, 6.5), (2, 2.25)]
        assert found["memory/reserved"] == [(0, 7)]


RESUMED = LOG.removesuffix(FINISHED) + step(3, 6.0) + settings(started="2026-11-24T12:00:00Z")
RESUMED += event("resumed", step=1) + step(2, 5.25) + step(3, 5.0) + step(4, 4.0) + FINISHED


def test_a_resumed_run_shows_its_last_values(program, monkeypatch):
    """In UTC, which the log has. The configuration is in TensorBoard's table of runs."""
    from tensorboard.plugins.hparams import metadata

    monkeypatch.setenv("TZ", "EST5EDT")
    written(RESUMED)
    for _ in range(2):  # sent again, nothing is shown twice
        assert program("tensorboard") == 0
    found, reader = shown()
    assert found["train/loss"] == [(1, 6.5), (2, 5.25), (3, 5.0), (4, 4.0)]
    assert found["bytes/total"] == [(4, 9000)]
    times = [point.wall_time for point in reader.Scalars("train/loss")]
    assert times[0] == datetime(2026, 11, 24, 10, tzinfo=UTC).timestamp() + 0.5
    assert [times[i] - times[0] for i in (1, 3)] == [7200 + 0.5, 7200 + 1.5]
    begins = reader.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    knobs = metadata.parse_session_start_info_plugin_data(begins).hparams
    assert knobs["num_layers"].number_value == 3 and knobs["versions"].string_value == "python 3"
    assert reader.SummaryMetadata(metadata.SESSION_END_INFO_TAG)
    assert program(module := Recorder("wandb")) == 0  # has each step once
    assert [call for call, _ in module.calls].count("init") == 1
    assert module.logged("train/loss") == [(1, 6.5), (2, 6.25), (3, 6.0), (3, 5.0), (4, 4.0)]


@pytest.mark.parametrize("to", ["tensorboard", "wandb"])
def test_numbers_that_are_not_finite_and_lines_that_were_cut(to, program, capsys):
    """A cut line is left out and said, also before the run was resumed."""
    cut = '{"event": "train", "step": 3, "tra <- cut\n1\n'
    written(settings() + step(1, math.nan) + step(2, math.inf) + cut + step(4, 6.0) + FINISHED)
    module = to == "wandb" and Recorder(to)
    assert program(module or to) == 0
    said = "left out: a line of logs/r.jsonl that a crash or a full disk has cut\n"
    assert capsys.readouterr().out.count(said) == 2
    (first, nan), *rest = module.logged("train/loss") if module else shown()[0]["train/loss"]
    assert first == 1 and math.isnan(nan) and rest == [(2, math.inf), (4, 6.0)]


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_following_of_a_run_that_died(number, status, program):
    """And the tracker's run is closed."""
    written(LOG.removesuffix(FINISHED))
    module = Recorder("wandb")
    assert program(module, lambda: os.kill(os.getpid(), number)) == status
    assert len(module.logged("train/loss")) == 2 and module.calls[-1] == ("finish", None)


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_one_sentence(fails, program):
    written(LOG)
    module, what = Recorder("wandb", fails), "RuntimeError: the network is down"
    advice = "the log has everything: start this command again"
    assert program(module) == f"error: cannot send to wandb: {what}; {advice}\n"
    assert fails == "init" or module.calls[-1][0] == "finish"


@pytest.mark.parametrize("to", ["tensorboard", "wandb"])
def test_a_missing_package_is_one_sentence(to, program, monkeypatch):
    """It does not wait for the log first."""
    monkeypatch.setitem(sys.modules, track.MODULES[to], None)
    sentence = rf"error: --to {to}: ModuleNotFoundError: .*; pip install {to}\n"
    assert re.fullmatch(sentence, program(to))


@pytest.mark.parametrize("text", [step(1, 6.0), "import os\n"])
def test_what_is_not_a_log(text, program):
    written(text)
    part = "error: logs/r.jsonl does not begin with the settings of a run; give the logs/<"
    assert program(Recorder("wandb")).startswith(part)

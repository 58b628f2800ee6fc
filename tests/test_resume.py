"""No run is lost: checkpoints, resuming, and the faults that a rented machine can have."""

import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

import train_gpt
from conftest import PARTS, ROOT, made, run, script_after, sentence, user_error, work
from lib import runs
from train_gpt import Comm, StepSettings, UserError

pytestmark = pytest.mark.usefixtures("nothing_is_left_running")

FAULTS = Path(__file__).with_name("faults.py")
KNOBS = {"RUN_ID": "r", "CHECKPOINT_EVERY": 3, "TRAIN_LOG_EVERY": 1, "RESUME": "auto"}
KNOBS |= {"EVAL_STRIDE": 32, "GPTQ_BATCHES": 0, **PARTS}
KNOBS["LOOP_START"] = 0.55  # depth recurrence begins at step 7 of 12
PLAIN = {"CHECKPOINT_EVERY": "", "RESUME": ""}
SETTINGS = StepSettings(1.0, 0.9, False, 32)


def step_file(step: int) -> str:
    """The checkpoint of run r after this many steps."""
    return f"checkpoints/r/step_{step:08d}.npz"


def faulty(fault, step, environment, folder, ranks=1, rank=0, status=0):
    return run([FAULTS, fault, step, rank], environment, folder, ranks, status=status)


def losses(folder) -> dict[str, str]:
    """The training losses in the log of run r, by step, of a repeated one the last, and the final
    scores, with all digits."""
    text = (folder / "logs" / "r.txt").read_text().split("=" * 100)[1]
    steps = re.findall(r"(?m)^step:(\d+)/\d+ train_loss:(\S+)", text)
    return dict(steps + re.findall(r"(?m)^(final_\w+_exact) (val_loss:\S+ val_bpb:\S+)", text))


FINAL = ["final_average_exact", "final_int6_roundtrip_exact", "final_int6_sliding_window_exact"]


def complete(first: int, last: int) -> list[str]:
    """The keys of `losses` of a run with these steps."""
    return [*map(str, range(first, last + 1)), *FINAL]


def kept(folder) -> list[int]:
    """The steps of all checkpoints. There must be no other file."""
    names = sorted(path.name for path in (folder / "checkpoints" / "r").iterdir())
    return [int(re.fullmatch(r"step_(\d{8})\.npz", name)[1]) for name in names]


@pytest.fixture(scope="module")
def knobs(env):
    return env(**KNOBS)


@pytest.fixture(scope="module")
def undisturbed(knobs, tmp_path_factory):
    """The folder of a run without a fault. Only knobs are logged, in any file."""
    folder = tmp_path_factory.mktemp("undisturbed")
    secrets = {"HF_TOKEN": "hf_verysecret", "AWS_SECRET_ACCESS_KEY": "verysecret"}
    result = faulty("none", 0, knobs | secrets, folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) == 6 and not any(b"verysecret" in path.read_bytes() for path in files)
    assert "verysecret" not in result.stdout + result.stderr
    return folder


def resume(knobs: dict[str, str]) -> list[str]:
    """Restore a run of one rank in this process. Returns the notes for its log."""
    hp = train_gpt.Hyperparameters.from_env(knobs)
    with train_gpt.Runtime.start(hp) as runtime:
        found, state, tensors, notes = train_gpt.find_checkpoint(hp, runtime.comm)
        training = train_gpt.Run(hp, runtime, train_gpt.Log(hp, Comm(1, 2)), None)
        training.restore(found, state, tensors)
    return notes


# ---- Resuming ------------------------------------------------------------------------------------
def test_checkpoints_do_not_change_the_run(undisturbed, knobs, tmp_path):
    faulty("none", 0, knobs | PLAIN, tmp_path)
    assert losses(tmp_path) == losses(undisturbed)
    assert list(losses(tmp_path)) == complete(1, 12)
    assert not (tmp_path / "checkpoints").exists() and kept(undisturbed) == [9, 12]


@pytest.mark.parametrize("fault, status", [("kill", -signal.SIGKILL), ("term", 143)])
def test_a_stopped_run_resumes_bit_for_bit(fault, status, undisturbed, knobs, tmp_path, capsys):
    """Fault B11: #399's state was empty after sharded steps. A kill may cut the last lines of the
    log: the start event was glued to one, and report.py refused the finished run."""
    killed, logs = fault == "kill", [tmp_path / "logs" / f"r{kind}" for kind in (".txt", ".jsonl")]
    first = faulty(fault, 7, knobs, tmp_path, status=status)
    if killed:
        for log in logs:  # the line of step 7
            log.write_bytes(log.read_bytes()[:-40])
    else:  # the run ends after its step, with a checkpoint
        assert sentence(first) == f"error: {INTERRUPTED.format('SIGTERM')}"
    (tmp_path / f"{step_file(5)}.partial").write_bytes(b"half")
    again = faulty("none", 0, knobs, tmp_path)
    assert f"resumed: step:{6 if killed else 8} " in again.stdout
    assert losses(tmp_path) == losses(undisturbed)
    assert len(kept(tmp_path)) == 2, "and there is no unfinished file"
    text, events = (log.read_text() for log in logs)
    assert text.startswith((ROOT / "train_gpt.py").read_text()) and text.count("\nstarted: ") == 2
    assert [lines.count(train_gpt.CUT) for lines in (text, events)] == [killed] * 2
    found, history = runs.read_run(logs[0]), runs.read_events(logs[1])
    assert [point.step for point in found.train] == list(range(1, 13)) and found.steps == 12
    assert found.score and found.resumed == 1
    assert [event["event"] for event in history].count("start") == 2
    assert len(history) == len(events.splitlines()) - killed
    said = "left out: damaged lines of {}: 1, cut by a crash or a full disk\n"
    assert capsys.readouterr().err == "".join(said.format(log) for log in logs) * killed


INTERRUPTED = "interrupted by {}; what was finished until then is in the log"
SIGNALS = {  # (changed knobs, status, the signal, the steps of the checkpoints)
    "term": (PLAIN, 143, "SIGTERM", []),
    "int": (PLAIN, 130, "SIGINT", []),
    "hup": ({}, 129, "SIGHUP", [6, 8]),
    "usr1": (PLAIN, 138, "SIGUSR1", []),
    "late": ({}, 143, "SIGTERM", [9, 12]),
    "export": (PLAIN, 130, "SIGINT", []),
    "twice": ({}, 130, "SIGINT", [9, 12]),
    "score": (PLAIN, 129, "SIGHUP", []),
}
CASES = [*((fault, 1) for fault in SIGNALS), ("int", 2), ("late", 2), ("export", 2), ("score", 2)]


@pytest.mark.parametrize("fault, ranks", CASES)
def test_a_signal_ends_a_run_with_one_sentence(fault, ranks, knobs, tmp_path):
    """Without checkpoints too, and outside the training. SIGHUP and SIGUSR1 killed a run, Ctrl-C in
    the export lost the finished training, and one during the last validation, which is in no
    step's report, was forgotten."""
    changes, status, name, steps = SIGNALS[fault]
    status = status if ranks == 1 else 1
    result = faulty(fault, 7, knobs | changes, tmp_path, ranks, ranks - 1, status)
    assert result.stderr.count(f"error: {INTERRUPTED.format(name)}\n") == 1, result.stderr
    assert "lost a collective" not in result.stderr and 'pt.py", line' not in result.stderr
    log = (tmp_path / "logs" / "r.txt").read_text()
    assert log.endswith(f"\nerror: KeyboardInterrupt: {name}\n")
    trained = fault in ("export", "twice", "score")
    assert [name for name in FINAL if name in losses(tmp_path)] == FINAL[:trained]
    assert (tmp_path / "logs" / "r.npz").exists() == (fault in ("export", "score"))
    assert sorted(tmp_path.rglob("step_*.npz")) == [tmp_path / step_file(n) for n in steps]


IN_FLIGHT = [(0, 8, 6, 8), (0, 8, 7, 8), (4, 12, 3.5, 5), (0, 4, 3.5, 4)]


@pytest.mark.parametrize("every, steps, at, taken", IN_FLIGHT)
def test_a_signal_in_the_steps_in_flight_stops_the_run(every, steps, at, taken, run_of, tmp_path):
    """As on a GPU, where reports are read two steps later. No validation follows, although a signal
    between two steps (3.5) is not in the last one's report, or that was not read in time."""
    knobs = {"RUN_ID": "r", "CHECKPOINT_EVERY": 100, "VAL_LOSS_EVERY": every, "ITERATIONS": steps}
    training, validated = run_of(val=True, **knobs), []
    training.clock.ahead, step = 2, training.train_step
    training.clock.pause = lambda: validated.append(training.clock.step + 1)

    def signalled(number, settings):
        if number == at:
            os.kill(os.getpid(), signal.SIGTERM)
        report = step(number, settings)
        if number + 0.5 == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return report

    training.train_step = signalled
    train_gpt.handle_signals(training.signals)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        training.train()
    assert kept(tmp_path) == [taken] and validated == [0] * bool(every)
    training.signals = [signal.SIGTERM, signal.SIGHUP]  # of a lost terminal, and its launcher's
    with pytest.raises(KeyboardInterrupt, match="SIGHUP"):
        training.raise_if_stopped()


def test_the_second_interrupt_ends_a_run_at_once():
    """But a launcher repeats SIGTERM, and the first one's checkpoint must be written."""
    received, sent = [], [signal.SIGTERM, signal.SIGTERM, signal.SIGINT]
    train_gpt.handle_signals(received)
    with pytest.raises(KeyboardInterrupt, match="SIGINT"):
        for number in sent:
            os.kill(os.getpid(), number)
        assert received == sent
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second one was only noted")


def test_a_checkpoint_is_one_file_that_any_number_of_ranks_reads(env, tmp_path):
    """Two nodes of two ranks write whole banks. 1 and 4 ranks, on nodes of 1, 2 and 4, restore them
    bit for bit. 5 layers make banks of 10 rows, which a node of 4 ranks pads."""
    changes = {"NUM_LAYERS": 5, "CHECKPOINT_EVERY": 100, "RUN_ID": "r"}
    work("checkpoint", tmp_path, env(**changes, SHARD_RANKS=2), 4)
    assert kept(tmp_path) == [2]
    metadata, tensors = train_gpt.read_checkpoint(tmp_path / step_file(2))
    assert metadata["step"] == 2 and metadata["samples"] == 2
    assert metadata["version"] == train_gpt.CHECKPOINT_VERSION
    shapes, model = {}, made(train_gpt.Hyperparameters.from_env(env(**changes)))
    for name, parameter in model.named_parameters():
        state = ("momentum",) if name in train_gpt.BANKS else ("exp_avg", "exp_avg_sq", "step")
        for kind in ("weight", "average", *state):
            shapes[f"{name}.{kind}"] = () if kind == "step" else parameter.shape
    assert {name: tensor.shape for name, tensor in tensors.items()} == shapes
    assert all(tensor.any() for tensor in tensors.values())
    digests = set()
    for ranks, node in ((1, 1), (4, 4), (4, 1)):
        work("restore", tmp_path, env(**changes, RESUME="auto", SHARD_RANKS=node), ranks)
        for rank in range(ranks):
            found = torch.load(tmp_path / f"restored{rank}-of-{ranks}.pt")
            assert found.keys() == tensors.keys()
            assert all(torch.equal(found[name], tensors[name]) for name in tensors), (ranks, rank)
            digests.add((tmp_path / f"digest{rank}-of-{ranks}").read_text())
    assert len(digests) == 1, "the weights that the forward reads are equal on all ranks"
    for rank in range(4):
        saved = torch.load(tmp_path / f"saved{rank}.pt")
        # The state when it was saved
        assert all(torch.equal(saved[name], tensors[name]) for name in tensors)


def test_nodes_that_share_no_folder_resume(undisturbed, knobs, tmp_path):
    """Fault B17: #399's ranks read their own disks. Rank 0's clock decides, rank 1 has no file. A
    finished run is lengthened, and knobs that change nothing of the experiment change."""
    node0, node1 = tmp_path / "node0", tmp_path / "node1"
    shutil.copytree(undisturbed / "checkpoints", node0 / "checkpoints")
    free = {"MAX_WALLCLOCK_SECONDS": "900", "VAL_LOSS_EVERY": "5", "MICRO_BATCH_TOKENS": "96"}
    result = work("apart", tmp_path, {**knobs, "ITERATIONS": "14", **free}, 2)
    assert "resumed: step:12 " in result.stdout and "error:" not in result.stderr
    assert kept(node0) == [12, 14] and not list(node1.iterdir())
    assert (node0 / "final_model.npz").exists()
    assert result.stdout.count("final_int6_sliding_window_exact") == 1
    assert list(losses(node0)) == complete(13, 14)
    log = (node0 / "logs" / "r.txt").read_text()
    assert log.startswith((ROOT / "train_gpt.py").read_text()), "also in another folder"


def test_a_launcher_brings_a_run_back_by_itself(knobs, tmp_path):
    """One of two ranks is killed. torchrun --max-restarts starts both again."""
    launcher = "-m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc_per_node=2 --max-restarts=1"
    environment = {**knobs, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    result = run([*launcher.split(), FAULTS, "kill", 7, 1], environment, tmp_path)
    assert (tmp_path / "killed").exists() and "resumed: step:6 " in result.stdout
    assert list(losses(tmp_path)) == complete(1, 12)


# 2 as on a GPU, where the last reports are read after the decision
@pytest.mark.parametrize("in_flight", [0, 2])
def test_a_run_that_its_cap_has_ended_takes_no_other_step(in_flight, run_of, tmp_path):
    """The time for GPTQ was measured again, and the pace was known only when it resumed."""
    now, taken = [0.0], []

    def prepared(reserve: float) -> train_gpt.Run:
        capped = dict(MAX_WALLCLOCK_SECONDS=36, ITERATIONS=100000, EVAL_STRIDE=32)
        capped |= {"RUN_ID": "r", "CHECKPOINT_EVERY": 10000, "RESUME": "auto"}
        training = run_of(val=True, **capped)
        training.clock.reserve = reserve
        training.clock.ahead, training.clock.elapsed = in_flight, lambda: now[0]
        step = training.train_step

        def timed(number, settings):
            taken.append(number)
            now[0] += 3.0 if number % 7 == 3 else 1.0
            return step(number, settings)

        training.train_step = timed
        return training

    first, again = prepared(2.2), prepared(0.4)
    first.train()
    first.checkpoints.written.result()
    steps = len(taken)
    assert steps > 10 and kept(tmp_path) == [steps]
    path, state, tensors, _ = train_gpt.find_checkpoint(again.hp, again.comm)
    again.restore(path, state, tensors)
    for each in (train_gpt.Clock.expected_start, train_gpt.Clock.time_left):
        assert each(again.clock, steps) == each(first.clock, steps)
    assert train_gpt.Clock.elapsed(again.clock) == state["seconds"] > 10, "its timer goes on"
    again.train()
    assert taken == list(range(steps))
    again.clock.reserve = 99.0  # of a machine that has become slower
    again.restore(*train_gpt.find_checkpoint(again.hp, again.comm)[:3])
    assert again.clock.reserve == 99.0


# ---- Checkpoints of another run ------------------------------------------------------------------
def test_only_the_same_experiment_continues(undisturbed, knobs, tmp_path):
    """A run that was stopped after the training only exports."""

    def refused(**changes) -> str:
        return sentence(faulty("none", 0, knobs | changes, tmp_path, status=1))

    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    said = refused()
    assert "RUN_ID=r is used by an earlier run" in said
    assert said.endswith("or delete logs/r.txt, .jsonl, .npz and checkpoints/r"), "to begin again"
    (tmp_path / "logs" / "r.npz").unlink()  # as if it had been killed before its export
    for suffix, mark in ((".txt", "\nexporting"), (".jsonl", '\n{"event": "artifact"')):
        log = tmp_path / "logs" / f"r{suffix}"
        log.write_text(log.read_text().rpartition(mark)[0] + "\n")
    again = refused(RESUME="")
    assert "checkpoints/r holds an earlier run: set RESUME=auto to continue it" in again
    changed = refused(MATRIX_LR="0.01", SEED="5")
    unlike = "MATRIX_LR=0.01 instead of 0.025, SEED=5 instead of 1337: set the same"
    assert f"{step_file(12)} is of another run, with {unlike}" in changed
    free = changed.split("only these may change:")[1].split()
    assert {"VAL_LOSS_EVERY", "RUN_ID", "ITERATIONS", "DATA_PATH"} <= set(free)
    result = faulty("none", 0, knobs, tmp_path)
    assert "resumed: step:12 " in result.stdout and "train_loss" not in result.stdout
    assert losses(tmp_path) == losses(undisturbed)


def test_two_runs_of_one_name(knobs, tmp_path, monkeypatch):
    """The second one leaves the log and the unfinished checkpoint of the first."""
    monkeypatch.chdir(tmp_path)
    first = train_gpt.Log(train_gpt.Hyperparameters.from_env(knobs), Comm())
    first("a line")
    partial = Path(f"{step_file(99999999)}.partial")
    partial.parent.mkdir(parents=True)
    partial.touch()
    for changes in (PLAIN, {}):
        second = faulty("none", 0, knobs | changes, tmp_path, status=1)
        assert "RUN_ID=r: another run is writing logs/r.txt" in sentence(second)
    assert Path("logs/r.txt").read_text() == "a line\n" and partial.exists()


# ---- Damage --------------------------------------------------------------------------------------
def damage(file: str) -> None:
    """Flip a bit of a checkpoint."""
    blob = bytearray(Path(file).read_bytes())
    blob[len(blob) // 2] ^= 1
    Path(file).write_bytes(blob)


def test_damaged_checkpoints_are_skipped(undisturbed, knobs, tmp_path, monkeypatch):
    """One must be usable. Those later than the run's own do not count as the newest."""
    shutil.copytree(undisturbed / "checkpoints", tmp_path / "checkpoints")
    monkeypatch.chdir(tmp_path)
    damage(step_file(12))
    shutil.copy(step_file(12), step_file(13))
    damaged = "skipped: checkpoint {} is truncated, altered or of another version: its checksum is "
    expected = [f"{damaged}wrong; copy or delete it".format(step_file(step)) for step in (13, 12)]
    assert resume(knobs) == expected
    hp = train_gpt.Hyperparameters.from_env(knobs)
    checkpoints = train_gpt.Checkpoints(hp, Comm(), mock.Mock())
    for step, left in ((10, [9, 10, 12, 13]), (11, [10, 11, 12, 13]), (14, [13, 14])):
        checkpoints.write({"step": step}, {})
        assert kept(tmp_path) == left
    for step in (13, 14):
        Path(step_file(step)).rename(step_file(step - 4))
    damage(step_file(10))
    with user_error(f"{step_file(10)} .*{step_file(9)} .* delete checkpoints/r to start over"):
        resume(knobs)


def test_no_flipped_byte_and_no_cut_passes(tmp_path):
    """A flipped one is an error, it hides a whole tensor, which the model then misses, or nobody reads it."""
    path, text = tmp_path / "c.npz", json.dumps({"version": train_gpt.CHECKPOINT_VERSION})
    weight = np.arange(3000, dtype=np.float32)  # more than zipfile reads ahead
    np.savez(path, metadata=text, weight=weight, step=np.float32(1))
    blob, (metadata, tensors) = path.read_bytes(), train_gpt.read_checkpoint(path)
    assert metadata == json.loads(text) and tensors["weight"].tolist() == weight.tolist()
    inside = blob.index(weight.tobytes()) + 9  # one byte in the tensor stands for all
    places = [*range(inside), *range(inside + weight.nbytes - 9, len(blob))]
    for end in range(0, len(blob), 61):
        path.write_bytes(blob[:end])
        with user_error("is truncated, altered or of another version: "):
            train_gpt.read_checkpoint(path)
    refused, flips = 0, [(place, flip) for place in places for flip in (6, 1 << place % 8)]
    for place, flip in flips:
        path.write_bytes(blob[:place] + bytes([blob[place] ^ flip]) + blob[place + 1 :])
        try:
            found, again = train_gpt.read_checkpoint(path)
        except UserError:
            refused += 1
            continue
        assert found == metadata
        for name, tensor in again.items():
            assert torch.equal(tensor, tensors[name]) and tensor.dtype == torch.float32
    assert refused > 1.3 * len(places)


class Code:
    """An array with this is stored by pickle; reading it would make a folder."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


OTHER_MODEL = "the checkpoint has {}.weight with shape .*, not "
SMALL = {"qo_bank.weight": torch.ones(3)}
WRONG = f"{step_file(12)} is truncated, altered or of another version: .* to start ov"
FORGED = {  # (sentence, change of the metadata and the tensors, or what writes another file)
    "a text": (WRONG, lambda *_: Path(step_file(12)).write_bytes(b"\x80\x04\x95pickle" * 9)),
    "code": (WRONG, lambda *_: np.savez(step_file(12), metadata=np.array(Code(), dtype=object))),
    "version": ("another version: version 9; copy", lambda data, _: data.update(version=9)),
    "a tensor less": (OTHER_MODEL.format("tok_emb"), lambda _, found: found.pop("tok_emb.weight")),
    "a small bank": (OTHER_MODEL.format("qo_bank"), lambda _, found: found.update(SMALL)),
    "no knobs": ("is of another run,", lambda data, _: data.update(hyperparameters={})),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_checkpoint_that_does_not_fit_is_refused(kind, undisturbed, knobs, tmp_path, monkeypatch):
    """Although the file is whole. Nothing in it is executed."""
    (tmp_path / "checkpoints" / "r").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    metadata, tensors = train_gpt.read_checkpoint(undisturbed / step_file(12))
    part, change = FORGED[kind]
    change(metadata, tensors)
    if not Path(step_file(12)).exists():
        np.savez(step_file(12), metadata=json.dumps(metadata), **tensors)
    with user_error(part):
        resume(knobs)
    assert not Path("executed").exists()


def test_a_full_disk_does_not_end_the_run(undisturbed, knobs, tmp_path):
    """The operating system refuses files over a limit that only the checkpoints exceed."""
    files = ("logs/r.txt", "final_model.npz", step_file(12))
    *sizes, checkpoint = ((undisturbed / name).stat().st_size for name in files)
    limit = max(sizes) + 20_000
    assert checkpoint > limit
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    result = run(script_after(limited), knobs, tmp_path)
    assert result.stdout.count("note: there is no checkpoint of step ") == 4
    assert "File too large" in result.stdout
    assert losses(tmp_path) == losses(undisturbed) and not list(tmp_path.rglob("*.partial"))


# No later loss shows that of the last step, 12. Step 6 is that before a checkpoint.
@pytest.mark.parametrize("step, ranks, steps", [(7, 1, [3, 6]), (5, 1, [3]), (11, 2, [6, 9])])
def test_a_loss_that_is_not_finite_ends_the_run(step, ranks, steps, knobs, tmp_path):
    result = faulty("nan", step, knobs, tmp_path, ranks, status=1)
    assert f"error: the training loss of step {step + 1} is nan: lower MATRIX_LR" in result.stderr
    assert kept(tmp_path) == steps and not (tmp_path / "final_model.npz").exists()


# ---- Clocks --------------------------------------------------------------------------------------
def test_a_clock_that_jumps_ends_the_run_cleanly(knobs, tmp_path):
    """Fault B20: a machine's sleep and calibration count; all scores, no valid submission."""
    endless = {"MAX_WALLCLOCK_SECONDS": "600", "ITERATIONS": "100000", "GPTQ_BATCHES": "1"}
    result = faulty("jump", 7, knobs | endless, tmp_path, status=1)
    slow = (
        r"error: training took (1\d{3}\.\d\d) s, over the limit of 600: this run is not a valid s"
    )
    seconds = re.match(slow, sentence(result))[1]
    stopped = r"(?m)^stopping_early: wallclock_cap train_time:(1\d{6})ms step:8/"
    calibrated = r"(?m)^calibration: 1 batches took (\d+)ms train_time:(\d+)ms"
    milliseconds = re.search(stopped, result.stdout)[1]
    took, total = re.search(calibrated, result.stdout).groups()
    assert int(milliseconds) + int(took) - 2 <= int(total)
    assert list(losses(tmp_path)) == complete(1, 8)
    assert float(seconds) == pytest.approx(int(total) / 1000, abs=0.006)


def test_seconds_between_checkpoints(hyperparameters, tmp_path, monkeypatch):
    """Of which the last was at step 10, 100 seconds into the run."""
    monkeypatch.chdir(tmp_path)
    for every, expected in (("60s", [False, True]), ("60", [False, False]), ("", [False, False])):
        hp = hyperparameters(CHECKPOINT_EVERY=every, RUN_ID="a")
        checkpoints = train_gpt.Checkpoints(hp, Comm(), mock.Mock())
        checkpoints.last = {"step": 10, "seconds": 100.0}
        assert [checkpoints.due(69, seconds) for seconds in (159.9, 160.0)] == expected
        assert checkpoints.due(70, 0.0) == (every == "60")
    # On a GPU, whose loss is read later, weights that are not finite may be due
    checkpoints.write({"step": 70}, {"x": torch.tensor([1.0, np.nan])})
    said = "note: there is no checkpoint of step 70: x is not finite"
    assert checkpoints.log.call_args == mock.call(said)


def test_the_step_does_not_wait_for_the_disk(run_of, tmp_path, monkeypatch):
    """The file holds the state when `save` returned. The next one waits, so there is one copy."""
    training = run_of(CHECKPOINT_EVERY=1, RUN_ID="r")
    real, disk, states = train_gpt.replacing, threading.Event(), []
    monkeypatch.setattr(train_gpt, "replacing", lambda path: (disk.wait(20), real(path))[1])
    for step in range(2):
        training.train_step(step, SETTINGS)
        states.append({name: tensor.clone() for name, tensor in training.tensors().items()})
        if step == 0:
            training.save(1)
    assert not training.checkpoints.written.done() and not list(tmp_path.rglob("*.npz"))
    second = threading.Thread(target=training.save, args=(2,))
    second.start()
    second.join(0.2)
    assert second.is_alive() and not training.checkpoints.written.done()
    disk.set()
    second.join()
    training.checkpoints.written.result()
    for step, wanted in enumerate(states, 1):
        _, written = train_gpt.read_checkpoint(tmp_path / step_file(step))
        assert set(written) == set(wanted)
        assert all(torch.equal(written[name], wanted[name]) for name in wanted)
    assert not torch.equal(states[0]["qo_bank.weight"], states[1]["qo_bank.weight"])


def test_an_error_waits_for_the_checkpoint_that_is_being_written(run_of, tmp_path, monkeypatch):
    """Of several ranks the process ends without its threads; its launcher sends SIGTERM."""
    training, real = run_of(CHECKPOINT_EVERY=1, RUN_ID="r"), train_gpt.replacing
    failed = threading.Event()

    def slow(path):
        failed.wait(60)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        return real(path)

    def failing(run, log):
        train_gpt.handle_signals()
        monkeypatch.setattr(train_gpt, "replacing", slow)
        run.save(1)
        failed.set()
        raise UserError("another rank has died")

    monkeypatch.setattr(train_gpt, "prepare", lambda *_: training)
    monkeypatch.setattr(train_gpt, "train_and_export", failing)
    with user_error("another rank has died"):
        train_gpt.train_and_score(training.hp)
    assert kept(tmp_path) == [1]


def test_a_report_is_read_after_its_copy(run_of):
    training, values = run_of(), torch.full((3,), float("nan"))
    # A fake event of a copy that arrives late
    event = SimpleNamespace(synchronize=lambda: values.copy_(torch.tensor([2.0, 7.0, 1.0])))
    training.in_flight.append((10, SETTINGS, values, event))
    training.read_reports()
    assert training.clock.seconds == 7.0 and training.stopping

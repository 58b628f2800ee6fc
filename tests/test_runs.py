"""tools/runs.py: logs in both formats."""

import json
import re

import pytest

from conftest import ROOT, user_error
from lib import runs
from sample_logs import LATER, LEGAL, PUBLISHED, logs_of, written


def test_published_logs_are_read(tmp_path):
    found = runs.read_run(written(tmp_path, PUBLISHED))
    assert (found.seed, found.ranks, found.steps, found.train_seconds) == (42, 8, 7179, 600.128)
    assert found.score == runs.Score(1.89385556, 1.12165091, 74.066, None, None)
    assert found.score_name == "final_int6_sliding_window"
    assert (found.before_export.bpb, found.after_export.bpb) == (1.1369, 1.14518023)
    assert (found.code_bytes, found.model_bytes, found.total_bytes) == (89458, 15887928, 15977386)
    assert (found.train[-1].seconds, found.val[0].fields["val_bpb"]) == (584.853, 4.1046)
    assert found.configuration["ITERATIONS"] == "9000"
    learning = runs.read_run(written(tmp_path, PUBLISHED + LEGAL))
    assert learning.score == runs.Score(1.88976776, 1.11922988, 410.268, None, None)


def test_later_published_logs_are_read(tmp_path):
    found = runs.read_run(written(tmp_path, LATER))
    assert (found.seed, found.ranks, found.steps, found.train_seconds) == (42, 8, 4945, 599.592)
    assert found.score == runs.Score(2.31944212, 1.05989454, 508.785, None, None)
    bits = (found.before_export.bpb, found.after_export.bpb, found.val[-1].fields["val_bpb"])
    assert bits == (1.06395844, 1.07254371, 1.0756)
    sizes = (found.code_bytes, found.total_bytes, found.train[-1].seconds)
    assert sizes == (31999, 15897259, 540.0)
    assert found.configuration == {"MATRIX_LR": "0.026", "WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    "names", ["int6_roundtrip int6_banded int6_ttt_sgd", "quant_roundtrip sliding_window"]
)
def test_the_last_pass_is_the_score(names, tmp_path):
    """Also a banded one, and a baseline's with its stride in the middle."""
    text = "step:9/9 val_loss:2.1 val_bpb:1.2 train_time:9ms\n"
    for bits, name in zip((1.1, 1.08, 1.07), names.split(), strict=False):
        stride = "stride:64 " * (name == "sliding_window")
        text += f"final_{name}_exact {stride}val_loss:2.0 val_bpb:{bits}\n"
        found = runs.read_run(written(tmp_path, text))
        assert (found.score.bpb, found.after_export.bpb) == (bits, 1.1)
        assert found.score_name == f"final_{name}"


def test_our_log_is_read_whole(swept):
    path = logs_of(swept)[0]
    found = runs.read_run(path)
    events = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    start, last = events[0], events[-3]
    artifact = next(event for event in events if event["event"] == "artifact")
    assert found.source == (ROOT / "train_gpt.py").read_bytes()
    assert found.ranks == 1 and found.device.startswith("CPU")
    assert found.started == start["started"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found.started)
    names = ("val_loss", "val_bpb", "eval_seconds", "val_tokens", "val_bytes")
    assert found.score == pytest.approx(tuple(last[name] for name in names), abs=1e-3)
    sizes = {"model_bytes": found.model_bytes, "code_bytes": found.code_bytes}
    assert artifact.items() >= sizes.items()
    assert found.settings["NUM_LAYERS"] == "3"
    assert "NUM_LAYERS" in found.changed and "MUON_WD" not in found.changed
    assert [point.step for point in found.train] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12]
    assert [point.step for point in found.val] == [0, 4, 8, 12]
    assert found.versions["torch"] == start["versions"].split("torch ")[1].split(",")[0]
    assert "constriction" in found.versions


def test_steps_that_a_resumed_run_did_not_reach_again_do_not_count(tmp_path):
    lines = [f"step:{step}/9 train_loss:{6 - step} train_time:{step}00ms" for step in range(1, 5)]
    lines.append("resumed: step:1 train_time:100ms from:checkpoints/r/step_00000001.npz")
    lines.append("step:2/9 train_loss:4.5 train_time:210ms")
    found = runs.read_run(written(tmp_path, "\n".join(lines)))
    losses = [(point.step, point.fields["train_loss"]) for point in found.train]
    assert losses == [(1, 5.0), (2, 4.5)]
    assert (found.steps, found.resumed) == (2, 1)


RESUMED = "resumed: step:12 train_time:100ms from:checkpoints/t/step_00000012.safetensors\n"


def test_our_log_is_finished_by_its_last_line(swept, tmp_path):
    """A run that dies in its final evaluation has scores, but not the one that counts."""
    text = logs_of(swept)[0].read_text()
    whole = runs.read_run(logs_of(swept)[0])
    place = text.rindex("final_int6_sliding_window_exact")
    died, rest = text[:place], text[place:]
    partial = "final_int6_sliding_window_partial val_loss:2.0 val_bpb:1.1 val_tokens:9\n"
    for cut in (died, died + partial, text[: text.rindex("finished: ")], text + RESUMED + partial):
        with pytest.raises(runs.Unfinished, match="did not finish"):
            _ = runs.read_run(written(tmp_path, cut)).score
    assert "partial" not in str(runs.read_run(written(tmp_path, died + partial)).scores)
    assert not runs.read_run(written(tmp_path, text + RESUMED)).scores
    resumed = died + partial + RESUMED + died[died.rindex("final_average") :] + rest
    assert runs.read_run(written(tmp_path, resumed)).score == whole.score


def test_a_group_has_one_kind_of_score(tmp_path):
    written(tmp_path, PUBLISHED)
    written(tmp_path, PUBLISHED.replace("seed:42", "seed:1") + LEGAL, "train_seed1.log")
    with user_error("have the scores legal_ttt and final_int6_sliding_window"):
        runs.read_group(str(tmp_path))


def test_knobs_without_effect_are_no_other_configuration(swept, tmp_path):
    first, second = map(runs.read_run, logs_of(swept))
    text, quiet = re.subn(
        r"(?m)^. (VAL_LOSS_EVERY|RESUME|TRAIN_LOG_EVERY)=.*", r"* \1=9", second.path.read_text()
    )
    assert quiet == 3 and not runs.differences([first, runs.read_run(written(tmp_path, text))])


@pytest.mark.parametrize("steps, warned", [(6700, False), (6000, True)])
def test_runs_of_a_group_with_other_steps_are_a_warning(steps, warned, tmp_path):
    other = PUBLISHED.replace("7179", str(steps)).replace("step:7000", "step:5000")
    written(tmp_path, other.replace("seed:42", "seed:1"), "train_seed1.log")
    written(tmp_path, PUBLISHED)
    table = runs.table(runs.read_group(str(tmp_path)))
    assert (f"warning: these runs have {steps} to 7179 steps" in table) == warned


def test_what_is_not_a_single_run_is_refused(tmp_path):
    for name, text, part in (
        ("a.log", PUBLISHED + PUBLISHED, "holds several runs"),
        ("a.log", "hello\n", "neither steps nor scores"),
        ("x.jsonl", "{}", "give x.txt instead"),
    ):
        with user_error(part):
            runs.read_run(written(tmp_path, text, name))
    with user_error("cannot read"):
        runs.read_run(tmp_path / "none.txt")


def test_damaged_lines_are_left_out_and_said(swept, tmp_path, capsys):
    """In a log of ours the last line, if it has no end; events glued to one; a step glued to a line."""
    log = logs_of(swept)[0]
    text, whole = log.read_text(), runs.read_run(log).train
    place = text.rindex("\nstep:12/12 train_loss")
    glued = text[: place + 27] + "started: now" + text[place:]
    said = "left out: damaged lines of {}: {}, cut by a crash or a full disk\n"
    for damaged, points in ((text[: place + 30], whole[:-1]), (glued, whole)):
        cut = written(tmp_path, damaged, f"{len(points)}.txt")  # each is said once
        assert runs.read_run(cut).train == points
        assert capsys.readouterr().err == said.format(cut, 1)
    lines = log.with_suffix(".jsonl").read_bytes().splitlines(keepends=True)
    events = tmp_path / "a.jsonl"
    events.write_bytes(b"".join([*lines[:2], b'{"event": "tr', *lines[2:], b"[1]\n", b"\0\xff\n"]))
    assert len(runs.read_events(events)) == len(lines) - 1
    assert capsys.readouterr().err == said.format(events, 3)
    runs.read_run(written(tmp_path, PUBLISHED.rstrip()))  # published ones may end so
    assert not capsys.readouterr().err

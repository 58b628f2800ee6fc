"""tools/published.py: a run beside the published losses of a record."""

import json
import math

import pytest

import published
import runs
from conftest import ROOT, run, user_error
from sample_logs import written

CURVES = json.loads(published.CURVES.read_text())
FINAL = "final_int6_roundtrip_exact val_loss:1.93000000 val_bpb:1.14300000\n"


def log_of(name: str, seed: str, change=lambda step, nats: nats, end=FINAL, **settings) -> str:
    """A log of this script with a record's losses, each changed."""
    settings = {"VOCAB_SIZE": published.VOCABULARIES[name], "SHUFFLE_SEED": 0, **settings}
    lines = ["hyperparameters (* differs from the default)"]
    lines += [f"* {name}={value}" for name, value in settings.items()]
    for step, kind, nats, _, seconds in CURVES[name][seed]["curve"]:
        rate = published.RATES[name](step, seconds) if step and seconds else 1.0
        tail = f"train_time:{1000 * (seconds or 0):.0f}ms step_avg:80.00ms lr_scale:{rate:.4f}"
        extra = "" if kind == "train" else " val_bpb:1.1"
        lines.append(f"step:{step}/9000 {kind}_loss:{change(step, nats):.4f}{extra} {tail}")
    return "\n".join(lines) + "\n" + end


def followed(tmp_path, name: str, text: str) -> tuple[bool, str]:
    return published.follow(runs.read_run(written(tmp_path, text)), name)


@pytest.mark.parametrize("name", ["399", "1493"])
def test_each_seed_of_a_record_is_on_its_track(tmp_path, name):
    for number, seed in enumerate(CURVES[name]):
        ok, text = followed(tmp_path / str(number), name, log_of(name, seed))
        assert ok and "on the published track in all" in text, text


def test_a_run_that_leaves_the_track_is_told_where(tmp_path):
    worse = log_of("399", "42", lambda step, nats: nats + 0.1 * (step >= 400))
    ok, text = followed(tmp_path, "399", worse)
    assert not ok
    assert "behind the published track from step 400 (train) on" in text
    assert "+0.1" in text and text.count("  behind") > 30
    better = log_of("399", "42", lambda step, nats: nats - 0.1 * (step >= 400))
    ok, text = followed(tmp_path / "b", "399", better)
    assert ok and " of them ahead" in text and "  ahead" in text


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_behind(tmp_path, value):
    text = log_of("399", "42", lambda step, nats: value if step == 4000 else nats)
    ok, report = followed(tmp_path, "399", text)
    assert not ok and "behind the published track from step 4000 (" in report


def test_limits_follow_the_seeds(tmp_path):
    """Twice the range of the seeds, or twice a least one."""
    curves = published.read_curves("399")
    for point in (("train", 200), ("val", 3000)):
        spread = max(curves[point].losses) - min(curves[point].losses)
        limit = 2 * max(spread, published.LEAST_RANGE[point[0]])
        for factor, expected in ((0.9, True), (1.1, False)):
            moved = {point[1]: curves[point].mean + factor * limit}
            text = log_of("399", "42", lambda step, nats: moved.get(step, nats))  # noqa: B023
            # Both losses of step 3,000 are moved, and only one of them is asked for.
            rows = published.rows_of(runs.read_run(written(tmp_path, text)), "399")
            (row,) = [row for row in rows if (row.kind, row.step) == point]
            assert (row.off == 0) == expected


def test_training_losses_need_the_same_tokens(tmp_path):
    ok, text = followed(tmp_path, "399", log_of("399", "42", SHUFFLE_SEED=1))
    assert ok and "not compared: other tokens" in text
    assert "in all 9 compared losses" in text


def test_another_validation_text_is_not_compared(tmp_path):
    there = CURVES["399"]["42"]["curve"][34][2]
    text = log_of("399", "42").replace(f"val_loss:{there:.4f}", "val_loss:9.0000")
    for tokens, expected in ((62_021_632, False), (1_000_000, True)):
        start = f"model_params:9 val_tokens:{tokens} val_bytes:9 train_shards:1\nstep:0/"
        ok, report = followed(tmp_path, "399", text.replace("step:0/", start, 1))
        assert ok is expected
        assert ("not compared: another validation text" in report) is expected


def test_another_learning_rate_is_not_compared(tmp_path):
    """A faster machine begins its warmdown at a later step."""
    text = log_of("399", "42")
    faster = text.replace("lr_scale:0.6", "lr_scale:0.9")
    assert faster != text
    ok, text = followed(tmp_path, "399", faster)
    assert ok and "not compared: learning rate 0.9" in text


def test_a_running_log_is_compared(tmp_path):
    """Its last validation is not the run's last one."""
    head = "\n".join(log_of("399", "42", end="").splitlines()[:25]) + "\n"
    ok, text = followed(tmp_path, "399", head)
    assert ok and "in all" in text and "  1000 val" in text and "\n    -1 " not in text


@pytest.mark.parametrize(
    "name, text, part",
    [
        ("399", log_of("399", "42", VOCAB_SIZE=8192), "#399 has 1024 pieces"),
        ("2135", log_of("399", "42"), "#2135 has 8192 pieces"),
        ("2135", log_of("2135", "42"), "it trains on other tokens and validates flat batches"),
        ("399", "step:77/9000 train_loss:3.0 train_time:1ms\n", "no step is in both"),
        ("399", "step:200/9000 train_loss:3.0 train_time:1ms\n", "other tokens"),
    ],
)
def test_what_cannot_be_compared_is_an_error(tmp_path, name, text, part):
    with user_error(part):
        followed(tmp_path, name, text)


def test_the_program(tmp_path):
    """Exit status 0 on the track, 3 behind it, 2 without a second side."""
    compare = ROOT / "tools" / "compare.py"
    log = written(tmp_path, log_of("1493", "42"))
    result = run([compare, log, "--published", "1493"], {}, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "beside #1493 (published, 8 x H100)" in result.stdout
    worse = written(tmp_path, log_of("1493", "42", lambda step, nats: nats + 1), "worse.txt")
    assert run([compare, worse, "--published", "1493"], {}, tmp_path).returncode == 3
    for words in ([log], [log, log, "--published", "399"]):
        result = run([compare, *words], {}, tmp_path)
        assert result.returncode == 2 and "either the logs B or --published" in result.stderr

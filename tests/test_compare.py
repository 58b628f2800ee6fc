"""tools/compare.py: significance, and a run beside the published losses of a record."""

import math
import re
import statistics
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import compare
from conftest import ROOT, assert_mistake, run, user_error
from lib import html_page, record_curves, runs
from sample_logs import CURVES, PUBLISHED, group, log_of, logs_of, written


def test_welch_is_the_textbook_one(tmp_path):
    a, b = [1.90, 1.91, 1.92, 1.905], [1.88, 1.882, 1.885]
    test = compare.welch(a, b, 0.005)
    variance = [np.var(side, ddof=1) / len(side) for side in (a, b)]
    assert test.t == pytest.approx((np.mean(a) - np.mean(b) - 0.005) / sum(variance) ** 0.5)
    df = sum(variance) ** 2 / (variance[0] ** 2 / 3 + variance[1] ** 2 / 2)
    assert test.df == pytest.approx(df)
    cauchy = 0.5 - np.arctan(21) / np.pi  # t with one degree of freedom
    assert compare.paired([1.9, 1.92], [1.8, 1.81]).p == pytest.approx(cauchy)
    assert compare.welch([1.0], b) is None and compare.welch([1.0, 1.0], [0.5, 0.5]) is None


@pytest.mark.parametrize(
    "losses, counts, part",
    [
        ({1: 1.880, 2: 1.8802, 3: 1.8801}, True, "\nA record: B is better by 0.0199 nats"),
        ({1: 1.896, 2: 1.8962, 3: 1.8961}, False, "better by 0.0039 nats, and at least 0.005"),
        ({1: 1.910, 2: 1.9102, 3: 1.9101}, False, "worse by 0.0101 nats"),
        ({1: 1.880, 2: 1.9, 3: 1.886}, False, "it may be chance (p = "),
        # Better at all with p = 0.0006, by more than the margin with 0.02
        ({1: 1.8938, 2: 1.8944, 3: 1.8935}, False, "large enough, but it may be chance (p = 0.0"),
        ({1: 1.880}, False, "3 and 1 seeds cannot show it"),
    ],
)
def test_the_rule_for_records(tmp_path, losses, counts, part):
    a, b = group(tmp_path / "a", {1: 1.9, 2: 1.9001, 3: 1.8999}), group(tmp_path / "b", losses)
    found, text = compare.report(a, b)
    assert found is counts and part in text
    nats = statistics.fmean(losses.values()) - 1.9
    assert f"\nB - A: {nats:+.5f} nats per token, {nats / 1.7:+.5f} bits per byte\n" in text
    assert ("paired by seed (1 2 3)" in text) == (len(losses) == 3)


@pytest.mark.parametrize(
    "b, conclusion",
    [
        ([1.85, 1.87, 1.89], "a gain was seen (Welch's p = {:.4g}; a gain needs p < 0.05)"),
        # By pairs p is 0.0067
        ([1.89, 1.93, 1.96], "no gain was seen (Welch's p = {:.4g}; a gain needs p < 0.05)"),
        ([1.8], "no verdict, as a test needs two unequal runs of each"),
    ],
)
def test_the_p_of_welch_decides(b, conclusion, tmp_path):
    """That of pairs may be lower."""
    a = [1.9, 1.95, 1.97]
    sides = [group(tmp_path / name, dict(enumerate(x))) for name, x in (("a", a), ("b", b))]
    test = compare.welch(*([run.score.loss for run in side] for side in sides))
    assert len(b) < 3 or compare.paired(a, b).p < compare.LEVEL
    _, text = compare.report(*sides)
    assert f"\nbetter at all: {conclusion.format(test and test.p)}\n" in text


def test_pairs_are_of_equal_seeds_in_any_order_of_the_logs():
    """seed10 comes before seed2, and a seed of one side alone is left out."""
    losses = [1.9, 1.95, 1.97, 1.8], [1.85, 1.93, 1.91]
    a, b = map(made, losses)

    def paired(*sides) -> list[str]:
        lines = compare.tests_of(*sides, *([run.score.loss for run in side] for side in sides))
        return [line for line in lines if "paired" in line]

    test = compare.paired(losses[0][:3], losses[1])
    assert f"(0 1 2): t = {test.t:.2f}, df = 2, p = {test.p:.4g}" in paired(a, b)[0]
    assert paired(a, b[::-1]) == paired(a[::-1], b) == paired(a, b)


def test_unequal_seeds_are_told(tmp_path):
    """Means of three seeds beside two were 0.0316 nats apart, which was the third seed's."""
    sides = {"a": {1: 1.9, 2: 1.92, 3: 2.0}, "b": {1: 1.8998, 2: 1.9196}, "c": {4: 1.8, 5: 1.9}}
    a, b, c = (group(tmp_path / name, losses) for name, losses in sides.items())
    told = "the seeds are unequal: A has 1 2 3, B 1 2; on seed 1 2 alone B - A is -0.00030 nats per token"
    assert f"\nnote: {told}\n" in compare.report(a, b)[1]
    assert "A has 1 2 3, B 4 5, none of them in both\n" in compare.report(a, c)[1]
    assert "seeds are unequal" not in compare.report(b, group(tmp_path / "d", {2: 1.8, 1: 1.9}))[1]
    page = tmp_path / "x.html"
    html_page.write(page, [str(tmp_path / "a"), str(tmp_path / "b")])
    assert f"But {told}." in " ".join(page.read_text().split())


def test_other_tokenizers_are_compared_by_bits(tmp_path):
    a = group(tmp_path / "a", {1: 1.9, 2: 1.91}, rate=1.7)
    b = group(tmp_path / "b", {1: 2.4, 2: 2.41}, rate=2.2)
    of_a, of_b, note = compare.losses(a, b)
    assert of_a == pytest.approx([1.9 / 1.7 * 2.2, 1.91 / 1.7 * 2.2], rel=1e-6)
    assert of_b == [2.4, 2.41] and "tokenizers differ" in note


def test_logs_that_are_no_group(tmp_path, swept):
    first, slow = logs_of(swept)[0], logs_of(swept, "0.005")[0]
    unfinished = written(tmp_path, PUBLISHED[: PUBLISHED.index("DIAG")])
    for logs, part in (
        (f"{slow},{first}", "MATRIX_LR=0.005 and 0.025"),
        (f"{first},{first}", "seed 1 more than once"),
        (f"{tmp_path}/no*", "there are no logs in"),
        (f"{unfinished}", "did not finish"),
        (f"{first},nothing.log", "cannot read"),
    ):
        with user_error(part):
            runs.read_group(logs)


def test_another_text_is_not_compared(tmp_path, swept):
    """Also with other tokenizers the text must be the same."""
    mixed = group(tmp_path / "a", {1: 1.9}) + group(tmp_path / "b", {2: 1.9}, rate=1.7005)
    with user_error("the logs of one side were scored on different texts or tokenizers"):
        compare.losses(mixed, mixed[:1])
    first, second = (runs.read_run(log) for log in logs_of(swept))
    assert len(compare.losses([first], [second])[0]) == 1
    for what in ("tokens", "bytes"):
        other = re.sub(rf"val_{what}:\d+", f"val_{what}:77", second.path.read_text())
        with user_error(f"were scored on 77 and .* {what}: score"):
            compare.losses([runs.read_run(written(tmp_path, other))], [first])


def test_a_failed_run_is_left_out(tmp_path, capsys):
    """A run without a score, and one that ended before its first step."""
    group(tmp_path / "a", {1: 1.9, 2: 1.91})
    cut = PUBLISHED.replace("seed:42", "seed:3")
    failed = written(tmp_path / "a", cut[: cut.index("DIAG")], "train_seed3.log")
    dead = written(tmp_path / "a", cut[: cut.index("step:0")], "train_seed4.log")
    assert [found.seed for found in runs.read_group(str(tmp_path / "a"))] == [1, 2]
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"left out: {failed} has no final score: the run did not finish")
    assert second.startswith(f"left out: {dead} has neither steps nor scores")


def test_help_needs_no_scipy(tmp_path):
    (tmp_path / "scipy.py").write_text("raise ModuleNotFoundError('No module named it')")
    broken = {"PYTHONPATH": str(tmp_path)}
    for program in ("compare", "ablate"):
        result = run([ROOT / "tools" / f"{program}.py", "--help"], broken, tmp_path)
        assert result.stdout.startswith("usage: ")
    group(tmp_path / "a", {1: 1.9, 2: 1.91})
    group(tmp_path / "b", {1: 1.8, 2: 1.81})
    command = [ROOT / "tools" / "compare.py", "a", "b"]
    assert_mistake(command, tmp_path, "error: No module named it: run ", **broken)


def test_the_program(tmp_path):
    """Exit status 3: equal, or behind a record's track."""
    group(tmp_path / "a", {1: 1.9, 2: 1.91, 3: 1.92})
    written(tmp_path, log_of("1493", "42"), "good.txt")
    written(tmp_path, log_of("1493", "42", lambda step, nats: nats + 1), "worse.txt")
    one = "a/train_seed1.log"
    for words, status, part in (
        ("a a/*.log", 3, "B is equal to A: both are the same runs"),
        (f"a {one}", 1, f"error: {tmp_path / one} is on both sides: leave it out of one of them"),
        ("good.txt --record 1493", 0, "beside #1493 (published, 8 x H100)"),
        ("worse.txt --record 1493", 3, "behind the published track"),
    ):
        command = [ROOT / "tools" / "compare.py", *words.split()]
        result = run(command, {}, tmp_path, status=status)
        assert part in result.stdout + result.stderr and "Welch" not in result.stdout


def test_logs_are_found_by_folder_pattern_and_list(tmp_path):
    names = ("a1.txt", "a2.txt", "a[1].txt", "b,1.txt", "c.log")
    names = [written(tmp_path, PUBLISHED, name) for name in names]
    for text, expected in (
        (f"{tmp_path}/a?.txt", names[:2]),
        (f"{tmp_path}", names),
        (f"{tmp_path}/c.log,{tmp_path}/a?.txt", [names[4], *names[:2]]),
        (f"{tmp_path}/a[1].txt", [names[2]]),
        (f"{tmp_path}/b,1.txt", [names[3]]),
        ("nothing.txt", [Path("nothing.txt")]),
    ):
        assert runs.find_logs(text) == expected


def made(losses: list[float]) -> list[runs.Run]:
    """Runs with these final losses."""
    scores = [SimpleNamespace(loss=x, bpb=x / 2, tokens=9, nbytes=None) for x in losses]
    return [SimpleNamespace(score=score, seed=seed) for seed, score in enumerate(scores)]


@pytest.mark.parametrize("score", ["nan", "inf", "0.0"])
def test_a_score_that_is_not_finite_is_an_error(score, tmp_path):
    """Every comparison with nan is false, so it would have counted as a record."""
    log = written(tmp_path, PUBLISHED.replace("1.12165091", score))
    with user_error(f"has the score {score}: it cannot be compared"):
        runs.read_group(str(log))


# ---- Beside the published losses of a record -----------------------------------------------------
def followed(tmp_path, name: str, text: str) -> tuple[bool, str]:
    return record_curves.follow(runs.read_run(written(tmp_path, text)), name)


@pytest.mark.parametrize("name", ["399", "1493"])
def test_each_seed_of_a_record_is_on_its_track(tmp_path, name):
    for number, seed in enumerate(CURVES[name]):
        ok, text = followed(tmp_path / str(number), name, log_of(name, seed))
        assert ok and "on the published track in all" in text, text


@pytest.mark.parametrize(
    "moved, on_track, told",
    [
        (0.1, False, r"(?s)(\+0\.1\d+  behind.*){20}\nbehind .* from step 400 \(train\) on"),
        (-0.1, True, r"(?s)  ahead\n.* of them ahead"),
        (math.nan, False, r"behind the published track from step 400 \("),
        (math.inf, False, r"behind the published track from step 400 \("),
    ],
)
def test_a_run_that_leaves_the_track_is_told_where(tmp_path, moved, on_track, told):
    log = log_of("399", "42", lambda step, nats: nats + (step >= 400 and moved))
    ok, text = followed(tmp_path, "399", log)
    assert ok is on_track and re.search(told, text), text


def test_limits_follow_the_seeds(tmp_path):
    """Twice the range of the seeds, or twice a least one."""
    curves = record_curves.read_curves("399")
    for point in (("train", 200), ("val", 3000)):
        spread = max(curves[point].losses) - min(curves[point].losses)
        limit = 2 * max(spread, record_curves.LEAST_RANGE[point[0]])
        for factor, expected in ((0.9, True), (1.1, False)):
            moved = {point[1]: curves[point].mean + factor * limit}
            text = log_of("399", "42", lambda step, nats: moved.get(step, nats))  # noqa: B023
            # Both losses of step 3,000 are moved, and only one of them is asked for.
            rows = record_curves.rows_of(runs.read_run(written(tmp_path, text)), "399")
            (row,) = [row for row in rows if (row.kind, row.step) == point]
            assert (row.off == 0) == expected


def test_another_validation_text_is_not_compared(tmp_path):
    there = CURVES["399"]["42"]["curve"][34][2]
    text = log_of("399", "42").replace(f"val_loss:{there:.4f}", "val_loss:9.0000")
    for tokens, expected in ((62_021_632, False), (1_000_000, True)):
        start = f"model_params:9 val_tokens:{tokens} val_bytes:9 train_shards:1\nstep:0/"
        ok, report = followed(tmp_path, "399", text.replace("step:0/", start, 1))
        assert ok is expected
        assert ("not compared: it was scored on another text" in report) is expected


@pytest.mark.parametrize(
    "kind, old, new, why",
    [
        # A lower loss that is not the model's would be ahead of the track.
        (" val ", "CANONICAL_MASK=False", "CANONICAL_MASK=True", "it has CANONICAL_MASK=True"),
        (" val ", "NGRAM_TILT=False", "NGRAM_TILT=True", "it has NGRAM_TILT=True"),
        (" val ", "EVAL_MODE=sliding", "EVAL_MODE=banded", "it has EVAL_MODE=banded"),
        (" train ", "SHUFFLE_SEED=0", "SHUFFLE_SEED=1", "it trained on other tokens"),
        # A faster machine begins its warmdown at a later step.
        ("0.9", "lr_scale:0.6", "lr_scale:0.9", "its learning rate is 0.9"),
    ],
)
def test_losses_of_another_kind_are_not_compared(tmp_path, kind, old, new, why):
    text = log_of("399", "42", CANONICAL_MASK=False, NGRAM_TILT=False, EVAL_MODE="sliding")
    assert old in text
    ok, text = followed(tmp_path, "399", text.replace(old, new))
    lines = [line for line in text.splitlines() if kind in line and "compared" in line]
    assert ok and all(f"not compared: {why}" in line for line in lines)
    assert lines and "on the published track in all" in text, "the other losses"


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

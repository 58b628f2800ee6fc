"""tools/compare.py: significance."""

import re
import statistics
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import compare
import runs
from conftest import ROOT, run, user_error
from sample_logs import PUBLISHED, copy_of, logs_of, written


def group(folder: Path, values: dict[int, float], rate: float = 1.7) -> list:
    """Logs that look published, with these losses by seed."""
    for seed, loss in values.items():
        log = PUBLISHED.replace("seed:42", f"seed:{seed}")
        log = log.replace("1.89385556 val_bpb:1.12165091", f"{loss:.8f} val_bpb:{loss / rate:.8f}")
        written(folder, log, f"train_seed{seed}.log")
    return runs.read_group(str(folder))


def test_welch_is_the_textbook_one(tmp_path):
    a, b = [1.90, 1.91, 1.92, 1.905], [1.88, 1.882, 1.885]
    test = compare.welch(a, b, 0.005)
    variance = [np.var(side, ddof=1) / len(side) for side in (a, b)]
    assert test.t == pytest.approx((np.mean(a) - np.mean(b) - 0.005) / sum(variance) ** 0.5)
    df = sum(variance) ** 2 / (variance[0] ** 2 / 3 + variance[1] ** 2 / 2)
    assert test.df == pytest.approx(df)
    least = compare.smallest(a, b, compare.RECORD)
    shifted = [value - (least - (np.mean(a) - np.mean(b))) for value in b]
    # The smallest gain is just significant
    assert compare.welch(a, shifted, 0.005).p == pytest.approx(compare.RECORD.level)
    cauchy = 0.5 - np.arctan(21) / np.pi  # t with one degree of freedom
    assert compare.paired([1.9, 1.92], [1.8, 1.81]).p == pytest.approx(cauchy)
    assert compare.welch([1.0], b) is None and compare.welch([1.0, 1.0], [0.5, 0.5]) is None


@pytest.mark.parametrize(
    "losses, counts, part",
    [
        ({1: 1.880, 2: 1.8802, 3: 1.8801}, True, "would count: B is better by 0.0199 nats"),
        ({1: 1.896, 2: 1.8962, 3: 1.8961}, False, "better by 0.0039 nats, and at least 0.005"),
        ({1: 1.910, 2: 1.9102, 3: 1.9101}, False, "worse by 0.0101 nats"),
        ({1: 1.880, 2: 1.9, 3: 1.886}, False, "seeds of each would be needed"),
        ({1: 1.880}, False, "3 and 1 seeds cannot show it"),
    ],
)
def test_the_rule_for_records(tmp_path, losses, counts, part):
    a, b = group(tmp_path / "a", {1: 1.9, 2: 1.9001, 3: 1.8999}), group(tmp_path / "b", losses)
    assert compare.verdict(a, b)[0] is counts
    result = run([ROOT / "tools" / "compare.py", tmp_path / "a", tmp_path / "b"], {}, tmp_path)
    assert result.returncode == (0 if counts else 3) and part in result.stdout
    assert ("paired by seed (1 2 3)" in result.stdout) == (len(losses) == 3)


def test_other_tokenizers_are_compared_by_bits(tmp_path):
    a = group(tmp_path / "a", {1: 1.9, 2: 1.91}, rate=1.7)
    b = group(tmp_path / "b", {1: 2.4, 2: 2.41}, rate=2.2)
    of_a, of_b, note = compare.losses(a, b)
    assert of_a == pytest.approx([1.9 / 1.7 * 2.2, 1.91 / 1.7 * 2.2], rel=1e-6)
    assert of_b == [2.4, 2.41]
    assert "tokenizers differ" in note


def test_groups_that_cannot_be_compared(tmp_path, swept):
    first = logs_of(swept)[0]
    mixed = ",".join(str(logs_of(swept, rate)[0]) for rate in ("0.005", "0.025"))
    with user_error(r"MATRIX_LR=0.005 and 0.025"):
        runs.read_group(mixed)
    with user_error("seed 1 more than once"):
        runs.read_group(f"{first},{first}")
    with user_error("there are no logs in"):
        runs.read_group(str(tmp_path / "no*"))
    unfinished = written(tmp_path / "unfinished", PUBLISHED[: PUBLISHED.index("DIAG")])
    with user_error("did not finish"):
        runs.read_group(str(unfinished))
    fewer = re.sub(r"val_tokens:\d+", "val_tokens:77", logs_of(swept)[1].read_text())
    other = written(tmp_path, fewer, "other.txt")
    with user_error("were scored on 77 and"):
        compare.losses(runs.read_group(str(first)), runs.read_group(str(other)))


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
    with user_error("cannot read"):
        runs.read_group(f"{tmp_path / 'a'},nothing.log")


@pytest.mark.parametrize("program", ["compare", "ablate"])
def test_help_needs_no_scipy(program, tmp_path):
    (tmp_path / "scipy.py").write_text("raise ModuleNotFoundError('No module named it')")
    broken = {"PYTHONPATH": str(tmp_path)}
    result = run([ROOT / "tools" / f"{program}.py", "--help"], broken, tmp_path)
    assert result.returncode == 0 and result.stdout.startswith("usage: "), result.stderr
    group(tmp_path / "a", {1: 1.9, 2: 1.91})
    group(tmp_path / "b", {1: 1.8, 2: 1.81})
    result = run([ROOT / "tools" / "compare.py", "a", "b"], broken, tmp_path)
    assert result.returncode == 1 and "error: No module named it: run " in result.stderr


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
    with user_error("there are no logs in"):
        runs.find_logs(f"{tmp_path}/x*.txt")


def made(losses: list[float]) -> list[runs.Run]:
    """Runs with these final losses."""
    scores = [SimpleNamespace(loss=x, bpb=x / 2, tokens=9, nbytes=None) for x in losses]
    return [SimpleNamespace(score=score, seed=seed) for seed, score in enumerate(scores)]


def test_how_many_more_seeds_would_be_needed():
    """The count is the first at which Welch's test would be significant."""
    a, b = made([1.02, 1.03, 1.01]), made([1.00, 1.01, 0.99])
    rule = compare.RECORD
    counts, why = compare.verdict(a, b)
    assert not counts
    needed = int(re.search(r"(\d+) seeds of each would be needed", why)[1])
    assert f"{needed - 3} more of A and {needed - 3} more of B" in why
    sides = [[run.score.loss for run in side] for side in (a, b)]

    def p_of(count: int) -> float:
        """With as many values of these means and deviations."""
        found = []
        for side in sides:
            mean, deviation = statistics.fmean(side), statistics.stdev(side)
            values = np.arange(count) - (count - 1) / 2
            found.append((mean + deviation * values / values.std(ddof=1)).tolist())
        return compare.welch(*found, rule.margin).p

    assert p_of(needed) < rule.level <= p_of(needed - 1)
    assert compare.seeds_needed(*reversed(sides), rule) is None, "B is worse"


def test_the_rule_of_the_later_board():
    """p < 0.25 is enough there; another margin may not be."""
    a, b = made([1.02, 1.03, 1.01]), made([1.00, 1.01, 0.99])
    board = compare.Rule(level=0.25)
    assert compare.verdict(a, b, board)[0] and not compare.verdict(a, b)[0]
    assert not compare.verdict(a, b, compare.Rule(0.05, 0.25))[0]


@pytest.mark.parametrize("score", ["nan", "inf", "0.0"])
def test_a_score_that_is_not_finite_is_an_error(score, swept, tmp_path):
    """Every comparison with nan is false, so it would have counted as a record."""
    logs = copy_of(swept, tmp_path) / "logs"
    (log, *_) = sorted(logs.glob("t_MATRIX_LR=0.005_seed*.txt"))
    form = r"(final_int6_sliding_window_exact val_loss:\S+ val_bpb:)\S+"
    log.write_text(re.sub(form, rf"\g<1>{score}", log.read_text()))
    with user_error(f"has the score {score}: it cannot be compared"):
        runs.read_group(f"{logs}/t_MATRIX_LR=0.005_seed*.txt")


def test_texts_of_different_sizes_are_not_compared(swept, tmp_path):
    """Also with other tokenizers the text must be the same."""
    logs = copy_of(swept, tmp_path) / "logs"
    sides = [runs.read_group(f"{logs}/t_MATRIX_LR={rate}_seed*.txt") for rate in ("0.025", "0.005")]
    assert len(compare.losses(*sides)[0]) == len(sides[0])
    for log in logs.glob("t_MATRIX_LR=0.005_seed*.txt"):
        log.write_text(re.sub(r"val_bytes:\d+", "val_bytes:900", log.read_text()))
    other = runs.read_group(f"{logs}/t_MATRIX_LR=0.005_seed*.txt")
    with user_error("the logs were scored on .* bytes: score all on the same"):
        compare.losses(sides[0], other)

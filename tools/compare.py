#!/usr/bin/env python3
"""Compare two groups of runs: is B better than A, is it significant, would it count as a record?

    python tools/compare.py "logs/base_seed*.txt" "logs/new_seed*.txt"
    python tools/compare.py records/track_10min_16mb/2026-03-23_someone records/track_10min_16mb/2026-11-21_mine
    python tools/compare.py logs/mine.txt --record 399    # beside a record's losses, also while it runs

Each side is a folder of logs, a log, a pattern, or several of these separated by commas. Published
logs work too. The challenge asks that a record "beat the existing SOTA by at least 0.005 nats",
shown "at p < 0.01". The test that decides is Welch's, one-sided (B. L. Welch, Biometrika 34, 1947);
an experiment shows a gain if its p is below 0.05. The exit status is 0 if B would count as a
record, 3 if it would not, and 1 if the two cannot be compared. --record compares the losses of
one log, step by step, with those of a record; the exit status is 3 if it is behind them.
"""

import math
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]

import program
from lib import record_curves, runs
from lib.runs import Run, UserError
from train_gpt import require

MARGIN = 0.005  # nats by which a record is better, by the challenge's rule
RECORD_LEVEL = 0.01  # of its p, by the same rule
LEVEL = 0.05  # of an experiment
POWER = 0.8  # of the smallest gain that is seen


class Test(NamedTuple):
    """A one-sided test of whether A's mean exceeds B's by more than a margin."""

    t: float
    df: float
    p: float
    error: float  # standard error of the difference


def scipy_stats() -> ModuleType:
    """scipy.stats, which --help does not need."""
    from scipy import stats

    return stats


def welch(a: list[float], b: list[float], margin: float = 0.0) -> Test | None:
    """The test with unequal variances, or None if these are unknown (a single value) or zero."""
    if min(len(a), len(b)) < 2:
        return None
    variance = sum(statistics.variance(side) / len(side) for side in (a, b))
    if not variance:
        return None
    found = scipy_stats().ttest_ind(
        [value - margin for value in a], b, equal_var=False, alternative="greater"
    )
    return Test(float(found.statistic), float(found.df), float(found.pvalue), math.sqrt(variance))


def paired(a: list[float], b: list[float], margin: float = 0.0) -> Test | None:
    """The paired test, or None as in `welch`."""
    differences = [x - y - margin for x, y in zip(a, b, strict=True)]
    if len(differences) < 2 or not statistics.variance(differences):
        return None
    found = scipy_stats().ttest_1samp(differences, 0.0, alternative="greater")
    error = math.sqrt(statistics.variance(differences) / len(differences))
    return Test(float(found.statistic), float(found.df), float(found.pvalue), error)


def losses(a: list[Run], b: list[Run]) -> tuple[list[float], list[float], str]:
    """(A's nats per token, B's, a note). If the tokenizers differ, A's bits per byte are converted
    to B's tokens.

    Raises UserError if the scores cannot be compared.
    """
    sizes = {run.score.nbytes for run in (*a, *b)} - {None}
    counts = " and ".join(f"{size:,}" for size in sorted(sizes))
    other = f"the logs were scored on {counts} bytes: score all on the same text"
    require(len(sizes) < 2, other)
    # Nats per token divided by bits per byte depends on the tokenizer and the text alone.
    rates = [[run.score.loss / run.score.bpb for run in side] for side in (a, b)]
    mixed = "the logs of one side were scored on different texts or tokenizers"
    for side in rates:
        require(max(side) / min(side) <= 1.0001, f"{mixed}; compare one at a time")
    rate_a, rate_b = rates[0][0], rates[1][0]
    of_b = [run.score.loss for run in b]
    if abs(rate_a / rate_b - 1) >= 1e-4:
        note = "the tokenizers differ: A's bits per byte are converted to nats per token of B"
        return [run.score.bpb * rate_b for run in a], of_b, note
    scored = {run.score.tokens for run in (*a, *b)} - {None}
    counts = " and ".join(map(str, sorted(scored)))
    other = f"A and B were scored on {counts} tokens: score both on the whole validation split"
    require(len(scored) < 2, other)
    return [run.score.loss for run in a], of_b, ""


def detectable(test: Test, level: float = LEVEL) -> float:
    """The gain that a test would show at p `level` with a probability of POWER: the power formula of
    a t-test, with the deviations of its runs."""
    quantile = scipy_stats().t.ppf
    return float(quantile(1 - level, test.df) + quantile(POWER, test.df)) * test.error


def verdict(a: list[Run], b: list[Run]) -> tuple[bool, str]:
    """(whether B would count, the reason)."""
    of_a, of_b, _ = losses(a, b)
    gain = statistics.fmean(of_a) - statistics.fmean(of_b)
    test = welch(of_a, of_b, MARGIN)
    if gain < MARGIN:
        way = "better" if gain >= 0 else "worse"
        wanted = f"at least {MARGIN} are required"
        return False, f"Not a record: B is {way} by {abs(gain):.4f} nats, and {wanted}"
    if test is None:
        seeds = f"{len(a)} and {len(b)} seeds cannot show it"
        return False, f"Not a record yet. {gain:.4f} nats are enough, but {seeds}: run 3 of each"
    if test.p >= RECORD_LEVEL:
        doubt = f"The gain of {gain:.4f} nats is large enough, but it may be chance"
        limits = f"p = {test.p:.4g}, a record needs p < {RECORD_LEVEL}"
        return False, f"Not a record yet. {doubt} ({limits}). Run more seeds"
    over = f"more than {MARGIN} at p = {test.p:.2g}"
    return True, f"A record: B is better by {gain:.4f} nats, {over}"


def conclusion(p: float | None) -> str:
    """The verdict of an experiment by the p of Welch's test that B is better at all. That of pairs
    does not decide: with the lower of two p, a gain would be seen too often."""
    if p is None:
        return "no verdict, as a test needs two unequal runs of each"
    seen = "a gain was seen" if p < LEVEL else "no gain was seen"
    return f"{seen} (Welch's p = {p:.4g}; a gain needs p < {LEVEL})"


def unlike(a: Run, b: Run) -> str:
    """The knobs in which two runs differ, and whether their scripts do."""
    old, new = a.configuration, b.configuration
    names = [name for name in old | new if old.get(name) != new.get(name)]
    knobs = [f"{n} {old.get(n, 'not set')} -> {new.get(n, 'not set')}" for n in names]
    scripts = {a.source, b.source} - {None}
    return ("; ".join(knobs) or "no logged knob") + "; the script" * (len(scripts) > 1)


def on_equal_seeds(
    a: list[Run], b: list[Run], of_a: list[float], of_b: list[float]
) -> tuple[list[int], list[list[float]]]:
    """(the seeds that both sides have, A's and B's losses on these)."""
    seeds = sorted({run.seed for run in a} & {run.seed for run in b} - {None})
    return seeds, [
        [loss for seed in seeds for run, loss in zip(side, values, strict=True) if run.seed == seed]
        for side, values in ((a, of_a), (b, of_b))
    ]


def unequal_seeds(a: list[Run], b: list[Run], of_a: list[float], of_b: list[float]) -> str:
    """What the difference is worth if the sides have not the same seeds, else ""."""
    sides = [sorted({run.seed for run in side} - {None}) for side in (a, b)]
    if sides[0] == sides[1] or not all(sides):
        return ""
    seeds, both = on_equal_seeds(a, b, of_a, of_b)
    named, *of_side = (" ".join(map(str, found)) for found in (seeds, *sides))
    text = f"the seeds are unequal: A has {of_side[0]}, B {of_side[1]}"
    if not seeds:
        return f"{text}, none of them in both"
    nats = statistics.fmean(both[1]) - statistics.fmean(both[0])
    return f"{text}; on seed {named} alone B - A is {nats:+.5f} nats per token"


def tests_of(a: list[Run], b: list[Run], of_a: list[float], of_b: list[float]) -> list[str]:
    """A line per test: better at all, and by the margin; of groups, and of pairs by seed."""
    seeds, by_seed = on_equal_seeds(a, b, of_a, of_b)
    lines = []
    by_margin = f"better by more than {MARGIN} nats"
    for margin, what in {0.0: "better at all", MARGIN: by_margin}.items():
        test = welch(of_a, of_b, margin)
        found = "untested: needs two unequal runs of each"
        if test:
            found = f"t = {test.t:.2f}, df = {test.df:.1f}, p = {test.p:.4g}"
        lines.append(f"Welch, one-sided, B {what}: {found}")
        if len(seeds) > 1 and (test := paired(*by_seed, margin)):
            found = f"t = {test.t:.2f}, df = {test.df:.0f}, p = {test.p:.4g}"
            lines.append(f"  paired by seed ({' '.join(map(str, seeds))}): {found}")
    if test := welch(of_a, of_b):
        seeds = f"{len(a)} and {len(b)} seeds"
        least = f"only a gain of {detectable(test):.4f} nats or more"
        lines.append(f"with {seeds} {least} is seen in {POWER:.0%} of comparisons")
    return lines


def report(a: list[Run], b: list[Run]) -> tuple[bool, str]:
    """(whether B would count, the whole report). Raises UserError if the sides overlap."""
    paths_a, paths_b = ({run.path.resolve() for run in side} for side in (a, b))
    if paths_a == paths_b:
        return False, f"{runs.table(a)}\n\nB is equal to A: both are the same runs"
    if shared := paths_a & paths_b:
        raise UserError(f"{min(shared)} is on both sides: leave it out of one of them")
    lines = []
    for name, side in (("A", a), ("B", b)):
        head = f"{name}: {side[0].path.parent}, score {side[0].score_name}"
        lines += [head, runs.table(side), ""]
    of_a, of_b, note = losses(a, b)
    if note:
        lines.append(f"note: {note}")
    lines.append(f"what differs: {unlike(a[0], b[0])}")
    nats = statistics.fmean(of_b) - statistics.fmean(of_a)
    bits_a, bits_b = (statistics.fmean(run.score.bpb for run in side) for side in (a, b))
    if unequal := unequal_seeds(a, b, of_a, of_b):
        lines.append(f"note: {unequal}")
    lines.append(f"B - A: {nats:+.5f} nats per token, {bits_b - bits_a:+.5f} bits per byte")
    lines += tests_of(a, b, of_a, of_b)
    counts, why = verdict(a, b)
    test = welch(of_a, of_b)
    found = f"better at all: {conclusion(test and test.p)}"
    return counts, "\n".join([*lines, "", found, why])


def main() -> None:
    parser = program.parser(__doc__)
    add, text = parser.add_argument, "compare the log A with a record's losses"
    add("a", help="logs of the baseline or of the record to beat")
    add("b", nargs="?", help="logs of the candidate")
    add("--record", choices=record_curves.RATES, help=text)
    arguments = parser.parse_args()
    if (arguments.b is None) == (arguments.record is None):
        parser.error("give either the logs B or --record")
    if arguments.record:
        counts, text = record_curves.follow(runs.read_run(Path(arguments.a)), arguments.record)
    else:
        counts, text = report(runs.read_group(arguments.a), runs.read_group(arguments.b))
    print(text)
    sys.exit(0 if counts else 3)


if __name__ == "__main__":
    program.run_program(main)

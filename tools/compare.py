#!/usr/bin/env python3
"""Compare two groups of runs: is B better than A, is it significant, would it count as a record?

    python tools/compare.py "logs/base_seed*.txt" "logs/new_seed*.txt"
    python tools/compare.py records/track_10min_16mb/2026-03-23_someone records/track_10min_16mb/2026-11-21_mine
    python tools/compare.py logs/mine.txt --published 399    # beside a record's losses, also while it runs

Each side is a folder of logs, a log, a pattern, or several of these separated by commas. Published
logs work too. The challenge asks that a record "beat the existing SOTA by at least 0.005 nats",
shown "at p < 0.01". A pure speed-up (--speed) is exempt. The test is Welch's, one-sided (B. L.
Welch, Biometrika 34, 1947). The exit status is 0 if B would count, 3 if it would not, and 1 if the
two cannot be compared. --published compares the losses of one log, step by step, with those of a
record; the exit status is 3 if it is behind them.
"""

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import published
import runs
from runs import Run, UserError
from train_gpt import importing, run_program

with importing("requirements-dev.txt"):
    from scipy import stats

MARGIN = 0.005  # nats
LEVEL = 0.01  # p


class Test(NamedTuple):
    """A one-sided test of whether A's mean exceeds B's by more than a margin."""

    t: float
    df: float
    p: float
    error: float  # standard error of the difference


def welch(a: list[float], b: list[float], margin: float = 0.0) -> Test | None:
    """The test with unequal variances, or None if the variances are unknown (a single value) or
    zero."""
    if min(len(a), len(b)) < 2:
        return None
    variance = sum(statistics.variance(side) / len(side) for side in (a, b))
    if not variance:
        return None
    found = stats.ttest_ind(
        [value - margin for value in a], b, equal_var=False, alternative="greater"
    )
    return Test(float(found.statistic), float(found.df), float(found.pvalue), math.sqrt(variance))


def paired(a: list[float], b: list[float], margin: float = 0.0) -> Test | None:
    """The paired test, or None as in `welch`."""
    differences = [x - y - margin for x, y in zip(a, b, strict=True)]
    if len(differences) < 2 or not statistics.variance(differences):
        return None
    found = stats.ttest_1samp(differences, 0.0, alternative="greater")
    error = math.sqrt(statistics.variance(differences) / len(differences))
    return Test(float(found.statistic), float(found.df), float(found.pvalue), error)


def losses(a: list[Run], b: list[Run]) -> tuple[list[float], list[float], str]:
    """(A's nats per token, B's, a note). If the tokenizers differ, A's bits per byte are converted
    to B's tokens.

    Raises UserError if the scores cannot be compared.
    """
    # Nats per token divided by bits per byte depends on the tokenizer and the text alone.
    rates = [[run.score.loss / run.score.bpb for run in side] for side in (a, b)]
    for side in rates:
        if max(side) / min(side) > 1.0001:
            raise UserError(
                "the logs of one side were scored on different texts or tokenizers; compare one at a time"
            )
    rate_a, rate_b = rates[0][0], rates[1][0]
    of_b = [run.score.loss for run in b]
    if abs(rate_a / rate_b - 1) >= 1e-4:
        note = "the tokenizers differ: A's bits per byte are converted to nats per token of B"
        return [run.score.bpb * rate_b for run in a], of_b, note
    scored = {run.score.tokens for run in (*a, *b)} - {None}
    if len(scored) > 1:
        counts = " and ".join(map(str, sorted(scored)))
        raise UserError(
            f"A and B were scored on {counts} tokens: score both on the whole validation split"
        )
    return [run.score.loss for run in a], of_b, ""


def smallest(a: list[float], b: list[float], margin: float) -> float | None:
    """The smallest gain in nats that would have been significant with these numbers of seeds and
    deviations."""
    test = welch(a, b)
    return None if test is None else margin + float(stats.t.ppf(1 - LEVEL, test.df)) * test.error


def verdict(a: list[Run], b: list[Run], speed: bool) -> tuple[bool, str]:
    """(whether B would count, the reason)."""
    of_a, of_b, _ = losses(a, b)
    if speed:
        return speed_verdict(a, b, of_a, of_b)
    gain = statistics.fmean(of_a) - statistics.fmean(of_b)
    test = welch(of_a, of_b, MARGIN)
    if gain < MARGIN:
        way = "better" if gain > 0 else "worse"
        return (
            False,
            f"would not count: B is {way} by {abs(gain):.4f} nats, and at least {MARGIN} are required",
        )
    if test is None:
        seeds = f"{len(a)} and {len(b)} seeds cannot show it"
        return False, f"would not count yet: {gain:.4f} nats are enough, but {seeds}: run 3 of each"
    if test.p >= LEVEL:
        enough = f"{gain:.4f} nats are enough, but p = {test.p:.4f} that they exceed {MARGIN} is not below {LEVEL}"
        return False, f"would not count yet: {enough}: run more seeds"
    return (
        True,
        f"would count: B is better by {gain:.4f} nats, more than {MARGIN} at p = {test.p:.2g}",
    )


def speed_verdict(
    a: list[Run], b: list[Run], of_a: list[float], of_b: list[float]
) -> tuple[bool, str]:
    """(whether B would count as a pure speed-up, the reason)."""
    before, after = ([run.step_ms for run in side] for side in (a, b))
    if None in (*before, *after):
        return False, "would not count as a speed-up: some logs lack the milliseconds per step"
    worse = welch(of_b, of_a)
    if worse is not None and worse.p < LEVEL:
        loss = statistics.fmean(of_b) - statistics.fmean(of_a)
        return (
            False,
            f"would not count as a speed-up: the loss is worse by {loss:.4f} nats (p = {worse.p:.4f})",
        )
    faster = welch(before, after)
    ratio = statistics.fmean(after) / statistics.fmean(before)
    if faster is None or faster.p >= LEVEL:
        certainty = "untested" if faster is None else f"p = {faster.p:.4f}"
        return (
            False,
            f"would not count as a speed-up: {ratio:.3f} times the time per step, {certainty}",
        )
    return True, (
        f"would count as a pure speed-up ({ratio:.3f} times the time per step, p = {faster.p:.2g}): the rule of "
        f"{MARGIN} nats is waived if reviewers agree that the machine learning is unchanged"
    )


def unlike(a: Run, b: Run) -> str:
    """The knobs in which two runs differ, and whether their scripts do."""
    old, new = a.configuration, b.configuration
    knobs = [
        f"{name} {old.get(name, 'not set')} -> {new.get(name, 'not set')}"
        for name in old | new
        if old.get(name) != new.get(name)
    ]
    script = "; the script" if None not in (a.source, b.source) and a.source != b.source else ""
    return ("; ".join(knobs) or "no logged knob") + script


def tests_of(a: list[Run], b: list[Run], of_a: list[float], of_b: list[float]) -> list[str]:
    """A line per test: better at all and better by the margin, for the groups and for pairs with
    equal seeds."""
    seeds = sorted({run.seed for run in a} & {run.seed for run in b} - {None})
    by_seed = [
        [loss for seed in seeds for run, loss in zip(side, values, strict=True) if run.seed == seed]
        for side, values in ((a, of_a), (b, of_b))
    ]
    lines = []
    for margin, what in ((0.0, "better at all"), (MARGIN, f"better by more than {MARGIN} nats")):
        test = welch(of_a, of_b, margin)
        found = "untested: needs two unequal runs of each"
        if test:
            found = f"t = {test.t:.2f}, df = {test.df:.1f}, p = {test.p:.4g}"
        lines.append(f"Welch, one-sided, B {what}: {found}")
        if len(seeds) > 1 and (test := paired(*by_seed, margin)):
            names = " ".join(map(str, seeds))
            lines.append(
                f"  paired by seed ({names}): t = {test.t:.2f}, df = {test.df:.0f}, p = {test.p:.4g}"
            )
    if (least := smallest(of_a, of_b, MARGIN)) is not None:
        lines.append(
            f"smallest gain that {len(a)} and {len(b)} seeds could have shown: {least:.4f} nats"
        )
    return lines


def report(a: list[Run], b: list[Run], speed: bool) -> tuple[bool, str]:
    """(whether B would count, the whole report). Raises UserError if some runs, but not all, are on
    both sides."""
    paths_a, paths_b = ({run.path.resolve() for run in side} for side in (a, b))
    if paths_a == paths_b:
        return False, f"{runs.table(a)}\n\nB is equal to A: both are the same runs"
    if shared := paths_a & paths_b:
        raise UserError(f"{min(shared)} is on both sides: leave it out of one of them")
    lines = []
    for name, side in (("A", a), ("B", b)):
        lines += [
            f"{name}: {side[0].path.parent}, score {side[0].score_name}",
            runs.table(side),
            "",
        ]
    of_a, of_b, note = losses(a, b)
    if note:
        lines.append(f"note: {note}")
    lines.append(f"what differs: {unlike(a[0], b[0])}")
    nats = statistics.fmean(of_b) - statistics.fmean(of_a)
    bits = statistics.fmean(run.score.bpb for run in b) - statistics.fmean(
        run.score.bpb for run in a
    )
    lines += [
        f"B - A: {nats:+.5f} nats per token, {bits:+.5f} bits per byte",
        *tests_of(a, b, of_a, of_b),
    ]
    counts, why = verdict(a, b, speed)
    return counts, "\n".join([*lines, "", f"B {why}"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", help="logs of the baseline or of the record to beat")
    parser.add_argument("b", nargs="?", help="logs of the candidate")
    parser.add_argument(
        "--published", choices=published.RATES, help="compare the log A with a record's losses"
    )
    parser.add_argument(
        "--speed", action="store_true", help="B claims the same machine learning, only faster"
    )
    arguments = parser.parse_args()
    if (arguments.b is None) == (arguments.published is None):
        parser.error("give either the logs B or --published")
    if arguments.published:
        counts, text = published.follow(runs.read_run(Path(arguments.a)), arguments.published)
    else:
        sides = runs.read_group(arguments.a), runs.read_group(arguments.b)
        counts, text = report(*sides, arguments.speed)
    print(text)
    sys.exit(0 if counts else 3)


if __name__ == "__main__":
    run_program(main)

#!/usr/bin/env python3
"""Is B better than A, is it significant, would it count as a record?

    python tools/compare.py "logs/base_seed*.txt" "logs/new_seed*.txt"
    python tools/compare.py records/10min_16mb/2026-03-23_someone/ records/10min_16mb/2026-11-21_mine/

Each side is a folder of logs, a log or a pattern, or several of them with commas between; published logs are read, too.
The challenge asks that a record "beat the existing SOTA by at least 0.005 nats", shown "at p < 0.01"; a pure speed-up
(--speed) need not. The test is Welch's, one-sided (B. L. Welch, Biometrika 34, 1947). The exit status is 0 if B would
count, 3 if it would not, 1 if the two cannot be compared.
"""

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from scipy import stats

import runs
from runs import Run, UserError

MARGIN, LEVEL = 0.005, 0.01  # nats, and p: the challenge's rule


class Test(NamedTuple):
    """A one-sided test that A's mean exceeds B's by more than a margin."""

    t: float
    df: float
    p: float
    error: float  # standard error of the difference


def welch(a: list[float], b: list[float], margin: float = 0.0) -> Test | None:
    """Unequal variances; None where there is nothing to estimate them from: fewer than two values, or all of them equal."""
    if min(len(a), len(b)) < 2:
        return None
    variance = [statistics.variance(side) / len(side) for side in (a, b)]
    if not sum(variance):
        return None
    found = stats.ttest_ind([value - margin for value in a], b, equal_var=False, alternative="greater")
    return Test(float(found.statistic), float(found.df), float(found.pvalue), math.sqrt(sum(variance)))


def paired(a: list[float], b: list[float], margin: float = 0.0) -> Test | None:
    """The same for pairs."""
    differences = [x - y - margin for x, y in zip(a, b, strict=True)]
    if len(differences) < 2 or not statistics.variance(differences):
        return None
    found = stats.ttest_1samp(differences, 0.0, alternative="greater")
    return Test(
        float(found.statistic),
        float(found.df),
        float(found.pvalue),
        math.sqrt(statistics.variance(differences) / len(differences)),
    )


def losses(a: list[Run], b: list[Run]) -> tuple[list[float], list[float], str]:
    """Nats a token of both sides, and a remark. Where B has another tokenizer, A's bits per byte are expressed in B's nats.

    Raises UserError if both have the tokens of the same kind but not the same number of them, or are scored otherwise.
    """
    rate = [
        [run.score.loss / run.score.bpb for run in side] for side in (a, b)
    ]  # nats a token for a bit a byte: the tokenizer's
    for side in rate:
        if max(side) / min(side) > 1.0001:
            raise UserError(
                "the logs of one side were scored on different texts or tokenizers: their losses are not of one kind"
            )
    scored = {run.score.tokens for run in (*a, *b)} - {None}
    if abs(rate[0][0] / rate[1][0] - 1) < 1e-4:
        if len(scored) > 1:
            raise UserError(
                f"A and B were scored on {' and '.join(map(str, sorted(scored)))} tokens: score both on the whole validation split"
            )
        return [run.score.loss for run in a], [run.score.loss for run in b], ""
    return (
        [run.score.bpb * rate[1][0] for run in a],
        [run.score.loss for run in b],
        "A and B have other tokens: A's bits per byte are expressed in nats a token of B",
    )


def smallest(a: list[float], b: list[float], margin: float) -> float | None:
    """The smallest gain, in nats, that these numbers of seeds with these deviations would have shown at LEVEL."""
    test = welch(a, b)
    return None if test is None else margin + float(stats.t.ppf(1 - LEVEL, test.df)) * test.error


def verdict(a: list[Run], b: list[Run], speed: bool) -> tuple[bool, str]:
    """Whether B would count, and why, in words."""
    of_a, of_b, _ = losses(a, b)
    gain = statistics.fmean(of_a) - statistics.fmean(of_b)
    if speed:
        before, after = ([run.step_ms for run in side] for side in (a, b))
        if None in (*before, *after):
            return False, "would not count as a speed-up: not all logs tell milliseconds a step"
        faster, worse = welch(before, after), welch(of_b, of_a)
        ratio = statistics.fmean(after) / statistics.fmean(before)
        if worse is not None and worse.p < LEVEL:
            return False, f"would not count as a speed-up: the loss is worse by {-gain:.4f} nats (p = {worse.p:.4f})"
        if faster is None or faster.p >= LEVEL:
            certainty = "untested" if faster is None else f"p = {faster.p:.4f}"
            return False, f"would not count as a speed-up: {ratio:.3f} of the time of a step, {certainty}"
        return True, (
            f"would count as a pure speed-up ({ratio:.3f} of the time of a step, p = {faster.p:.2g}): the rule of {MARGIN} nats is waived "
            "if reviewers agree that the machine learning is unchanged"
        )
    test = welch(of_a, of_b, MARGIN)
    if gain < MARGIN:
        way = "better" if gain > 0 else "worse"
        return False, f"would not count: B is {way} by {abs(gain):.4f} nats, and at least {MARGIN} are asked for"
    if test is None:
        return (
            False,
            f"would not count yet: {gain:.4f} nats are enough, but {len(a)} and {len(b)} seeds cannot show it: run 3 of each",
        )
    if test.p >= LEVEL:
        enough = f"{gain:.4f} nats are enough, but p = {test.p:.4f} that they exceed {MARGIN} is not under {LEVEL}"
        return False, f"would not count yet: {enough}: run more seeds"
    return True, f"would count: B is better by {gain:.4f} nats, more than {MARGIN} at p = {test.p:.2g}"


def unlike(a: Run, b: Run) -> str:
    """In what knobs, and whether in the script, two runs differ."""
    old, new = a.configuration, b.configuration
    knobs = [
        f"{name} {old.get(name, 'not set')} -> {new.get(name, 'not set')}"
        for name in old | new
        if old.get(name) != new.get(name)
    ]
    script = "; the script" if None not in (a.source, b.source) and a.source != b.source else ""
    return ("; ".join(knobs) or "no knob that the logs list") + script


def tests_of(a: list[Run], b: list[Run], of_a: list[float], of_b: list[float]) -> list[str]:
    """Lines on all tests: better at all, and better by the challenge's margin; of groups, and of pairs where seeds match."""
    lines = []
    seeds = sorted({run.seed for run in a} & {run.seed for run in b} - {None})
    by_seed = [
        [loss for seed in seeds for run, loss in zip(side, values, strict=True) if run.seed == seed]
        for side, values in ((a, of_a), (b, of_b))
    ]
    for margin, what in ((0.0, "better at all"), (MARGIN, f"better by more than {MARGIN} nats")):
        test = welch(of_a, of_b, margin)
        found = (
            f"t = {test.t:.2f}, df = {test.df:.1f}, p = {test.p:.4g}"
            if test
            else "untested: it takes two unequal runs of each"
        )
        lines.append(f"Welch, one-sided, B {what}: {found}")
        if len(seeds) > 1 and (test := paired(*by_seed, margin)):
            lines.append(
                f"  paired by seed ({' '.join(map(str, seeds))}): t = {test.t:.2f}, df = {test.df:.0f}, p = {test.p:.4g}"
            )
    if (least := smallest(of_a, of_b, MARGIN)) is not None:
        lines.append(
            f"the smallest gain that {len(a)} and {len(b)} seeds of these deviations could have shown: {least:.4f} nats"
        )
    return lines


def report(a: list[Run], b: list[Run], speed: bool) -> tuple[bool, str]:
    """Whether B would count, and all that was found, for people."""
    lines = []
    for name, side in (("A", a), ("B", b)):
        lines += [f"{name}: {side[0].path.parent}, score {side[0].score_name}", runs.table(side), ""]
    of_a, of_b, remark = losses(a, b)
    lines += [f"note: {remark}"] if remark else []
    lines.append(f"what differs: {unlike(a[0], b[0])}")
    nats, bits = (
        statistics.fmean(y) - statistics.fmean(x)
        for x, y in ((of_a, of_b), [[run.score.bpb for run in side] for side in (a, b)])
    )
    lines += [f"B - A: {nats:+.5f} nats a token, {bits:+.5f} bits a byte", *tests_of(a, b, of_a, of_b)]
    counts, why = verdict(a, b, speed)
    return counts, "\n".join([*lines, "", f"B {why}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", help="logs of the base, or of the record to beat")
    parser.add_argument("b", help="logs of what is to be better")
    parser.add_argument("--speed", action="store_true", help="B claims to be the same machine learning, only faster")
    arguments = parser.parse_args()
    try:
        counts, text = report(runs.read_group(arguments.a), runs.read_group(arguments.b), arguments.speed)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(text)
    sys.exit(0 if counts else 3)


if __name__ == "__main__":
    main()

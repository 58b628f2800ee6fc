"""A run beside the published losses of a record, step by step: is it on that track?

The losses are in tools/golden/curves.json: three seeds of #399, #1493 and #2135. A loss is compared
where both runs have the same learning rate. Training losses are compared only for #399 and
SHUFFLE_SEED=0, which reads the same tokens in every step; validation losses only without mask, tilt
and banded mode, and for #399 only on a text of as many tokens. #2135 cuts the text of its validation
otherwise, so none of its losses is compared; the page of `tools/report.py` draws them.
"""

import collections
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lib.runs import Point, Run, UserError
from train_gpt import require

CURVES = Path(__file__).resolve().parents[1] / "golden" / "curves.json"
# A loss is off the track if it differs from the seeds' mean by more than twice their range, or than
# twice this many nats.
LEAST_RANGE = {"train": 0.01, "val": 0.0025}
SAME_RATE = 0.03  # of the peak learning rate; the seconds of two logs are rounded to 6 s

RATES = {  # multipliers of the learning rate
    # A warmdown of 3,000 steps at the average pace
    "399": lambda step, seconds: min(1.0, (600 - seconds) / (3000 * seconds / step)),
    "1493": lambda step, seconds: min(1.0, (1 - seconds / 588) / 0.72),
    "2135": lambda step, seconds: min(1.0, max((1 - seconds / 599.5) / 0.85, 0.1)),
}
VAL_TOKENS_399 = 62_021_632  # targets of its validation text
# What makes our validation loss another one than a record's
SCORED = {"CANONICAL_MASK": "False", "NGRAM_TILT": "False", "EVAL_MODE": "sliding"}
VOCABULARIES = {"399": "1024", "1493": "8192", "2135": "8192"}


class Published(NamedTuple):
    """What the seeds of a record have at one step."""

    losses: list[float]  # nats per token
    rate: float | None  # multiplier of the learning rate, None if the log has no time

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses)


class Track(NamedTuple):
    """One seed of a record, with the fields of `runs.Run` from which curves are drawn."""

    train: list[Point]
    val: list[Point]
    settings: dict[str, str]


def tracks(name: str) -> list[Track]:
    """The seeds of a record. Times of others than #399 are rounded to 6 s, too much for a speed."""
    settings = {"TRAIN_BATCH_TOKENS": "786432"} if name == "399" else {}
    found = []
    for seed in json.loads(CURVES.read_text())[name].values():
        points: dict[str, list[Point]] = {"train": [], "val": []}
        for step, kind, nats, bpb, seconds in seed["curve"]:
            fields = {f"{kind}_loss": nats} | ({} if bpb is None else {"val_bpb": bpb})
            if step and seconds is not None:
                fields["lr_scale"] = RATES[name](step, seconds)
            points[kind].append(Point(step, seconds, fields))
        found.append(Track(**points, settings=settings))
    return found


class Row(NamedTuple):
    """One step that both have."""

    step: int
    kind: str  # "train" or "val"
    ours: float
    published: Published
    off: float  # nats over the limit: positive behind, negative ahead, 0 within
    why_not: str  # a reason not to compare, or ""

    def line(self) -> str:
        low, high = min(self.published.losses), max(self.published.losses)
        numbers = f"{self.ours:9.4f} {self.published.mean:9.4f}  {low:.4f} .. {high:.4f}"
        word = "behind" if self.off > 0 else "ahead" if self.off else "on the track"
        verdict = self.why_not and f"not compared: {self.why_not}"
        difference = self.ours - self.published.mean
        return f"{self.step:6} {self.kind:6} {numbers} {difference:+9.4f}  {verdict or word}"


def read_curves(name: str) -> dict[tuple[str, int], Published]:
    """What a record's seeds have by (kind, step); at step -1 the last validation of each seed."""
    seeds, losses, rates = tracks(name), collections.defaultdict(list), {}
    for seed in seeds:
        for kind, points in (("train", seed.train), ("val", seed.val)):
            for point in points:
                step = -1 if point is seed.val[-1] else point.step
                losses[kind, step].append(point.fields[f"{kind}_loss"])
                if "lr_scale" in point.fields:
                    rates.setdefault(step, point.fields["lr_scale"])
    return {
        (kind, step): Published(found, rates.get(step))
        for (kind, step), found in losses.items()
        if len(found) == len(seeds)
    }


def rows_of(run: Run, name: str) -> Iterator[Row]:
    """The steps that both have, in order, training before validation."""
    curves = read_curves(name)
    other_text = name == "399" and run.val_tokens not in (None, VAL_TOKENS_399)
    same_data = name == "399" and run.settings.get("SHUFFLE_SEED") == "0"
    rates = {
        point.step: point.fields["lr_scale"] for point in run.train if "lr_scale" in point.fields
    }
    own = [f"{k}={run.settings[k]}" for k, v in SCORED.items() if run.settings.get(k, v) != v]
    last = run.val[-1] if run.val and run.scores else None
    points = [(p.step, "train", p) for p in run.train] + [(p.step, "val", p) for p in run.val]
    for step, kind, point in sorted(points, key=lambda one: one[:2]):
        final = point is last
        published = curves.get((kind, -1 if final else step))
        if published is None:
            continue
        why_not = ""
        # The rate of a step is logged after it.
        here, there = rates.get(step), published.rate
        if kind == "train" and not same_data:
            why_not = "it trained on other tokens"
        elif kind == "val" and other_text:
            why_not = "it was scored on another text"
        elif kind == "val" and own:
            why_not = f"it has {' '.join(own)}, which #{name} has not"
        elif not final and None not in (here, there) and abs(here - there) > SAME_RATE:
            why_not = f"its learning rate is {here:.2f} of the peak, there {there:.2f}"
        ours = point.fields[f"{kind}_loss"]
        spread = max(published.losses) - min(published.losses)
        limit = 2 * max(spread, LEAST_RANGE[kind])
        difference = ours - published.mean
        off = math.copysign(max(0.0, abs(difference) - limit), difference)
        if not math.isfinite(difference):  # a diverged run
            off = math.inf
        yield Row(step, kind, ours, published, 0.0 if why_not else off, why_not)


def check_vocabulary(run: Run, name: str) -> None:
    """Raise UserError if a run has another vocabulary than a record."""
    vocabulary = run.settings.get("VOCAB_SIZE", VOCABULARIES[name])
    other = f"{run.path} has VOCAB_SIZE={vocabulary}, but #{name} has {VOCABULARIES[name]} pieces"
    require(vocabulary == VOCABULARIES[name], f"{other}: nats per token cannot be compared")


def follow(run: Run, name: str) -> tuple[bool, str]:
    """(whether no loss is behind the published track, the report). Raises UserError."""
    require(name in RATES, f"--record {name}: choose one of {', '.join(RATES)}")
    check_vocabulary(run, name)
    # With whole documents a position sees more: some 0.02 nats (modelled), four times the limit.
    require(
        name != "2135",
        f"{run.path} cannot be compared with #2135: it trains on other tokens and validates flat "
        "batches with whole documents, not rows; compare the final scores",
    )
    rows = list(rows_of(run, name))
    compared = [row for row in rows if not row.why_not]
    if not compared:
        reason = rows[0].why_not if rows else "no step is in both"
        raise UserError(f"{run.path} cannot be compared with #{name}: {reason}")
    head = f"{'step':>6} {'':6} {'ours':>9} {'#' + name:>9}  range of 3 seeds  difference"
    lines = [f"{run.path} beside #{name} (published, 8 x H100), nats per token", head]
    lines += [row.line() for row in rows]
    behind = [row for row in compared if row.off > 0]
    if behind:
        place = f"step {behind[0].step} ({behind[0].kind})"
        worst = f"at most by {max(row.off for row in behind):.4f} over the limit"
        end = f"behind the published track from {place} on, {worst}"
    else:
        ahead = sum(row.off < 0 for row in compared)
        count = f"{len(compared)} compared losses, {ahead} of them ahead"
        end = f"on the published track in all {count}"
    return not behind, "\n".join([*lines, "", end])

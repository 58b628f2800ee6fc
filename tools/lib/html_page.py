"""The HTML page of `tools/report.py --html`: one file about runs, drawn by Plotly.

`write` reads the logs, makes tables of strings and figures, and fills html_page.html. The template
escapes every string. A color is the number of a group; the page has the colors, for light and dark.
"""

import base64
import dataclasses
import gzip
import hashlib
import html
import json
import math
import re
import statistics
from pathlib import Path
from typing import NamedTuple

import compare
import plot
import train_gpt
from lib import record_curves, runs
from lib.runs import Run

# isort: split
import jinja2
import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

# By the challenge's rule, and by that of its later board
LEVELS = {f"record, p < {rule.level}": rule for rule in (compare.RECORD, compare.LATER)}
HEADINGS = {  # of runs.COLUMNS, the score first
    "score": "score, bpb",
    "before": "before export, bpb",
    "after": "after export, bpb",
    "bytes": "submission, bytes",
    "steps": "steps",
    "ms/step": "ms per step",
    "train s": "training and calibration, s",
    "eval s": "final evaluation, s",
}
COLUMNS = sorted(runs.COLUMNS, key=lambda column: list(HEADINGS).index(column[0]))
PANELS = (  # title, unit, format, field of a point
    ("Training loss", "nats per token", ".4f", "train_loss"),
    ("Validation score", "bits per byte", ".4f", "val_bpb"),
    ("Learning rate", "fraction of its peak", ".3f", "lr_scale"),
    ("Speed", "tokens per second", ",.0f", "speed"),
)
AXES = {"step": ("step", "step %{x}"), "seconds": ("training time, s", "%{x:,.1f} s")}
PUBLISHED = -1  # its color


class Group(NamedTuple):
    """Finished runs that differ only in their seeds, or a single run that did not finish."""

    name: str
    color: int
    members: list[Run]
    finished: bool = True

    @property
    def bpb(self) -> float:
        return statistics.fmean(run.score.bpb for run in self.members)


class Row(NamedTuple):
    """A row of a table. `color` is that of its first cell, `kind` a CSS class."""

    cells: list[str]
    color: int | None = None
    kind: str = ""


class Table(NamedTuple):
    head: list[str]
    rows: list[Row]


# ---- Logs ----------------------------------------------------------------------------------------
def fault_of(run: Run) -> str:
    """Why a run has no score: it did not finish, or its score is not finite. Else ""."""
    try:
        run.score  # noqa: B018  raises
        return ""
    except train_gpt.UserError as error:
        return str(error)


def is_finished(run: Run) -> bool:
    return not fault_of(run)


def read_groups(texts: list[str]) -> tuple[list[Group], list[str]]:
    """(the groups of all logs, notes on logs that are left out). Evaluations of artifacts are, beside
    trainings. A .jsonl stands for the text log
    beside it. Raises UserError if no log has a step."""
    texts = [re.sub(r"\.jsonl$", ".txt", text) for text in texts]
    members, note = runs.read_logs(texts)
    notes = [f"{note}."] if note else []
    trained = [run for run in members if not run.settings.get("EVAL_ONLY")]
    if trained and len(trained) < len(members):
        notes.append(
            f"left out: {len(members) - len(trained)} logs that only evaluate (EVAL_ONLY)."
        )
        members = trained
    named = plot.groups([run for run in members if is_finished(run)])
    found = [Group(name, i, group) for i, (name, group) in enumerate(named.items())]
    for run in members:
        if not is_finished(run):
            found.append(Group(f"{run.path.stem}, not finished", len(found), [run], False))
            why = fault_of(run).removeprefix(f"{run.path.parent}/").partition(";")[0]
            notes.append(f"{why}.")
    return found, notes


def events_of(run: Run) -> dict[str, dict]:
    """The last event of each kind, from the .jsonl beside the text log; none without it."""
    try:
        return {event["event"]: event for event in runs.read_events(run.path.with_suffix(".jsonl"))}
    except train_gpt.UserError:
        return {}


# ---- Scores --------------------------------------------------------------------------------------
def significance(groups: list[Group]) -> tuple[Table, list[str]]:
    """(each group beside the first one, sentences on the levels)."""
    margin = compare.RECORD.margin
    head = ["configuration", "score, bits per byte", "B − A, nats per token", "p, better at all"]
    rows, notes = [], []
    for group in groups:
        cells = ["baseline, A", "", "", "", ""]
        if group is not groups[0]:
            cells, sentences = beside(groups[0].members, group.members)
            notes += [f"{group.name}: {sentence}." for sentence in sentences]
        score = plot.mean_std([run.score.bpb for run in group.members], ".5f")
        rows.append(Row([group.name, score, *cells], group.color))
    return Table([*head, f"p, by more than {margin}", *LEVELS], rows), notes


def beside(a: list[Run], b: list[Run]) -> tuple[list[str], list[str]]:
    """(cells of B's row, sentences on the levels), both by tools/compare.py."""
    try:
        of_a, of_b, note = compare.losses(a, b)
    except train_gpt.UserError as error:
        return ["", "", "", "", ""], [f"not comparable: {error}"]
    cells = [f"{statistics.fmean(of_b) - statistics.fmean(of_a):+.5f}"]
    for margin in (0.0, compare.RECORD.margin):
        test = compare.welch(of_a, of_b, margin)
        cells.append(f"{test.p:.2g}" if test else "untested")
    verdicts = [compare.verdict(a, b, rule) for rule in LEVELS.values()]
    cells += ["reached" if counts else "not reached" for counts, _ in verdicts]
    reasons = {reason: level for level, (_, reason) in zip(LEVELS, verdicts, strict=True)}
    sentences = [f"{level}: {why}" if len(reasons) > 1 else why for why, level in reasons.items()]
    notes = [note, compare.unequal_seeds(a, b, of_a, of_b)]
    return cells, sentences + [note for note in notes if note]


def headline(groups: list[Group], table: Table) -> str:
    """The result in one or two sentences. `table` is of the finished groups."""
    done = [group for group in groups if group.finished]
    if not done:
        ends = []
        for run in (run for group in groups for run in group.members):
            x, y = read_curve(run, "val_bpb", "step")
            if len(x):
                ends.append(f"{run.path.stem} {y[-1]:.4f} bits per byte at step {x[-1]:,.0f}")
        return f"Not finished. Last validation: {', '.join(ends) or 'none'}."
    best = best_of(done, table)
    score = plot.mean_std([run.score.bpb for run in best.members], ".4f")
    text = f"{best.name}: {score} bits per byte"
    if len(done) == 1:
        return f"{text}."
    if best is done[0]:
        return f"{text}. No other configuration that can be compared has a lower score."
    _, _, nats, p, _, *cells = next(row.cells for row in table.rows if row.color == best.color)
    levels = [
        rule.level for rule, cell in zip(LEVELS.values(), cells, strict=True) if cell == "reached"
    ]
    tested = f"p = {p}" if p != "untested" else p
    record, later = (rule.level for rule in LEVELS.values())
    end = f"A record (p < {record})" if record in levels else "Not a record"
    if levels == [later]:
        end += f" (p < {record}), but enough for the later board (p < {later})"
    gain = f"{-float(nats):.5f} nats per token better than {done[0].name} ({tested})"
    sides = done[0].members, best.members
    unequal = compare.unequal_seeds(*sides, *compare.losses(*sides)[:2])
    return f"{text}, {gain}. {end}.{unequal and f' But {unequal}.'}"


def best_of(done: list[Group], table: Table) -> Group:
    """The group with the lowest score among the first one and those that are compared with it."""
    compared = {row.color for row in table.rows if row.cells[2]}
    return min((group for group in done if group.color in compared), key=lambda group: group.bpb)


def tiles(group: Group) -> list[tuple[str, str, str]]:
    """(title, number, remark): means of a group."""
    values = {name: [row_of(run)[i] for run in group.members] for i, name in enumerate(HEADINGS)}
    means = {name: statistics.fmean(found) for name, found in values.items() if None not in found}
    seeds = [str(run.seed) for run in group.members if run.seed is not None]
    share = f"{100 * means.get('bytes', 0) / train_gpt.SUBMISSION_CAP:.1f} %"
    found = (
        ("score", ".4f", f"bits per byte, seed{'s' * (len(seeds) > 1)} {', '.join(seeds) or '?'}"),
        ("bytes", ",.0f", f"bytes, {share} of {train_gpt.SUBMISSION_CAP:,}"),
        ("train s", ",.0f", "seconds"),
        ("steps", ",.0f", f"{means.get('ms/step', 0):,.1f} ms each"),
    )
    titles = {"bytes": "submission", "train s": "training"}
    return [
        (titles.get(name, name), format(means[name], form), remark)
        for name, form, remark in found
        if name in means
    ]


def row_of(run: Run) -> list[float | None]:
    """The numbers of COLUMNS; none that an unfinished run lacks."""
    done = is_finished(run)
    return [
        read(run) if done or name not in ("score", "eval s") else None
        for name, _, _, read in COLUMNS
    ]


def run_table(groups: list[Group]) -> Table:
    """Each run, then the mean and standard deviation of its group."""
    rows = []

    def add(name: str, values: list, group: Group, kind: str = "") -> None:
        forms = [form for _, _, form, _ in COLUMNS]
        cells = ["–" if v is None else format(v, f) for v, f in zip(values, forms, strict=True)]
        rows.append(Row([name, *cells], group.color, kind))

    for group in groups:
        numbers = [row_of(run) for run in group.members]
        for run, values in zip(group.members, numbers, strict=True):
            add(run.path.stem, values, group)
        if len(numbers) > 1:
            for name, values in zip(("mean", "std"), runs.summary(numbers), strict=True):
                add(name, values, group, "mean")
    return Table(["run", *HEADINGS.values()], rows)


# ---- Figures -------------------------------------------------------------------------------------
def read_curve(run: Run | record_curves.Track, field: str, x: str) -> plot.Curve:
    """A field of a run, or its tokens per second between two logged steps, against `x`."""
    if field == "speed":
        tokens = run.settings.get("TRAIN_BATCH_TOKENS", "")
        timed = [point for point in run.train if point.seconds is not None]
        rates = [
            b._replace(fields={field: int(tokens) * (b.step - a.step) / (b.seconds - a.seconds)})
            for a, b in zip(timed, timed[1:], strict=False)
            if tokens.isdigit() and b.seconds > a.seconds
        ]
        return plot.curve(rates, x, field)
    return plot.curve(run.val if field == "val_bpb" else run.train, x, field)


def lines_of(curves: list[plot.Curve], color: int, name: str, form: str) -> list[go.Scatter]:
    """The mean of a group's curves, above the band from the lowest to the highest; none if they
    have no x in common."""
    x, y = plot.together(curves)
    if not len(x):
        return []
    # Interpolated points get no markers.
    measured = all(np.array_equal(x, points[0]) for points in curves)
    low, mean, high = y.min(axis=0).tolist(), y.mean(axis=0).tolist(), y.max(axis=0).tolist()
    span = f" (%{{customdata[0]:{form}}} to %{{customdata[1]:{form}}})" * (len(curves) > 1)
    line = go.Scatter(
        x=x.tolist(),
        y=mean,
        customdata=list(zip(low, high, strict=True)),
        name=html.escape(name),  # Plotly reads HTML
        mode="lines+markers" if measured and len(x) <= 12 else "lines",
        line={"width": 2, "dash": ("solid", "dot", "dash")[color // 8 % 3]},  # of eight colors
        hovertemplate=f"%{{y:{form}}}{span}",
        meta={"color": color},
    )
    band = go.Scatter(
        x=[*x.tolist(), *x[::-1].tolist()],
        y=[*high, *low[::-1]],
        fill="toself",
        mode="lines",
        line={"width": 0},
        hoverinfo="skip",
        meta={"color": color, "band": True},
    )
    return [band, line] if len(curves) > 1 else [line]


def late_range(traces: list[go.Scatter], field: str) -> list[float] | None:
    """The range of y without the first 5 % of x, where the loss falls from that of a random model;
    of a speed from 0. None, for the whole range, if less than two points are left."""
    start = 0.05 * max(max(trace.x) for trace in traces)
    points = [point for trace in traces for point in zip(trace.x, trace.y, strict=True)]
    kept = [y for x, y in points if x >= start and math.isfinite(y)]
    if len(kept) < 2 or field == "lr_scale":
        return None
    low, high = 0.0 if field == "speed" else min(kept), max(kept)
    room = 0.05 * (high - low)
    return [low and low - room, high + room]


def figure(traces: list, **layout) -> dict:
    """A figure as Plotly's JavaScript takes it."""
    common = {"showlegend": False, "template": "none"}
    return json.loads(go.Figure(traces, common | layout).to_json())


def panels(members: list[tuple[str, int, list]]) -> list[dict]:
    """Each panel that has data, over steps and over time. `members`: (name, color, runs)."""
    found = []
    for title, unit, form, field in PANELS:
        figures = {}
        for x, (label, hover) in AXES.items():
            traces = []
            for name, color, group in members:
                curves = [read_curve(run, field, x) for run in group]
                if curves := [points for points in curves if len(points[0])]:
                    traces += lines_of(curves, color, name, form)
            layout = {
                "xaxis": {
                    "title": {"text": label},
                    "unifiedhovertitle": {"text": hover},
                    "rangemode": "tozero",
                },
                "hovermode": "x unified",
                "margin": {"l": 52, "r": 14, "t": 8, "b": 44},
            }
            if traces:
                figures[x] = figure(traces, yaxis={"range": late_range(traces, field)}, **layout)
        if figures:
            found.append({"title": title, "unit": unit, "figures": figures})
    return found


def bars(shares: list[tuple[Group, dict[str, float]]], form: str, count: int) -> dict | None:
    """A bar for each part and group, in the height of `count` parts; None without parts. The label
    has the part's share of the group's total."""
    names = list(dict.fromkeys(name for _, parts in shares for name in parts))
    if not names:
        return None
    traces = [
        go.Bar(
            x=list(parts.values()),
            y=list(parts),
            orientation="h",
            text=[f"{v:{form}} · {100 * v / sum(parts.values()):.1f} %" for v in parts.values()],
            textposition="outside",
            cliponaxis=False,
            name=html.escape(group.name),
            hovertemplate="%{y}: %{text}",
            meta={"color": group.color},
        )
        for group, parts in shares
    ]
    return figure(
        traces,
        height=40 + count * (14 + 20 * len(shares)),
        # The page makes room for the labels.
        xaxis={"range": [0, max(max(parts.values()) for _, parts in shares)], "visible": False},
        yaxis={
            "categoryarray": names,
            "autorange": "reversed",
            "automargin": True,
            "ticksuffix": " ",
        },
        margin={"l": 8, "r": 8, "t": 4, "b": 4},
        bargap=0.3,
    )


def average(found: list[dict[str, float]]) -> dict[str, float]:
    """The means of the parts, over the runs that have the same parts as the most complete one."""
    most = max(found, key=len)
    kept = [parts for parts in found if parts.keys() == most.keys()]
    return {name: statistics.fmean(parts[name] for parts in kept) for name in most}


def bytes_of(run: Run) -> dict[str, float]:
    """The bytes of the submission by part. By tensor if an artifact of the logged size lies beside
    the log."""
    if None in (run.model_bytes, run.code_bytes):
        return {}
    code = {"code": run.code_bytes}
    path = run.path.with_name(run.path.stem + "".join(train_gpt.ARTIFACT.suffixes))
    try:
        if path.stat().st_size == run.model_bytes:
            return plot.byte_shares(str(path)) | code
    except (OSError, train_gpt.UserError):
        pass
    return {"weights": run.model_bytes} | code


def seconds_of(run: Run) -> dict[str, float]:
    """The seconds of a run by part, in order. Those of warm-up, calibration, export and the rest
    are in the events alone."""
    events = events_of(run)
    events |= {"calibration": events["gptq"]} if "gptq" in events else {}  # until 2026-11-26
    kinds = ("warmup", "calibration", "artifact")
    walls = {kind: events.get(kind, {}).get("wall_seconds", 0.0) for kind in kinds}
    parts = {
        "warm-up": walls["warmup"],
        "training": (run.train_seconds or 0.0) - walls["calibration"],
        "validation": sum(point.fields.get("eval_time", 0.0) for point in run.val),
        "calibration": walls["calibration"],
        "export": walls["artifact"],
    }
    parts["text and artifact"] = run.prepare_seconds or 0.0
    for name, score in run.scores.items():
        parts[f"score: {name.removeprefix('final_').removeprefix('int6_')}"] = score.seconds or 0.0
    if "finished" in events and not run.resumed:
        parts["other"] = events["finished"]["seconds"] - sum(parts.values())
    return {name: value for name, value in parts.items() if value > 0}


# ---- Machine and knobs ---------------------------------------------------------------------------
def environment(groups: list[Group]) -> Table:
    """Facts about the machines: a column per group, or a single one if all are equal."""
    columns = []
    for group in groups:
        facts: dict[str, list[str]] = {}
        for run in group.members:
            script = run.source and hashlib.sha256(run.source).hexdigest()[:12]
            found = {"device": run.device, "ranks": run.ranks}
            for name, value in (found | run.versions | {"sha256 of the script": script}).items():
                facts.setdefault(name, []).append(str(value or ""))
        columns.append({name: "; ".join(dict.fromkeys(told)) for name, told in facts.items()})
    names = [name for name in dict.fromkeys(n for c in columns for n in c)]
    names = [name for name in names if any(column.get(name) for column in columns)]
    alike = all(column == columns[0] for column in columns)
    titles = ["all runs"] if alike else [group.name for group in groups]
    shown = columns[: len(titles)]
    return Table(["", *titles], [Row([n, *(c.get(n) or "–" for c in shown)]) for n in names])


def value_of(field: dataclasses.Field, text: str) -> object:
    """The value of a knob in a log, or its text if this version of the script refuses it."""
    try:
        return train_gpt.parse(field, {field.name.upper(): text})
    except train_gpt.UserError:
        return text


def knobs(groups: list[Group]) -> tuple[Table, Table]:
    """(the knobs that differ between groups, those of all groups that are not the default)."""
    settings = [group.members[0].configuration for group in groups]
    differing, alike = [], []
    for field in dataclasses.fields(train_gpt.Hyperparameters):
        name = field.name.upper()
        start, end = [name, str(field.default)], field.metadata["text"]
        values = [found.get(name, "–") for found in settings]
        # A script without a knob counts as one with its default
        if len({found.get(name, start[1]) for found in settings}) > 1:
            differing.append(Row([*start, *values, end]))
        elif name in settings[0] and value_of(field, values[0]) != field.default:
            alike.append(Row([*start, values[0], end]))
    heads = [
        ["knob", "default", *titles, "meaning"] for titles in ([g.name for g in groups], ["value"])
    ]
    return Table(heads[0], differing), Table(heads[1], alike)


# ---- The page ------------------------------------------------------------------------------------
def track_notes(groups: list[Group], record: str) -> list[str]:
    """What `tools/compare.py --record` concludes about each run. Raises UserError for another
    vocabulary."""
    notes = []
    for run in (run for group in groups for run in group.members):
        record_curves.check_vocabulary(run, record)
        try:
            end = record_curves.follow(run, record)[1].splitlines()[-1]
        except train_gpt.UserError as error:
            end = str(error)
        notes.append(f"{run.path.stem}: {end}.")
    return notes


def about(members: list[Run], configurations: int) -> list[str]:
    """What ran, where and when."""
    kinds = f"{configurations} configuration{'s' * (configurations > 1)}"
    devices = dict.fromkeys(run.device for run in members if run.device)
    dates = {run.started[:10] for run in members if run.started}
    days = [" to ".join(sorted({min(dates), max(dates)}))] if dates else []
    return [kinds, f"{len(members)} run{'s' * (len(members) > 1)}", *devices, *days]


def contents(texts: list[str], record: str | None) -> dict:
    """What the template shows."""
    groups, notes = read_groups(texts)
    done = [group for group in groups if group.finished]
    table, sentences = significance(done)
    sizes = [(group, average([bytes_of(run) for run in group.members])) for group in groups]
    sizes = [(g, dict(sorted(parts.items(), key=lambda part: -part[1]))) for g, parts in sizes]
    times = [(group, average([seconds_of(run) for run in group.members])) for group in groups]
    sizes, times = ([(g, parts) for g, parts in found if parts] for found in (sizes, times))
    count = max((len(parts) for _, parts in sizes + times), default=0)
    members = [(group.name, group.color, group.members) for group in groups]
    warned = {group.name: runs.uneven_steps(group.members) for group in groups}
    notes += [f"{name}: {warning}." for name, warning in warned.items() if warning]
    if record:
        notes += track_notes(groups, record)
        members.append((f"#{record}, published", PUBLISHED, record_curves.tracks(record)))
    return {
        "title": groups[0].name + f" and {len(groups) - 1} more" * (len(groups) > 1),
        "about": about([run for group in groups for run in group.members], len(groups)),
        "headline": headline(groups, table),
        "tiles": tiles(best_of(done, table) if done else groups[0]),
        "key": [(color, name) for name, color, _ in members],
        "significance": table,
        "sentences": sentences,
        "runs": run_table(groups),
        "record": record,
        "panels": panels(members),
        "bars": {"bytes": bars(sizes, ",.0f", count), "time": bars(times, ",.1f", count)},
        "tables": dict(zip(("between", "defaults"), knobs(groups), strict=True))
        | {"environment": environment(groups)},
        "notes": notes,
        "margin": compare.RECORD.margin,
        "levels": [rule.level for rule in LEVELS.values()],
        # A third of its 4.8 MB; every browser since 2023 unpacks it
        "plotly": base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode(),
    }


def write(path: Path, texts: list[str], record: str | None = None) -> None:
    """Write the page about these logs, with the curves of a published record if one is named."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    options = {"autoescape": True, "undefined": jinja2.StrictUndefined, "trim_blocks": True}
    template = jinja2.Environment(loader=loader, **options).get_template("html_page.html")
    page = template.render(contents(texts, record)).encode(errors="replace")
    with train_gpt.replacing(path) as partial:
        partial.write_bytes(page)
    print(f"written: {path}, {len(page) / 1e6:.1f} MB")

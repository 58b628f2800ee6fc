"""The HTML page of `tools/report.py --html`: one file about runs, drawn by Plotly.

`write` reads the logs, makes tables of strings and figures, and fills html_page.html. The template
escapes every string.
"""

import dataclasses
import hashlib
import html
import itertools
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
from plotly.subplots import make_subplots

PANELS = (  # title, unit, format, field of a point
    ("Training loss", "nats per token", ".4f", "train_loss"),
    ("Validation score", "bits per byte", ".4f", "val_bpb"),
    ("Learning rate", "fraction of its peak", ".3f", "lr_scale"),
    ("Speed", "tokens per second", ",.0f", "speed"),
)
AXES = {"step": "step", "seconds": "training time, s"}
# At least 21 units of CIELAB apart, also with protanopia, deuteranopia or tritanopia
COLORS = ["#0064b0", "#d55e00", "#602030", "#8c1aff", "#800000", "#cc6699", "#203060", "#ff1a53"]
CONFIG = {  # of the figures
    "responsive": True,
    "displaylogo": False,
    # Plotly's own choice has a button that sends the data to a server.
    "modeBarButtons": [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    "plotlyServerURL": "",
}


class Group(NamedTuple):
    """Finished runs that differ only in their seeds, or a single run that did not finish."""

    name: str
    members: list[Run]
    finished: bool = True

    @property
    def bpb(self) -> float:
        return statistics.fmean(run.score.bpb for run in self.members)


class Table(NamedTuple):
    head: list[str]
    rows: list[list[str]]


# ---- Logs ----------------------------------------------------------------------------------------
def read_groups(texts: list[str]) -> tuple[list[Group], list[str]]:
    """(the groups of all logs, notes on logs that are left out). Evaluations of artifacts are, beside
    trainings. A .jsonl stands for the text log beside it. Raises UserError if no log has a step."""
    members, note = runs.read_logs([re.sub(r"\.jsonl$", ".txt", text) for text in texts])
    notes = [f"{note}."] if note else []
    trained = [run for run in members if not run.settings.get("EVAL_ONLY")]
    if trained and (only := len(members) - len(trained)):
        notes.append(f"left out: {only} logs that only evaluate (EVAL_ONLY).")
        members = trained
    named = plot.groups([run for run in members if not run.fault])
    found = [Group(name, group) for name, group in named.items()]
    for run in members:
        if run.fault:
            found.append(Group(f"{run.path.stem}, not finished", [run], False))
            why = run.fault.removeprefix(f"{run.path.parent}/").partition(";")[0]
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
    """(each group beside the first one, sentences on what counts as a record)."""
    head = ["configuration", "score, bits per byte", "B − A, nats per token", "p, better at all"]
    rows, notes = [], []
    for group in groups:
        cells = ["baseline, A", "", "", ""]
        if group is not groups[0]:
            cells, sentences = beside(groups[0].members, group.members)
            notes += [f"{group.name}: {sentence}." for sentence in sentences]
        score = plot.mean_std([run.score.bpb for run in group.members], ".5f")
        rows.append([group.name, score, *cells])
    return Table([*head, f"p, by more than {compare.MARGIN}", "record"], rows), notes


def beside(a: list[Run], b: list[Run]) -> tuple[list[str], list[str]]:
    """(cells of B's row, sentences), both by tools/compare.py."""
    try:
        of_a, of_b, note = compare.losses(a, b)
    except train_gpt.UserError as error:
        return ["", "", "", ""], [f"not comparable: {error}"]
    cells = [f"{statistics.fmean(of_b) - statistics.fmean(of_a):+.5f}"]
    for margin in (0.0, compare.MARGIN):
        test = compare.welch(of_a, of_b, margin)
        cells.append(f"{test.p:.2g}" if test else "untested")
    counts, why = compare.verdict(a, b)
    notes = [why, note, compare.unequal_seeds(a, b, of_a, of_b)]
    return [*cells, "yes" if counts else "no"], [note for note in notes if note]


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
    # Those that cannot be compared with the first one have no difference.
    compared = {name for name, _, difference, *_ in table.rows if difference}
    best = min((group for group in done if group.name in compared), key=lambda group: group.bpb)
    score = plot.mean_std([run.score.bpb for run in best.members], ".4f")
    text = f"{best.name}: {score} bits per byte"
    if len(done) == 1:
        return f"{text}."
    if best is done[0]:
        return f"{text}. No other configuration that can be compared has a lower score."
    _, _, nats, p, _, record = next(row for row in table.rows if row[0] == best.name)
    tested = f"p = {p}" if p != "untested" else p
    end = f"A record (p < {compare.RECORD_LEVEL})" if record == "yes" else "Not a record"
    gain = f"{-float(nats):.5f} nats per token better than {done[0].name} ({tested})"
    sides = done[0].members, best.members
    unequal = compare.unequal_seeds(*sides, *compare.losses(*sides)[:2])
    return f"{text}, {gain}. {end}.{unequal and f' But {unequal}.'}"


# ---- Figures -------------------------------------------------------------------------------------
def read_curve(run: Run | record_curves.Track, field: str, x: str) -> plot.Curve:
    """A field of a run, or its tokens per second between two logged steps, against `x`; losses and
    scores as `plot.late` leaves them."""
    if field == "speed":
        tokens = run.settings.get("TRAIN_BATCH_TOKENS", "")
        at, ms = plot.step_times(run.train if tokens.isdigit() else [], x)
        return at[ms > 0], 1000 * int(tokens or 0) / ms[ms > 0]
    points = plot.curve(run.val if field == "val_bpb" else run.train, x, field)
    return points if field == "lr_scale" else plot.late(points)


def lines_of(curves: list[plot.Curve], style: dict, form: str) -> list[go.Scatter]:
    """The mean of a group's curves, above the band from the lowest to the highest."""
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
        mode="lines+markers" if measured and len(x) <= 12 else "lines",
        hovertemplate=f"%{{y:{form}}}{span}",
        **style,
    )
    band = go.Scatter(
        x=[*x.tolist(), *x[::-1].tolist()],
        y=[*high, *low[::-1]],
        fill="toself",
        line={"width": 0, "color": style["line"]["color"]},
        hoverinfo="skip",
        legendgroup=style["legendgroup"],
        showlegend=False,
    )
    return [band, line] if len(curves) > 1 else [line]


def styles(groups: list[Group]) -> list[tuple[dict, list[Run]]]:
    """(how its lines are drawn, its runs) of each group. Plotly reads HTML in names."""
    found = []
    for i, group in enumerate(groups):
        line = {"color": COLORS[i % 8], "dash": ("solid", "dot", "dash")[i // 8 % 3]}
        style = {"name": html.escape(group.name), "legendgroup": str(i), "line": line}
        found.append((style, group.members))
    return found


def curves(groups: list[Group], record: str | None) -> go.Figure | None:
    """A row of each panel that has data: over steps and over time. None without data."""
    members = styles(groups)
    if record:
        line = {"color": "#6b7580", "dash": "dash"}
        style = {"name": f"#{record}, published", "legendgroup": "record", "line": line}
        members.append((style, record_curves.tracks(record)))
    panels = {}
    for title, unit, form, field in PANELS:
        found = {x: [] for x in AXES}
        for x, (style, group) in itertools.product(AXES, members):
            points = [read_curve(run, field, x) for run in group]
            if points := [curve for curve in points if len(curve[0])]:
                found[x] += lines_of(points, style, form)
        if any(found.values()):
            panels[f"{title}, {unit}"] = field, found
    if not panels:
        return None
    figure = make_subplots(len(panels), 2, vertical_spacing=0.3 / len(panels))
    named = set()
    for row, (title, (field, found)) in enumerate(panels.items(), start=1):
        for column, (x, label) in enumerate(AXES.items(), start=1):
            for trace in found[x]:
                if trace.showlegend is None:
                    trace.showlegend = trace.legendgroup not in named
                    named.add(trace.legendgroup)
                figure.add_trace(trace, row, column)
            figure.update_xaxes(title=label, rangemode="tozero", row=row, col=column)
            mode = "tozero" if field == "speed" else "normal"
            figure.update_yaxes(title=title, rangemode=mode, row=row, col=column)
    legend = {"orientation": "h", "yanchor": "bottom", "y": 1.02}
    return figure.update_layout(
        height=320 * len(panels), hovermode="x unified", template="plotly_white", legend=legend
    )


def bars(groups: list[Group]) -> go.Figure | None:
    """Seconds by part and group, each with its share of the group's total; None without parts."""
    figure, height = go.Figure(), 0
    for style, members in styles(groups):
        parts = average([seconds_of(run) for run in members])
        height += 20 * len(parts)
        figure.add_bar(
            x=list(parts.values()),
            y=list(parts),
            orientation="h",
            text=[f"{v:,.1f} · {100 * v / sum(parts.values()):.1f} %" for v in parts.values()],
            textposition="outside",
            cliponaxis=False,
            name=style["name"],
            marker={"color": style["line"]["color"]},
            visible=bool(parts),
        )
    figure.update_layout(height=120 + height, template="plotly_white", margin={"r": 140, "t": 20})
    figure.update_xaxes(visible=False)
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure if height else None


def average(found: list[dict[str, float]]) -> dict[str, float]:
    """The means of the parts, over the runs that have the same parts as the most complete one."""
    most = max(found, key=len)
    kept = [parts for parts in found if parts.keys() == most.keys()]
    return {name: statistics.fmean(parts[name] for parts in kept) for name in most}


def seconds_of(run: Run) -> dict[str, float]:
    """The seconds of a run by part, in order; some are in the events alone."""
    events = events_of(run)
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
    names = dict.fromkeys(name for column in columns for name, told in column.items() if told)
    alike = all(column == columns[0] for column in columns)
    titles = ["all runs"] if alike else [group.name for group in groups]
    shown = columns[: len(titles)]
    return Table(["", *titles], [[n, *(c.get(n) or "–" for c in shown)] for n in names])


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
            differing.append([*start, *values, end])
        elif name in settings[0] and values[0] != start[1]:
            alike.append([*start, values[0], end])
    names = [group.name for group in groups]
    head = ["knob", "default", "value", "meaning"]
    return Table([*head[:2], *names, head[3]], differing), Table(head, alike)


# ---- The page ------------------------------------------------------------------------------------
def track_notes(groups: list[Group], record: str) -> list[str]:
    """What `tools/compare.py --record` concludes about each run. Raises UserError."""
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
    rows = []
    for group in groups:  # each run, then mean and standard deviation
        names = [run.path.stem for run in group.members]
        rows += runs.rows(group.members, names, unknown="–")
    warned = {group.name: runs.uneven_steps(group.members) for group in groups}
    notes += [f"{name}: {warning}." for name, warning in warned.items() if warning]
    if record:
        notes += track_notes(groups, record)
    between, defaults = knobs(groups)
    return {
        "title": groups[0].name + f" and {len(groups) - 1} more" * (len(groups) > 1),
        "about": about([run for group in groups for run in group.members], len(groups)),
        "headline": headline(groups, table),
        "significance": table,
        "sentences": sentences,
        "runs": Table(["run", *(title for title, *_ in runs.COLUMNS)], rows),
        "record": record,
        "figures": {
            "Curves": curves(groups, record),
            "Where the time went": bars(groups),
        },
        "tables": {
            "Knobs that differ between configurations": between,
            "Knobs that differ from the defaults": defaults,
            "Environment": environment(groups),
        },
        "notes": notes,
        "margin": compare.MARGIN,
        "level": compare.RECORD_LEVEL,
    }


def write(path: Path, texts: list[str], record: str | None = None) -> None:
    """Write the page about these logs, with the curves of a published record if one is named."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    options = {"autoescape": True, "undefined": jinja2.StrictUndefined, "trim_blocks": True}
    template = jinja2.Environment(loader=loader, **options).get_template("html_page.html")

    def drawn(figure: go.Figure, library: bool) -> str:  # the library is for all figures
        return figure.to_html(CONFIG, full_html=False, include_plotlyjs=library)

    page = template.render(contents(texts, record), drawn=drawn).encode(errors="replace")
    with train_gpt.replacing(path) as partial:
        partial.write_bytes(page)
    print(f"written: {path}, {len(page) / 1e6:.1f} MB")

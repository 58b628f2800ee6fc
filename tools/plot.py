#!/usr/bin/env python3
"""Plot runs from their logs: loss, score, learning rate and speed.

    python tools/plot.py "logs/base_seed*.txt" "logs/new_seed*.txt" -o runs.png

Runs of one configuration share a curve: the mean over seeds, in a band from the lowest to the
highest. A loss or score with more than 20 points is drawn without its first 5 %.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("", "tools", "bench")]

import program
import train_gpt
from common import image_file
from lib import runs
from lib.runs import Point, Run

with train_gpt.importing("requirements-dev.txt"):
    import matplotlib
    import numpy as np

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

Curve = tuple[np.ndarray, np.ndarray]  # x and y, both (n,)


def groups(members: list[Run]) -> dict[str, list[Run]]:
    """Runs grouped by configuration and script, by title."""
    found: list[list[Run]] = []
    for run in members:
        for group in found:
            seeds = {other.seed for other in group}
            if run.seed not in seeds and not runs.differences([group[0], run]):
                group.append(run)
                break
        else:
            found.append([run])
    named: dict[str, list[Run]] = {}
    for group in found:
        title = name_of(group, found)
        # Equal, for example, for s_seed1 and 2 beside s_seed3 and 4 of another configuration
        named[f"{title} from {group[0].path.stem}" if title in named else title] = group
    return named


def name_of(group: list[Run], all_groups: list[list[Run]]) -> str:
    """The title of a group: the name of its only log, or the common start of the names."""
    names = [run.path.stem for run in group]
    title = names[0]
    if len(group) > 1:
        prefix = os.path.commonprefix(names)
        title = prefix.rstrip("_-0123456789").removesuffix("seed").rstrip("_-") or names[0]
        others = (run for other in all_groups if other is not group for run in other)
        if title in {run.path.stem for run in others}:  # demo, and demo_seed1 with other settings
            title += "_*"
    if any(other is not group and other[0].path.stem == names[0] for other in all_groups):
        title = f"{group[0].path.parent.name}/{title}"
    return title if len(group) == 1 else f"{title} ({len(group)} seeds)"


def mean_std(values: list[float], form: str) -> str:
    """The mean, with the standard deviation of several values."""
    mean, std = runs.mean_std(values)
    return format(mean, form) + (f" ± {std:{form}}" if std is not None else "")


def curve(points: list[Point], x: str, field: str) -> Curve:
    """One field of a run against `x`, "step" or "seconds"."""
    pairs = [
        (getattr(point, x), point.fields[field])
        for point in points
        if field in point.fields and getattr(point, x) is not None
    ]
    return to_curve(pairs)


def to_curve(pairs: list[tuple[float, float]]) -> Curve:
    x, y = np.array(pairs, dtype=float).reshape(-1, 2).T
    return x, y


def late(points: Curve) -> Curve:
    """A curve without its first 5 %, where the loss falls far, unless it is short."""
    x, y = points
    kept = x >= 0.05 * x[-1] if len(x) > 20 else slice(None)
    return x[kept], y[kept]


def step_times(points: list[Point], x: str = "step") -> Curve:
    """Milliseconds per step between two logged steps, against `x` of the later one."""
    timed = [point for point in points if point.seconds is not None]
    pairs = [
        (getattr(b, x), 1000 * (b.seconds - a.seconds) / (b.step - a.step))
        for a, b in zip(timed, timed[1:], strict=False)
    ]
    return to_curve(pairs)


def together(curves: list[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """x (n,) and the curves (runs, n), interpolated at all x that every run covers."""
    begin, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.unique(np.concatenate([x for x, _ in curves]))
    grid = grid[(grid >= begin) & (grid <= end)]
    return grid, np.array([np.interp(grid, x, y) for x, y in curves])


def panel(
    axis: plt.Axes, found: dict[str, list[Run]], read: Callable[[Run], Curve], marker: str = ""
) -> None:
    """Draw one panel: a line and a band per group, or a note that the logs lack the data."""
    drawn = False
    for number, (name, members) in enumerate(found.items()):
        curves = [points for points in map(read, members) if len(points[0])]
        if not curves:
            continue
        x, y = together(curves)
        # Interpolated points get no marker
        measured = all(np.array_equal(x, points[0]) for points in curves)
        color = f"C{number % 10}"
        style = {"marker": marker if measured else "", "ms": 3.5, "lw": 1.4}
        axis.plot(x, y.mean(axis=0), color=color, label=name, **style)
        if len(curves) > 1:
            axis.fill_between(x, y.min(axis=0), y.max(axis=0), color=color, alpha=0.2, lw=0)
        drawn = True
    if not drawn:
        axis.set_title("not in these logs", color="gray")
    axis.grid(alpha=0.3)


def draw_runs(members: list[Run], output: Path) -> None:
    """Loss and score against steps and seconds; learning rate and time per step."""
    found = {}
    for name, group in groups(members).items():
        bpb = [run.score.bpb for run in group if not run.fault]
        score = f"{mean_std(bpb, '.4f')} bits per byte" if bpb else "not finished"
        title = f"{name}: {score}".encode(errors="backslashreplace")
        found[title.decode()] = group  # Matplotlib draws UTF-8 only
    figure, axes = plt.subplots(3, 2, figsize=(11, 10), layout="constrained")
    for column, (x, label) in enumerate((("step", "step"), ("seconds", "training time (s)"))):
        losses = lambda run, x=x: late(curve(run.train, x, "train_loss"))  # noqa: E731
        scores = lambda run, x=x: late(curve(run.val, x, "val_bpb"))  # noqa: E731
        panel(axes[0][column], found, losses)
        panel(axes[1][column], found, scores, marker="o")
        axes[0][column].set(xlabel=label, ylabel="training loss (nats per token)")
        axes[1][column].set(xlabel=label, ylabel="validation (bits per byte)")
    panel(axes[2][0], found, lambda run: curve(run.train, "step", "lr_scale"))
    axes[2][0].set(xlabel="step", ylabel="learning rate (fraction of its peak)", ylim=(0, 1.08))
    panel(axes[2][1], found, lambda run: step_times(run.train))
    axes[2][1].set(xlabel="step", ylabel="time per step (ms)")
    axes[2][1].set_ylim(bottom=0)
    handles, labels = axes[0][0].get_legend_handles_labels()
    columns = max(1, min(3, len(labels), 110 // max(map(len, labels), default=1)))
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, frameon=False)
    figure.savefig(output, dpi=120)


def main() -> None:
    parser = program.parser(__doc__)
    add, text = parser.add_argument, "default: %(default)s"
    add("logs", nargs="+", help="text logs of runs, folders of logs, patterns")
    add("-o", "--output", type=image_file, default="runs.png", help=text)
    arguments = parser.parse_args()
    members, note = runs.read_logs(arguments.logs)
    if note:
        print(note, file=sys.stderr)
    with train_gpt.writing(arguments.output):
        draw_runs(members, arguments.output)
    print(f"drawn: {arguments.output}")


if __name__ == "__main__":
    program.run_program(main)

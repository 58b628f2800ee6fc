"""tools/plot.py: curves, scaling, bytes."""

from unittest import mock

import numpy as np
import pytest

import plot
from conftest import ROOT, run
from lib import runs
from sample_logs import PUBLISHED, logs_of, written


def test_runs_of_one_configuration_are_one_curve(swept, tmp_path):
    members = [runs.read_run(path) for rate in ("0.005", "0.025") for path in logs_of(swept, rate)]
    found = plot.groups(members)
    names = ["t_MATRIX_LR=0.005 (2 seeds)", "t_MATRIX_LR=0.025 (2 seeds)"]
    assert {name: len(group) for name, group in found.items()} == dict.fromkeys(names, 2)
    # Seeds 1 and 2 of one configuration, 3 and 4 of another, named alike, are all kept
    for number, one in enumerate(members, 1):
        written(tmp_path, one.path.read_text(), f"s_seed{number}.txt")
    alike = plot.groups([runs.read_run(path) for path in runs.find_logs(str(tmp_path))])
    assert list(map(len, alike.values())) == [2, 2]
    for name, one in zip(("demo", "demo_seed1", "demo_seed2"), members[1:], strict=True):
        written(tmp_path / "demos", one.path.read_text(), f"{name}.txt")
    demos = [runs.read_run(path) for path in runs.find_logs(str(tmp_path / "demos"))]
    assert list(plot.groups(demos)) == ["demo", "demo_* (2 seeds)"]
    curves = (([0.0, 10.0], [0.0, 1.0]), ([5.0, 20.0], [2.0, 5.0]))
    x, y = plot.together([tuple(map(np.array, curve)) for curve in curves])
    assert x.tolist() == [5.0, 10.0] and y.tolist() == [[0.5, 1.0], [2.0, 3.0]]
    steps, ms = plot.step_times(members[0].train)
    a, b = members[0].train[-2:]
    assert steps[-1] == 12 and ms[-1] == pytest.approx(1000 * (b.seconds - a.seconds) / 2)


def test_a_point_that_not_every_run_has_gets_no_marker():
    long, short = ((np.array(x), np.zeros(len(x))) for x in ([0.0, 5.0, 10.0], [0.0, 10.0]))
    for curves, marker in (([long, short], ""), ([short, long], ""), ([long, long], "o")):
        axis = plot.plt.figure().subplots()
        plot.panel(axis, {"a": [0, 1]}, lambda run, curves=curves: curves[run], marker="o")
        assert axis.lines[0].get_marker() == marker


def test_plots_are_drawn(swept, tmp_path):
    """One log's name is not UTF-8; logs without steps are left out in one line."""
    for name in "012":
        written(tmp_path, "started\n", f"{name}.txt")
    logs = swept / "logs" / "*seed?.txt", written(tmp_path, PUBLISHED, "caf\udcff.log"), "*.txt"
    said = run([ROOT / "tools" / "plot.py", *logs, "-o", "x.png"], {}, tmp_path).stderr
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert said.startswith("left out: 0.txt has neither steps nor scores; ")
    assert said.endswith(" (and 2 more such logs)\n") and said.count("\n") == 1


def drawn(members):
    """The figure of these runs, and the texts of its legend."""
    with mock.patch.object(plot.plt.Figure, "savefig", autospec=True) as saved:
        plot.draw_runs(members, "x.png")
    figure = saved.call_args.args[0]
    return figure, [text.get_text() for text in figure.legends[0].texts]


@pytest.mark.parametrize("validations", [2, 3, 21])
def test_all_drawn_points_are_in_range(validations, tmp_path):
    """Of a long curve the first 5 %, which would flatten the rest, are not drawn."""
    lines, every = [], 100 // (validations - 1)
    for step in range(101):
        kinds = [f"train_loss:{7 - step / 100}"] * (step > 0)
        kinds += [f"val_loss:2 val_bpb:{4 - step / 100}"] * (step % every == 0)
        lines += [f"step:{step}/100 {kind} train_time:{step}00ms" for kind in kinds]
    figure, texts = drawn([runs.read_run(written(tmp_path, "\n".join(lines)))])
    assert texts == ["train_seed42: not finished"]
    for axis, points in zip(figure.axes, (96, 96, *[min(validations, 20)] * 2), strict=False):
        (line,) = axis.lines
        x, y = line.get_data()
        assert len(x) == points
        for values, (low, high) in ((x, axis.get_xlim()), (y, axis.get_ylim())):
            assert low <= values.min() and values.max() <= high


def test_the_picture_has_the_scores(swept):
    """Means over the seeds that have one."""
    members = [runs.read_run(path) for path in logs_of(swept)]
    bits = np.array([run.score.bpb for run in members])
    mean = f"t_MATRIX_LR=0.025 (2 seeds): {bits.mean():.4f} ± {bits.std(ddof=1):.4f} bits per byte"
    assert drawn(members)[1] == [mean]
    assert drawn(members[:1])[1] == [f"{members[0].path.stem}: {bits[0]:.4f} bits per byte"]

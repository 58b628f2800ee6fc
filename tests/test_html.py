"""tools/report.py --html: the page, read with a parser. No browser runs here."""

import html
import re
from html.parser import HTMLParser

import pytest

import compare
import plot
from conftest import ROOT, run, user_error
from lib import html_page, runs
from sample_logs import LATER, PUBLISHED, group, log_of, logs_of, written

EMPTY = {"meta", "input", "wbr", "br"}
HOSTILE = "<img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """The elements, rows of tables, texts and scripts of a page, which must close its elements."""

    def __init__(self, path):
        super().__init__()
        self.open, self.elements, self.rows, self.texts, self.scripts = [], [], [], [], []
        self.source = path.read_text()
        self.feed(self.source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        place = "".join(self.open[-1:])
        if place != "style":
            (self.scripts if place == "script" else self.texts).append(data)
        if place in ("td", "th"):
            self.rows[-1][-1] += data.replace("\n", "")

    def row(self, name: str) -> list[str]:
        """The cells of the first row with this name."""
        return next(cells[1:] for cells in self.rows if cells and cells[0] == name)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def written_page(tmp_path, *logs, record=None) -> Page:
    html_page.write(tmp_path / "x.html", list(map(str, logs)), record)
    return Page(tmp_path / "x.html")


def figures_of(*logs, record=None) -> list:
    """The figures of the page about these logs: curves, time."""
    return list(html_page.contents(list(map(str, logs)), record)["figures"].values())


def drawn_in(curves, panel: int, axis: int) -> list:
    """The traces of a panel (counted from 0) over steps (0) or time (1)."""
    number = 2 * panel + axis + 1
    return [t for t in curves.data if (t.xaxis or "x") == f"x{number if number > 1 else ''}"]


def named(curves, panel=0, axis=0) -> list[str]:
    """The names of these lines, without bands."""
    return [trace.name for trace in drawn_in(curves, panel, axis) if trace.name]


@pytest.fixture(scope="module")
def sweep(swept):
    """The page of a sweep, made as a user would."""
    options = ["--html", "x.html", "logs/t_MATRIX_LR=0.005*.txt", "logs/t_MATRIX_LR=0.025*.jsonl"]
    result = run([ROOT / "tools" / "report.py", *options], {}, swept)
    assert not result.stderr and result.stdout.startswith("written: x.html, "), result
    return Page(swept / "x.html")


def test_the_page_is_one_file(sweep):
    """Nothing is loaded from elsewhere, and no button sends anything there."""
    tags = {tag for tag, _ in sweep.elements}
    assert not tags & {"link", "img", "iframe", "object", "embed", "base", "form"}
    for _, attributes in sweep.elements:
        assert not {"src", "href", "srcset", "data", "action"} & attributes.keys()
    (library,) = (script for script in sweep.scripts if "plotly.js v" in script[:500])
    rest = sweep.source.replace(library, "")
    assert not re.search(r"https?:|//[\w-]+\.|@import|url\(|\bfetch|XMLHttp|import\(", rest)
    assert rest.count('"modeBarButtons": [["toImage", "zoom2d", "pan2d", "resetScale2d"]]') == 2
    viewport = {"name": "viewport", "content": "width=device-width, initial-scale=1"}
    assert ("meta", viewport) in sweep.elements


def test_scores_are_those_of_compare(sweep, swept):
    a, b = ([runs.read_run(path) for path in logs_of(swept, r)] for r in ("0.005", "0.025"))
    of_a, of_b, _ = compare.losses(a, b)
    assert sweep.row("t_MATRIX_LR=0.005 (2 seeds)")[1] == "baseline, A"
    score, nats, better, margin, record = sweep.row("t_MATRIX_LR=0.025 (2 seeds)")
    mean, std = runs.mean_std([one.score.bpb for one in b])
    assert score == f"{mean:.5f} ± {std:.5f}"
    assert nats == f"{sum(of_b) / 2 - sum(of_a) / 2:+.5f}"
    assert better == f"{compare.welch(of_a, of_b).p:.2g}"
    assert margin == f"{compare.welch(of_a, of_b, compare.MARGIN).p:.2g}"
    counts, why = compare.verdict(a, b)
    assert record == ("yes" if counts else "no") and f"{why}." in sweep.text
    assert (compare.MARGIN, compare.RECORD_LEVEL) == (0.005, 0.01)


def test_curves_are_over_steps_and_time(swept):
    """Each of the four panels, each group with its mean and its band."""
    curves, times = figures_of(*logs_of(swept, "0.005"), *logs_of(swept, "0.025"))
    members = [runs.read_run(path) for path in logs_of(swept, "0.005")]
    kinds = {"train_loss": "train", "val_bpb": "val", "lr_scale": "train", "speed": ""}
    for panel, (field, kind) in enumerate(kinds.items()):
        for axis, x in enumerate(("step", "seconds")):
            band, line, *others = drawn_in(curves, panel, axis)
            found = [html_page.read_curve(one, field, x) for one in members]
            if kind:
                found = [plot.curve(getattr(one, kind), x, field) for one in members]
            at, values = plot.together(found)
            assert list(line.x) == at.tolist() and list(line.y) == values.mean(axis=0).tolist()
            assert max(band.y) == values.max() and min(band.y) == values.min()
            assert [trace.legendgroup for trace in others] == ["1", "1"]
    assert len(drawn_in(curves, 4, 0)) == 0
    # The legend has each group once, which hides all of its lines
    assert sum(trace.showlegend for trace in curves.data) == 2
    (step, ms), tokens = plot.step_times(members[0].train), members[0].settings
    at, speed = html_page.read_curve(members[0], "speed", "step")
    assert at.tolist() == step.tolist()
    assert speed == pytest.approx(1000 * int(tokens["TRAIN_BATCH_TOKENS"]) / ms)
    # Seconds add up
    seconds = [html_page.events_of(one)["finished"]["seconds"] for one in members]
    assert sum(times.data[0].x) == pytest.approx(sum(seconds) / 2)
    assert {"warm-up", "training", "export", "text and artifact", "other"} <= set(times.data[0].y)


def test_knobs_and_environment(sweep, swept):
    assert sweep.row("MATRIX_LR") == ["0.025", "0.005", "0.025", "Muon learning rate of the banks"]
    assert sweep.row("NUM_LAYERS")[:2] == ["11", "3"]
    names = [cells[0] for cells in sweep.rows]
    assert "SEED" not in names and "LOOP_VISITS" not in names
    member = runs.read_run(logs_of(swept)[0])
    assert sweep.row("device") == [member.device] and sweep.row("ranks") == ["1"]
    assert sweep.row("torch") == [member.versions["torch"]]


def test_a_script_without_a_knob_counts_as_one_with_its_default(swept, tmp_path):
    text = logs_of(swept, "0.005")[0].read_text()
    older = written(tmp_path, re.sub(r"(?m)^  MUON_EQ=.*\n", "", text), "older.txt")
    names = [cells[0] for cells in written_page(tmp_path, older, logs_of(swept)[0]).rows]
    assert "MATRIX_LR" in names and "MUON_EQ" not in names


def test_what_a_log_says_is_not_run(swept, tmp_path):
    """Names, knobs and devices with HTML, in the page and in Plotly's texts."""
    text = logs_of(swept)[0].read_text()
    for old in ("device:CPU", "* MODEL_DIM="):
        text = text.replace(old, f"{old} </script>{HOSTILE}")
    plain = written_page(tmp_path, logs_of(swept)[0])
    found = written_page(tmp_path, log := written(tmp_path, text, f"{HOSTILE}.txt"))
    assert len(found.scripts) == len(plain.scripts)
    assert "img" not in {tag for tag, _ in found.elements}
    assert found.row(HOSTILE)[0] and HOSTILE in found.row("MODEL_DIM")[1]
    assert set(named(figures_of(log)[0])) == {html.escape(HOSTILE)}


def test_a_run_without_events(swept, tmp_path):
    """One log alone, as in a record's folder."""
    log = written(tmp_path, logs_of(swept)[0].read_text(), "train_seed1.log")
    _, times = figures_of(log)
    assert "training" in times.data[0].y and "warm-up" not in times.data[0].y
    found = written_page(tmp_path, log)
    assert f"train_seed1: {runs.read_run(log).score.bpb:.4f} bits per byte." in found.text
    assert "p is Welch" not in found.text


def test_seeds_with_unequal_steps_are_warned_about(swept, tmp_path):
    """In the words of tools/compare.py. A run alone has nothing to differ from."""
    first, second = logs_of(swept)
    cut = re.sub(r"(?m)^step:1[12]/12 .*\n", "", second.read_text())
    logs = first, written(tmp_path, cut, second.name)
    warning = runs.uneven_steps([runs.read_run(log) for log in logs])
    assert f"(2 seeds): {warning}." in written_page(tmp_path, *logs).text and "10 to 12" in warning
    assert "warning" not in written_page(tmp_path, logs[1]).text


def test_evaluations_are_no_configurations_beside_trainings(swept, tmp_path):
    """The dated log of an evaluation comes first, and the page compared every training with it."""
    first, second = logs_of(swept)
    text = re.sub(r"(?m)^. EVAL_ONLY=.*$", "* EVAL_ONLY=logs/x.npz", first.read_text())
    scored = written(tmp_path, text, "20261125-012116-27833.txt")
    found = written_page(tmp_path, scored, second)
    assert "left out: 1 logs that only evaluate (EVAL_ONLY)." in found.text
    assert scored.stem not in found.text
    assert scored.stem in written_page(tmp_path, scored).text


def test_runs_that_did_not_finish(copied, tmp_path):
    """Alone, beside others, and one without a step."""
    first, second = logs_of(copied)
    first.write_text(re.sub(r"(?m)^final_int6.*\n", "", first.read_text()))
    found, last = written_page(tmp_path, first), runs.read_run(first).val[-1].fields["val_bpb"]
    end = re.escape(f"{last:.4f} bits per byte at step 12.")
    assert re.search(rf"Last validation: \S+ {end}", found.text)
    assert found.row(first.stem)[4] == "–" and named(figures_of(first)[0], panel=3)
    empty, other = (written(tmp_path, "started\n", name) for name in ("empty.txt", "empty2.txt"))
    found = written_page(tmp_path, first, second, empty, other)
    assert f"{first.name} has no final score: the run did not finish." in found.text
    assert f"left out: {empty} has neither steps nor scores" in found.text
    assert "(and 1 more such logs)" in found.text and "empty2" not in found.text
    unfinished = f"{first.stem}, not finished"
    assert named(figures_of(first, second)[0]) == [second.stem, unfinished]
    twins = [written(tmp_path / place, first.read_text(), first.name) for place in ("a", "b")]
    assert named(figures_of(*twins)[0]) == [unfinished] * 2
    with user_error("empty.txt has neither steps nor scores"):
        written_page(tmp_path, empty)


def test_published_logs_are_read(tmp_path):
    """With another tokenizer, and scored on another number of tokens."""
    scored = [PUBLISHED.replace("1.12165091", f"1.12165091 val_tokens:{n}") for n in (7, 8)]
    lower = scored[1].replace("1.12165091", "0.5").replace("1.89385556", "0.84422657")
    texts = {"a": scored[0], "b": LATER, "c": scored[1], "lower/c": lower}
    a, b, c, lower_c = (written((tmp_path / n).parent, t, f"{n[-1]}.log") for n, t in texts.items())
    found = written_page(tmp_path, a, b, c)
    of_a, of_b, note = compare.losses([runs.read_run(a)], [runs.read_run(b)])
    nats = of_b[0] - of_a[0]
    assert found.row("b") == ["1.05989", f"{nats:+.5f}", "untested", "untested", "no"]
    assert f"b: {note}." in found.text and "seeds cannot show it" in found.text
    assert found.row("c") == ["1.12165", "", "", "", ""]
    assert "c: not comparable: A and B were scored on 7 and 8 tokens" in found.text
    assert "No p is corrected" in found.text
    gain = f"{-nats:.5f} nats per token better than a (untested). Not a record."
    assert gain in found.text
    # One that is not comparable is no result, however low its score
    found = written_page(tmp_path, a, b, lower_c)
    assert found.row("c") == ["0.50000", "", "", "", ""] and gain in found.text
    assert "b: 1.0599 bits per byte" in found.text
    found = written_page(tmp_path, a, lower_c)
    assert "a: 1.1217 bits per byte. No other configuration that can be compared has" in found.text


@pytest.mark.parametrize("gain, end", [(0.03, "A record (p < 0.01)."), (0.01, "Not a record.")])
def test_the_headline_says_whether_it_is_a_record(gain, end, tmp_path):
    """A gain that is probable only was called one."""
    for name, nats in {"a": 1.9, "b": 1.9 - gain}.items():
        group(tmp_path / name, {1: nats - 0.002, 2: nats, 3: nats + 0.002})
    assert f" {end}" in written_page(tmp_path, tmp_path / "a", tmp_path / "b").text


def test_the_published_track_is_drawn_on_demand(tmp_path):
    log = written(tmp_path, log_of("399", "42"))
    assert len(named(figures_of(log)[0])) == 1
    found = written_page(tmp_path, log, record="399")
    line = drawn_in(figures_of(log, record="399")[0], 0, 0)[-1]
    assert (line.name, line.line.dash) == ("#399, published", "dash")
    assert line.x[0] == 400, "without the first 5 %"
    assert line.y[line.x.index(1000)] == pytest.approx((2.28 + 2.2879 + 2.283) / 3)
    assert "train_seed42: on the published track in all" in found.text

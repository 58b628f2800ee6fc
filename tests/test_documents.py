"""Links between documents lead to files and headings that exist, no document is empty, and the
examples of docs/experiment.md can be copied."""

import csv
import os
import re
import shutil
import subprocess
import sys

import pytest

import demo_corpus
import train_gpt
from conftest import ROOT, run, user_error

FOLDERS = [ROOT, *(ROOT / name for name in ("bench", "data", "docs", "records", "tools"))]
DOCUMENTS = sorted(path for folder in FOLDERS for path in folder.glob("*.md"))
TABLES = sorted((ROOT / "docs" / "data").glob("*.csv"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    assert len(text) > 500, "a document has lost its text"
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        if re.match(r"https?:", file):
            continue
        other = (path.parent / file).resolve() if file else path
        assert other.exists(), f"{target} leads nowhere"
        if anchor:
            titles = re.findall(r"(?m)^#+ (.*)$", other.read_text(encoding="utf-8"))
            names = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in names, f"{target}: no heading of this name"


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_table_says_where_it_is_from(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = [line for line in lines if line.startswith("#")]
    assert re.match(r"# (Measured|Modelled|Published|Estimated)\b", lines[0])
    assert lines[: len(comment)] == comment
    assert re.search(r"\b2026-\d\d-\d\d\b", " ".join(comment))
    rows = list(csv.reader(lines[len(comment) :]))
    assert len(rows) > 2 and len({len(row) for row in rows}) == 1
    assert any(f"data/{path.name})" in other.read_text(encoding="utf-8") for other in DOCUMENTS)


def test_a_rendezvous_on_one_machine_needs_no_dns():
    """torchrun --standalone waits for ever for a hostname that does not resolve."""
    folders = [*FOLDERS, *(ROOT / name for name in ("configs", "data", "tests"))]
    files = [path for folder in folders for path in folder.iterdir() if path.is_file()]
    lines = [line for path in files for line in path.read_text(errors="replace").splitlines()]
    commands = [line for line in lines if re.search(r"--standalone\b.*--nproc_per[_]node", line)]
    assert len(commands) > 10
    named = re.compile(r"--standalone\W+--local-addr=127.0.0.1\W")
    assert [command for command in commands if not named.search(command)] == []


def test_the_examples_of_an_experiment_apply_and_run(env, tmp_path):
    """Each alone, and both: a step, export and reload; the artifact has their knobs."""
    text = (ROOT / "docs" / "experiment.md").read_text(encoding="utf-8")
    diffs = re.findall(r"(?ms)^```diff\n(.*?)^```$", text)
    assert len(diffs) == 2
    script = shutil.copy(ROOT / "train_gpt.py", tmp_path)
    for options in ("--check", "--apply"):
        for diff in diffs:  # git finds places that have moved, by their lines of context
            command = ["git", "apply", options, "-"]
            subprocess.run(command, input=diff.encode(), cwd=tmp_path, check=True)
    run([script], env(ITERATIONS=1, ATTN_TEMP=1, VALUE_RESIDUAL=1), tmp_path)
    with user_error("this script has no knob ATTN_TEMP VALUE_RESIDUAL"):
        train_gpt.open_artifact((tmp_path / "final_model.npz").read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("name, last", [("2135", "sliding_window"), ("frontier", "banded")])
def test_the_lines_for_a_cpu_work(tmp_path, name, last):
    """As they are in the document, but for two steps on a small text."""
    text = (ROOT / "docs" / "configurations.md").read_text(encoding="utf-8")
    _, section = text.split("## On a CPU\n")
    first, *lines = re.findall(r"(?m)^    (.*)", section.partition("\n## ")[0])
    assert first == "python data/demo_corpus.py demo_data"
    demo_corpus.build(tmp_path / "demo_data", ROOT / "tools", val_bytes=4000)
    for part in ("configs", "train_gpt.py"):
        (tmp_path / part).symlink_to(ROOT / part)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nITERATIONS=2 exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    script = "\n".join(line for line in lines if "configs/" not in line or f"/{name}.env" in line)
    assert script.endswith("python train_gpt.py")
    environ = {"PATH": f"{python.parent}:{os.environ['PATH']}", "RUN_ID": "r", "DEVICE": "cpu"}
    done = subprocess.run(["bash", "-c", script], env=environ, cwd=tmp_path, capture_output=True)
    output = done.stdout.decode()
    assert done.returncode == 0, output[-2000:] + done.stderr.decode()
    assert f"final_int6_{last}_exact" in output and "\nfinished: " in output

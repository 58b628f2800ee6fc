"""Links between documents lead to files and headings that exist, and no document is empty."""

import os
import re
import subprocess
import sys

import pytest

import demo_corpus
from conftest import ROOT

FOLDERS = [ROOT, *(ROOT / name for name in ("bench", "data", "docs", "records", "tools"))]
DOCUMENTS = sorted(path for folder in FOLDERS for path in folder.glob("*.md"))


def anchors(text: str) -> set[str]:
    """GitHub's names of the headings."""
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    plain = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
    return {title.replace(" ", "-") for title in plain}


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
            assert anchor in anchors(other.read_text(encoding="utf-8")), f"{target}: no heading"


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

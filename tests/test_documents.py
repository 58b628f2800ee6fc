"""Links between documents lead to files and headings that exist, and no document is empty."""

import re

import pytest

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


def test_a_rendezvous_on_one_machine_needs_no_dns():
    """torchrun --standalone waits for ever for a hostname that does not resolve."""
    folders = [*FOLDERS, *(ROOT / name for name in ("configs", "data", "tests"))]
    files = [path for folder in folders for path in folder.iterdir() if path.is_file()]
    lines = [line for path in files for line in path.read_text(errors="replace").splitlines()]
    commands = [line for line in lines if re.search(r"--standalone\b.*--nproc_per[_]node", line)]
    assert len(commands) > 10
    assert [
        c for c in commands if not re.search(r"--standalone\W+--local-addr=127.0.0.1\W", c)
    ] == []

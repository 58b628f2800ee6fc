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

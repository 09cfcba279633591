"""Links between pages, and from pages to files, lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.doc_blocks import ROOT, pages

_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]:\s+(\S+)$", re.MULTILINE)
_HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)
PAGES = [*pages(), ROOT / "CHANGELOG.md"]


def anchors(page: Path) -> set[str]:
    """The names of a page's headings as GitHub makes them."""
    headings = _HEADING.findall(_FENCED.sub("", page.read_text(encoding="utf-8")))
    plain = [re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def links(page: Path) -> list[str]:
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    return [inline or reference for inline, reference in _LINK.findall(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    broken = []
    for link in links(page):
        if re.match(r"(https?|mailto):", link):
            assert not link.startswith("http:"), f"{page.name}: {link} is not https"
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken, f"{page.relative_to(ROOT)}: {broken}"


def test_the_readme_leads_to_every_page():
    found = {(ROOT / link.partition("#")[0]).resolve() for link in links(ROOT / "README.md") if "://" not in link}
    pages = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    missing = [str(page.relative_to(ROOT)) for page in pages if page not in found]
    assert not missing


def test_the_first_screen_of_the_readme():
    """What it is, a picture, the two commands, what it is not and how it compares come first, in this order."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    places = [
        text.index(part)
        for part in (
            "fine-tunes",
            "make venv",
            "terminal.svg",
            "make quickstart",
            "make test",
            "What it is not",
            "How it compares",
        )
    ]
    assert places == sorted(places)
    assert text.count("\n", 0, places[3]) < 40

"""Links between pages, and from pages to files, lead somewhere."""

from __future__ import annotations

import itertools
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
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain]
    return {
        slug + (f"-{slugs[:place].count(slug)}" if slug in slugs[:place] else "") for place, slug in enumerate(slugs)
    }


def links(page: Path) -> list[str]:
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    return [inline or reference for inline, reference in _LINK.findall(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    check(page)


def check(page: Path) -> None:
    """Refuse a page with links, anchors or images that are not there."""
    broken = []
    for link in links(page):
        if re.match(r"(https?|mailto):", link):
            assert not link.startswith("http:"), f"{page.name}: {link} is not https"
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken, f"{page}: {broken}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_headings_leave_out_no_level(page: Path):
    levels = [len(mark) for mark in re.findall(r"^(#+) ", _FENCED.sub("", page.read_text(encoding="utf-8")), re.M)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def led_to(page: Path) -> set[Path]:
    """The files that a page links to."""
    return {(page.parent / link.partition("#")[0]).resolve() for link in links(page) if "://" not in link}


def test_the_readme_leads_to_every_page():
    listed = led_to(ROOT / "README.md")
    found = listed | led_to(ROOT / "docs" / "index.md") | led_to(ROOT / "docs" / "errors" / "index.md")
    top = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    assert not [str(page.relative_to(ROOT)) for page in top if page not in listed]
    reference = {page for page in found if page.is_relative_to(ROOT / "docs" / "reference")}
    pages = {page for page in (ROOT / "docs").rglob("*.md") if not page.is_relative_to(ROOT / "docs" / "reference")}
    assert pages <= found
    assert len(reference) >= 2


def test_the_site_has_every_page():
    """In the navigation that docs/index.md gives it."""
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = {name for tree in re.findall(r"```{toctree}\n(.*?)```", text, re.DOTALL) for name in tree.splitlines()}
    pages = {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert pages - listed == {"index"}


def test_an_anchor_or_an_image_that_is_gone_is_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# Same\n\n# Same\n\n[a](#same-1) [b](#same-2) ![c](gone.svg)\n")
    assert anchors(page) == {"same", "same-1"}
    assert links(page) == ["#same-1", "#same-2", "gone.svg"]
    with pytest.raises(AssertionError, match=r"gone\.svg"):
        check(page)


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

"""Can every page of the documentation site be read, on a phone and on a desktop?

    make docs-check        # builds the site first
    python bench/pages.py [--site build/site] [--screenshots DIR] [--only TEXT]

Each page is opened in a headless Chromium, 390 and 1280 pixels wide. Faults are dead links and anchors, files that fail
to load, errors on the console, and pages that are wider than the window. Prints a table; exit code 1 if there is a
fault. Chromium is Playwright's own (`playwright install chromium`) or the system's (`apt install chromium`).
"""

from __future__ import annotations

import argparse
import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlparse

from playwright.sync_api import Page, sync_playwright

WIDTHS = {"phone": 390, "desktop": 1280}
HEIGHT = 900
WIDER = """() => {
  const page = document.documentElement, wide = page.scrollWidth - page.clientWidth;
  if (wide <= 0) return null;
  const worst = [...document.querySelectorAll("body *")]
    .filter(e => e.getBoundingClientRect().right > page.clientWidth + 1)
    .map(e => e.tagName.toLowerCase() + (e.className ? "." + e.className : "") + " " + e.textContent.slice(0, 40));
  return `${wide} px wider than the window: ${worst.slice(-1)[0] || ""}`;
}"""
FOUND = """() => ({
  links: [...document.querySelectorAll("a[href], img[src], link[href], script[src]")].map(e => e.href || e.src),
  ids: [...document.querySelectorAll("[id]")].map(e => e.id),
})"""


@dataclass
class Opened:
    """What one page has and what is wrong with it."""

    links: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder, served on this machine."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def opened(page: Page, base: str, path: str, screenshot: Path | None) -> Opened:
    """Load one page and look at it."""
    found = Opened()

    def note(what: str) -> None:
        found.faults.append(what)

    page.on("console", lambda message: note(f"console: {message.text}") if message.type == "error" else None)
    page.on("pageerror", lambda error: note(f"error: {error}"))
    page.on("requestfailed", lambda request: note(f"not loaded: {request.url}"))
    page.goto(base + path, wait_until="load")
    wider = page.evaluate(WIDER)
    if wider:
        note(wider)
    seen = page.evaluate(FOUND)
    found.links, found.ids = seen["links"], set(seen["ids"])
    if screenshot is not None:
        page.screenshot(path=screenshot, full_page=False)
    return found


def dead_links(base: str, folder: Path, pages: dict[str, Opened]) -> dict[str, list[str]]:
    """The links of each page that lead nowhere within the site."""
    dead: dict[str, list[str]] = {}
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            address, anchor = urldefrag(urljoin(base + path, link))
            if not address.startswith(base):
                continue
            target = unquote(urlparse(address).path).lstrip("/") or "index.html"
            missing = not (folder / target).is_file()
            if missing or (anchor and target in pages and unquote(anchor) not in pages[target].ids):
                dead.setdefault(path, []).append(f"dead link: {target}{'#' + anchor if anchor else ''}")
    return dead


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, default=Path("build/site"), help="the folder that `make docs` has written")
    parser.add_argument("--screenshots", type=Path, help="a folder for a picture of the top of each page")
    parser.add_argument("--only", default="", help="only pages whose path contains this text; links are not checked")
    given = parser.parse_args()
    paths = sorted(path.relative_to(given.site).as_posix() for path in given.site.rglob("*.html"))
    # The first page of the folder only leads on to the site's own.
    paths = [path for path in paths if given.only in path and not path.startswith("_") and path != "index.html"]
    if given.screenshots:
        given.screenshots.mkdir(parents=True, exist_ok=True)
    faults: dict[str, list[str]] = {}
    with served(given.site) as base, sync_playwright() as playwright:
        own = Path(playwright.chromium.executable_path).exists()
        browser = playwright.chromium.launch(
            executable_path=None if own else shutil.which("chromium"), args=["--no-sandbox"]
        )
        pages: dict[str, Opened] = {}
        for name, width in WIDTHS.items():
            context = browser.new_context(viewport={"width": width, "height": HEIGHT}, device_scale_factor=1)
            for path in paths:
                if path.startswith("source/") and name != "phone":
                    continue  # a listing is as wide as its window
                picture = given.screenshots / f"{path.replace('/', '_')}.{name}.png" if given.screenshots else None
                page = context.new_page()
                pages[path] = opened(page, base, path, picture)
                page.close()
                faults.setdefault(path, []).extend(f"{name}: {fault}" for fault in pages[path].faults)
        browser.close()
        if not given.only:
            for path, dead in dead_links(base, given.site, pages).items():
                faults[path] += dead
    links = sum(len(set(page.links)) for page in pages.values())
    for path in paths:
        for fault in faults[path]:
            print(f"{path}: {fault}")
    wrong = sum(map(bool, faults.values()))
    widths = " and ".join(map(str, WIDTHS.values()))
    print(f"{len(paths)} pages at {widths} px, {links} links: {wrong} pages with faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

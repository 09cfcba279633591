"""Draws `docs/images/report.png`: the curves of two runs on a page of `shardtune report`, as a browser shows them.

make quickstart
shardtune train examples/quickstart/recipe.yaml optim.lr=1e-3 runner.logger.experiment_name=lr-1e-3
python docs/report_picture.py runs/quickstart runs/lr-1e-3       # needs a Chromium
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from shardtune.run.report.write import write_report

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "report.png"
WIDTH, HEIGHT = 1100, 700
COLORS = 48


def main() -> None:
    """Take the picture of the runs that are named."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = write_report([Path(run) for run in sys.argv[1:]], Path(folder) / "report.html")
        own = Path(playwright.chromium.executable_path).exists()
        path = None if own else shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(file.as_uri() + "#curves")
        page.wait_for_selector("html.drawn")
        page.locator("figure").first.hover(position={"x": 270, "y": 120})
        shot = page.screenshot()
        browser.close()
    PICTURE.parent.mkdir(exist_ok=True)
    with Image.open(io.BytesIO(shot)) as image:
        image.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(PICTURE, optimize=True)
    sys.stderr.write(f"wrote {PICTURE.relative_to(ROOT)}, {PICTURE.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main()

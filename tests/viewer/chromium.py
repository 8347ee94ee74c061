"""A real Chromium on the page of `relax view`: what tests and the benchmark of the page share."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
"""Debian's, as it plays h264; Playwright's own does not."""
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio"]
AXE = Path(__file__).parents[2] / "viewer" / "node_modules" / "axe-core" / "axe.min.js"
"""Comes with `make view`."""
expect.set_options(timeout=60_000)
"""For all that wait for a state of the page: a busy machine may be slow, and what fails is told all the same."""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """The browser, without a window."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def viewer(*arguments: str | Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`relax view` with these arguments at a free port: the page's address, and the process."""
    command = [sys.executable, "-c", "from relax_sdk.cli import main; main()", "view", *map(str, arguments), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        assert said.startswith("http://"), f"relax view said {said!r}"
        yield said.split()[0], process
    finally:
        process.terminate()
        process.wait(30)


def serious(page: Page) -> list[str]:
    """What axe finds serious or critical on a page, with the elements."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{one['impact']}: {one['id']}: {node['html'][:160]} ({node['failureSummary'][:160]})"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


def plays(player: Locator, seconds: float) -> None:
    """Play a sound or a film, and return once it has come past `seconds`; a time-out of Playwright's where it does not."""
    player.evaluate(
        """(player, seconds) => new Promise((done, failed) => {
            player.addEventListener("timeupdate", () => player.currentTime > seconds && done());
            player.addEventListener("error", () => failed(player.error));
            player.play().catch(failed);
        })""",
        seconds,
    )


def painted(page: Page, selector: str, least: int) -> None:
    """Return once a canvas shows that many different colours; a time-out of Playwright's where it does not."""
    page.wait_for_function(
        """([selector, least]) => {
            const canvas = document.querySelector(selector);
            if (!canvas?.width || !canvas.height) return false;
            const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            const seen = new Set();
            for (let i = 0; i < data.length; i += 4) seen.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
            return seen.size >= least;
        }""",
        arg=[selector, least],
    )


def hashes(page: Page) -> Sequence[str]:
    """The part of the address behind `#`, and its query."""
    return page.evaluate("location.hash").partition("?")[::2]

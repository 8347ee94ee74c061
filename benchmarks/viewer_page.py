"""How fast is the page of `relax view` in a real Chromium: a run of 10,000 trajectories opened, single ones, and a live run?

    python -m benchmarks.viewer_page [--live-seconds 60]

Times are the browser's own, from the start of the navigation, or the key press, to the moment at which the first row or the
trajectory's account stands on the page. The live part commits 50 trajectories a second while the list is open, and tells the
longest stretch in which the page could not answer, and the server's memory after a first quarter and at the end.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Browser, Page
from relax_server.journal import open_journal

from benchmarks.report import save, table
from relax_sdk.run_lock import Holder, RunLock
from tests.viewed_runs import make_omni
from tests.viewer.chromium import chromium, viewer
from tests.viewer.many_runs import GROUP, MANY, make_many, text_group

OPEN_BAR = 2.0
ONE_BAR = 0.3
"""Seconds."""
RATE = 50
"""Trajectories a second of the live run."""
OMNI = 12
"""Trajectories with media, tokens and a training record."""
TOKENS = 400
"""Most tokens of an answer."""
WATCH = """
(() => {
    window.seen = {}; window.longest = 0;
    new PerformanceObserver(list => list.getEntries().forEach(one => window.longest = Math.max(window.longest, one.duration)))
        .observe({type: "longtask"});
    const look = () => {
        if (!window.seen.row && document.querySelector(".virtual tbody th")) window.seen.row = performance.now();
        const title = document.querySelector(".story") && document.querySelector("h1")?.textContent;
        if (title && !window.seen[title]) window.seen[title] = performance.now();
    };
    new MutationObserver(() => requestAnimationFrame(() => { look(); })).observe(document, {childList: true, subtree: true});
})();
"""
"""Notes when something has first been drawn, and how long the page was busy at a stretch."""
CHOOSE = "([run, seq]) => { const at = performance.now(); location.hash = `#/runs/${run}/trajectories/${seq}`; return at; }"
"""Goes to a trajectory, and says when, in milliseconds of the page's clock."""


def new_page(browser: Browser) -> Page:
    page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
    page.add_init_script(WATCH)
    return page


def shown(page: Page, name: str, timeout: float = 30.0) -> float:
    """When `name` was first drawn, in seconds of the page's clock."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        at = page.evaluate("name => window.seen?.[name] ?? null", name)
        if at is not None:
            return at / 1000
        time.sleep(0.02)
    raise TimeoutError(f"{name} was not shown within {timeout:g} s")


def opening(browser: Browser, url: str, repeats: int) -> list[float]:
    """Seconds until the list of a run shows its rows, each time in a browser that has nothing of it."""
    times = []
    for _ in range(repeats):
        page = new_page(browser)
        page.goto(f"{url}#/runs/many/trajectories")
        times.append(shown(page, "row"))
        page.context.close()
    return times


def by_link(browser: Browser, url: str, run: str, numbers: Sequence[int]) -> list[float]:
    """Seconds until a trajectory that was linked to stands there, the page's own code loaded anew."""
    times = []
    for seq in numbers:
        page = new_page(browser)
        page.goto(f"{url}#/runs/{run}/trajectories/{seq}")
        times.append(shown(page, f"Trajectory #{seq}"))
        page.context.close()
    return times


def by_list(browser: Browser, url: str, run: str, numbers: Sequence[int]) -> list[float]:
    """Seconds from the choice of a trajectory in the list until it stands there."""
    page, times = new_page(browser), []
    page.goto(f"{url}#/runs/{run}/trajectories")
    shown(page, "row")
    for seq in numbers:
        start = page.evaluate(CHOOSE, [run, seq])
        times.append(shown(page, f"Trajectory #{seq}") - start / 1000)
    page.context.close()
    return times


def live(browser: Browser, folder: Path, url: str, server: psutil.Process, seconds: float) -> dict[str, Any]:
    """A run that grows while its list is open."""
    page = new_page(browser)
    page.goto(f"{url}#/runs/live/trajectories")
    shown(page, "row")
    page.evaluate("window.longest = 0")
    journal, started, number, quarter = open_journal(folder / "journal.db"), time.monotonic(), 1000, 0
    while (passed := time.monotonic() - started) < seconds:
        if not quarter and passed > seconds / 4:
            quarter = server.memory_info().rss
        while (number - 1000) * GROUP < passed * RATE:
            journal.commit(text_group(number, "live", TOKENS), "live")
            number += 1
        time.sleep(0.02)
    journal.close()
    whole = 800 + (number - 1000) * GROUP
    page.locator(".list-count", has_text=f"{whole:,} trajectories").wait_for(timeout=30_000)
    busy = page.evaluate("window.longest")
    page.context.close()
    return {
        "trajectories": whole,
        "longest busy ms": round(busy),
        "server MiB at a quarter": quarter >> 20,
        "server MiB at the end": server.memory_info().rss >> 20,
    }


def row(name: str, times: list[float], bar: float) -> dict[str, Any]:
    middle, worst = sorted(times)[len(times) // 2], max(times)
    return {"what": name, "n": len(times), "median ms": round(1000 * middle), "worst ms": round(1000 * worst)} | {
        "bar ms": round(1000 * bar),
        "kept": worst < bar,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--live-seconds", type=float, default=60.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_many(folder, tokens=TOKENS)
        make_omni(folder)
        growing = make_many(folder, "live", 800, TOKENS)
        with viewer(folder) as (url, process), chromium() as browser, RunLock(growing, Holder.here()):
            some = random.Random(0).sample(range(1, MANY), 2 * args.repeats)
            heard = [1 + number % OMNI for number in range(2 * args.repeats)]
            rows = [
                row(f"the list of {MANY:,} trajectories", opening(browser, url, args.repeats), OPEN_BAR),
                row("a trajectory by its link, all loaded anew", by_link(browser, url, "many", some[: args.repeats]), ONE_BAR),
                row("a trajectory from the list", by_list(browser, url, "many", some), ONE_BAR),
                row(
                    "the same by its link, with media and tokens", by_link(browser, url, "omni", heard[: args.repeats]), ONE_BAR
                ),
                row("the same from the list, with media and tokens", by_list(browser, url, "omni", heard), ONE_BAR),
            ]
            grown = live(browser, growing, url, psutil.Process(process.pid), args.live_seconds)
    print(table(rows))
    print(table([grown]))
    save("viewer_page", rows, live=grown)


if __name__ == "__main__":
    main()

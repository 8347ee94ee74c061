"""Makes the pictures of docs/viewing.md: the page over real runs, in Chromium, as small PNG files.

    .venv/bin/python viewer/screenshots.py RUNS QUIZ TONE EVALUATION [--out docs/images]

RUNS is a folder with all of them: the runs QUIZ of omni-quiz-v0 and TONE of tone-v0, and an evaluation of TONE
(`relax eval RUNS/TONE --samples 4 --out RUNS/EVALUATION`). Look at each picture before it is committed.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.viewer.chromium import chromium, viewer  # noqa: E402

SETTLE = 3000
"""Milliseconds in which media are decoded and drawn."""
COLOURS = 128
"""Of a picture: few enough for small files, enough for curves and players."""


def picture(browser: Browser, url: str, scheme: str, file: Path, wait_for: str, height: int) -> None:
    """One view as a PNG, once `wait_for` is on the page and all media have been drawn."""
    context = browser.new_context(viewport={"width": 1280, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(url)
    page.locator(wait_for).first.wait_for()
    page.wait_for_timeout(SETTLE)  # the live stream never ends, so the network is never idle
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(COLOURS)
    image.save(file, optimize=True)
    context.close()
    print(f"{file} ({file.stat().st_size / 1024:.0f} KiB)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("quiz")
    parser.add_argument("tone")
    parser.add_argument("evaluation")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    quiz, tone = f"#/runs/{args.quiz}", f"#/runs/{args.tone}"
    worst = "?plot=1&x=step&y=advantage&split=train&sort=reward%3Aasc"
    views = [
        ("view-run", tone, "light", ".plot canvas", 800),
        ("view-trajectory", f"{quiz}/trajectories/2000", "light", ".frames img", 1000),
        (
            "view-trajectories",
            f"{tone}/trajectories{worst}",
            "dark",
            "tbody th",
            800,
        ),
        ("view-evaluation", f"#/runs/{args.evaluation}", "light", ".report table", 620),
        ("view-group", f"{tone}/groups/4000", "dark", ".waves canvas", 800),
    ]
    with viewer(args.runs) as (url, _), chromium() as browser:
        for name, address, scheme, wait_for, height in views:
            picture(browser, url + address, scheme, args.out / f"{name}.png", wait_for, height)


if __name__ == "__main__":
    main()

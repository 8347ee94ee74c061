"""What a new user waits for: `import relax_sdk`, and `make train` from the command to its last line.

python -m benchmarks.first_run [--imports 9]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import save

IMPORT = "import time; t = time.perf_counter(); import relax_sdk, sys; print(time.perf_counter() - t, 'torch' in sys.modules)"


def import_seconds(times: int) -> tuple[float, bool]:
    """Median over fresh processes, and whether torch came with it."""
    seen = [subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True) for _ in range(times)]
    return statistics.median(float(s.stdout.split()[0]) for s in seen), any("True" in s.stdout for s in seen)


def train(folder: Path) -> dict[str, Any]:
    """`relax train tone-v0`, as `make train` calls it."""
    began, clock = time.time(), time.perf_counter()
    subprocess.run([sys.executable, "-m", "relax_sdk.cli", "train", "tone-v0", "--folder", str(folder)], check=True)
    seconds = time.perf_counter() - clock
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = {row["step"]: row for row in rows}  # a step's last line holds its evaluation
    first = min(row["time"] - row["seconds_step"] for row in rows)
    reached = [row["time"] - first for row in steps.values() if row.get("eval_reward", 0) >= 0.95]
    return {
        "command to last line, s": seconds,
        "of it before the first step, s": first - began,
        "training until held-out 0.95, s": min(reached) if reached else None,
        "held-out at the end": rows[-1].get("eval_reward"),
        "step, median s": statistics.median(row["seconds_step"] for row in steps.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--imports", type=int, default=9)
    args = parser.parse_args()
    seconds, torch = import_seconds(args.imports)
    with tempfile.TemporaryDirectory() as temporary:
        figures = {"import relax_sdk, s": seconds, "torch imported": torch, **train(Path(temporary) / "tone")}
    save("first_run", [{"figure": k, "value": v} for k, v in figures.items()], bars={"import": 0.3, "training": 240})


if __name__ == "__main__":
    main()

"""Tables and JSON of the benchmarks, with the machine they ran on; `python -m benchmarks.report` puts them into README.md."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Processor, cores, Python and load: what a figure has to be read with."""
    model = platform.processor() or "unknown"
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _commit() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent)
    except OSError:  # no git here
        return "unknown"
    return done.stdout.strip() or "unknown"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a Markdown table; the keys of all of them are the columns."""
    if not rows:
        return "(no rows)"
    keys = dict.fromkeys(name for row in rows for name in row)
    names = [name for name in keys if name != "measured"] + [name for name in keys if name == "measured"]
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if value != 0 and abs(value) < 1e-3 else f"{value:,.3f}".rstrip("0").rstrip(".")
    return "–" if value is None else str(value)


def save(name: str, rows: Sequence[dict[str, Any]], *, key: str | None = None, folder: Path = RESULTS, **more: Any) -> None:
    """Print a table and write `results/<name>.json`.

    Args:
        name: of the file.
        rows: of the table.
        key: a column. Rows of earlier runs with other values in it are kept, so that a table can be made in parts; every row
            then says when it was measured, and at which commit.
        folder: where it is written.
        **more: kept beside the rows.
    """
    where = machine()
    if key is not None:
        rows = [row | {"measured": f"{where['date']}, {where['commit']}"} for row in rows]
        new = {row[key] for row in rows}
        rows = [row for row in _earlier(name) if row.get(key) not in new] + rows
    print(f"\n{name} · {where['processor']}, {where['cores']} cores, {where['date']}\n\n{table(rows)}\n", flush=True)
    print(f"written: {write(name, rows, where, folder=folder, **more)}")


def write(name: str, rows: Sequence[dict[str, Any]], where: dict[str, Any], *, folder: Path = RESULTS, **more: Any) -> Path:
    """Write `<name>.json` without a word, for instance what there is so far.

    Args:
        name: of the file, without its ending.
        rows: of the table.
        where: what `machine` says.
        folder: where it is written.
        **more: kept beside the rows.
    """
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"machine": where, "rows": list(rows)} | more, indent=1, default=float) + "\n")
    return path


def _earlier(name: str) -> list[dict[str, Any]]:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    where = found["machine"]
    return [{"measured": f"{where['date']}, {where['commit']}"} | row for row in found["rows"]]


README = RESULTS.parent / "README.md"
MARK = "## Last results"


def write_readme() -> None:
    """Bring the tables at the end of `README.md` up to date with `results/`."""
    parts = [README.read_text().partition(MARK)[0] + MARK]
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        where = result["machine"]
        place = f"{where['processor']}, {where['cores']} cores, Python {where['python']}, load {where['load']} before"
        parts.append(f"### {path.stem}\n\n{place}; {where['date']}, commit {where['commit']}.\n\n{table(result['rows'])}")
        notes = [
            f"{key}: {value}"
            for key, value in result.items()
            if key in ("bars", "export_exact", "live", "device", "torch", "note")
        ]
        if notes:
            parts.append("; ".join(notes) + ".")
    README.write_text("\n\n".join(parts) + "\n")
    print(f"written: {README}")


if __name__ == "__main__":
    write_readme()

"""`compare`: several runs beside one another: what was set otherwise, what came of it, and their curves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_sdk.errors import ConfigError
from relax_sdk.run import Run

if TYPE_CHECKING:
    import pandas

LAST = 10
"""Steps at the end whose mean stands for a run."""
FIRST_METRICS = ("steps", "minutes", "reward", "eval_reward", "eval_ci95", "staleness_mean", "tokens_per_second")
"""Metrics that stand at the top of the table, if they are there."""
UNCOMPARED = ("step", "time")


@dataclass(frozen=True)
class Comparison:
    """Several runs beside one another. In a notebook it shows its tables and the curves."""

    runs: Mapping[str, Run]
    """By what they are called here: the folder's name, or its whole path where two are alike."""

    @property
    def metrics(self) -> pandas.DataFrame:
        """A row for each metric and a column for each run, nested metrics as `outer/inner`.

        A value is the mean of the metric over the run's last 10 steps; of those with `eval` in front the last one. NaN where
        a run has none. With two runs `difference` is the second less the first.
        """
        import pandas

        columns = {name: _summary(run.metrics) for name, run in self.runs.items()}
        names = dict.fromkeys(metric for column in columns.values() for metric in column)
        order = [name for name in FIRST_METRICS if name in names] + sorted(set(names) - set(FIRST_METRICS))
        frame = pandas.DataFrame(columns, index=order, columns=list(columns), dtype=float)
        if len(columns) == 2:
            first, second = columns
            frame["difference"] = frame[second] - frame[first]
        return frame.rename_axis("metric")

    @property
    def settings(self) -> pandas.DataFrame:
        """A row for each setting that is not the same in all runs, and a column for each run."""
        import pandas

        columns = {name: dict(_flat(run.config.to_dict())) for name, run in self.runs.items()}
        names = dict.fromkeys(setting for column in columns.values() for setting in column)
        differing = [n for n in names if any(c.get(n) != next(iter(columns.values())).get(n) for c in columns.values())]
        frame = pandas.DataFrame({name: [str(c.get(n)) for n in differing] for name, c in columns.items()}, index=differing)
        return frame.rename_axis("setting")

    def plot(self, path: str | Path | None = None) -> Any:
        """Rewards and held-out rewards of all runs against steps.

        Args:
            path: also save the figure there.

        Returns:
            The matplotlib figure.
        """
        from relax_sdk.plot import plot_comparison

        return plot_comparison({name: run.metrics for name, run in self.runs.items()}, path)

    def __str__(self) -> str:
        settings = self.settings
        differ = settings.to_string() if len(settings) else "no setting differs"
        return f"{differ}\n\n{self._shown().to_string()}"

    def _repr_html_(self) -> str:
        import base64

        settings = self.settings
        differ = settings.to_html() if len(settings) else "<p>No setting differs.</p>"
        png = base64.b64encode(self.plot()._repr_png_()).decode("ascii")
        curves = f'<img alt="reward curves" src="data:image/png;base64,{png}">'
        return f"{differ}{self._shown().to_html()}{curves}"

    def _shown(self) -> pandas.DataFrame:
        """The metrics that a person looks at first."""
        metrics = self.metrics
        return metrics.loc[[name for name in FIRST_METRICS if name in metrics.index]].round(4)


def compare(*runs: Run | str | Path) -> Comparison:
    """Set several runs beside one another.

        relax.compare("runs/tone-a", "runs/tone-b").metrics

    Args:
        runs: two or more, or their folders.

    Raises:
        ConfigError: fewer than two, one of them twice, or a folder that holds no run.
    """
    opened = [run if isinstance(run, Run) else Run.load(run) for run in runs]
    folders = [run.folder for run in opened]
    if len(set(folders)) < max(2, len(folders)):
        raise ConfigError(f"compare takes two or more different runs, got {', '.join(map(str, folders)) or 'none'}")
    names = [folder.name for folder in folders]
    called = [str(f) if names.count(f.name) > 1 else f.name for f in folders]
    return Comparison(dict(zip(called, opened, strict=True)))


def _summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What stands for a run: number of steps, minutes, and each metric."""
    if not rows:
        return {}
    times = [row["time"] for row in rows if "time" in row]
    found = {"steps": float(rows[-1]["step"])} | ({"minutes": (times[-1] - times[0]) / 60} if times else {})
    last: dict[str, list[float]] = {}
    for row in rows:
        for name, value in _flat(row, "/"):
            if isinstance(value, (int, float)) and math.isfinite(value) and name not in UNCOMPARED:
                last.setdefault(name, []).append(float(value))
    return found | {name: v[-1] if name.startswith("eval") else sum(v[-LAST:]) / len(v[-LAST:]) for name, v in last.items()}


def _flat(values: Mapping[str, Any], joint: str = ".", prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dictionaries with their paths."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, joint, f"{prefix}{name}{joint}")
        else:
            yield f"{prefix}{name}", value

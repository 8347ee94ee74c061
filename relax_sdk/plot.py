"""Plots of rewards: of one run, and of several beside one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plot_rewards(metrics: Sequence[dict[str, Any]], title: str = "", path: str | Path | None = None) -> Any:
    """Reward while training, held-out reward and staleness against steps.

    Args:
        metrics: rows of `metrics.jsonl`.
        title: above the figure.
        path: also save it there.

    Returns:
        The matplotlib figure.
    """
    figure = _new_figure()
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    steps = [row["step"] for row in metrics]
    top.plot(steps, [row.get("reward") for row in metrics], alpha=0.35, label="reward (sampled)")
    top.plot(steps, smooth([row.get("reward") or 0.0 for row in metrics]), label="reward, mean of 10 steps")
    _plot_held_out(top, metrics, label="held-out (greedy)")
    top.set_ylabel("reward")
    top.legend(loc="best", frameon=False)
    top.set_title(title)
    bottom.plot(steps, [row.get("staleness_mean") for row in metrics], color="tab:gray")
    bottom.set_ylabel("staleness")
    bottom.set_xlabel("optimizer step")
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def plot_comparison(metrics: Mapping[str, Sequence[dict[str, Any]]], path: str | Path | None = None) -> Any:
    """Rewards of several runs against steps: lines are means of 10 steps, points with bars held-out rewards.

    Args:
        metrics: rows of `metrics.jsonl` by the run's name.
        path: also save it there.

    Returns:
        The matplotlib figure.
    """
    figure = _new_figure()
    axes = figure.subplots()
    for number, (name, rows) in enumerate(metrics.items()):
        colour = f"C{number % 10}"
        axes.plot([row["step"] for row in rows], smooth([row.get("reward") or 0.0 for row in rows]), color=colour, label=name)
        _plot_held_out(axes, rows, color=colour, label=f"{name}, held-out", fmt="o:")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("reward")
    axes.legend(loc="best", frameon=False)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def _new_figure() -> Any:
    """A figure that shows itself in a notebook without pyplot and its global state."""
    import io

    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", dpi=100)
            return buffer.getvalue()

    return NotebookFigure(figsize=(7, 4), layout="constrained")


def _plot_held_out(axes: Any, metrics: Sequence[dict[str, Any]], **style: Any) -> None:
    """Held-out rewards with their 95% intervals; nothing where there are none."""
    held = [(row["step"], row["eval_reward"], row.get("eval_ci95", 0.0)) for row in metrics if "eval_reward" in row]
    if held:
        x, y, ci = zip(*held, strict=True)
        axes.errorbar(x, y, yerr=ci, **{"fmt": "o-", "capsize": 3, **style})


def smooth(values: Sequence[float], width: int = 10) -> list[float]:
    """Trailing mean over `width` values."""
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]

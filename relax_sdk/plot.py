"""The reward plot of a run."""

from __future__ import annotations

from collections.abc import Sequence
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
    import io

    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        """Shows itself in a notebook without pyplot and its global state."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", dpi=100)
            return buffer.getvalue()

    figure = NotebookFigure(figsize=(7, 4), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    steps = [row["step"] for row in metrics]
    top.plot(steps, [row.get("reward") for row in metrics], alpha=0.35, label="reward (sampled)")
    top.plot(steps, smooth([row.get("reward") or 0.0 for row in metrics]), label="reward, mean of 10 steps")
    held = [(row["step"], row["eval_reward"], row.get("eval_ci95", 0.0)) for row in metrics if "eval_reward" in row]
    if held:
        x, y, ci = zip(*held, strict=True)
        top.errorbar(x, y, yerr=ci, fmt="o-", capsize=3, label="held-out (greedy)")
    top.set_ylabel("reward")
    top.legend(loc="best", frameon=False)
    top.set_title(title)
    bottom.plot(steps, [row.get("staleness_mean") for row in metrics], color="tab:gray")
    bottom.set_ylabel("staleness")
    bottom.set_xlabel("optimizer step")
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def smooth(values: Sequence[float], width: int = 10) -> list[float]:
    """Trailing mean over `width` values."""
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]

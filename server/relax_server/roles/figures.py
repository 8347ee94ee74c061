"""The figures of a run by step: written to its folder, and shown."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from relax_server.roles.layout import RunLayout
from relax_server.roles.messages import Evaluated
from relax_server.roles.outputs import Outputs, drop_after
from relax_server.roles.record import RunRecord

KEPT = 512
"""Steps whose figures may still be completed by an evaluation."""


class Figures:
    """What is known of the last steps.

    Args:
        layout: of the run.
        record: is told them.
    """

    def __init__(self, layout: RunLayout, record: RunRecord) -> None:
        self._layout, self._record = layout, record
        self._rows: dict[int, dict[str, Any]] = {}
        self._last = 0
        """The last step that has a row."""
        self._generated: deque[tuple[float, int]] = deque(maxlen=8)
        self._outputs: Outputs | None = None

    @property
    def begun(self) -> bool:
        """Whether steps can be written."""
        return self._outputs is not None

    def begin(self, step: int, told: Iterable[dict[str, Any]] = ()) -> None:
        """Go on after a step; what an earlier start has written of later ones is dropped.

        Args:
            step: the last one that is done.
            told: figures of the last steps before it; see `recover`.
        """
        written = drop_after(self._layout.metrics, step)
        self._rows = {row["step"]: row for row in written[-KEPT:]}
        self._last = max(self._rows, default=0)
        self._outputs = Outputs(self._layout)
        self.recover(told)
        self._record.begin(step)

    def recover(self, told: Iterable[dict[str, Any]]) -> None:
        """Write the steps that are done and have no row, or that of an earlier try, as who was told of them had ended.

        Args:
            told: figures that the trainer has kept with its checkpoint, each with its `step`; what only the controller knew
                is not in them.
        """
        for row in told:
            written = self._rows.get(row["step"])
            if row["step"] > self._last or (written is not None and written["time"] != row["time"]):
                self._keep(row)

    def add(self, step: int, metrics: dict[str, Any]) -> None:
        """A step is done."""
        row = {"step": step, "time": time.time()} | metrics
        row["tokens_per_second"] = self._token_rate(row)
        self._keep(row)
        self._record.step(row)

    def evaluated(self, message: Evaluated, newest: int) -> None:
        """An evaluation has ended, of a step that may not be the newest."""
        result = message.result
        before = self._rows.get(message.step, {"step": message.step, "time": time.time()})
        row = self._rows[message.step] = before | dict(
            eval_reward=result.mean_reward,
            eval_ci95=result.ci95,
            eval_n=result.n,
            eval_components=result.components,
            eval_failures=result.failures,
            eval_version_min=message.version_min,
            eval_version_max=message.version_max,
        )
        self._write(row)
        self._record.evaluated(row, result, self._rows.get(newest, row))

    def is_evaluated(self, step: int) -> bool:
        """Whether there is a held-out reward of its weights alone; one beside training may have been of several versions."""
        row = self._rows.get(step, {})
        return "eval_reward" in row and row["eval_version_min"] == row["eval_version_max"]

    def close(self) -> None:
        """Close the files."""
        if self._outputs is not None:
            self._outputs.close()

    def _keep(self, row: dict[str, Any]) -> None:
        """Write the row of a step that was not written, or is done again."""
        self._last = row["step"]
        self._rows[self._last] = row
        self._rows.pop(self._last - KEPT, None)
        self._write(row)

    def _write(self, row: dict[str, Any]) -> None:
        assert self._outputs is not None
        self._outputs.write(row)
        self._record.figures(row)

    def _token_rate(self, row: dict[str, Any]) -> float:
        """Response tokens trained on per second, over the last few steps."""
        self._generated.append((time.monotonic(), int(row.get("n_response_tokens", 0))))
        if len(self._generated) < 2:
            return 0.0
        (first, _), (last, _) = self._generated[0], self._generated[-1]
        return sum(n for _, n in list(self._generated)[1:]) / max(last - first, 1e-6)


def waited_for(stats: Mapping[str, Any], groups: int) -> str:
    """How far the episodes are that the first step waits for, in words.

    Args:
        stats: the rollout's last figures, as in `relax_server.rollout.RolloutStats`.
        groups: of one step.
    """
    if stats["committed"] or stats["in_flight"]:
        return f"{stats['committed']} of {groups} groups are complete, {stats['ended']} episodes have ended"
    played, of = stats["warmup"]
    return f"{played} of {of} episodes are played" if played < of else ""

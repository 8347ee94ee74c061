"""A watch over a run that goes on: what its figures let one find, said once and again after many steps."""

from __future__ import annotations

from collections.abc import Sequence

from relax_sdk.config import RunConfig
from relax_sdk.findings import Finding
from relax_sdk.run_checks import RunFigures, findings_of
from relax_sdk.silence import WINDOW, Row

AGAIN = 50
"""Steps after which the same is told again."""
EVERY = 10
"""Steps between two looks once a run is past its first `FIRST` steps."""
FIRST = 30


class Watch:
    """Says what the checks of `relax_sdk.run_checks` find, once, and again every `AGAIN` steps.

    Args:
        config: the run's settings.
        examples: whether the environment defines `format_example`; None: not known.
        rows: metrics of the steps before, when a run goes on.
    """

    def __init__(self, config: RunConfig, examples: bool | None, rows: Sequence[Row] = ()) -> None:
        self._config, self._examples = config, examples
        self._rows: dict[int, Row] = {row["step"]: row for row in rows}
        self._told: dict[str, int] = {}
        self._since = max(self._rows, default=0)

    def step(self, row: Row) -> list[Finding]:
        """Take one step's metrics; a step may come again with its evaluation, also when newer ones have come.

        Returns:
            What is to be said now; empty: nothing.
        """
        before = self._rows.get(int(row["step"]))
        self._rows[int(row["step"])] = {**(before or {}), **row}
        step = max(self._rows)
        since = step - self._since
        evaluated = "eval_reward" in row and "eval_reward" not in (before or {})
        if not evaluated and (before is not None or (since > FIRST and since % EVERY)):
            return []
        known = [self._rows[number] for number in sorted(self._rows)]
        found = findings_of(RunFigures(known, self._config, self._examples))
        if since < WINDOW:
            found.pop("nothing_learnt", None)  # a run that goes on is given its ten steps
        new = {name: finding for name, finding in found.items() if step - self._told.get(name, -AGAIN) >= AGAIN}
        self._told |= dict.fromkeys(new, step)
        return list(new.values())

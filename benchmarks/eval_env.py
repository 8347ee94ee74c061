"""The environment of `benchmarks.evals`: a question, one answer, a reward."""

from __future__ import annotations

from typing import Any, ClassVar

from relax_sdk.env import Env, ResetResult, StepResult
from relax_sdk.messages import AssistantMessage

TASKS = 100_000


class Echo(Env):
    """One turn, as the echo environment that verifiers plays (`peers/verifiers_echo`)."""

    blocking: ClassVar[bool] = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        super().reset(seed=seed)
        number = (options or {})["task"]["number"]
        return f"question {number}: which letter?", {}

    def step(self, action: AssistantMessage) -> StepResult:
        return None, float(action.text == "A"), True, False, {}

    @staticmethod
    def tasks() -> dict[str, list[dict[str, int]]]:
        rows = [{"number": number} for number in range(TASKS)]
        return {"train": rows, "eval": rows}

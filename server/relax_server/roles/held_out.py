"""The held-out evaluations of a run: when they are due, which are under way, and which must be done before it ends."""

from __future__ import annotations

from relax_sdk.config import EvalConfig
from relax_server.roles.figures import Figures
from relax_server.roles.messages import Evaluate, Evaluated
from relax_server.roles.placement import Role


class HeldOut:
    """What the rollout is asked to evaluate beside training.

    Args:
        config: how often, and on how many tasks.
        steps: of the run; its last one is evaluated at the end.
        rollout: plays them.
        figures: get the results.
    """

    def __init__(self, config: EvalConfig, steps: int, rollout: Role, figures: Figures) -> None:
        self._config, self._steps, self._rollout, self._figures = config, steps, rollout, figures
        self._asked: set[int] = set()
        self.there = False
        """Whether the environment has tasks for it; known once the rollout is ready."""

    def due(self, step: int) -> bool:
        """Whether the weights of this step are to be evaluated while training goes on."""
        every = self._config.every
        return bool(self.there and every and step % every == 0 and step < self._steps)

    def owed(self, step: int) -> bool:
        """Whether the run cannot end before the weights of this step, its last one, were evaluated."""
        return self.there and not self._figures.is_evaluated(step)

    def under_way(self, step: int) -> bool:
        """Whether the weights of this step are being evaluated."""
        return step in self._asked

    def others_under_way(self, step: int) -> bool:
        """Whether those of any other step are."""
        return bool(self._asked - {step})

    @property
    def generates(self) -> bool:
        """Whether engines are at work for an evaluation."""
        return bool(self._asked)

    def ask(self, step: int) -> None:
        """Have the weights evaluated that the engines have."""
        self._asked.add(step)
        self._send(step)

    def ask_again(self) -> None:
        """Ask a rollout that was started again for all that is under way."""
        for step in self._asked:
            self._send(step)

    def ended(self, message: Evaluated, newest: int) -> None:
        """A result is there, of a step that may not be the newest."""
        self._asked.discard(message.step)
        self._figures.evaluated(message, newest)

    def _send(self, step: int) -> None:
        self._rollout.send(Evaluate(step, "eval", self._config.limit))

"""Groups that a training step fails on by themselves: found one by one, so that they can be set aside and the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relax_sdk.errors import MediaError, RunError, TokenError, TrainingError
from relax_sdk.trajectory import Group

POISON = (MediaError, TokenError, TrainingError)
"""What a training step raises because of its groups."""

BEARABLE, SHARE = 8, 0.1
"""A run ends once more groups than the first, and more than this share of those that it has used, were set aside."""


def poisoned(groups: Sequence[Group], attempt: Callable[[int], None]) -> dict[str, str]:
    """The groups of a failed batch that fail alone, too.

    Args:
        groups: of the batch.
        attempt: does with the group of this index, alone, what the step did with all; raises one of `POISON` if it cannot.

    Returns:
        The reason by group id. Empty where no single group is to blame, and where several were tried and none passed: then
        the fault lies in what they have in common, such as the weights.
    """
    found: dict[str, str] = {}
    for index, group in enumerate(groups):
        try:
            attempt(index)
        except POISON as error:
            found[group.id] = f"{type(error).__name__}: {error}"
    return {} if len(found) == len(groups) > 1 else found


def check_bearable(set_aside: int, used: int, last: str) -> None:
    """Refuse to go on with an environment, or an engine, of which too much cannot be trained on.

    Args:
        set_aside: groups of the run so far.
        used: groups that were trained on or set aside.
        last: the reason of the last one.

    Raises:
        RunError: it is too many.
    """
    if set_aside > BEARABLE and set_aside > SHARE * used:
        raise RunError(
            f"{set_aside} of {used} groups could not be trained on and were set aside, more than {SHARE:.0%}; the last: {last}"
        )

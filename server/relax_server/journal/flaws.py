"""What no journal can ever store: groups that contradict themselves, and values that a database refuses."""

from __future__ import annotations

import math
from typing import Any

from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError, StatementError

from relax_sdk.errors import TokenError, UnstorableError
from relax_sdk.trajectory import Group, token_versions


def check_group(group: Group, trained: bool) -> None:
    """Refuse what could be stored but not be read, counted or trained on.

    Args:
        group: finished.
        trained: whether it will be leased to a trainer.

    Raises:
        UnstorableError: a trajectory of another group, a reward that is not finite, or tokens of a train group without
            logprobs or versions.
    """
    for t in group.trajectories:
        where = f"trajectory {t.id!r} of group {group.id!r}"
        if t.group_id != group.id:
            raise UnstorableError(f"{where} says that it belongs to group {t.group_id!r}")
        if bad := [name for name, value in (("reward", t.reward), *t.rewards.items()) if not math.isfinite(value)]:
            raise UnstorableError(f"{where}: {', '.join(bad)} must be finite")
        for index, turn in enumerate(t.turns if trained else ()):
            tokens, logprobs = len(turn.response_ids), len(turn.response_logprobs)
            if logprobs != tokens:
                raise UnstorableError(f"{where}, turn {index}: {logprobs} logprobs for {tokens} response tokens")
            try:
                token_versions(turn)
            except TokenError as error:
                raise UnstorableError(f"{where}, turn {index}: {error}") from error


def flaw(error: SQLAlchemyError, doing: str) -> UnstorableError | None:
    """The error of a value that no database would take, or that breaks a rule of the tables; None: the database is to blame.

    Args:
        error: of SQLAlchemy.
        doing: what was being done.
    """
    if not isinstance(error, StatementError):
        return None
    cause: Any = error.orig
    if isinstance(cause, UnstorableError):
        return UnstorableError(f"cannot {doing}: {cause}", cause.field)
    if isinstance(error, DBAPIError) and not isinstance(error, (DataError, IntegrityError)):
        return None
    return UnstorableError(f"cannot {doing}: {str(cause).strip()}")

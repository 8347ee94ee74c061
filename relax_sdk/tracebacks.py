"""What a script shows of an expected error or of Ctrl-C: the message and the script's own line, not the SDK's frames."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

from relax_sdk.errors import RelaxError
from relax_sdk.stop_signals import Interrupted

F = TypeVar("F", bound=Callable[..., Any])

FULL = "RELAX_TRACEBACK"
"""Set to `full`, this environment variable keeps all frames and causes."""


def short_traceback(function: F) -> F:
    """Let a `RelaxError` or `Interrupted` leave a public function without the frames inside of it and without the errors that
    caused it."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except (RelaxError, Interrupted) as error:
            if os.environ.get(FULL) == "full":
                raise
            raise error.with_traceback(None) from None

    return call  # type: ignore[return-value]

"""Bodies of requests, checked by pydantic at the door: the same ones over every way in."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from relax_server.gateway.errors import invalid


class Body(BaseModel):
    """A request's body: unknown fields are refused, so that a misspelt one is noticed."""

    model_config = ConfigDict(extra="forbid")


class StepBody(Body):
    """An action in the environment."""

    action: dict[str, Any] = Field(description="An assistant message, as the model call returned it")


class RewardBody(Body):
    """A reward from outside."""

    name: str = Field(default="reward", min_length=1, max_length=100)
    value: float = Field(allow_inf_nan=False, strict=True)


B = TypeVar("B", bound=Body)


def checked(kind: type[B], raw: Any) -> B:
    """A body that came by another way than a FastAPI route, which checks its own.

    Raises:
        ApiError: it is not of this kind; the first reason is told.
    """
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise invalid(error.errors()) from error

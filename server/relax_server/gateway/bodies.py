"""Bodies of requests, checked by pydantic at the door: the same ones over every way in."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from relax_sdk.storable import check_name, check_storable
from relax_server.gateway.errors import invalid


class Body(BaseModel):
    """A request's body: unknown fields are refused, so that a misspelt one is noticed, and what could not be stored is.

    A body's own texts are names and may hold no NUL character; what is inside other fields may: it is stored as JSON or bytes.

    Raises:
        UnstorableError: a field holds half of a surrogate pair, an integer of more than 64 bits, a float that is not finite, or
            too many lists and objects inside one another.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _storable(cls, raw: Any) -> Any:
        for name, value in raw.items() if isinstance(raw, dict) else ():
            check_storable({name: value}, "")
            if isinstance(value, str):
                check_name(value, name)
        return raw


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

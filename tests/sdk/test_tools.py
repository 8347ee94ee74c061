"""Tools: schemas from signatures, calls with good and bad arguments, what tools may return."""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import Field

import relax_sdk as relax
from relax_sdk.errors import ConfigError, EnvError
from relax_sdk.messages import AssistantMessage, Message, Text, ToolCall
from relax_sdk.tools import call_tool, call_tools, tool_methods, tool_schemas

PICTURE = relax.Image.from_array(np.zeros((4, 4, 3), np.uint8))


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


class Shop(relax.Env):
    """An environment with tools of every kind."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    @relax.tool
    def buy(
        self,
        item: str,
        count: Annotated[int, Field(ge=1, le=9, description="how many")] = 1,
        *,
        size: Size = Size.SMALL,
        colour: Literal["red", "blue"] | None = None,
    ) -> str:
        """Buy something.

        It is paid at once.
        """
        self.log.append((item, count, size, colour))
        return f"{count} {item}"

    @relax.tool
    async def look(self) -> list[Any]:
        return ["a picture: ", PICTURE]

    @relax.tool
    def leave(self) -> relax.ToolResult:
        """Leave."""
        return relax.ToolResult("bye", reward=0.5, terminated=True)

    @relax.tool
    def nothing(self) -> None:
        """Say nothing."""

    @relax.tool
    def broken(self) -> str:
        """Fail."""
        raise KeyError("till")

    def private(self) -> str:
        return "not a tool"


class LargeShop(Shop):
    @relax.tool
    def count(self, things: list[str]) -> str:
        """Count things."""
        return str(len(things))

    @relax.tool
    def leave(self) -> relax.ToolResult:
        """Leave the large shop."""
        return relax.ToolResult("goodbye", reward=0.25, truncated=True)


async def ask(name: str, /, env: Any = None, **arguments: Any) -> tuple[str, relax.ToolResult]:
    message, result = await call_tool(env or Shop(), ToolCall("call_1", name, arguments))
    assert message.role == "tool" and message.tool_call_id == "call_1"
    return message.text, result


def test_a_schema_is_the_signature_and_the_docstring() -> None:
    schema = {s["function"]["name"]: s["function"] for s in tool_schemas(Shop())}
    assert list(schema) == ["buy", "look", "leave", "nothing", "broken"]
    buy = schema["buy"]
    assert buy["description"] == "Buy something.\n\nIt is paid at once."
    parameters = buy["parameters"]
    assert parameters["type"] == "object" and parameters["required"] == ["item"]
    assert parameters["additionalProperties"] is False
    assert parameters["properties"]["item"] == {"type": "string"}
    assert parameters["properties"]["count"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 9,
        "default": 1,
        "description": "how many",
    }
    assert {"enum": ["red", "blue"], "type": "string"} in parameters["properties"]["colour"]["anyOf"]
    assert schema["look"]["parameters"]["properties"] == {} and schema["look"]["description"] == ""


def test_tools_are_inherited_and_overridden() -> None:
    assert list(tool_methods(LargeShop())) == ["buy", "look", "leave", "nothing", "broken", "count"]
    leave = next(s["function"] for s in tool_schemas(LargeShop()) if s["function"]["name"] == "leave")
    assert leave["description"] == "Leave the large shop."
    assert tool_schemas(relax.Env()) == []


def test_a_schema_is_plain_json() -> None:
    import json

    assert json.loads(json.dumps(tool_schemas(LargeShop()))) == tool_schemas(LargeShop())


def untyped() -> type[relax.Env]:
    class Untyped(relax.Env):
        @relax.tool
        def guess(self, number) -> str:  # type: ignore[no-untyped-def]
            return "?"

    return Untyped


def variadic() -> type[relax.Env]:
    class Variadic(relax.Env):
        @relax.tool
        def guess(self, *numbers: int) -> str:
            return "?"

    return Variadic


def opaque() -> type[relax.Env]:
    class Opaque(relax.Env):
        @relax.tool
        def guess(self, number: np.ndarray) -> str:
            return "?"

    return Opaque


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (untyped, "parameter 'number' needs a type hint"),
        (variadic, r"parameter 'numbers' .*\*"),
        (opaque, "no JSON schema"),
    ],
)
def test_a_tool_without_a_schema(make: Any, why: str) -> None:
    with pytest.raises(ConfigError, match="tool guess: .*" + why):
        tool_schemas(make()())


async def test_arguments_arrive_with_their_types() -> None:
    shop = Shop()
    assert (await ask("buy", shop, item="tea", count="3", size="large", colour="red"))[0] == "3 tea"
    assert (await ask("buy", shop, item="tea"))[0] == "1 tea"
    assert shop.log == [("tea", 3, Size.LARGE, "red"), ("tea", 1, Size.SMALL, None)]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "item: Field required"),
        ({"item": 3}, "item: Input should be a valid string"),
        ({"item": "tea", "count": "many"}, "count: Input should be a valid integer"),
        ({"item": "tea", "count": 10}, "count: Input should be less than or equal to 9"),
        ({"item": "tea", "size": "huge"}, "size: "),
        ({"item": "tea", "price": 1}, "price: Extra inputs are not permitted"),
        ({"self": 1, "item": "tea"}, "self: Extra inputs are not permitted"),
    ],
)
async def test_bad_arguments_are_told_to_the_model(arguments: dict[str, Any], why: str) -> None:
    shop = Shop()
    text, result = await ask("buy", shop, **arguments) if "self" not in arguments else await _raw("buy", shop, arguments)
    assert text.startswith("buy: ") and why in text
    assert (result.reward, result.terminated, result.truncated) == (0.0, False, False) and shop.log == []


async def _raw(name: str, env: Any, arguments: dict[str, Any]) -> tuple[str, relax.ToolResult]:
    message, result = await call_tool(env, ToolCall("call_1", name, arguments))
    return message.text, result


@pytest.mark.parametrize("name", ["fly", "private", "step", "__init__", ""])
async def test_an_unknown_tool_is_told_to_the_model(name: str) -> None:
    text, result = await ask(name)
    assert text == f"unknown tool {name!r}; there are: buy, look, leave, nothing, broken" and not result.terminated


async def test_an_unreadable_call_is_told_to_the_model() -> None:
    message, _ = await call_tool(Shop(), ToolCall("call_1", "", {}, error="no closing bracket"))
    assert message.text == "no closing bracket"


async def test_async_tools_and_media() -> None:
    message, _ = await call_tool(Shop(), ToolCall("call_1", "look", {}))
    assert message == Message("tool", (Text("a picture: "), PICTURE), tool_call_id="call_1")


async def test_a_tool_may_say_nothing() -> None:
    assert (await ask("nothing"))[0] == ""


async def test_a_tools_own_error_is_the_environments() -> None:
    with pytest.raises(KeyError, match="till"):
        await ask("broken")


async def test_a_tool_that_returns_nonsense() -> None:
    class Odd(relax.Env):
        @relax.tool
        def number(self) -> Any:
            """A number."""
            return 3

        @relax.tool
        def several(self) -> Any:
            """Two messages."""
            return [Message("user", (Text("a"),)), Message("user", (Text("b"),))]

    for name in ("number", "several"):
        with pytest.raises(EnvError, match=r"must be|must return"):
            await ask(name, Odd())


async def test_rewards_add_up_and_an_end_ends() -> None:
    shop = Shop()
    calls = [ToolCall("1", "buy", {"item": "tea"}), ToolCall("2", "leave", {}), ToolCall("3", "buy", {"item": "milk"})]
    messages, reward, terminated, truncated = await call_tools(shop, AssistantMessage(tool_calls=tuple(calls)))
    assert [m.tool_call_id for m in messages] == ["1", "2"]
    assert (reward, terminated, truncated) == (0.5, True, False)
    assert [entry[0] for entry in shop.log] == ["tea"], "what follows the end is not called"
    _, reward, terminated, truncated = await call_tools(LargeShop(), AssistantMessage(tool_calls=(calls[1],)))
    assert (reward, terminated, truncated) == (0.25, False, True)

"""Tools: methods of an environment that the model may call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from relax_sdk.errors import ConfigError, EnvError
from relax_sdk.messages import AssistantMessage, Message, Text, ToolCall, as_messages
from relax_sdk.rewards import Invoke

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__relax_tool__"


@dataclass(frozen=True)
class ToolResult:
    """A tool's answer that does more than answer: it can pay a reward or end the episode."""

    content: Any
    """A string, a part, a list of these, or None for an empty answer."""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False


def tool(function: F) -> F:
    """Mark a method of an `Env` as a tool.

    Its OpenAI schema comes from the signature and the docstring. It returns a string, a part, a list of these, or a
    `ToolResult`; it may be `async def`.
    """
    setattr(function, _MARK, True)
    return function


def tool_methods(env: Any) -> dict[str, Callable[..., Any]]:
    """The tools of an environment, by name, in the order of their definition."""
    names = [n for cls in reversed(type(env).__mro__) for n, f in vars(cls).items() if getattr(f, _MARK, False)]
    return {name: getattr(env, name) for name in dict.fromkeys(names)}


def has_tools(cls: type) -> bool:
    """Whether an environment class has tools."""
    return bool(getattr(cls, "remote_tools", ())) or any(
        getattr(f, _MARK, False) for base in cls.__mro__ for f in vars(base).values()
    )


def tool_schemas(env: Any) -> list[dict[str, Any]]:
    """OpenAI tool schemas of an environment's tools.

    Raises:
        ConfigError: a parameter without a type hint, of a type that JSON cannot express, or `*args`.
    """
    remote = getattr(env, "remote_tools", None)  # its code runs elsewhere
    if remote is not None:
        return list(remote)
    return [_schema(name, function) for name, function in tool_methods(env).items()]


def _arguments_model(name: str, function: Callable[..., Any]) -> Any:
    return _model_of(name, getattr(function, "__func__", function), hasattr(function, "__self__"))


@functools.lru_cache(maxsize=512)
def _model_of(name: str, function: Callable[..., Any], bound: bool) -> Any:
    """Building a pydantic model takes a millisecond, so it is built once a function and not once a call."""
    from pydantic import ConfigDict, PydanticUserError, create_model

    hints = inspect.get_annotations(function, eval_str=True)
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[1 if bound else 0 :]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"tool {name}: parameter {parameter.name!r} may not be *{parameter.name} or **{parameter.name}")
        if parameter.name not in hints:
            raise ConfigError(f"tool {name}: parameter {parameter.name!r} needs a type hint")
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    try:
        return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    except (PydanticUserError, NameError) as error:
        raise ConfigError(f"tool {name}: there is no JSON schema for its parameters ({str(error).splitlines()[0]})") from error


def _schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    parameters = _arguments_model(name, function).model_json_schema()
    parameters.pop("title", None)
    for prop in parameters.get("properties", {}).values():
        prop.pop("title", None)
    return {
        "type": "function",
        "function": {"name": name, "description": inspect.getdoc(function) or "", "parameters": parameters},
    }


async def call_tool(env: Any, call: ToolCall, invoke: Invoke | None = None) -> tuple[Message, ToolResult]:
    """Call one tool.

    A call that cannot be read, an unknown name or arguments of the wrong type are answered to the model as text, since
    they are its mistake; an exception inside the tool is the environment's, and passes through.

    Args:
        env: whose tools they are.
        call: what the model wants.
        invoke: calls the tool; default: right here.

    Raises:
        EnvError: the tool returned something that cannot be shown.
    """
    from pydantic import ValidationError

    methods = tool_methods(env)
    if call.error is not None:
        result = ToolResult(call.error)
    elif call.name not in methods:
        result = ToolResult(f"unknown tool {call.name!r}; there are: {', '.join(methods) or 'none'}")
    else:
        function = methods[call.name]
        try:
            arguments = dict(_arguments_model(call.name, function).model_validate(call.arguments))
        except ValidationError as error:
            first = error.errors()[0]
            result = ToolResult(f"{call.name}: {'.'.join(map(str, first['loc'])) or 'arguments'}: {first['msg']}")
        else:
            answer = await invoke(functools.partial(function, **arguments)) if invoke else function(**arguments)
            if inspect.isawaitable(answer):
                answer = await answer
            result = answer if isinstance(answer, ToolResult) else ToolResult(answer)
    shown = as_messages(result.content, role="tool")
    if not shown:  # None or an empty list
        shown = [Message("tool")]
    if len(shown) != 1:
        raise EnvError(f"tool {call.name!r} must return one string, part, list of parts or ToolResult")
    return Message("tool", shown[0].content or (Text(""),), tool_call_id=call.id), result


async def call_tools(
    env: Any, action: AssistantMessage, invoke: Invoke | None = None
) -> tuple[list[Message], float, bool, bool]:
    """Call every tool an action asks for, in order, until one ends the episode; `invoke` as in `call_tool`.

    Returns:
        Tool messages, summed reward, terminated, truncated.
    """
    remote = getattr(env, "call_tools_remotely", None)
    if remote is not None:
        return await (invoke(remote, action) if invoke else remote(action))
    messages: list[Message] = []
    reward, terminated, truncated = 0.0, False, False
    for call in action.tool_calls:
        message, result = await call_tool(env, call, invoke)
        messages.append(message)
        reward += result.reward
        terminated, truncated = terminated or result.terminated, truncated or result.truncated
        if terminated or truncated:
            break
    return messages, reward, terminated, truncated

"""A black-box ReAct agent: thoughts, actions and observations as plain text. `python -m relax_agents.react [--steps 16]`.

The protocol of Yao et al. 2022 (arXiv 2210.03629): the policy writes `Thought:`, `Action:` and `Action Input:`, and is told
`Observation:`. The environment's tools are described in the prompt, so this works with models that know nothing of tool
calls. What cannot be read is told to the policy, and costs one step. It is told where to go as `relax_agents.openai_loop` is.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openai import OpenAI

from relax_sdk.client import RemoteSession, attach

STEPS = 16
"""Answers of the policy."""
STOP = "\nObservation:"
"""The environment says what is observed, not the policy."""

PROMPT = """Solve the task step by step. You can take these actions:
{actions}

Answer in this form:
Thought: what to do next, and why
Action: the name of one action
Action Input: its arguments, a JSON object

You are then told what came of it, after "Observation:". When you have what you need, answer in this form instead:
Thought: why this is the answer
Final Answer: the answer"""

_FIELD = re.compile(r"^[ \t]*(Thought|Action Input|Action|Final Answer)[ \t]*:[ \t]*", re.MULTILINE)


@dataclass(frozen=True)
class Action:
    """One of the environment's tools, and what to call it with."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class FinalAnswer:
    """What the policy says to the environment itself."""

    text: str


class UnreadableAnswer(Exception):
    """An answer that keeps to neither form; the message is for the policy."""


def describe(tools: Sequence[Mapping[str, Any]]) -> str:
    """OpenAI tool schemas as lines of a prompt: `name(argument: type, optional: type = default): description`."""
    return "\n".join(_describe(tool["function"]) for tool in tools) or "(none: give a final answer)"


def _describe(function: Mapping[str, Any]) -> str:
    schema = function.get("parameters") or {}
    required, arguments = schema.get("required", ()), list[str]()
    for name, argument in schema.get("properties", {}).items():
        kind = argument.get("type") or json.dumps({k: v for k, v in argument.items() if k != "default"})
        default = f" = {json.dumps(argument.get('default'))}" if name not in required else ""
        arguments.append(f"{name}: {kind}{default}")
    return f"{function['name']}({', '.join(arguments)}): {function.get('description') or 'no description'}"


def read_answer(text: str) -> Action | FinalAnswer:
    """What an answer asks for: its first action, or its final answer.

    Raises:
        UnreadableAnswer: it has neither, or the input of its action is not a JSON object.
    """
    marks = list(_FIELD.finditer(text))
    fields: dict[str, str] = {}
    for i, mark in enumerate(marks):
        end = marks[i + 1].start() if i + 1 < len(marks) else len(text)
        fields.setdefault(mark[1], text[mark.end() : end].strip())
        if mark[1] in ("Final Answer", "Action Input"):
            break  # what comes behind is made up: nothing has been observed yet
    if "Final Answer" in fields:
        return FinalAnswer(fields["Final Answer"])
    if not fields.get("Action"):
        raise UnreadableAnswer('there is neither an "Action:" nor a "Final Answer:" in your answer')
    given = fields.get("Action Input") or "{}"
    try:
        arguments = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise UnreadableAnswer(f"the Action Input {given[:80]!r} is not JSON ({error})") from error
    if not isinstance(arguments, dict):
        raise UnreadableAnswer(f"the Action Input {given[:80]!r} must be a JSON object of the action's arguments")
    return Action(fields["Action"], arguments)


def play(policy: OpenAI, session: RemoteSession, steps: int) -> None:
    """Think, act and observe until the environment ends the episode, or for `steps` answers of the policy."""
    prompt = {"role": "system", "content": PROMPT.format(actions=describe(session.tools))}
    messages: list[Any] = [prompt, *session.observation]
    for number in range(steps):
        completion = policy.chat.completions.create(model="policy", messages=messages, stop=STOP, tool_choice="none")
        answer = completion.choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        text = answer.content or ""
        try:
            action = read_answer(text)
        except UnreadableAnswer as error:
            messages.append({"role": "user", "content": f"Observation: {error}; keep to the form"})
            continue
        step = session.step(_message(action, text, number))
        if step.done:
            return
        messages += [observed(message) for message in step.observation]


def _message(action: Action | FinalAnswer, text: str, number: int) -> dict[str, Any]:
    """An action as the environment takes it."""
    if isinstance(action, FinalAnswer):
        return {"role": "assistant", "content": action.text}
    function = {"name": action.name, "arguments": json.dumps(action.arguments)}
    call = {"id": f"action_{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": text, "tool_calls": [call]}


def observed(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of the environment as the policy is told it: from the user, after `Observation:`, media left as they are."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return {"role": "user", "content": f"Observation: {content}"}
    return {"role": "user", "content": [{"type": "text", "text": "Observation: "}, *content]}


def main() -> None:
    """Play one episode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="answers of the policy at most")
    steps = parser.parse_args().steps
    with attach() as session:
        play(OpenAI(), session, steps)
        session.finish()


if __name__ == "__main__":
    main()

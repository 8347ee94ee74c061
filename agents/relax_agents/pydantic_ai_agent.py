"""A black-box agent on a framework: Pydantic AI asks the model and calls tools. `python -m relax_agents.pydantic_ai_agent`.

The framework runs its own loop against the base URL in its environment, as it would against OpenAI; each of the environment's
tools is one of its tools. A run of that loop ends with an answer without a tool call, which is an action too: if the
environment goes on, so does the conversation. Text and pictures are shown; sounds and videos the framework would want to fetch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_ai import Agent, ImageUrl, RunContext, Tool
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ModelMessage, ModelRequest, SystemPromptPart, UserContent, UserPromptPart
from pydantic_ai.models.openai import OpenAIChatModel

from relax_sdk.client import RemoteSession, attach

RETRIES = 100
"""Answers in a row that the framework may send back to the model; the episode's own limits come first."""


class EpisodeEnded(Exception):
    """The environment has ended the episode inside a tool."""


def make_tool(session: RemoteSession, schema: Mapping[str, Any]) -> Tool[object]:
    """One of the environment's tools as a tool of the framework."""
    function = schema["function"]

    def call(context: RunContext[object], **arguments: Any) -> Any:
        wish = {"name": function["name"], "arguments": json.dumps(arguments)}
        wishes = [{"id": context.tool_call_id, "type": "function", "function": wish}]
        step = session.step({"role": "assistant", "tool_calls": wishes})
        if step.done:
            raise EpisodeEnded
        return spoken(step.observation[0]["content"])

    return Tool.from_schema(
        call,
        name=function["name"],
        description=function.get("description"),
        json_schema=function["parameters"],
        takes_ctx=True,
        sequential=True,
    )


def spoken(content: str | Sequence[Mapping[str, Any]]) -> str | list[UserContent]:
    """The content of an OpenAI message in the framework's terms.

    Raises:
        ValueError: it holds a sound or a video.
    """
    if isinstance(content, str):
        return content
    parts: list[UserContent] = []
    for part in content:
        if part["type"] == "text":
            parts.append(part["text"])
        elif part["type"] == "image_url":
            parts.append(ImageUrl(part["image_url"]["url"], media_type="image/png"))
        else:
            raise ValueError(f"a part of type {part['type']!r}: this agent shows text and pictures only")
    return parts


def request(observation: Sequence[Mapping[str, Any]]) -> ModelRequest:
    """What the environment shows as one request of the framework."""
    kinds = {"system": SystemPromptPart, "user": UserPromptPart}
    return ModelRequest(parts=[kinds[message["role"]](spoken(message["content"])) for message in observation])


def play(session: RemoteSession) -> None:
    """Run the framework's loop until the environment ends the episode."""
    tools = [make_tool(session, schema) for schema in session.tools]
    agent = Agent(OpenAIChatModel("policy"), tools=tools, retries=RETRIES)
    history: list[ModelMessage] = [request(session.observation)]
    while True:
        try:
            result = agent.run_sync(message_history=history)
        except EpisodeEnded:
            return
        except ModelHTTPError as error:
            if isinstance(error.body, Mapping) and error.body.get("code") == "episode_over":
                return  # a limit on turns or tokens: what was reached until then counts
            raise
        step = session.step(result.output)
        if step.done:
            return
        history = [*result.all_messages(), request(step.observation)]


def main() -> None:
    """Play one episode."""
    with attach() as session:
        play(session)
        session.finish()


if __name__ == "__main__":
    main()

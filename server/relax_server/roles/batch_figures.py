"""What a batch says of its episodes: how they ended, what they earned, and what one of them answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from relax_sdk.trajectory import Group, Trajectory

SAMPLE_EVERY = 10
"""Steps between two sample answers; the first step has one too."""
SAMPLE_CHARACTERS = 200


def batch_figures(groups: Sequence[Group], step: int) -> dict[str, Any]:
    """Figures of a batch's episodes.

    Args:
        groups: the batch.
        step: the optimizer step that was taken on it.

    Returns:
        `status` (episodes by how they ended), `reward_min` and `reward_max` (of single episodes), `cut_responses` (share of
        the model's answers that ended at the token limit), `unreadable_calls` (share of the answers with a tool call that could
        not be read) and, in the first and every tenth step, `sample`: what one episode
        was last `asked`, its `answer`, and its `reward`, as texts.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    figures: dict[str, Any] = dict(
        status=dict(Counter(trajectory.status.value for trajectory in trajectories)),
        reward_min=min((trajectory.reward for trajectory in trajectories), default=0.0),
        reward_max=max((trajectory.reward for trajectory in trajectories), default=0.0),
        cut_responses=sum(turn.finish_reason == "length" for turn in turns) / max(len(turns), 1),
        unreadable_calls=sum(turn.unreadable_calls > 0 for turn in turns) / max(len(turns), 1),
    )
    if trajectories and (step == 1 or step % SAMPLE_EVERY == 0):
        sample = sample_answer(trajectories[(step // SAMPLE_EVERY) % len(trajectories)])
        if sample is not None:
            figures["sample"] = sample
    return figures


def sample_answer(trajectory: Trajectory) -> dict[str, str] | None:
    """The last answer of an episode and what it was an answer to; None where there is none."""
    messages = trajectory.messages
    last = next((i for i in range(len(messages) - 1, -1, -1) if messages[i].get("role") == "assistant"), None)
    if last is None:
        return None
    asked = shown(messages[last - 1]) if last else ""
    return {"asked": asked, "answer": shown(messages[last]), "reward": f"{trajectory.reward:.3f}"}


def shown(message: dict[str, Any]) -> str:
    """A chat message in one short text, media as `<audio>` and tool calls as `name(arguments)`; one that could not be read has
    no name."""
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [_part(part) for part in content]
    for function in (call["function"] for call in message.get("tool_calls") or ()):
        parts.append(f"{function['name']}({function['arguments']})" if function["name"] else "<unreadable tool call>")
    text = " ".join(part for part in parts if part)
    return text if len(text) <= SAMPLE_CHARACTERS else text[:SAMPLE_CHARACTERS] + "…"


def _part(part: dict[str, Any]) -> str:
    kind = str(part.get("type", ""))
    return str(part.get("text", "")) if kind == "text" else f"<{kind.removeprefix('input_').removesuffix('_url')}>"

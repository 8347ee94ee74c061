"""What a batch says of its episodes: how they ended, what they earned, and what the best and the worst answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import pstdev
from typing import Any

from relax_sdk.trajectory import Group, Trajectory, Turn

SAMPLE_EVERY = 10
"""Steps between two that have sample answers; the first step has them too."""
SAMPLE_CHARACTERS = 200
SAMPLE_MEDIA = 3
"""Media of one sample answer."""


def batch_figures(groups: Sequence[Group], step: int) -> dict[str, Any]:
    """Figures of a batch's episodes.

    Args:
        groups: the batch.
        step: the optimizer step that was taken on it.

    Returns:
        `status` (episodes by how they ended), `reward_min` and `reward_max` (of single episodes that did not fail),
        `cut_responses` (share of the model's answers that ended at the token limit), `unreadable_calls` (share of the answers
        with a tool call that could not be read), `rewards_std` (standard deviation of every reward component over the episodes
        that have it),
        `answer_tokens_mean` and `answer_tokens_max` (response tokens of one turn), `turns_mean` (of an episode),
        `observations` (different first prompts with their media), `media_different` (different media by kind) and, in the
        first and every tenth step, `samples` (see `sample_answers`).
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    counted = [trajectory for group in groups for trajectory in group.counted]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    figures: dict[str, Any] = dict(
        status=dict(Counter(trajectory.status.value for trajectory in trajectories)),
        reward_min=min((trajectory.reward for trajectory in counted), default=0.0),
        reward_max=max((trajectory.reward for trajectory in counted), default=0.0),
        cut_responses=sum(turn.finish_reason == "length" for turn in turns) / max(len(turns), 1),
        unreadable_calls=sum(turn.unreadable_calls > 0 for turn in turns) / max(len(turns), 1),
        rewards_std=spreads(counted),
        answer_tokens_mean=sum(len(turn.response_ids) for turn in turns) / max(len(turns), 1),
        answer_tokens_max=max((len(turn.response_ids) for turn in turns), default=0),
        turns_mean=len(turns) / max(len(trajectories), 1),
        observations=len({_first(trajectory.turns[0]) for trajectory in trajectories if trajectory.turns}),
        media_different=different_media(trajectories),
    )
    if step == 1 or step % SAMPLE_EVERY == 0:
        figures["samples"] = sample_answers(counted, step // SAMPLE_EVERY)
    return figures


def spreads(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The population standard deviation of every reward component, over the episodes that have it."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.rewards.items():
            values.setdefault(name, []).append(value)
    return {name: pstdev(of) for name, of in values.items()}


def different_media(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """How many different media the episodes were shown, by kind."""
    seen = {media.sha256: media for trajectory in trajectories for turn in trajectory.turns for media in turn.media}
    return dict(Counter(media.kind for media in seen.values()))


def _first(turn: Turn) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """What an episode began with."""
    return tuple(turn.prompt_ids), tuple(media.sha256 for media in turn.media)


def sample_answers(trajectories: Sequence[Trajectory], turn: int = 0) -> list[dict[str, Any]]:
    """The best and the worst answer of a batch, or any one where all earned the same; none where nothing was answered.

    Args:
        trajectories: of the batch.
        turn: another number chooses another one among equals.

    Returns:
        For each `which` it is (`best`, `worst` or `an answer`), the index of its `task`, what it was `asked` last, its `answer`
        and its `reward` as texts, and the last `media` of its prompt: `kind` and `sha256` of each, three at most.
    """
    answered = [trajectory for trajectory in trajectories if _last_answer(trajectory) is not None]
    rewards = {trajectory.reward for trajectory in answered}
    if not rewards:
        return []
    wanted = {"best": max(rewards), "worst": min(rewards)} if len(rewards) > 1 else {"an answer": max(rewards)}
    samples = []
    for which, reward in wanted.items():
        alike = [trajectory for trajectory in answered if trajectory.reward == reward]
        samples.append({"which": which, **_sample(alike[turn % len(alike)])})
    return samples


def _last_answer(trajectory: Trajectory) -> int | None:
    """Index of the last message of the model."""
    messages = trajectory.messages
    return next((i for i in range(len(messages) - 1, -1, -1) if messages[i].get("role") == "assistant"), None)


def _sample(trajectory: Trajectory) -> dict[str, Any]:
    messages, last = trajectory.messages, _last_answer(trajectory)
    assert last is not None
    media = [ref for turn in trajectory.turns[-1:] for ref in turn.media][-SAMPLE_MEDIA:]
    return {
        "task": trajectory.task_index,
        "asked": shown(messages[last - 1]) if last else "",
        "answer": shown(messages[last]),
        "reward": f"{trajectory.reward:.3f}",
        "media": [{"kind": ref.kind, "sha256": ref.sha256} for ref in media],
    }


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

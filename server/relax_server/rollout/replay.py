"""A recorded episode played again: its environment with the recorded actions, its prompts with the recorded seeds."""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from relax_sdk.config import RunConfig
from relax_sdk.errors import RunError
from relax_sdk.media import MediaStore
from relax_sdk.messages import AssistantMessage, Message
from relax_sdk.registry import EnvSpec
from relax_sdk.replay import Difference
from relax_sdk.session import Agent
from relax_sdk.trajectory import Trajectory, Turn
from relax_server.engines.base import Engine, GenerateRequest, MediaItem
from relax_server.models.processor import Processor
from relax_server.rollout.context import RolloutContext, default_agent
from relax_server.rollout.episode import Episode
from relax_server.rollout.media import MediaIntake
from relax_server.rollout.policy import Policies
from relax_server.rollout.policy.recorded import RecordedMessagePolicies, RecordedPolicies
from relax_server.rollout.rendering import Renderer
from relax_server.rollout.task import EpisodeTask
from relax_server.rollout.threads import CallThreads

THREADS = 4
SHOWN = 160
"""Characters of a message that a difference tells, at most."""
EQUAL = 1e-9
"""Rewards that are apart by no more are equal."""


async def play_again(
    spec: EnvSpec, config: RunConfig, processor: Processor | None, agent: Agent | None, recorded: Trajectory, task: EpisodeTask
) -> tuple[Trajectory, bool]:
    """Play an episode with the recorded actions; nothing is written.

    Args:
        spec: of the environment.
        config: of the run.
        processor: of the model; it reads the recorded tokens as actions. None: the record has none, see `by_messages`.
        agent: that played; default: the built-in loop.
        recorded: the record.
        task: with the recorded row and seed.

    Returns:
        The new trajectory, and whether its environment has rewards for whole groups, which are not in it.
    """
    threads = CallThreads("replay", THREADS)
    with tempfile.TemporaryDirectory(prefix="relax-replay-") as folder:
        stage = ReplayStage(spec, config, processor, agent, threads, MediaStore(Path(folder)), asyncio.Semaphore(1))
        episode = stage.episode(recorded, task)
        try:
            trajectory = await episode.launch()
            groups = episode.has_group_rewards
            await episode.close()
        finally:
            threads.close()
    return trajectory, groups


@dataclass(frozen=True)
class ReplayStage:
    """What replays of recorded episodes stand on; several may go on at once."""

    spec: EnvSpec
    config: RunConfig
    processor: Processor | None
    """Reads the recorded tokens as actions; None: no record has any, see `by_messages`."""
    agent: Agent | None
    """Played them; None: the built-in loop."""
    threads: CallThreads
    store: MediaStore
    """Takes the media that the environments show."""
    slots: asyncio.Semaphore
    """One per episode that may be in flight."""

    def episode(self, recorded: Trajectory, task: EpisodeTask) -> Episode:
        """An episode that gives the recorded answers again; `launch` plays it.

        Args:
            recorded: the record.
            task: with the recorded row and seed.
        """
        env_class, rollout = self.spec.load(), self.config.rollout
        context = RolloutContext(
            run="replay",
            spec=self.spec,
            env_class=env_class,
            config=rollout,
            agent=self.agent or default_agent(env_class),
            policies=self._policies(recorded),
            threads=self.threads,
            slots=self.slots,
        )
        return Episode(context, task)

    def _policies(self, recorded: Trajectory) -> Policies:
        if by_messages(recorded):
            return RecordedMessagePolicies(recorded.turns, recorded_answers(recorded), self.store)
        assert self.processor is not None, "tokens are read with a processor"
        intake = MediaIntake(self.store, self.processor, self.threads, self.config.rollout.step_timeout)
        return RecordedPolicies(Renderer(self.processor), intake, recorded.turns)


def by_messages(recorded: Trajectory) -> bool:
    """Whether a record has answers and no tokens: it was played behind a URL that tells none."""
    return bool(recorded.turns) and not any(turn.prompt_ids or turn.response_ids for turn in recorded.turns)


def recorded_answers(recorded: Trajectory) -> list[AssistantMessage]:
    """The answers of a record without tokens, one for each of its turns.

    Raises:
        RunError: its messages do not hold them all, as where an agent asked more than it said.
    """
    said = [Message.from_openai(message) for message in recorded.messages if message["role"] == "assistant"]
    answers = [message for message in said if isinstance(message, AssistantMessage)]
    if len(answers) != len(recorded.turns):
        raise RunError(
            f"{recorded.id}: no tokens are recorded, and {len(answers)} answers among its messages for {len(recorded.turns)} "
            "turns, so it cannot be played again"
        )
    pairs = zip(answers, recorded.turns, strict=True)
    return [replace(answer, finish_reason=turn.finish_reason) for answer, turn in pairs]


def compare(recorded: Trajectory, now: Trajectory, processor: Processor | None, group_rewards: bool) -> list[Difference]:
    """The first difference of each kind between an episode and its replay with the same actions."""
    prompts = _prompts(recorded, now, processor) if processor is not None else None
    found = [_messages(recorded, now) or prompts, _steps(recorded, now)]
    names = [name for name in recorded.rewards if name in now.rewards or not group_rewards]
    for name in dict.fromkeys([*names, *now.rewards]):
        was, is_ = recorded.rewards.get(name), now.rewards.get(name)
        if was is None or is_ is None or not math.isclose(was, is_, rel_tol=EQUAL, abs_tol=EQUAL):
            found.append(Difference("component", name, str(was), str(is_)))
    if _end(recorded) != _end(now):
        ends = [f"{t.status} after {len(t.turns)} turns" + (f" ({t.error})" if t.error else "") for t in (recorded, now)]
        found.append(Difference("end", "the episode", *ends))
    return [difference for difference in found if difference is not None]


def _end(t: Trajectory) -> tuple[str, int, str | None]:
    """How an episode ended; one that failed, with its error."""
    return t.status, len(t.turns), t.error if t.failure is not None else None


def shown_otherwise(recorded: Trajectory, now: Trajectory) -> bool:
    """Whether the messages of a replay are not those of the record."""
    return _messages(recorded, now) is not None


def _messages(recorded: Trajectory, now: Trajectory) -> Difference | None:
    """The first message that is not the same, media by their content."""
    was, new = json.loads(json.dumps(recorded.messages)), json.loads(json.dumps(now.messages))
    for index in range(max(len(was), len(new))):
        pair = [messages[index] if index < len(messages) else None for messages in (was, new)]
        if pair[0] == pair[1]:
            continue
        role = next(message["role"] for message in pair if message is not None)
        turn = sum(message["role"] == "assistant" for message in was[:index])
        what = "action" if role == "assistant" else "observation"
        return Difference(what, f"turn {turn}, message {index} ({role})", *map(_shown, pair))
    return None


def _shown(message: dict[str, Any] | None) -> str:
    if message is None:
        return "nothing"
    text = json.dumps({key: value for key, value in message.items() if key != "role"}, ensure_ascii=False)
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def _prompts(recorded: Trajectory, now: Trajectory, processor: Processor) -> Difference | None:
    for number, (was, new) in enumerate(zip(recorded.turns, now.turns, strict=False)):
        difference = tokens_differ("prompt", number, was.prompt_ids, new.prompt_ids, processor)
        if difference is not None:
            return difference
    return None


def _steps(recorded: Trajectory, now: Trajectory) -> Difference | None:
    for number, (was, new) in enumerate(zip(recorded.turns, now.turns, strict=False)):
        if not math.isclose(was.reward, new.reward, rel_tol=EQUAL, abs_tol=EQUAL):
            return Difference("reward", f"turn {number}", str(was.reward), str(new.reward))
    return None


def tokens_differ(what: Any, turn: int, was: Sequence[int], new: Sequence[int], processor: Processor) -> Difference | None:
    """Where two lists of tokens part; None: nowhere."""
    if list(was) == list(new):
        return None
    at = next((i for i, (a, b) in enumerate(zip(was, new, strict=False)) if a != b), min(len(was), len(new)))
    ids = [tokens[at] if at < len(tokens) else None for tokens in (was, new)]
    shown = ["the end" if id is None else f"{id} {processor.decode([id])!r}" for id in ids]
    return Difference(what, f"turn {turn}, position {at}", *shown)


async def sample_again(
    engine: Engine, recorded: Trajectory, processor: Processor, store: MediaStore, timeout: float
) -> tuple[int, Difference | None, list[str]]:
    """Send each recorded prompt to an engine with the recorded sampling.

    Args:
        engine: holds the weights to try.
        recorded: the record; the prompts are its own, so that one turn's difference does not make the next one's.
        processor: of the model.
        store: has the media of the prompts.
        timeout: seconds for one answer.

    Returns:
        Response tokens that are equal up to the first difference, that difference, and what could not be compared.

    Raises:
        RunError: a media item of the record is missing.
        EngineError: the engine did not answer.
    """
    equal, notes = 0, []
    for number, turn in enumerate(recorded.turns):
        sampling = turn.sampling
        if sampling is None or (sampling.sampling_seed is None and sampling.temperature > 0):
            notes.append(f"turn {number}: the engine drew its tokens without a recorded seed, so they are not compared")
            continue
        media = _media(turn, store, recorded.id)
        request = GenerateRequest(processor.collapse(turn.prompt_ids), sampling, media, rid=f"replay-{number}", alone=True)
        (answer,) = await engine.generate(request, timeout)
        if not answer.seeded and sampling.temperature > 0:
            notes.append(f"turn {number}: {engine.url} takes no seeds, so its tokens are not compared")
            continue
        difference = tokens_differ("token", number, turn.response_ids, answer.response_ids, processor)
        if difference is not None:
            same = zip(turn.response_ids, answer.response_ids, strict=False)
            return equal + next((i for i, (a, b) in enumerate(same) if a != b), 0), difference, notes
        equal += len(turn.response_ids)
    return equal, None, notes


def _media(turn: Turn, store: MediaStore, id: str) -> tuple[MediaItem, ...]:
    for ref in turn.media:
        if not store.path(ref).exists():
            raise RunError(f"{id}: the {ref.kind} {ref.sha256} of its record is missing, looked for at {store.path(ref)}")
    return tuple(MediaItem(ref, str(store.path(ref))) for ref in turn.media)

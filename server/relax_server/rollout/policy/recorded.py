"""Policies of a replay: the recorded answers are given again, whatever is asked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from relax_sdk.errors import EpisodeOver
from relax_sdk.media import MediaStore
from relax_sdk.messages import AssistantMessage, Message
from relax_sdk.trajectory import Trajectory, Turn
from relax_server.engines.base import Generation, MediaItem
from relax_server.rollout.calls import Answer, CallOptions
from relax_server.rollout.environment import EnvRunner
from relax_server.rollout.media import MediaIntake
from relax_server.rollout.policy.base import Policies, Policy
from relax_server.rollout.policy.messages import TokenlessPolicy
from relax_server.rollout.policy.tokens import Sampled, TokenPolicies, TokenPolicy
from relax_server.rollout.recorder import RecordedPrompt
from relax_server.rollout.rendering import Renderer


class RecordedPolicies(TokenPolicies):
    """Policies that give the turns of one trajectory again.

    Args:
        renderer: of the model.
        intake: takes the media that the environment shows.
        turns: that were recorded.
    """

    def __init__(self, renderer: Renderer, intake: MediaIntake, turns: Sequence[Turn]) -> None:
        super().__init__(renderer, intake)
        self.recorded = turns

    def of(self, runner: EnvRunner) -> Policy:
        return RecordedPolicy(self, runner)


class RecordedPolicy(TokenPolicy):
    """Answers the n-th call with the n-th recorded response; the prompts that it is asked are kept for comparison.

    Args:
        shared: holds the recorded turns.
        runner: of the environment that is played again.
    """

    def __init__(self, shared: RecordedPolicies, runner: EnvRunner) -> None:
        super().__init__(shared.renderer, shared.intake, *runner.tools, runner.context.config.max_tokens)
        self._shared = shared
        self._calls = itertools.count()

    async def sample(self, prompt: RecordedPrompt, media: tuple[MediaItem, ...], room: int, options: CallOptions) -> Sampled:
        number = next(self._calls)
        if number >= len(self._shared.recorded):
            raise EpisodeOver("the record has no further turn")
        turn = self._shared.recorded[number]
        spans, reason = turn.weight_versions, turn.finish_reason
        generation = Generation(prompt.expanded, turn.response_ids, turn.response_logprobs, spans, reason)
        return Sampled(generation, turn.engine, 0.0, turn.sampling)


class RecordedMessagePolicies(Policies):
    """Policies that give the answers of a trajectory without tokens again, from its messages.

    Args:
        turns: that were recorded.
        answers: of these turns, one each.
        store: takes the media that the environment shows.
    """

    def __init__(self, turns: Sequence[Turn], answers: Sequence[AssistantMessage], store: MediaStore) -> None:
        self._recorded, self._store = list(zip(turns, answers, strict=True)), store

    def of(self, runner: EnvRunner) -> Policy:
        return RecordedMessagePolicy(self._recorded, runner, self._store)

    def answered(self, trajectory: Trajectory) -> bool:
        return bool(trajectory.turns)


class RecordedMessagePolicy(TokenlessPolicy):
    """Answers the n-th call with the n-th recorded message.

    Args:
        recorded: the turns, each with its answer.
        runner: of the environment that is played again.
        store: takes the media that the environment shows.
    """

    def __init__(self, recorded: Sequence[tuple[Turn, AssistantMessage]], runner: EnvRunner, store: MediaStore) -> None:
        super().__init__(runner, store)
        self._left = iter(recorded)

    async def ask(self, messages: Sequence[Message], options: CallOptions) -> Answer:
        turn, message = next(self._left, (None, None))
        if turn is None or message is None:
            raise EpisodeOver("the record has no further turn")
        media = [item.ref for asked in messages for item in asked.media]
        now = Turn([], [], [], finish_reason=turn.finish_reason, media=media, engine=turn.engine)
        now.sampling, now.unreadable_calls = turn.sampling, turn.unreadable_calls
        self._turns.append(now)
        return Answer(message if options.shown is None else options.shown(message, now), now, list(messages))

"""Token in, token out: the ids an episode sent and received, so that a response is never decoded and encoded again."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from relax_sdk.config import SamplingParams
from relax_sdk.errors import EngineError, EpisodeError, TokenError
from relax_sdk.media import Media, MediaRef
from relax_sdk.messages import AssistantMessage, Message, Text
from relax_sdk.trajectory import Turn, token_versions
from relax_server.engines.base import Generation
from relax_server.models.processor import MediaFeatures
from relax_server.rollout.rendering import Piece, Renderer

Shown = Callable[[AssistantMessage, Turn], AssistantMessage]


@dataclass(frozen=True)
class RecordedPrompt:
    """What is to be sent for one model call."""

    messages: list[Message]
    """The whole conversation it stands for."""
    ids: list[int]
    """Wire form: one placeholder per media item."""
    expanded: list[int]
    """The ids as the model must see them, with one placeholder per embedding of our own features."""
    media: list[Media]
    """The media items, in the order of the placeholders."""


@dataclass(frozen=True)
class PromptPlan:
    """The way to make a prompt: tokens that were recorded, and a piece that is new."""

    messages: list[Message]
    base_ids: list[int]
    base_expanded: list[int]
    base_media: list[Media]
    piece: Piece | None
    tools: Sequence[dict[str, Any]] = ()
    tools_key: str = ""

    @property
    def new_media(self) -> list[Media]:
        """Media whose features the prompt needs."""
        return self.piece.media if self.piece is not None else []


@dataclass(frozen=True)
class _Call:
    """A recorded model call."""

    prompt: RecordedPrompt
    turn: Turn
    closed: bool
    """The response ends with an end-of-turn token of its own."""


class _Conversations:
    """Conversations that were seen, as a tree of messages: finding one takes as long as it is, however many there are.

    An answer that comes back as it was given is found as itself; one that comes back without what OpenAI's messages cannot hold
    is found as the last one that says the same.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[int | str, Any], int] = {}
        self._plain: dict[tuple[int | str, Any], int] = {}

    def walk(self, tools_key: str, messages: Sequence[Message]) -> list[int]:
        """A number for each beginning of a conversation, as far as it is known."""
        path: list[int] = []
        at: int | str = tools_key
        for message in messages:
            number = self._find(at, message)
            if number is None:
                break
            path.append(number)
            at = number
        return path

    def add(self, tools_key: str, messages: Sequence[Message]) -> list[int]:
        """The same, for a conversation that is known from now on; its last message is an answer as it is given."""
        path: list[int] = []
        at: int | str = tools_key
        for message in messages:
            plain = _meaning(message)
            number = None if message is messages[-1] else self._find(at, message)
            if number is None:
                number = self._next.setdefault((at, (plain, _unspoken(message))), len(self._next))
                self._plain[at, plain] = number
            path.append(number)
            at = number
        return path

    def _find(self, at: int | str, message: Message) -> int | None:
        plain = _meaning(message)
        number = self._next.get((at, (plain, _unspoken(message))))
        return self._plain.get((at, plain)) if number is None else number


class TokenRecorder:
    """The token record of one episode.

    Each model call is `plan` → (features of `plan.new_media`) → `prompt` → engine → `record`. The longest recorded
    conversation that the new one begins with supplies the ids; only what follows it is rendered. Where an agent has rewritten
    history, the whole is rendered anew, and a new training sequence begins.

    Args:
        renderer: of the model.
        tools: OpenAI schemas the policy is offered.
        tools_key: names `tools` in the renderer's cache.
    """

    def __init__(self, renderer: Renderer, tools: Sequence[dict[str, Any]] = (), tools_key: str = "") -> None:
        self.renderer = renderer
        self.processor = renderer.processor
        self.tools = tools
        self.tools_key = tools_key
        self.turns: list[Turn] = []
        self._known = _Conversations()
        self._prompts: dict[int, _Call] = {}
        """The last call for each conversation that was asked about."""
        self._answered: dict[int, _Call] = {}
        """The call that each conversation was answered by."""

    def plan(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None, tools_key: str = ""
    ) -> PromptPlan:
        """Find out what is recorded of a conversation, and render the rest.

        Args:
            messages: the conversation.
            tools: that the policy is offered in this call; default: the episode's.
            tools_key: names `tools` in the renderer's cache; what was recorded with other tools is not gone on from.

        Raises:
            EpisodeError: there is nothing to answer.
            TokenError: the template or the model does not take these messages.
        """
        if tools is None:
            tools, tools_key = self.tools, self.tools_key
        messages = list(messages)
        if not messages:
            raise EpisodeError("no messages to answer")
        if messages[-1].role == "assistant":
            raise EpisodeError(
                "nothing follows the policy's last message: the environment must return an observation or end the episode"
            )
        path = self._known.walk(tools_key, messages)
        again = self._prompts.get(path[-1]) if len(path) == len(messages) else None
        if again is not None:
            return PromptPlan(messages, again.prompt.ids, again.turn.prompt_ids, again.prompt.media, None, tools, tools_key)
        for n in range(len(path), 0, -1):
            call = self._answered.get(path[n - 1])
            if call is not None and n < len(messages):
                piece = self.renderer.append(messages[n:], call.closed)
                ids = call.prompt.ids + call.turn.response_ids
                same = call.turn.prompt_ids is call.prompt.ids
                expanded = ids if same else call.turn.prompt_ids + call.turn.response_ids
                return PromptPlan(messages, ids, expanded, call.prompt.media, piece, tools, tools_key)
        return PromptPlan(messages, [], [], [], self.renderer.prompt(messages, tools, tools_key), tools, tools_key)

    def prompt(self, plan: PromptPlan, features: Sequence[MediaFeatures]) -> RecordedPrompt:
        """The ids of a planned prompt.

        Args:
            plan: from `plan`.
            features: of `plan.new_media`, in order.

        Raises:
            TokenError: placeholders and features differ; both counts are given.
        """
        if plan.piece is None:
            return RecordedPrompt(plan.messages, plan.base_ids, plan.base_expanded, plan.base_media)
        expanded, ids = self.renderer.expanded(plan.piece, features), plan.base_ids + plan.piece.ids
        same = expanded == plan.piece.ids and (plan.base_expanded is plan.base_ids or not plan.base_ids)
        whole = ids if same else plan.base_expanded + expanded
        return RecordedPrompt(plan.messages, ids, whole, plan.base_media + plan.piece.media)

    def record(
        self,
        prompt: RecordedPrompt,
        generation: Generation,
        media: list[MediaRef],
        engine: str,
        seconds: float,
        sampling: SamplingParams | None = None,
        shown_fps: Sequence[float | None] = (),
    ) -> Turn:
        """Keep one model call as a turn.

        Args:
            prompt: what was sent.
            generation: what came back.
            media: references of `prompt.media`.
            engine: URL of the engine.
            seconds: that the call took.
            sampling: that was asked for.
            shown_fps: of `media`, see `Turn.shown_fps`.

        Raises:
            TokenError: the engine saw other tokens, or another number of placeholders, than were sent.
            EngineError: ids, logprobs and versions of the response do not fit together.
        """
        self._check_prompt(prompt, generation.prompt_ids)
        turn = Turn(
            prompt_ids=prompt.expanded,  # as the engine saw it; its integers are those of the turn before, not as many new ones
            response_ids=generation.response_ids,
            response_logprobs=generation.logprobs,
            weight_versions=generation.weight_versions,
            finish_reason=generation.finish_reason,
            media=media,
            routed_experts=generation.routed_experts,
            routed_shape=generation.routed_shape,
            cached_tokens=generation.cached_tokens,
            seconds=seconds,
            engine=engine,
            sampling=sampling if sampling is None or generation.seeded else sampling.with_seed(None),
            shown_fps=list(shown_fps),
        )
        self._check_response(turn)
        self.turns.append(turn)
        return turn

    def answer(self, plan: PromptPlan, prompt: RecordedPrompt, turn: Turn, shown: Shown | None = None) -> AssistantMessage:
        """The recorded turn as a message; a conversation that goes on from it reuses its tokens.

        The turn's `unreadable_calls` are counted here, where its tools are known.

        Args:
            plan: of the call.
            prompt: that was sent.
            turn: from `record`.
            shown: makes of the message what the agent is shown, and will send back; default: the message itself.
        """
        message = self.processor.parse(turn.response_ids, turn.finish_reason, plan.tools)
        turn.unreadable_calls = message.unreadable_calls
        if shown is not None:
            message = shown(message, turn)
        closed = bool(turn.response_ids) and turn.response_ids[-1] in self.processor.eos_ids
        call, path = _Call(prompt, turn, closed), self._known.add(plan.tools_key, [*prompt.messages, message])
        self._prompts[path[-2]] = self._answered[path[-1]] = call
        return message

    def _check_prompt(self, prompt: RecordedPrompt, seen: list[int]) -> None:
        if seen == prompt.expanded:
            return
        wire = self.processor.collapse(seen)
        if wire != prompt.ids:
            at = next(
                (i for i, (a, b) in enumerate(zip(wire, prompt.ids, strict=False)) if a != b), min(len(wire), len(prompt.ids))
            )
            raise TokenError(
                f"the engine saw other tokens than were sent: {len(wire)} for {len(prompt.ids)} before expansion, "
                f"the first difference at {at}"
            )
        ours, theirs = self.processor.placeholders(prompt.expanded), self.processor.placeholders(seen)
        counts = [
            f"{kind} {number}: {got} for {want}"
            for number, ((kind, _, want), (_, _, got)) in enumerate(zip(ours, theirs, strict=False))
            if want != got
        ]
        if len(ours) != len(theirs):  # films of which each part is a run of its own
            counts = [f"{len(theirs)} runs for {len(ours)}"]
        raise TokenError(
            f"the engine expanded media to another number of placeholders than our features have ({'; '.join(counts)}); "
            "engine and trainer must use the same preprocessor settings"
        )

    def _check_response(self, turn: Turn) -> None:
        n = len(turn.response_ids)
        if len(turn.response_logprobs) != n:
            raise EngineError(f"{turn.engine}: {len(turn.response_logprobs)} logprobs for {n} response tokens")
        if not all(map(math.isfinite, turn.response_logprobs)):
            raise EngineError(f"{turn.engine}: a logprob of the response is NaN or infinite")
        try:
            token_versions(turn)
        except TokenError as error:
            raise EngineError(f"{turn.engine}: {error}") from error
        if not set(self.processor.placeholder_ids.values()).isdisjoint(turn.response_ids):
            raise TokenError(f"{turn.engine}: the response holds media placeholders; the engine must never sample them")


def _unspoken(message: Message) -> Any:
    """What an answer holds that OpenAI's messages do not: control tokens, and why tool calls cannot be read."""
    control = message.control_tokens if isinstance(message, AssistantMessage) else ()
    return control, tuple(call.error for call in message.tool_calls)


def _meaning(message: Message) -> Any:
    """Equal for messages that say the same; an agent may have sent ours through JSON and back."""
    calls = tuple((c.id, c.name, json.dumps(c.arguments, sort_keys=True)) for c in message.tool_calls)
    return message.role, message.tool_call_id, tuple(_spoken(message)), calls


def _spoken(message: Message) -> list[Any]:
    """The parts, adjacent texts joined and empty ones left out."""
    parts: list[Any] = []
    for is_text, run in itertools.groupby(message.content, lambda part: isinstance(part, Text)):
        if not is_text:
            parts += run
        elif text := "".join([part.text for part in run if isinstance(part, Text)]):
            parts.append(text)
    return parts

"""What an episode leaves behind: turns of tokens, trajectories, training samples and groups."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from relax_sdk.config import SamplingParams
from relax_sdk.errors import JournalError, TokenError
from relax_sdk.media import MediaRef
from relax_sdk.showing import group_html, trajectory_html, trajectory_text


class Status(StrEnum):
    """The way in which an episode ended."""

    COMPLETED = "completed"
    """The environment said it is over."""
    TRUNCATED = "truncated"
    """A turn or token limit ended it; it is scored and trained on."""
    FAILED = "failed"
    """The environment, a reward or the engine failed; `Trajectory.error` says how."""
    TIMED_OUT = "timed_out"
    """A stage passed its time limit."""
    CANCELLED = "cancelled"
    """It was stopped from outside."""


@dataclass
class VersionSpan:
    """The weight version that produced response tokens `start` to `end` (exclusive)."""

    version: int
    start: int
    end: int


@dataclass
class Turn:
    """One call of the model: the exact ids that went in and came out, and how they were sampled, seed included.

    With the weights of its `weight_versions`, an engine that is sent `prompt_ids`, `media` and `sampling` gives `response_ids`
    again (`relax replay --episode ID --model run`)."""

    prompt_ids: list[int]
    """Everything the engine conditioned on, media placeholders expanded."""
    response_ids: list[int]
    """Tokens as sampled, the end-of-turn token included when the model produced it."""
    response_logprobs: list[float]
    """Natural log, one per response token, of the distribution that was sampled from: after temperature, `top_k` and `top_p`.

    So do the embedded engine and vLLM report them, and the trainer makes the same cut. SGLang reports them after temperature
    but before the cut, so with it training under `top_k` or `top_p` is refused. Greedy tokens (temperature 0), which are not
    trained on, have the logprob of temperature 1.
    """
    weight_versions: list[VersionSpan] = field(default_factory=list)
    finish_reason: str = "stop"
    """`stop`, `length` or `abort`."""
    media: list[MediaRef] = field(default_factory=list)
    """All media of the prompt, in the order of their placeholders."""
    reward: float = 0.0
    """What the environment gave for this turn's action."""
    routed_experts: bytes | None = None
    """int32 [len(prompt) + len(response) - 1, layers, top_k] in C order, or None."""
    routed_shape: list[int] | None = None
    unreadable_calls: int = 0
    """Tool calls of the answer that could not be read."""
    cached_tokens: int = 0
    """Prompt tokens served from the engine's cache."""
    seconds: float = 0.0
    """Seconds from request to answer."""
    engine: str = ""
    """URL of the engine that answered."""
    sampling: SamplingParams | None = None
    """How the engine was asked to sample, the seed of this answer included; None in records of older versions.

    An engine draws token `i` of an answer from this seed and `i` alone, whatever else is in its batch. `sampling_seed` is None
    where the engine drew as it liked: it does not take seeds."""
    shown_fps: list[float | None] = field(default_factory=list)
    """Frames per second at which the model was shown each of `media`, as its positions follow from them; None: it is no film.

    They are chosen by the model's processor and the run's `media` settings, from a film's own. Empty without films, and in
    records of older versions."""


@dataclass
class Sample:
    """One training sequence made of one or more turns.

    `ids`, `loss_mask`, `logprobs`, `versions` and `turn` all have the same length n.
    """

    ids: list[int]
    loss_mask: list[int]
    """1 on tokens that the policy produced, 0 on everything it was given."""
    logprobs: list[float]
    """The engine's; 0.0 where the mask is 0."""
    versions: list[int]
    """Weight version per produced token; -1 where the mask is 0."""
    turn: list[int]
    """Index into `Trajectory.turns` per produced token; -1 where the mask is 0."""
    media: list[MediaRef]
    """Media in the order of their placeholders in `ids`."""
    shown_fps: list[float | None] = field(default_factory=list)
    """See `Turn.shown_fps`."""


@dataclass(repr=False)
class Trajectory:
    """One finished episode, and what is needed to play it again: environment, task, seed, and each turn's tokens and sampling.

    The task's row is not in it; it is read again by its index."""

    id: str
    env: str
    env_version: str
    task_index: int
    group_id: str
    group_index: int
    """Position in the group, 0-based."""
    group_size: int
    seed: int
    """What `Env.reset` got: the same for all members of a group, and for each attempt."""
    status: Status
    turns: list[Turn] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    """OpenAI chat messages; media as `relax-media:<sha256>` URLs."""
    reward: float = 0.0
    """What training maximises: the sum of turn rewards and weighted components."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Every component by name, unweighted; `env` is the sum of the step rewards."""
    error: str | None = None
    attempts: int = 1
    """How often the episode was tried, failed tries included."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by stage: reset, generate, step, score, total."""
    info: dict[str, Any] = field(default_factory=dict)
    """The last `info` of the environment, as far as it is plain data."""

    @property
    def version_min(self) -> int | None:
        """Oldest weight version among its tokens; None without tokens."""
        return min((span.version for turn in self.turns for span in turn.weight_versions), default=None)

    @property
    def version_max(self) -> int | None:
        """Newest weight version among its tokens; None without tokens."""
        return max((span.version for turn in self.turns for span in turn.weight_versions), default=None)

    @property
    def failure(self) -> str | None:
        """The name of the error that the episode failed with, such as `EngineUnavailable`; None: it did not fail.

        An episode that was timed out or stopped from outside has failed; one that a limit on turns or tokens ended has not.
        """
        return None if self.status in (Status.COMPLETED, Status.TRUNCATED) else self.info.get("failure", str(self.status))

    @property
    def n_response_tokens(self) -> int:
        return sum(len(turn.response_ids) for turn in self.turns)

    def __repr__(self) -> str:
        about = f"reward={self.reward:.4g}, status={self.status.value!r}, turns={len(self.turns)}"
        return f"{type(self).__name__}({self.id!r}, {about}, tokens={self.n_response_tokens})"

    def __str__(self) -> str:
        return trajectory_text(self)

    def _repr_html_(self) -> str:
        return trajectory_html(self)

    def samples(self) -> list[Sample]:
        """Training sequences, by strict prefix.

        While each prompt starts with an earlier prompt and its response, the turns are one sample in which observations
        carry mask 0 and responses mask 1. Where history was rewritten, a new sample starts; calls of an agent that leads
        several conversations at once go each to its own.

        Raises:
            TokenError: a turn's weight versions do not cover its response.
        """
        out: list[Sample] = []
        for index, turn in enumerate(self.turns):
            if not turn.response_ids:
                continue
            sample = next((known for known in reversed(out) if _goes_on(turn, known)), None)
            if sample is None:
                sample = Sample([], [], [], [], [], [])
                out.append(sample)
            given = turn.prompt_ids[len(sample.ids) :]
            sample.ids += given + turn.response_ids
            sample.loss_mask += [0] * len(given) + [1] * len(turn.response_ids)
            sample.logprobs += [0.0] * len(given) + turn.response_logprobs
            sample.versions += [-1] * len(given) + token_versions(turn)
            sample.turn += [-1] * len(given) + [index] * len(turn.response_ids)
            sample.media, sample.shown_fps = list(turn.media), list(turn.shown_fps)
        return out


def _goes_on(turn: Turn, sample: Sample) -> bool:
    """Whether a turn's prompt starts with all of a sample."""
    return turn.prompt_ids[: len(sample.ids)] == sample.ids and turn.media[: len(sample.media)] == sample.media


@dataclass
class Group:
    """All trajectories of one task: the unit of advantage normalisation, of commit and of lease."""

    id: str
    env: str
    task_index: int
    trajectories: list[Trajectory]

    @property
    def counted(self) -> list[Trajectory]:
        """Those that did not fail: they alone have a reward, are compared with one another, and are trained on."""
        return [trajectory for trajectory in self.trajectories if trajectory.failure is None]

    @property
    def version_min(self) -> int:
        """Oldest weight version among all tokens of the group; 0 without tokens."""
        return min((v for t in self.trajectories if (v := t.version_min) is not None), default=0)

    @property
    def version_max(self) -> int:
        """Newest weight version among all tokens of the group; 0 without tokens."""
        return max((v for t in self.trajectories if (v := t.version_max) is not None), default=0)

    def _repr_html_(self) -> str:
        return group_html(self.trajectories)


def token_versions(turn: Turn) -> list[int]:
    """The weight version of every response token.

    Raises:
        TokenError: the spans do not cover the response exactly.
    """
    versions: list[int] = []
    for span in turn.weight_versions:
        if span.start != len(versions) or span.end <= span.start:
            break
        versions += [span.version] * (span.end - span.start)
    if len(versions) != len(turn.response_ids):
        raise TokenError(f"weight version spans {turn.weight_versions} do not cover {len(turn.response_ids)} response tokens")
    return versions


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from (run seed, split, task index, sample index, …), the same on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def encode_group(group: Group) -> bytes:
    """A group as MessagePack bytes."""
    return msgspec.msgpack.encode(group)


_decoder = msgspec.msgpack.Decoder(Group)


def decode_group(data: bytes) -> Group:
    """Read back what `encode_group` wrote.

    Raises:
        JournalError: damaged.
    """
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise JournalError(f"a stored group cannot be read ({error})") from error


def mean_reward(trajectories: Sequence[Trajectory]) -> float:
    """The mean of `reward`; 0.0 of nothing."""
    return sum(t.reward for t in trajectories) / len(trajectories) if trajectories else 0.0

"""Bodies of requests, checked by pydantic at the door."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from relax_sdk.config import SamplingParams
from relax_server.gateway.bodies import Body
from relax_server.json_form import as_json

SEED_BITS = 53
"""Bits of a seed: what a JSON number holds exactly."""
LEAST_SECONDS = 0.01
"""Seconds of the shortest time limit that a request may set: nothing is done in less."""
FREE_BYTES = 1 << 20
"""Bytes of an object of any form, as JSON."""


def _small(value: dict[str, Any]) -> dict[str, Any]:
    if (size := len(as_json(value))) > FREE_BYTES:
        raise PydanticCustomError("too_large", "has {size} bytes as JSON; allowed: {most}", {"size": size, "most": FREE_BYTES})
    return value


FreeForm = Annotated[dict[str, Any], AfterValidator(_small)]
"""An object of any form, for whoever reads it later."""


class SamplingBody(Body):
    """How answers are sampled; what is left out is the service's."""

    max_new_tokens: int | None = Field(default=None, ge=1, le=1 << 20)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=1 << 30)
    stop: list[str] | None = Field(default=None, max_length=16)
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=1 << 31)]] | None = Field(default=None, max_length=64)
    ignore_eos: bool | None = None
    sampling_seed: int | None = Field(default=None, ge=0, lt=1 << 31)

    def over(self, base: SamplingParams) -> SamplingParams:
        """`base` with what was given.

        Raises:
            ConfigError: a value outside its range.
        """
        return replace(base, **self.model_dump(exclude_none=True))


class LimitsBody(Body):
    """Time limits in seconds, and sizes, of one episode; what is left out is the service's."""

    max_turns: int | None = Field(default=None, ge=1, le=100_000)
    max_tokens: int | None = Field(default=None, ge=1, le=1 << 24)
    reset_timeout: float | None = Field(default=None, ge=LEAST_SECONDS, le=86_400)
    turn_timeout: float | None = Field(default=None, ge=LEAST_SECONDS, le=86_400)
    step_timeout: float | None = Field(default=None, ge=LEAST_SECONDS, le=86_400)
    score_timeout: float | None = Field(default=None, ge=LEAST_SECONDS, le=86_400)
    episode_timeout: float | None = Field(default=None, ge=LEAST_SECONDS, le=604_800)


class EngineBody(Body):
    """An engine that runs somewhere."""

    url: str = Field(min_length=1, max_length=2000, description="http://HOST:PORT")
    token: str | None = Field(
        default=None, max_length=512, description="Its token; default: the one that the service finds for it", repr=False
    )


class RunEngineBody(Body):
    """An engine for a training run."""

    id: str | None = Field(default=None, max_length=64, description="Its name; default: a free one")
    url: str | None = Field(default=None, max_length=2000, description="Of one that runs already; default: one is started")
    kind: str | None = Field(default=None, max_length=64, description="Of the one at url; default: as the run's own")
    token: str | None = Field(
        default=None, max_length=512, description="Of the one at url; default: the one that the run finds for it", repr=False
    )
    weights: str | None = Field(
        default=None, max_length=64, description="How the one at url gets new weights: folder (default) or broadcast (SGLang)"
    )


class SessionBody(Body):
    """Opens a session."""

    env: str = Field(default="none", max_length=200, description="none: the agent has a world of its own")
    split: str = Field(default="train", max_length=100)
    task_index: int | None = Field(
        default=None,
        ge=0,
        le=1 << 53,
        description="Default: with a seed, a task that follows from it; without, the next one of the split",
    )
    seed: int | None = Field(
        default=None, ge=0, le=1 << 53, description="What environment and sampling are seeded from; default: a new one"
    )
    sample_index: int = Field(
        default=0, ge=0, le=1 << 20, description="Which of several episodes of the task; they differ in sampling only"
    )
    run: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        pattern=r"^[A-Za-z0-9_.:-]+$",
        description="A name in the journal, which belongs to the key that uses it first; default: one of the key's own",
    )
    mode: Literal["eval", "train"] = "eval"
    sampling: SamplingBody = Field(default_factory=SamplingBody)
    limits: LimitsBody = Field(default_factory=LimitsBody)
    media: Literal["reference", "inline"] = Field(
        default="reference", description="How observations name media: relax-media:<sha256>, or whole as data URIs"
    )
    metadata: FreeForm = Field(default_factory=dict, description="Kept with the trajectory; at most 1 MiB as JSON")


class RolloutBody(Body):
    """Groups of episodes to play."""

    env: str = Field(min_length=1, max_length=200)
    split: str = Field(default="train", max_length=100)
    tasks: list[Annotated[int, Field(ge=0, le=1 << 53)]] | None = Field(
        default=None, min_length=1, max_length=100_000, description="Their indices"
    )
    n: int | None = Field(default=None, ge=1, le=1_000_000, description="The first n tasks; default: all")
    group_size: int = Field(default=1, ge=1, le=4096, description="Episodes of each task")
    seed: int | None = Field(
        default=None, ge=0, le=1 << 53, description="What environments and sampling are seeded from; default: a new one"
    )
    run: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        pattern=r"^[A-Za-z0-9_.:-]+$",
        description="A name in the journal, which belongs to the key that uses it first; default: the rollout's id",
    )
    sampling: SamplingBody = Field(default_factory=SamplingBody)
    limits: LimitsBody = Field(default_factory=LimitsBody)
    on_failure: Literal["retry", "count", "drop"] = "retry"
    max_retries: int = Field(default=1, ge=0, le=100)


class RunBody(Body):
    """Submits a training run."""

    env: str = Field(min_length=1, max_length=200)
    config: FreeForm = Field(default_factory=dict, description="Fields of RunConfig; what is left out is its default")
    agent: str | list[str] | None = Field(
        default=None, description="A command that plays the episodes; takes the right to upload"
    )


class EvaluateBody(Body):
    """Plays a split with a trained model."""

    split: str = Field(default="eval", max_length=100)
    limit: int = Field(default=0, ge=0, le=1_000_000, description="Tasks at most; 0: the run's own limit")


class GenerateBody(Body):
    """Asks a trained model."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=10_000)
    sampling: SamplingBody = Field(default_factory=SamplingBody)


class EnvBody(Body):
    """Registers an environment: one of `entry`, `package` and `upload`."""

    id: str = Field(min_length=1, max_length=100, pattern=r"^([A-Za-z0-9_-]+/)?[A-Za-z0-9_-]+$", description="Its name here")
    entry: str | None = Field(
        default=None, max_length=300, pattern=r"^[\w.]+:[\w.]+$", description="package.module:Class, of an installed package"
    )
    tasks: str | None = Field(
        default=None, max_length=300, pattern=r"^[\w.]+:[\w.]+$", description="With entry: package.module:function"
    )
    package: str | None = Field(
        default=None, max_length=200, pattern=r"^[A-Za-z0-9._-]+$", description="An installed distribution that registers it"
    )
    name: str | None = Field(default=None, max_length=100, description="With package: its name there; default: id")
    upload: str | None = Field(default=None, description="A spec pickled by cloudpickle, base64; see Client.upload_env")
    python: str = Field(default="", max_length=20, description="With upload: the version that pickled it, as 3.11")


class KeyBody(Body):
    """Makes a key."""

    name: str = Field(min_length=1, max_length=200)
    rights: list[Literal["run", "upload", "admin"]] = Field(default_factory=lambda: ["run"], min_length=1, max_length=3)
    episodes: int = Field(default=1024, ge=1, le=1 << 31)
    tokens_per_minute: int = Field(default=10_000_000, ge=1, le=1 << 53)
    runs: int = Field(default=16, ge=1, le=1 << 31, description="Training runs that are not over")
    media_bytes_per_day: int = Field(default=64 << 30, ge=1, le=1 << 53, description="Bytes of media that were not stored yet")
    worker_seconds_per_hour: int = Field(
        default=10 * 3600, ge=1, le=1 << 31, description="Seconds of processors, of its environments' workers and of decoding"
    )
    lifetime: float | None = Field(default=None, gt=0, le=10 * 365 * 86_400, description="Seconds")

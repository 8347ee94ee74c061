"""`Endpoint`: a model behind any OpenAI-compatible URL, to be evaluated on environments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from relax_sdk.config import RunConfig
from relax_sdk.env import Env
from relax_sdk.errors import ConfigError
from relax_sdk.evaluation import Evaluation
from relax_sdk.progress import Waiting
from relax_sdk.registry import EnvSpec
from relax_sdk.runtime import Tell, find_runtime
from relax_sdk.trainer import Trainer

BASE_URL, API_KEY, OPENAI = "OPENAI_BASE_URL", "OPENAI_API_KEY", "https://api.openai.com/v1"
"""What the `openai` client takes its defaults from."""


@dataclass(frozen=True)
class Endpoint:
    """A chat model that is asked with messages and answers with a message; its token ids are not seen, so nothing is trained.

    Images are sent as `image_url`, sounds as `input_audio` and videos as `video_url`, with the bytes in them; an environment's
    tools are passed on.

        Endpoint("https://api.openai.com/v1", "gpt-5", api_key=key).evaluate("colour-v0", limit=32)
        Endpoint(model="gpt-5")      # where OPENAI_BASE_URL says, with OPENAI_API_KEY, as the `openai` client has it
    """

    url: str = ""
    """Address of the API, usually ending in `/v1`; empty: `OPENAI_BASE_URL`, or else OpenAI's own."""
    model: str = ""
    api_key: str | None = field(default=None, repr=False)
    """None: `OPENAI_API_KEY`, where there is one; empty: none is sent."""
    concurrency: int = 16
    """Episodes at once."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", self.url or os.environ.get(BASE_URL) or OPENAI)
        if self.api_key is None:
            object.__setattr__(self, "api_key", os.environ.get(API_KEY) or None)
        for ok, name, allowed in (
            (self.url.startswith(("http://", "https://")), "url", "an http:// or https:// URL"),
            (bool(self.model), "model", "a name that the server knows"),
            (self.concurrency >= 1, "concurrency", "1 or more"),
        ):
            if not ok:
                raise ConfigError(f"Endpoint.{name} = {getattr(self, name)!r}; allowed: {allowed}")

    def evaluate(
        self,
        env: str | type[Env] | EnvSpec,
        split: str = "eval",
        limit: int | None = None,
        *,
        progress: bool = True,
        **settings: Mapping[str, Any],
    ) -> Evaluation:
        """Play a split once, greedily (temperature 0). Nothing is written; `relax_sdk.evaluate` keeps what it plays.

        Args:
            env: a registered name, `package.module:Class`, a class or a spec.
            split: of the tasks.
            limit: tasks at most; default: `eval.limit`.
            progress: show a live line.
            **settings: sections of `RunConfig`, such as `sampling={"max_new_tokens": 256}`; default: the environment's own.

        Raises:
            ConfigError: there is no such split, or a setting that the OpenAI API has no word for.
            RunError: no episode was usable.
        """
        trainer = Trainer(env, **settings)  # type: ignore[arg-type]
        player = cast(EndpointPlayer, find_runtime("local"))
        with Waiting(f"evaluation of {trainer.spec.id} [{split}] with {self.model}", progress) as waiting:
            return player.evaluate_endpoint(trainer.spec, trainer.config, self, split, limit, waiting.tell)


class EndpointPlayer(Protocol):
    """Plays with models that run elsewhere; the `local` runtime does."""

    def evaluate_endpoint(
        self, spec: EnvSpec, config: RunConfig, endpoint: Endpoint, split: str, limit: int | None, tell: Tell
    ) -> Evaluation:
        """Play a split; no engine is started."""
        ...

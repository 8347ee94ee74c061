"""Traces for OpenTelemetry (the extra `otel`), with the attributes of its conventions for generative AI where they fit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from relax_sdk.errors import ConfigError, EpisodeOver
from relax_sdk.registry import EnvSpec
from relax_sdk.trajectory import Status, Trajectory, Turn
from relax_server.rollout.traces import EpisodeTrace, Stage, Traces

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

    from relax_server.rollout.task import EpisodeTask

PATH = "/v1/traces"
"""Where a receiver of OTLP over HTTP takes traces."""
EXPORT_SECONDS = 10.0
"""For one request to the receiver, repeats included."""
CLOSE_MILLISECONDS = 5000
OPERATIONS = {"generate": "chat", "tool": "execute_tool"}
"""Stages that the conventions have a name for (`gen_ai.operation.name`)."""


def open_traces(url: str, run: str, model: str) -> Traces:
    """Traces that go to a receiver of OTLP over HTTP; they are off where the URL is empty.

    A queue in front of the receiver holds 2,048 spans; where that is full, spans are dropped. What the SDK's own variables say
    (`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_TRACES_SAMPLER`, `OTEL_SERVICE_NAME`, …) counts.

    Args:
        url: such as `http://localhost:4318`; without a path it is completed by `/v1/traces`.
        run: name of the run, or of the service.
        model: its name.

    Raises:
        ConfigError: the packages are not installed.
    """
    if not url:
        return Traces()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"traces need packages that are missing ({error}): pip install 'relax-gym[otel]'") from error
    name = os.environ.get("OTEL_SERVICE_NAME", "relax-gym")
    endpoint = url if urlsplit(url).path.strip("/") else url.rstrip("/") + PATH
    provider = TracerProvider(resource=Resource.create({"service.name": name, "relax.run": run}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=EXPORT_SECONDS)))
    return OtelTraces(provider, model)


class OtelTraces(Traces):
    """Episodes as OpenTelemetry spans.

    Args:
        provider: of the SDK, with where spans go; shut down by `close`.
        model: the name that answers are said to come from.
    """

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._provider, self._model = provider, model
        self._tracer = provider.get_tracer("relax_server")

    def episode(self, run: str, env: EnvSpec, task: EpisodeTask) -> EpisodeTrace:
        """The trace of an episode that will be played."""
        return OtelEpisode(self._tracer, self._model, run, env, task)

    def close(self) -> None:
        """Send what is left; blocks for a few seconds at most."""
        self._provider.force_flush(CLOSE_MILLISECONDS)
        self._provider.shutdown()


class OtelEpisode(EpisodeTrace):
    """One episode as a span with a child for each stage; a retried one is a trace of its own."""

    def __init__(self, tracer: Tracer, model: str, run: str, env: EnvSpec, task: EpisodeTask) -> None:
        self._tracer, self._model, self._run, self._env, self._task = tracer, model, run, env, task
        self._span: Span | None = None
        self._parent: Any = None

    def begin(self) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        env, task = self._env, self._task
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.conversation.id": task.id,
            "gen_ai.request.model": self._model,
            "relax.episode.id": task.id,
            "relax.episode.attempt": task.attempt,
            "relax.run": self._run,
            "relax.env": env.id,
            "relax.env.version": env.load().version,
            "relax.split": task.split,
            "relax.task.index": task.task_index,
            "relax.group.id": task.group_id,
            "relax.group.index": task.group_index,
            "relax.seed": task.seed,
        }
        self._span = self._tracer.start_span(f"episode {env.id}", context=Context(), attributes=attributes)
        self._parent = set_span_in_context(self._span, Context())

    @contextmanager
    def stage(self, name: str, tool: str | None = None) -> Iterator[Stage]:
        from opentelemetry.trace import StatusCode

        if self._span is None:
            yield Stage()
            return
        operation = OPERATIONS.get(name)
        title = f"{operation} {tool or self._model}" if operation else name
        attributes: dict[str, Any] = {"relax.stage": name}
        attributes |= {"gen_ai.operation.name": operation} if operation else {}
        attributes |= {"gen_ai.tool.name": tool} if tool else {}
        parent = None if tool else self._parent  # a tool is called inside `call_tools`, whose span is the current one
        how: dict[str, Any] = dict(context=parent, record_exception=False, set_status_on_exception=False)
        with self._tracer.start_as_current_span(title, attributes=attributes, **how) as span:
            try:
                yield OtelStage(span, self._model)
            except EpisodeOver as over:  # a limit that is reached is no error
                span.set_attribute("relax.over", str(over))
                raise
            except Exception as error:
                span.record_exception(error)
                span.set_status(StatusCode.ERROR, str(error))
                raise

    def end(self, trajectory: Trajectory) -> None:
        from opentelemetry.trace import StatusCode

        span, self._span = self._span, None
        if span is None:
            return
        versions = [part.version for turn in trajectory.turns for part in turn.weight_versions]
        attributes: dict[str, Any] = {
            "relax.status": trajectory.status.value,
            "relax.turns": len(trajectory.turns),
            "gen_ai.usage.input_tokens": sum(len(turn.prompt_ids) for turn in trajectory.turns),
            "gen_ai.usage.output_tokens": sum(len(turn.response_ids) for turn in trajectory.turns),
        }
        if versions:
            attributes |= {"relax.weights.version_min": min(versions), "relax.weights.version_max": max(versions)}
        if trajectory.status in (Status.COMPLETED, Status.TRUNCATED):
            attributes |= {"relax.reward": trajectory.reward}
            attributes |= {f"relax.rewards.{name}": value for name, value in trajectory.rewards.items()}
        else:
            span.set_status(StatusCode.ERROR, trajectory.error)
        span.set_attributes(attributes)
        span.end()


class OtelStage(Stage):
    """The span of a stage."""

    def __init__(self, span: Span, model: str) -> None:
        self._span, self._model = span, model

    def answered(self, turn: Turn) -> None:
        """Note tokens, sampling, weight versions and engine, not the texts: `relax view` has these."""
        attributes: dict[str, Any] = {
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": len(turn.prompt_ids),
            "gen_ai.usage.cache_read.input_tokens": turn.cached_tokens,
            "gen_ai.usage.output_tokens": len(turn.response_ids),
            "gen_ai.response.finish_reasons": [turn.finish_reason],
            "relax.engine": turn.engine,
            "relax.media": [media.sha256 for media in turn.media],
            "relax.weights.versions": sorted({part.version for part in turn.weight_versions}),
        }
        if turn.sampling is not None:
            attributes |= {
                "gen_ai.request.max_tokens": turn.sampling.max_new_tokens,
                "gen_ai.request.temperature": turn.sampling.temperature,
                "gen_ai.request.top_p": turn.sampling.top_p,
            }
            attributes |= {"gen_ai.request.seed": seed} if (seed := turn.sampling.sampling_seed) is not None else {}
        self._span.set_attributes(attributes)

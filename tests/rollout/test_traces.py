"""Spans of episodes: what is in them, and that a receiver of OpenTelemetry gets them."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from episode_envs import Count, env_with, only, raising
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from relax_server.rollout.otel_traces import OtelTraces, open_traces
from relax_server.rollout.traces import Traces

import relax_sdk as relax
from relax_sdk.config import TrackingConfig


class Spans:
    """The spans of the episodes of a bench, which are kept in memory."""

    def __init__(self) -> None:
        self.kept = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.kept))
        self.traces = OtelTraces(self.provider, "tiny")

    def bench(self, bench: Any) -> Any:
        """A bench whose workers leave their spans here."""

        def make(*arguments: Any, **options: Any) -> Any:
            made = bench(*arguments, **options)
            made.worker.context.traces = self.traces
            return made

        return make

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.kept.get_finished_spans() if span.name == name]

    def one(self, name: str) -> tuple[ReadableSpan, dict[str, Any]]:
        (span,) = self.named(name)
        return span, dict(span.attributes or {})


@pytest.fixture
def spans() -> Spans:
    return Spans()


async def test_an_episode_is_a_span_and_each_of_its_stages_one_inside_it(bench, spans):
    trajectory, made = await only(spans.bench(bench), Count, "A", kwargs={"turns": 2})
    episode, facts = spans.one("episode test-v0")
    assert episode.parent is None
    assert (facts["relax.episode.id"], facts["relax.task.index"], facts["relax.seed"]) == (trajectory.id, 7, trajectory.seed)
    assert (facts["relax.status"], facts["relax.reward"], facts["relax.rewards.env"], facts["relax.turns"]) == (
        "completed",
        1,
        1,
        2,
    )
    inside = [span for span in spans.kept.get_finished_spans() if span is not episode]
    assert [span.name for span in inside] == ["reset", "chat tiny", "step", "chat tiny", "step", "score"]
    for span in inside:
        assert span.context.trace_id == episode.context.trace_id and span.parent == episode.context
        assert episode.start_time <= span.start_time <= span.end_time <= episode.end_time
    for span, turn in zip(spans.named("chat tiny"), trajectory.turns, strict=True):
        answer = dict(span.attributes or {})
        assert answer["gen_ai.operation.name"] == "chat" and answer["gen_ai.request.max_tokens"] == 32
        assert answer["gen_ai.usage.input_tokens"] == len(turn.prompt_ids)
        assert answer["gen_ai.usage.output_tokens"] == len(turn.response_ids)
        assert answer["gen_ai.request.seed"] == turn.sampling.sampling_seed and answer["relax.engine"] == made.engine.url
        assert answer["relax.weights.versions"] == (0,)
    assert facts["gen_ai.usage.output_tokens"] == sum(len(turn.response_ids) for turn in trajectory.turns)


async def test_calls_of_tools_lie_inside_their_stage_and_spans_of_the_environment_inside_theirs(bench, spans):
    class Tools(Count):
        @relax.tool
        def look(self, where: str) -> str:
            """Look."""
            with spans.provider.get_tracer("mine").start_as_current_span("query"):
                return where

    call = '<tool_call>{"name": "look", "arguments": {"where": "left"}}</tool_call>'

    async def agent(session):
        messages = await session.reset()
        action = await session.generate(messages)
        await session.call_tools(action)

    await only(spans.bench(bench), Tools, call, agent=agent, run_config={"sampling": relax.SamplingParams(max_new_tokens=256)})
    stage, _ = spans.one("call_tools")
    tool, facts = spans.one("execute_tool look")
    query, _ = spans.one("query")
    assert tool.parent == stage.context and (facts["gen_ai.tool.name"], facts["relax.stage"]) == ("look", "tool")
    assert query.parent == tool.context, "in a thread of its own, too"


async def test_a_failure_is_noted_where_it_happened_and_each_attempt_is_a_trace(bench, spans):
    made = spans.bench(bench)(env_with(step=raising(ValueError("boom"))), "A", max_retries=1)
    await made.group(7)
    episodes = spans.named("episode test-v0")
    assert [dict(span.attributes or {})["relax.episode.attempt"] for span in episodes] == [1, 2]
    assert len({span.context.trace_id for span in episodes}) == 2
    for span in (*episodes, *spans.named("step")):
        assert span.status.status_code is trace.StatusCode.ERROR and "boom" in (span.status.description or "")
    assert all("relax.reward" not in (span.attributes or {}) for span in episodes), "a failure is no reward of 0"
    assert all(span.events[0].name == "exception" for span in spans.named("step"))
    assert {span.status.status_code for span in spans.named("chat tiny")} == {trace.StatusCode.UNSET}


async def test_a_limit_that_is_reached_is_no_error(bench, spans):
    trajectory, _ = await only(spans.bench(bench), Count, "A", kwargs={"turns": 9}, max_turns=2)
    assert trajectory.status is relax.Status.TRUNCATED
    assert {span.status.status_code for span in spans.kept.get_finished_spans()} == {trace.StatusCode.UNSET}
    _, facts = spans.one("episode test-v0")
    assert facts["relax.status"] == "truncated" and facts["relax.turns"] == 2


async def test_episodes_that_are_cancelled_end_their_spans(bench, spans):
    begun = asyncio.Event()

    async def step(self, action):
        begun.set()
        await asyncio.sleep(60)

    made = spans.bench(bench)(env_with(step=step), "A")
    playing = asyncio.create_task(made.group(7))
    await asyncio.wait_for(begun.wait(), 20)
    playing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await playing
    async with asyncio.timeout(20):
        while not spans.named("episode test-v0"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert spans.one("episode test-v0")[1]["relax.status"] == "cancelled"


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[tuple[str, ExportTraceServiceRequest]]]]:
    """A receiver of OTLP over HTTP: its URL, and the path and body of each request."""
    received: list[tuple[str, ExportTraceServiceRequest]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing is said."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    thread.join()
    server.server_close()


async def test_a_receiver_over_http_gets_the_spans(bench, receiver):
    url, received = receiver
    traces = open_traces(url, "tone-1", "relax/tiny-omni")

    def traced(*arguments: Any, **options: Any) -> Any:
        made = bench(*arguments, **options)
        made.worker.context.traces = traces
        return made

    trajectory, _ = await only(traced, Count, "A")
    await asyncio.to_thread(traces.close)
    assert {path for path, _ in received} == {"/v1/traces"}
    resources = [resource for _, request in received for resource in request.resource_spans]
    about = {item.key: item.value.string_value for item in resources[0].resource.attributes}
    assert (about["service.name"], about["relax.run"]) == ("relax-gym", "tone-1")
    spans = {span.name: span for resource in resources for scope in resource.scope_spans for span in scope.spans}
    assert set(spans) == {"episode test-v0", "reset", "chat relax/tiny-omni", "step", "score"}
    facts = {item.key: item.value for item in spans["episode test-v0"].attributes}
    assert facts["relax.episode.id"].string_value == trajectory.id and facts["relax.reward"].double_value == trajectory.reward


async def test_a_receiver_that_is_gone_harms_no_episode(bench):
    traces = open_traces("http://127.0.0.1:9", "run", "tiny")
    made = bench(Count, "A")
    made.worker.context.traces = traces
    assert (await made.group(7)).trajectories[0].status is relax.Status.COMPLETED
    await asyncio.wait_for(asyncio.to_thread(traces.close), 30)


def test_traces_are_off_unless_asked_for():
    assert type(open_traces("", "run", "tiny")) is Traces
    with pytest.raises(relax.ConfigError, match="http://host:port"):
        TrackingConfig(traces="localhost:4318")

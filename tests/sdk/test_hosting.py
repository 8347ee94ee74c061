"""`EnvHost` and the service's side of it, talking to each other directly."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hosted_envs import Echo, Grouped
from relax_server.rollout.hosted import HostLink, hosted_spec

import relax_sdk as relax
from relax_sdk.examples import gives_examples
from relax_sdk.hosting.host import EnvHost, describe
from relax_sdk.hosting.protocol import (
    Act,
    Description,
    FromService,
    Hello,
    Reply,
    Reset,
    encode,
    read_from_host,
    read_from_service,
)
from relax_sdk.rewards import score, score_group
from relax_sdk.tasks import KEPT_ROWS, KeptRows, TaskSplit
from relax_sdk.tools import call_tools, has_tools, tool_schemas
from relax_sdk.validation import check_reset, check_step


async def in_thread(function: Any, *arguments: Any, limit: float) -> Any:
    return await asyncio.wait_for(asyncio.to_thread(function, *arguments), limit)


class DirectLink(HostLink):
    """To a host in the same process, through the bytes that would travel."""

    def __init__(self, env: Any, folder: Path) -> None:
        self.spec = relax.get_spec(env)
        super().__init__(self.spec.id, relax.MediaStore(folder), in_thread)
        self.host = EnvHost(self.spec)
        self.host.connect(self._came)
        self.replies: list[Reply] = []
        self.broken = False

    async def send(self, message: FromService) -> None:
        self.host.take(read_from_service(encode(message)))

    async def _came(self, data: bytes) -> None:
        if self.broken:
            raise ConnectionError("cut")
        reply = read_from_host(data)
        assert isinstance(reply, Reply)
        self.replies.append(reply)
        self.arrived(reply)


def hosted(env: Any, folder: Path) -> tuple[DirectLink, Any]:
    link = DirectLink(env, folder)
    return link, hosted_spec(describe(link.spec), link)


async def begin(spec: Any, task: int = 1, seed: int = 5) -> Any:
    env = spec.make()
    row = spec.splits()["train"].row(task)
    return env, *check_reset(await env.reset(seed=seed, options={"task": row}))


async def test_a_hosted_environment_is_like_the_original(tmp_path: Path) -> None:
    link, spec = hosted(Echo, tmp_path)
    env, messages, info = await begin(spec)
    local = Echo()
    shown, _ = check_reset(local.reset(seed=5, options={"task": {"shade": 10}}))
    assert messages[0].text == shown[0].text and messages[0].media[0].ref == shown[0].media[0].ref
    assert info == {"seed": 5}  # what is not plain data stays at the host
    assert (env.modalities, env.system_prompt, env.version) == ({"image"}, "be brief", "7")
    assert tool_schemas(env) == tool_schemas(local) and has_tools(type(env))
    action = relax.AssistantMessage(content=(relax.Text("A"),))
    outcome = check_step(await env.step(action))
    assert outcome.reward == 0.25 and outcome.info == {"turn": 1} and not outcome.done
    assert check_step(await env.step(action)).terminated
    splits = spec.splits()
    assert len(splits["train"]) == 6 and len(splits["eval"]) == 2
    assert link.store.get(messages[0].media[0].ref) == shown[0].media[0].bytes()


async def test_bytes_travel_once(tmp_path: Path) -> None:
    link, spec = hosted(Echo, tmp_path)
    for _ in range(2):
        env, *_ = await begin(spec)
        await env.step(relax.AssistantMessage(content=(relax.Text("A"),)))
    assert [len(reply.media) for reply in link.replies] == [1, 0, 0, 0]


async def test_an_answer_waits_for_media_that_another_one_brings(tmp_path: Path) -> None:
    link, spec = hosted(Echo, tmp_path)
    stored, asked = asyncio.Event(), []

    async def slow(function: Any, *arguments: Any, limit: float) -> Any:
        asked.append(function.__name__)
        await stored.wait()
        return await in_thread(function, *arguments, limit=limit)

    async def came(data: bytes) -> None:
        await link._came(data)
        if len(link.replies) == 3:
            stored.set()

    link._in_thread = slow
    link.host.connect(came)
    async with asyncio.timeout(10):
        begun = await asyncio.gather(*(begin(spec) for _ in range(3)))
    assert [len(reply.media) for reply in link.replies] == [1, 0, 0] and len(asked) == 1
    assert len({messages[0].media[0].ref for _, messages, _ in begun}) == 1


async def test_an_answer_that_is_too_long_is_an_error(tmp_path: Path) -> None:
    link, spec = hosted(Echo, tmp_path)

    async def narrow(data: bytes) -> None:
        if len(data) > 200:
            raise OverflowError(f"a message of {len(data)} bytes; allowed: 200")
        await link._came(data)

    link.host.connect(narrow)
    async with asyncio.timeout(10):
        with pytest.raises(relax.EnvError, match="allowed: 200"):
            await begin(spec)


async def test_what_nobody_asked_for_is_dropped_with_its_media(tmp_path: Path) -> None:
    """A host could fill the service's disk; an answer is taken once, also one that came after its time."""
    link, spec = hosted(Echo, tmp_path)
    unasked = [relax.Image.from_array(np.full((8, 8, 3), shade, np.uint8)) for shade in (1, 2)]
    link.arrived(Reply(99, media=[("image", unasked[0].bytes())]))
    await begin(spec)
    link.arrived(Reply(1, media=[("image", unasked[1].bytes())]))
    _, messages, _ = await begin(spec, task=2)
    assert link.store.path(messages[0].media[0].ref).exists()
    assert not any(link.store.path(image.ref).exists() for image in unasked)


@pytest.mark.parametrize("error, why", [(TimeoutError(), "not done within 120 s"), (OSError(28, "disk full"), "disk full")])
async def test_media_that_cannot_be_stored_fail_the_question_at_once(tmp_path: Path, error: OSError, why: str) -> None:
    link, spec = hosted(Echo, tmp_path)

    async def broken(function: Any, *arguments: Any, limit: float) -> Any:
        raise error

    link._in_thread = broken
    async with asyncio.timeout(10):
        with pytest.raises(relax.MediaError, match=f"'{link.env}' in {link.store.root}: .*{why}"):
            await begin(spec)
    assert link.waiting == 0


async def test_tools_and_their_mistakes(tmp_path: Path) -> None:
    _, spec = hosted(Echo, tmp_path)
    env, *_ = await begin(spec)
    calls = (relax.ToolCall("a", "look", {"where": "up"}), relax.ToolCall("b", "jump", {}))
    messages, reward, terminated, truncated = await call_tools(env, relax.AssistantMessage(tool_calls=calls))
    assert [m.tool_call_id for m in messages] == ["a", "b"] and reward == 0.5 and not terminated and not truncated
    assert messages[0].media and "unknown tool" in messages[1].text


def trajectory(index: int = 0) -> relax.Trajectory:
    turn = relax.Turn([1], [2], [-0.5], [], "stop", reward=0.25)
    return relax.Trajectory("t", "Echo", "7", 0, "g", index, 2, 1, relax.Status.COMPLETED, [turn])


async def test_rewards_are_the_hosts(tmp_path: Path) -> None:
    _, spec = hosted(Echo, tmp_path)
    env, *_ = await begin(spec)
    there, here = trajectory(), trajectory()
    await score(env, there)
    await score(Echo(), here)
    assert there.rewards == here.rewards == {"env": 0.25, "length": 1.0} and there.reward == here.reward == 2.25


async def test_rewards_of_a_group(tmp_path: Path) -> None:
    _, spec = hosted(Grouped, tmp_path)
    env, *_ = await begin(spec)
    group = [trajectory(0), trajectory(1)]
    for one in group:
        await score(env, one)
    await score_group(env, group)
    assert [t.rewards["best"] for t in group] == [0.0, 1.0] and [t.reward for t in group] == [2.25, 3.25]


async def test_format_examples(tmp_path: Path) -> None:
    _, spec = hosted(Echo, tmp_path)
    env, *_ = await begin(spec)
    one, two = [await env.format_example(np.random.default_rng(3)) for _ in range(2)]
    assert one == two and len(one.text) == 1


class Late(Echo):
    """Its examples need what `reset` sets, and one of them is wrong."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.letters = "xy"
        return super().reset(seed=seed, options=options)

    def format_example(self, rng: np.random.Generator) -> Any:
        return self.letters[0] if self.turn == 0 else None


class Without(relax.Env):
    """Has no examples."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return "x", {}


async def test_examples_are_asked_for_after_reset_only(tmp_path: Path) -> None:
    _, spec = hosted(Late, tmp_path)
    assert gives_examples(spec.load()) and not gives_examples(hosted(Without, tmp_path)[1].load())
    env, *_ = await begin(spec)
    assert (await env.format_example(np.random.default_rng(3))).text == "x"
    await env.step(relax.AssistantMessage(content=(relax.Text("A"),)))
    with pytest.raises(relax.EnvError, match="format_example of Late returned NoneType"):
        await env.format_example(np.random.default_rng(3))


class Failing(relax.Env):
    blocking = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        raise KeyError("no such thing")

    async def step(self, action: relax.AssistantMessage) -> Any:
        raise relax.MediaError("a broken picture")


async def test_errors_say_what_and_where(tmp_path: Path) -> None:
    _, spec = hosted(Failing, tmp_path)
    with pytest.raises(relax.EnvError, match=r"raised KeyError: 'no such thing' \(test_hosting.py:\d+\)"):
        await begin(spec)
    env = spec.make()
    with pytest.raises(relax.EnvError, match="does not know this episode"):
        await env.step(relax.AssistantMessage())


async def test_an_answer_that_was_lost_is_sent_again_and_not_worked_out_again(tmp_path: Path) -> None:
    """A host whose connection breaks: the service asks again over the next one, and no step is taken twice."""
    link = DirectLink(Echo, tmp_path)
    taken = [Reset(1, "e", "train", 0, 5), Act(2, "e", relax.AssistantMessage(content=(relax.Text("A"),)).to_openai(), False)]
    link.host.take(taken[0])
    await until(lambda: len(link.replies) == 1)
    link.broken = True
    link.host.take(taken[1])
    await until(lambda: not link.host._working)
    link.broken = False
    link.host.connect(link._came)
    link.host.take(taken[1])
    await until(lambda: len(link.replies) == 2)
    link.host.take(taken[1])
    await until(lambda: len(link.replies) == 3)
    assert [reply.result["info"] for reply in link.replies[1:]] == [{"turn": 1}] * 2
    assert len(link.replies[1].media) == 1  # on a new connection nothing was sent yet


async def until(ready: Any) -> None:
    async with asyncio.timeout(10):
        while not ready():  # noqa: ASYNC110 - the host tells nobody
            await asyncio.sleep(0.005)


def test_rows_of_a_generator_can_be_asked_for_in_any_order() -> None:
    rows = KeptRows(TaskSplit("train", ({"i": i} for i in itertools.count())))
    assert [rows.row(i)["i"] for i in (3, 0, 3, 9, 4)] == [3, 0, 3, 9, 4]
    rows.row(KEPT_ROWS + 20)
    with pytest.raises(relax.ConfigError, match="has gone by"):
        rows.row(5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"splits": {}}, "splits"),
        ({"splits": {"eval": 3}}, "train"),
        ({"splits": {"train": 0}}, "at least one"),
        ({"modalities": ["smell"]}, "modalities"),
        ({"doc": "x" * (1 << 20)}, "allowed: 1048576"),
    ],
)
def test_a_description_that_cannot_be_right(tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(relax.EnvError, match=message):
        hosted_spec(Description(**({"id": "x"} | changes)), DirectLink(Echo, tmp_path))


@pytest.mark.parametrize("data", [b"", b"\x00", b"\xc1", encode(Hello(Description(id="x")))[:-1], b"\x81\xa4type\xa5reset"])
def test_noise_on_the_wire_is_an_error_of_ours(data: bytes) -> None:
    for read in (read_from_host, read_from_service):
        with pytest.raises(relax.EnvError, match="cannot be read"):
            read(data)


async def test_an_answer_of_the_wrong_form(tmp_path: Path) -> None:
    link, spec = hosted(Echo, tmp_path)

    async def lie(ask: Any) -> None:
        link.arrived(Reply(ask.id, {"messages": "none", "info": 3}))

    link.send = lie  # type: ignore[method-assign]
    with pytest.raises(relax.EnvError, match="wrong form"):
        await begin(spec)

"""What a service was asked for can be asked for again until it is durable, whatever the journal does in between."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from relax_server.api import holding, outcomes, rollout_player, sessions
from relax_server.api.rollout_store import RolloutStore
from relax_server.journal import sql
from relax_server.models.processor import Processor
from rollout_bench import until
from service_inside import HELLO, InsideService, service_inside

from relax_sdk.errors import JournalError
from relax_sdk.trajectory import Group

POINTS = ("before", "inside", "after")
"""Where a write fails: before anything is written, in the middle of the transaction, or when it is durable already."""


@pytest.fixture
async def inside(processor: Processor, tmp_path: Path) -> AsyncIterator[InsideService]:
    async with service_inside(processor, tmp_path) as it:
        yield it


class Broken:
    """Makes a journal's commits fail at a point, with an error of one kind, until it is mended."""

    def __init__(self, service: InsideService, monkeypatch: pytest.MonkeyPatch) -> None:
        self.point: str | None = None
        self.error: type[Exception] = JournalError
        self.tries = 0
        commit, insert = service.core.journal.commit_many, sql.insert_group

        def commit_many(groups: Sequence[Group], *place: Any) -> list[bool]:
            self.tries += 1
            self.fail("before")
            new = commit(groups, *place)
            self.fail("after")
            return new

        def insert_(*arguments: Any) -> bool:
            new = insert(*arguments)
            self.fail("inside")
            return new

        monkeypatch.setattr(service.core.journal, "commit_many", commit_many)
        monkeypatch.setattr(sql, "insert_group", insert_)

    def fail(self, point: str) -> None:
        if point == self.point:
            raise self.error(f"/secret/place is full ({point})")


@pytest.fixture
def broken(inside: InsideService, monkeypatch: pytest.MonkeyPatch) -> Broken:
    return Broken(inside, monkeypatch)


def stored(service: InsideService, run: str = "sessions") -> list[str]:
    """Ids of the groups in the journal."""
    return [group.id for group in service.core.journal.groups(run, "session-train", newest_first=False)]


async def kinds(service: InsideService, topic: str) -> Counter[str]:
    """How many events of each kind a topic has, once it is finished."""
    async with asyncio.timeout(30):
        while True:
            await service.core.events.flush()
            found = Counter(event.kind for event in await service.core.events.after(topic, 0))
            if found["finished"]:
                return found
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("error", [JournalError, RuntimeError])
@pytest.mark.parametrize("point", POINTS)
async def test_finish_is_repeated_until_the_trajectory_is_durable(
    inside: InsideService, broken: Broken, point: str, error: type[Exception]
) -> None:
    session = await inside.played()
    broken.point, broken.error = point, error
    for _ in range(3):
        refused = await inside.finish(session)
        assert refused.status_code == (503 if error is JournalError else 500), refused.text
        assert "secret" not in refused.text
    asked = await inside.http.get(f"/v1/trajectories/{session['trajectory_id']}")
    assert asked.status_code == (200 if point == "after" else 404)
    broken.point = None
    done = await inside.finish(session)
    assert done.status_code == 200 and done.json()["status"] == "completed"
    assert (await inside.http.get(f"/v1/trajectories/{session['trajectory_id']}")).status_code == 200
    assert (await inside.finish(session)).json() == done.json()
    assert stored(inside) == [f"sessions/{session['id']}"]
    assert (await kinds(inside, f"session/{session['id']}"))["finished"] == 1


async def test_a_session_that_was_cancelled_becomes_durable_too(inside: InsideService, broken: Broken) -> None:
    session = await inside.played()
    broken.point = "before"
    assert (await inside.http.delete(f"/v1/sessions/{session['id']}")).json()["state"] == "cancelled"
    assert stored(inside) == []
    broken.point = None
    assert (await inside.finish(session)).json()["status"] == "cancelled"
    assert stored(inside) == [f"sessions/{session['id']}"]


async def test_nobody_has_to_ask_again(inside: InsideService, broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "AGAIN_SECONDS", 0.02)
    session = await inside.played()
    broken.point = "before"
    assert (await inside.finish(session)).status_code == 503
    await until(lambda: broken.tries > 3)
    broken.point = None
    async with asyncio.timeout(20):
        while not stored(inside):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await until(lambda: not inside.hub._open)


async def test_the_end_of_the_service_tries_once_more(
    processor: Processor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with service_inside(processor, tmp_path) as inside:
        broken = Broken(inside, monkeypatch)
        failed, still_open = await inside.played(), await inside.played()
        broken.point = "before"
        assert (await inside.finish(failed)).status_code == 503
        broken.point = None
    async with service_inside(processor, tmp_path) as again:
        assert sorted(stored(again)) == sorted(f"sessions/{s['id']}" for s in (failed, still_open))


async def test_what_is_not_durable_is_not_forgotten_and_what_is_takes_no_memory(
    inside: InsideService, broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "KEPT", 2)
    monkeypatch.setattr(sessions, "MOST_WAITING", 5)
    opened = [await inside.played(metadata={"note": "x" * 1000}) for _ in range(5)]
    known = [weakref.ref(session) for session in inside.hub.unfinished]
    broken.point = "before"
    assert {(await inside.finish(session)).status_code for session in opened} == {503}
    refused = await inside.http.post("/v1/sessions", json={})
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "journal_unavailable"
    broken.point = None
    assert [(await inside.finish(session)).status_code for session in opened] == [200] * 5
    assert [(await inside.finish(session)).status_code for session in opened] == [404] * 3 + [200] * 2
    gc.collect()
    assert [ref() for ref in known] == [None] * 5
    assert await inside.played()


async def test_what_a_session_that_is_over_still_answers(inside: InsideService) -> None:
    session = await inside.played(env="tone-v0")
    at = f"/v1/sessions/{session['id']}"
    open_ = (await inside.http.get(at)).json()
    assert open_["observation"] and open_["state"] == "running"
    await inside.finish(session)
    over = (await inside.http.get(at)).json()
    assert over | {"state": "", "observation": [], "calls": 0} == open_ | {"state": "", "observation": [], "calls": 0}
    assert over["state"] == "truncated" and over["observation"] == []
    assert [s["id"] for s in (await inside.http.get("/v1/sessions")).json()["sessions"]] == [session["id"]]
    assert (await inside.http.delete(at)).json()["state"] == "truncated"
    for path, body in (
        ("/step", {"action": {"content": "x"}}),
        ("/reward", {"value": 1.0}),
        ("/openai/v1/chat/completions", {"messages": HELLO}),
    ):
        refused = await inside.http.post(at + path, json=body)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "episode_over", refused.text


async def test_one_that_cannot_be_stored_says_so_for_ever_and_fails_alone(inside: InsideService) -> None:
    opened = [await inside.played() for _ in range(20)]
    inside.hub.unfinished[13].session.extra_info["note"] = "\ud800"
    answers = await asyncio.gather(*(inside.finish(session) for session in opened))
    bad = answers.pop(13)
    assert [answer.status_code for answer in answers] == [200] * 19 and len(stored(inside)) == 19
    error = bad.json()["error"]
    assert (bad.status_code, error["code"], error["param"]) == (400, "unstorable_value", "info.note")
    assert (await inside.finish(opened[13])).json() == bad.json()


# ------------------------------------------------------------------------------------------------------------- rollouts


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts that nobody holds are taken up at once."""
    monkeypatch.setattr(holding, "LAPSE_SECONDS", 0.3)
    monkeypatch.setattr(holding, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(rollout_player, "FIRST_PAUSE", 0.01)


async def completed(service: InsideService, id: str) -> dict[str, Any]:
    """A rollout once it has ended."""
    async with asyncio.timeout(30):
        while (rollout := (await service.http.get(f"/v1/rollouts/{id}")).json())["ended_at"] is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return rollout


ROLLOUT = {"env": "tone-v0", "n": 3, "group_size": 2}


def failing(method: Callable[..., Any], point: str, times: int) -> Callable[..., Any]:
    """A method of a store that fails before or after its work, the first times."""
    left = [times]

    def fails(self: RolloutStore, *arguments: Any) -> Any:
        broken = left[0] > 0
        left[0] -= 1
        if broken and point == "before":
            raise JournalError("nothing was written")
        done = method(self, *arguments)
        if broken:
            raise JournalError("it was written, and nobody heard of it")
        return done

    return fails


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("point", ["before", "after"])
async def test_submitting_is_repeated_until_the_rollout_is_durable(
    inside: InsideService, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setattr(RolloutStore, "insert", failing(RolloutStore.insert, point, 1))
    headers = {"Idempotency-Key": "once"}
    assert (await inside.http.post("/v1/rollouts", json=ROLLOUT, headers=headers)).status_code == 503
    again = [await inside.http.post("/v1/rollouts", json=ROLLOUT, headers=headers) for _ in range(2)]
    assert {answer.json()["id"] for answer in again} == {again[0].json()["id"]}
    rollout = await completed(inside, again[0].json()["id"])
    assert (rollout["state"], rollout["counts"]["trajectories"]) == ("completed", 6)
    assert len((await inside.http.get("/v1/rollouts")).json()["rollouts"]) == 1


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("point", POINTS)
async def test_a_rollout_outlives_a_journal_that_cannot_be_written(inside: InsideService, broken: Broken, point: str) -> None:
    broken.point = point
    rollout = (await inside.http.post("/v1/rollouts", json=ROLLOUT)).json()
    await until(lambda: broken.tries > 4)
    broken.point = None
    ended = await completed(inside, rollout["id"])
    assert (ended["state"], ended["counts"]) == (
        "completed",
        {"groups": 3, "done": 3, "unusable": 0, "failed": 0, "trajectories": 6},
    )
    assert await kinds(inside, f"rollout/{rollout['id']}") == {"queued": 1, "running": 1, "group": 3, "finished": 1}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("point", ["before", "after"])
async def test_a_rollout_whose_state_cannot_be_written_goes_on_later(
    inside: InsideService, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setattr(RolloutStore, "save", failing(RolloutStore.save, point, 2))
    rollout = (await inside.http.post("/v1/rollouts", json=ROLLOUT)).json()
    ended = await completed(inside, rollout["id"])
    assert (ended["state"], ended["counts"]["trajectories"]) == ("completed", 6)


@pytest.mark.usefixtures("quick")
async def test_a_group_that_cannot_be_stored_is_unusable_and_the_others_are_kept(
    inside: InsideService, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = inside.core.commit

    async def spoilt(group: Group, *place: str) -> bool:
        if group.task_index == 1:
            group.trajectories[0].info["note"] = "\ud800"
        return await commit(group, *place)

    monkeypatch.setattr(inside.core, "commit", spoilt)
    rollout = (await inside.http.post("/v1/rollouts", json=ROLLOUT)).json()
    ended = await completed(inside, rollout["id"])
    assert ended["counts"] == {"groups": 3, "done": 3, "unusable": 1, "failed": 0, "trajectories": 4}

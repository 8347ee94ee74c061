"""`/v1/chat/completions` with a key of the service, and which task a session plays that names none."""

from __future__ import annotations

import asyncio

import grafana_board
import httpx
import openai
from relax_server.api.next_task import NextTasks
from relax_server.api.workers.place import WorkerPlace
from service_process import Service

from relax_sdk.tasks import KeptRows, task_splits

HELLO = [{"role": "user", "content": "hello"}]


def rows(tasks: object) -> KeptRows:
    return KeptRows(task_splits(tasks)["train"])  # type: ignore[arg-type]


def test_a_call_outside_of_sessions_is_recorded(locked: Service) -> None:
    with locked.client() as client:
        secret = client.post("/v1/keys", json={"name": "one-call"}).json()["secret"]
    policy = openai.OpenAI(base_url=f"{locked.url}/v1", api_key=secret, max_retries=0)
    raw = policy.chat.completions.with_raw_response.create(model="policy", messages=HELLO, max_tokens=4)  # type: ignore[arg-type]
    id, said = raw.headers["X-Relax-Trajectory"], raw.parse().choices[0].message.content
    with locked.client(secret) as client:
        kept = client.get(f"/v1/trajectories/{id}").raise_for_status().json()
        assert kept["status"] == "completed" and kept["env"] == "none" and len(kept["turns"]) == 1
        assert kept["messages"][-1]["content"] == said
        assert client.get("/v1/sessions").json()["sessions"][0]["state"] == "completed"
    with locked.client("") as client:
        assert client.post("/v1/chat/completions", json={"messages": HELLO}).status_code == 401


def test_a_streamed_call_is_durable_when_it_has_ended(service: Service) -> None:
    body = {"messages": HELLO, "max_tokens": 4, "stream": True}
    with httpx.stream("POST", f"{service.url}/v1/chat/completions", json=body, timeout=60) as answer:
        id = answer.headers["X-Relax-Trajectory"]
        assert list(answer.iter_lines())[-2] == "data: [DONE]"
    assert httpx.get(f"{service.url}/v1/trajectories/{id}").json()["status"] == "completed"


async def test_a_call_that_is_refused_or_given_up_leaves_no_session_open(service: Service) -> None:
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:

        async def still_open() -> int:
            text = (await client.get("/metrics")).text
            return int(float(next(line.split()[1] for line in text.splitlines() if line.startswith("relax_sessions_open"))))

        before = await still_open()
        refused = await client.post("/v1/chat/completions", json={"messages": []})
        assert refused.status_code == 400 and "X-Relax-Trajectory" not in refused.headers
        body = {"messages": HELLO, "max_tokens": 2000, "stream": True, "ignore_eos": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            await anext(answer.aiter_lines())
        async with asyncio.timeout(30):
            while await still_open() > before:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


def test_tasks_are_played_one_after_the_other(service: Service) -> None:
    played = [service.open(env="tone-v0")["task_index"] for _ in range(3)]
    assert played == list(range(played[0], played[0] + 3))
    assert service.open(env="tone-v0", task_index=7)["task_index"] == 7
    one, again, other = (service.open(env="tone-v0", seed=seed) for seed in (3, 3, 4))
    assert one["task_index"] == again["task_index"] and one["observation"] == again["observation"]
    assert other["task_index"] != one["task_index"]


async def test_which_task_is_next() -> None:
    tasks, split = NextTasks(WorkerPlace()), rows([{"n": n} for n in range(3)])
    assert [await tasks.pick(split, ("a", "e", "train"), None, None) for _ in range(5)] == [0, 1, 2, 0, 1]
    assert await tasks.pick(split, ("b", "e", "train"), None, None) == 0, "each key has its own turn"
    assert await tasks.pick(split, ("a", "e", "train"), 9, 1) == 9
    assert {await tasks.pick(split, ("a", "e", "train"), None, seed) for seed in range(50)} == {0, 1, 2}
    endless = rows({"n": n} for n in iter(int, 1))
    assert [await tasks.pick(endless, ("a", "g", "train"), None, 5) for _ in range(3)] == [0, 1, 2], (
        "a generator has no end to choose from"
    )


def test_the_grafana_board_asks_for_what_the_service_exports(service: Service) -> None:
    assert not grafana_board.missing(False, [httpx.get(f"{service.url}/metrics").text])

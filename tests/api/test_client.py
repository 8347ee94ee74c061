"""`relax.Client` and `relax.AsyncClient` against a real service."""

from __future__ import annotations

import asyncio
import inspect

import numpy as np
import pytest
from service_process import Service

import relax_sdk as relax
from relax_sdk.client import AsyncRemoteSession, AsyncRollout, RemoteSession, Rollout

ONE = {"sampling": {"max_new_tokens": 1}}


def test_an_episode(service: Service) -> None:
    with relax.Client(service.url) as client, client.session("tone-v0", **ONE) as session:
        answer = session.chat(session.observation)
        step = session.step(answer)
        session.reward(0.5, "style")
        done = session.finish()
        played = session.trajectory()
    assert step.terminated and done.status == "completed" and done.rewards == {"env": step.reward, "style": 0.5}
    assert isinstance(played, relax.Trajectory) and played.status is relax.Status.COMPLETED
    assert played.id == session.trajectory_id and len(played.turns[0].response_ids) == 1
    assert played.samples()[0].loss_mask[-1] == 1
    sampling = played.turns[0].sampling
    assert isinstance(sampling, relax.SamplingParams) and sampling.sampling_seed is not None
    with relax.Client(service.url) as client:
        assert client.media(played.turns[0].media[0].sha256)[:4] == b"RIFF"
        assert "tone-v0" in [env["id"] for env in client.envs()] and client.models()["data"]


def test_messages_of_the_sdk_and_media(service: Service) -> None:
    picture = relax.Image.from_array(np.full((32, 32, 3), 7, np.uint8))
    with relax.Client(service.url) as client, client.session(**ONE) as session:
        ref = client.put_media(picture)
        assert ref == picture.ref
        session.chat([relax.Message("user", (picture, relax.Text("what?")))])
        by_name = {"type": "image_url", "image_url": {"url": f"relax-media:{ref.sha256}"}}
        session.chat([{"role": "user", "content": [by_name, {"type": "text", "text": "what?"}]}])
        session.finish()
        one, two = session.trajectory().turns
    assert one.media == two.media == [ref] and one.prompt_ids == two.prompt_ids


def test_a_rollout(service: Service) -> None:
    with relax.Client(service.url) as client:
        rollout = client.rollout("tone-v0", n=2, group_size=2, idempotency_key="client", **ONE)
        kinds = [event.kind for event in rollout.events()]
        assert kinds[-3:] == ["group", "group", "finished"] and rollout.wait().counts["done"] == 2
        assert client.rollout("tone-v0", n=2, group_size=2, idempotency_key="client", **ONE).id == rollout.id
        assert client.get_rollout(rollout.id).state.over


async def test_the_same_in_asyncio(service: Service) -> None:
    async with relax.AsyncClient(service.url) as client:

        async def episode(task: int) -> float:
            async with await client.session("tone-v0", task_index=task, **ONE) as session:
                step = await session.step(await session.chat(session.observation))
                assert (await session.finish()).reward == step.reward
                return step.reward

        assert len(await asyncio.gather(*(episode(task) for task in range(8)))) == 8
        rollout = await client.rollout("tone-v0", n=1, **ONE)
        assert (await rollout.wait()).state == "completed"


def test_leaving_a_session_after_an_error_cancels_it(service: Service) -> None:
    with relax.Client(service.url) as client:
        with pytest.raises(KeyError), client.session(**ONE) as session:
            session.chat([{"role": "user", "content": "x"}])
            raise KeyError("agent")
        with pytest.raises(relax.ServiceError, match=r"is over .cancelled"):
            session.chat([{"role": "user", "content": "x"}])


def test_leaving_a_session_at_its_limit_finishes_it(service: Service) -> None:
    with relax.Client(service.url) as client:
        with (
            pytest.raises(relax.ServiceError, match="max_turns = 1"),
            client.session("tone-v0", limits={"max_turns": 1}, **ONE) as session,
        ):
            for text in "xy":
                session.chat([{"role": "user", "content": text}])
        assert session.finished is not None and session.finished.status == "truncated"
        assert len(session.trajectory().turns) == 1


async def test_leaving_a_session_at_its_limit_finishes_it_in_asyncio(service: Service) -> None:
    async with relax.AsyncClient(service.url) as client:
        session = await client.session("tone-v0", limits={"max_turns": 1}, **ONE)
        with pytest.raises(relax.ServiceError, match="max_turns = 1"):
            async with session:
                for text in "xy":
                    await session.chat([{"role": "user", "content": text}])
        assert session.finished is not None and session.finished.status == "truncated"


def test_errors_are_the_service_s_words(service: Service) -> None:
    with relax.Client(service.url) as client:
        with pytest.raises(relax.ServiceError, match=r"no environment 'nope'.*tone-v0") as caught:
            client.session("nope")
        assert (caught.value.status, caught.value.code) == (404, "environment_not_found")
        with pytest.raises(relax.ServiceError, match="no trajectory"):
            client.trajectory("a/b")
        with pytest.raises(relax.MediaError):
            client.put_media(relax.Image.from_bytes(b"x"))


def test_both_clients_have_the_same_names() -> None:
    for sync, aio in ((relax.Client, relax.AsyncClient), (RemoteSession, AsyncRemoteSession), (Rollout, AsyncRollout)):
        ours = {name for name in vars(sync) if not name.startswith("_")}
        assert ours == {name for name in vars(aio) if not name.startswith("_")}
        for name in ours:
            assert (
                inspect.signature(getattr(sync, name)).parameters.keys()
                == inspect.signature(getattr(aio, name)).parameters.keys()
            )

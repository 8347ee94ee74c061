"""Agents outside play episodes over HTTP with the plain `openai` package, and every token is recorded."""

from __future__ import annotations

import base64
import concurrent.futures
import io
import json
import re

import httpx
import numpy as np
import openai
import psutil
import pytest
from service_process import Service

import relax_sdk as relax

HELLO = [{"role": "user", "content": "hello"}]
JSON = {"Content-Type": "application/json"}


def agent(session: dict) -> openai.OpenAI:
    return openai.OpenAI(base_url=session["base_url"], api_key=session["key"], max_retries=0, timeout=60)


def ask(client: openai.OpenAI, messages: list, **more):
    return client.chat.completions.create(model="any", messages=messages, **more)


def trajectory(service: Service, session: dict) -> dict:
    with service.client() as client:
        done = client.post(f"/v1/sessions/{session['id']}/finish")
        assert done.status_code == 200, done.text
        return client.get(f"/v1/trajectories/{done.json()['trajectory_id']}").json()


def test_an_episode_is_played_and_recorded(service: Service) -> None:
    session = service.open(env="tone-v0", task_index=3, sampling={"max_new_tokens": 2})
    answer = ask(agent(session), session["observation"])
    with service.client() as client:
        action = {"action": answer.choices[0].message.model_dump(exclude_none=True)}
        step = client.post(f"/v1/sessions/{session['id']}/step", json=action).json()
        assert (step["terminated"], step["truncated"], step["observation"]) == (True, False, [])
    played = trajectory(service, session)
    assert played["status"] == "completed" and played["env"] == "tone-v0" and played["task_index"] == 3
    assert played["reward"] == step["reward"] == played["rewards"]["env"]
    (turn,) = played["turns"]
    assert len(turn["response_ids"]) == len(turn["response_logprobs"]) == answer.usage.completion_tokens
    assert len(turn["prompt_ids"]) == answer.usage.prompt_tokens
    assert turn["media"][0]["mime"] == "audio/wav"
    with service.client() as client:
        sound = client.get(f"/v1/media/{turn['media'][0]['sha256']}")
        part = client.get(f"/v1/media/{turn['media'][0]['sha256']}", headers={"Range": "bytes=0-3"})
    assert sound.content[:4] == b"RIFF" == part.content and part.status_code == 206


def test_tokens_go_on_from_turn_to_turn(service: Service) -> None:
    """The second prompt begins with the tokens that were recorded, though the agent sent text."""
    session = service.open(sampling={"max_new_tokens": 6})
    client = agent(session)
    first = ask(client, HELLO).choices[0].message
    more = [*HELLO, first.model_dump(exclude_none=True), {"role": "user", "content": "and then?"}]
    ask(client, more)
    played = trajectory(service, session)
    one, two = played["turns"]
    known = one["prompt_ids"] + one["response_ids"]
    assert two["prompt_ids"][: len(known)] == known
    assert played["status"] == "completed"


def test_a_rewritten_history_begins_a_new_branch(service: Service) -> None:
    session = service.open(sampling={"max_new_tokens": 6})
    client = agent(session)
    ask(client, HELLO)
    ask(client, [*HELLO, {"role": "assistant", "content": "what I never said"}, {"role": "user", "content": "go on"}])
    one, two = trajectory(service, session)["turns"]
    known = one["prompt_ids"] + one["response_ids"]
    assert two["prompt_ids"][: len(known)] != known


def test_calls_at_once_in_one_session(service: Service) -> None:
    session = service.open(sampling={"max_new_tokens": 5}, limits={"max_turns": 64})
    client = agent(session)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts = [[{"role": "user", "content": f"question {i}"}] for i in range(16)]
        answers = list(pool.map(lambda messages: ask(client, messages), texts))
    played = trajectory(service, session)
    assert sorted(len(t["response_ids"]) for t in played["turns"]) == sorted(a.usage.completion_tokens for a in answers)


def test_streamed_pieces_are_the_whole_answer_and_come_while_it_grows(service: Service) -> None:
    # Greedy, as by chance it may begin a tool call, which is held back; long, as a busy machine may have all of a short answer
    # before it looks for its first piece.
    greedy = {"max_new_tokens": 400, "ignore_eos": True, "temperature": 0.0}
    client = agent(session := service.open(sampling=greedy))
    chunks = list(ask(client, HELLO, stream=True, stream_options={"include_usage": True}, logprobs=True))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[-1].usage.completion_tokens == len(trajectory(service, session)["turns"][0]["response_ids"])
    assert sum(bool(c.choices and c.choices[0].delta.content) for c in chunks) > 3
    whole = service.open(sampling={"max_new_tokens": 40, "temperature": 0.0})
    again = agent(whole)
    once = ask(again, HELLO).choices[0].message.content
    pieces = ask(again, HELLO, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in pieces) == once
    assert text and [c for c in chunks if c.choices][-1].choices[0].finish_reason in ("stop", "length")


def test_stop_texts_end_an_answer_and_are_not_shown(service: Service) -> None:
    session = service.open(sampling={"max_new_tokens": 40, "temperature": 0.0})
    client = agent(session)
    whole = ask(client, HELLO).choices[0].message.content
    stop = next(c for c in whole[3:] if c.isprintable() and c != "\ufffd")
    cut = ask(client, HELLO, stop=[stop])
    assert cut.choices[0].message.content == whole[: whole.index(stop)] and cut.choices[0].finish_reason == "stop"
    streamed = "".join(c.choices[0].delta.content or "" for c in ask(client, HELLO, stop=[stop], stream=True))
    assert streamed == whole[: whole.index(stop)]


def sound() -> bytes:
    return relax.Audio.from_array(np.sin(np.arange(8000) / 5).astype(np.float32)).bytes()


def picture() -> bytes:
    return relax.Image.from_array(np.full((64, 64, 3), 99, np.uint8)).bytes()


def test_media_of_every_kind_reach_the_model(service: Service) -> None:
    video = relax.Video.from_array(np.random.default_rng(0).integers(0, 255, (4, 64, 64, 3), dtype=np.uint8)).data_uri()
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(picture()).decode()}},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound()).decode(), "format": "wav"}},
        {"type": "video_url", "video_url": {"url": video}},
        {"type": "text", "text": "what is this?"},
    ]
    session = service.open(sampling={"max_new_tokens": 4})
    client = agent(session)
    messages = [{"role": "user", "content": parts}]
    first = ask(client, messages)
    shown = [{"role": "tool", "tool_call_id": "x", "content": [parts[0], {"type": "text", "text": "the result"}]}]
    ask(client, [*messages, first.choices[0].message.model_dump(exclude_none=True), *shown])
    one, two = trajectory(service, session)["turns"]
    assert [m["mime"].split("/")[0] for m in one["media"]] == ["image", "audio", "video"]
    assert [m["mime"].split("/")[0] for m in two["media"]] == ["image", "audio", "video", "image"]
    assert two["media"][0] == two["media"][3]
    assert len(list((service.folder / "media").rglob(f"{one['media'][0]['sha256']}*"))) == 1


def test_tools_of_an_environment_are_called_through_step(service: Service) -> None:
    session = service.open(env="higher-lower-v0")
    assert [t["function"]["name"] for t in session["tools"]] == ["guess"]
    ask(agent(session), session["observation"])
    call = {"id": "c1", "type": "function", "function": {"name": "guess", "arguments": json.dumps({"number": 2})}}
    with service.client() as client:
        step = client.post(
            f"/v1/sessions/{session['id']}/step", json={"action": {"content": None, "tool_calls": [call]}}
        ).json()
    (answer,) = step["observation"]
    assert answer["role"] == "tool" and answer["tool_call_id"] == "c1"


def test_training_sessions_keep_their_sampling(service: Service) -> None:
    session = service.open(mode="train", sampling={"max_new_tokens": 5, "temperature": 1.0})
    answer = ask(agent(session), HELLO, temperature=0.1, max_tokens=50, top_p=0.5)
    assert answer.usage.completion_tokens <= 5


def test_rewards_from_outside(service: Service) -> None:
    session = service.open(sampling={"max_new_tokens": 3}, metadata={"who": "me"})
    ask(agent(session), HELLO)
    with service.client() as client:
        for body in ({"name": "judge", "value": 0.25}, {"name": "judge", "value": 0.5}, {"value": 1}):
            assert client.post(f"/v1/sessions/{session['id']}/reward", json=body).status_code == 200
    played = trajectory(service, session)
    assert played["rewards"] == {"env": 0.0, "judge": 0.5, "reward": 1.0} and played["reward"] == 1.5
    assert played["info"]["metadata"] == {"who": "me"}


def test_events_are_followed_and_resumed(service: Service) -> None:
    session = service.open(sampling={"max_new_tokens": 3})
    ask(agent(session), HELLO)
    trajectory(service, session)

    def read(after: str | None = None) -> list[tuple[str, str]]:
        headers = {"Last-Event-ID": after} if after else {}
        seen, id = [], ""
        with httpx.stream("GET", f"{service.url}/v1/sessions/{session['id']}/events", headers=headers, timeout=30) as stream:
            for line in stream.iter_lines():
                if line.startswith("id: "):
                    id = line[4:]
                elif line.startswith("event: "):
                    seen.append((id, line[7:]))
        return seen

    events = read()
    assert [kind for _, kind in events] == ["opened", "turn", "finished"]
    assert read(events[0][0]) == events[1:]


def test_inline_media_can_be_decoded_by_the_agent(service: Service) -> None:
    session = service.open(env="colour-v0", media="inline")
    url = next(p for p in session["observation"][0]["content"] if p["type"] == "image_url")["image_url"]["url"]
    assert relax.Image.from_bytes(base64.b64decode(url.split(",")[1])).ref.width
    assert ask(agent(session), session["observation"]).choices


def test_a_session_that_is_cancelled_says_so(service: Service) -> None:
    session = service.open()
    with service.client() as client:
        assert client.delete(f"/v1/sessions/{session['id']}").json()["state"] == "cancelled"
    with pytest.raises(openai.BadRequestError, match=r"is over .cancelled.*open a new one"):
        ask(agent(session), HELLO)


def test_a_client_that_goes_away_ends_the_generation(service: Service) -> None:
    session = service.open(sampling={"max_new_tokens": 3000, "ignore_eos": True})
    body = {"messages": HELLO, "stream": True}
    with httpx.stream("POST", session["base_url"] + "/chat/completions", json=body, timeout=30) as stream:
        next(stream.iter_lines())
    with service.client() as client:
        for _ in range(200):
            if not client.get("/v1/models").json()["engines"][0]["running"]:
                break
        else:
            pytest.fail("the generation went on")
    assert ask(agent(session), HELLO, max_tokens=2).usage.completion_tokens <= 2


def seen(url: str) -> dict:
    """A request that shows an image."""
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


BAD = [
    ({}, "messages must be a list", None),
    ({"messages": []}, "messages must be a list", None),
    ({"messages": "x"}, "messages must be a list", None),
    ({"messages": [1]}, r"messages\[0\] must be an object", None),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "role must be", None),
    ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\]", None),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "incomplete", None),
    (seen("http://1.2.3.4/x.png"), "remote", None),
    (seen("file:///etc/passwd"), "remote", None),
    (seen("relax-media:../../x"), "sha256", None),
    (seen(f"relax-media:{'0' * 64}"), "no such media", None),
    (seen("data:image/png;base64,AAAA"), "messages", None),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "nothing follows", None),
    ({"messages": HELLO, "n": 3}, "n = 3 is not supported", "n"),
    ({"messages": HELLO, "temperature": "hot"}, "temperature", None),
    ({"messages": HELLO, "temperature": -1}, "temperature", None),
    ({"messages": HELLO, "max_tokens": 0}, "max", None),
    ({"messages": HELLO, "stop": [1]}, "stop", None),
    ({"messages": HELLO, "stream": "yes"}, "stream", "stream"),
    ({"messages": HELLO, "tools": [{"type": "browser"}]}, "tools", None),
    ({"messages": HELLO, "tool_choice": "required"}, "tool_choice", "tool_choice"),
    ({"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format", "response_format"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "says", "param"), BAD)
def test_a_request_that_cannot_be_carried_out_is_refused_in_openai_s_shape(service: Service, body, says, param) -> None:
    session = service.open(sampling={"max_new_tokens": 2})
    answer = httpx.post(session["base_url"] + "/chat/completions", json=body, timeout=30)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and set(error) == {"message", "type", "param", "code"}
    assert re.search(says, error["message"]), error["message"]
    assert param is None or error["param"] == param
    assert ask(agent(session), HELLO).choices, "and the session goes on"


def test_bodies_that_are_not_json_or_too_large(service: Service) -> None:
    session = service.open()
    url = session["base_url"] + "/chat/completions"
    assert httpx.post(url, content=b"{", headers=JSON).json()["error"]["code"] == "invalid_json"
    assert httpx.post(url, content=io.BytesIO(b" " * (65 << 20)), headers=JSON, timeout=60).status_code == 413


def test_unknown_things(service: Service) -> None:
    with service.client() as client:
        for path in ("/v1/sessions/s_nothing", "/v1/trajectories/a/b", f"/v1/media/{'0' * 64}", "/v1/nothing"):
            answer = client.get(path)
            assert answer.status_code == 404 and answer.json()["error"]["message"]
        assert "restarted" in client.get("/v1/sessions/s_nothing").json()["error"]["message"]
        assert client.get("/v1/media/..%2f..%2fetc%2fpasswd").status_code in (400, 404, 422)
        refused = client.post("/v1/sessions", json={"env": "no-such-v0"})
        assert refused.status_code == 404 and "tone-v0" in refused.json()["error"]["message"]
        refused = client.post("/v1/sessions", json={"env": "os:system"})
        assert refused.status_code == 404
        refused = client.post("/v1/sessions", json={"envv": "tone-v0"})
        assert refused.status_code == 400 and "envv" in refused.json()["error"]["message"]
        refused = client.post("/v1/sessions", json={"env": "tone-v0", "split": "nope"})
        assert refused.status_code == 400 and "eval" in refused.json()["error"]["message"]


def test_health_and_models(service: Service) -> None:
    with service.client() as client:
        assert client.get("/healthz").json() == {"status": "ok"}
        assert client.get("/readyz").json()["ready"] is True
        models = client.get("/v1/models").json()
        assert models["data"][0]["id"] == "relax/tiny-omni" and models["engines"][0]["weight_version"] == "0"
        assert "tone-v0" in [e["id"] for e in client.get("/v1/envs").json()["envs"]]


def test_a_web_page_s_own_name_does_not_lead_here(service: Service) -> None:
    """A page may give its name this machine's address; its requests then still carry the name."""
    with service.client() as client:
        assert client.get("/v1/envs", headers={"Host": "evil.example"}).status_code == 400
        assert client.get("/v1/envs", headers={"Host": "localhost:8000"}).status_code == 200


def test_many_runs_take_no_more_threads(service: Service) -> None:
    def play(run: str) -> int:
        session = service.open(run=run, sampling={"max_new_tokens": 1})
        ask(agent(session), HELLO)
        assert trajectory(service, session)["id"].startswith(f"{run}/")
        return psutil.Process(service.process.pid).num_threads()

    first = play("run-first")
    assert max(play(f"run-{i}") for i in range(10)) < first + 10


def test_a_session_without_an_environment_cannot_be_stepped_and_goes_on(service: Service) -> None:
    session = service.open(sampling={"max_new_tokens": 1})
    ask(agent(session), HELLO)
    with service.client() as client:
        refused = client.post(f"/v1/sessions/{session['id']}/step", json={"action": {"content": "x"}})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "no_environment"
    assert trajectory(service, session)["status"] == "completed"


def test_the_routes_are_published(service: Service) -> None:
    with service.client() as client:
        paths = client.get("/openapi.json").json()["paths"]
        assert client.get("/docs").status_code == 200
    for path in ("/v1/sessions", "/v1/rollouts", "/v1/sessions/{id}/openai/v1/chat/completions", "/v1/openai/v1/responses"):
        assert "post" in paths[path]

"""The Responses API with the plain `openai` package."""

from __future__ import annotations

import base64

import httpx
import numpy as np
import openai
import pytest
from service_process import Service

import relax_sdk as relax


def agent(session: dict) -> openai.OpenAI:
    return openai.OpenAI(base_url=session["base_url"], api_key=session["key"], max_retries=0, timeout=60)


def turns(service: Service, session: dict) -> list[dict]:
    with service.client() as client:
        done = client.post(f"/v1/sessions/{session['id']}/finish").json()
        return client.get(f"/v1/trajectories/{done['trajectory_id']}").json()["turns"]


def test_responses_go_on_from_each_other(service: Service) -> None:
    session = service.open(sampling={"max_new_tokens": 5})
    client = agent(session)
    first = client.responses.create(model="any", input="hello", instructions="be brief")
    assert first.status in ("completed", "incomplete") and first.usage.output_tokens <= 5
    again = client.responses.create(model="any", input="and?", previous_response_id=first.id)
    both = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": [{"type": "output_text", "text": first.output_text}]},
        {"role": "user", "content": [{"type": "input_text", "text": "and?"}]},
    ]
    client.responses.create(model="any", input=both)
    one, two, three = turns(service, session)
    known = one["prompt_ids"] + one["response_ids"]
    assert two["prompt_ids"][: len(known)] == known and three["prompt_ids"] == two["prompt_ids"]
    assert again.previous_response_id == first.id
    assert client.models.list().data[0].id == "relax/tiny-omni"


def test_a_streamed_response_is_what_the_package_expects(service: Service) -> None:
    session = service.open(sampling={"max_new_tokens": 30, "ignore_eos": True})
    events = list(agent(session).responses.create(model="any", input="hello", stream=True))
    final = events[-1].response
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == final.output_text and kinds.count("response.output_text.delta") > 3
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 1


def test_media_in_items_and_in_what_tools_return(service: Service) -> None:
    picture = relax.Image.from_array(np.full((32, 32, 3), 7, np.uint8))
    sound = relax.Audio.from_array(np.sin(np.arange(8000) / 5).astype(np.float32))
    items = [
        {
            "role": "user",
            "content": [
                {"type": "input_image", "image_url": picture.data_uri()},
                {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound.bytes()).decode(), "format": "wav"}},
                {"type": "input_text", "text": "what?"},
            ],
        },
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_image", "image_url": f"relax-media:{picture.ref.sha256}"}],
        },
    ]
    with relax.Client(service.url) as client:
        client.put_media(picture)
    session = service.open(sampling={"max_new_tokens": 2})
    agent(session).responses.create(model="any", input=items)
    (turn,) = turns(service, session)
    assert [ref["sha256"] for ref in turn["media"]] == [picture.ref.sha256, sound.ref.sha256, picture.ref.sha256]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "input must be"),
        ({"input": []}, "input must be"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input_file"),
        ({"input": "x", "previous_response_id": "resp_no"}, "no such response"),
        ({"input": "x", "text": {"format": {"type": "json_object"}}}, "text = "),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "stream": [None]}, "stream"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
    ],
)
def test_what_cannot_be_done_is_refused(service: Service, body: dict, says: str) -> None:
    session = service.open()
    answer = httpx.post(f"{session['base_url']}/responses", json=body, timeout=30)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text

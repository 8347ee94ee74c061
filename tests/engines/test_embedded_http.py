"""The embedded engine's HTTP: error bodies, the chat route, streams, banned ids, failures."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
import torch
from engine_reference import Reference
from relax_server.engines.process import EngineProcess
from relax_server.models.catalog import resolve_model
from safetensors.torch import load_file, save_file

from relax_sdk import Audio, Image

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Client:
    """Raw calls to one engine."""

    def __init__(self, url: str, root) -> None:
        self.url, self.root = url, root
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))

    async def post(self, path: str, body, status: int = 200):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data) as response:
            text = await response.text()
            assert response.status == status, text
            return json.loads(text) if text.startswith(("{", "[", "n")) else text

    async def get(self, path: str):
        async with self.session.get(self.url + path) as response:
            assert response.status == 200
            return json.loads(await response.text())

    async def events(self, path: str, body) -> list:
        async with self.session.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            lines = (await response.text()).strip().split("\n\n")
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(tmp_path_factory) -> AsyncIterator[Client]:
    folder = tmp_path_factory.mktemp("http")
    (folder / "media").mkdir()
    process = EngineProcess(
        resolve_model("relax/tiny-omni"), folder / "log", media_root=folder / "media", max_total_tokens=8192
    )
    await process.start()
    it = Client(process.url, folder / "media")
    yield it
    await it.session.close()
    await process.stop()


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(resolve_model("relax/tiny-omni"))


IDS = [20, 30, 40]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not valid JSON"),
        ([1], "must be a JSON object"),
        ({}, "input_ids or text"),
        ({"input_ids": [], "sampling_params": {}}, "empty"),
        ({"input_ids": [[1, 2]]}, "one list of integers"),
        ({"input_ids": [1, 9999]}, "9999 is outside the vocabulary"),
        ({"input_ids": [-1]}, "outside the vocabulary"),
        ({"input_ids": IDS, "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": IDS, "sampling_params": {"top_p": 0}}, "top_p"),
        ({"input_ids": IDS, "sampling_params": {"top_k": 0}}, "top_k"),
        ({"input_ids": IDS, "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"input_ids": IDS, "sampling_params": {"stop_token_ids": [99999]}}, "stop_token_ids"),
        ({"input_ids": IDS, "sampling_params": {"json_schema": "{}"}}, "not supported"),
        ({"input_ids": IDS, "sampling_params": {"min_p": 0.1}}, "min_p is not supported"),
        ({"input_ids": IDS, "sampling_params": {"max_new_tokens": 100_000}}, "tokens"),
        ({"input_ids": IDS, "return_routed_experts": True}, "--return-routed-experts"),
        ({"input_ids": IDS, "logprob_start_len": 0}, "logprob_start_len"),
        ({"input_ids": IDS, "image_data": {"a": 1}}, "image_data"),
        ({"input_ids": IDS, "rid": 7}, "rid"),
    ],
)
async def test_wrong_requests_get_400_and_a_reason(client: Client, body, says):
    answer = await client.post("/generate", body, 400)
    assert says in answer["error"]["message"]


async def test_error_bodies_are_sglang_s(client: Client):
    answer = await client.post("/generate", {"input_ids": IDS, "sampling_params": {"temprature": 1}}, 400)
    assert isinstance(answer["error"], str) and "temprature" in answer["error"]
    assert (await client.post("/generate", {"input_ids": IDS, "no_such_field": 1}))["output_ids"]
    answer = await client.post("/v1/chat/completions", {"messages": []}, 400)
    assert answer["object"] == "error" and answer["code"] == 400 and answer["type"] == "BadRequestError"
    answer = await client.post("/update_weights_from_disk", {"model_path": "/nowhere"}, 400)
    assert answer["success"] is False and "/nowhere" in answer["message"]
    assert "mode" in (await client.post("/pause_generation", {"mode": "soft"}, 400))["error"]["message"]
    assert "tags" in (await client.post("/release_memory_occupation", {"tags": ["disk"]}, 400))["error"]["message"]
    await client.post("/abort_request", {}, 400)
    await client.post("/nowhere", {}, 404)


async def test_generate_answers_every_field(client: Client, reference: Reference):
    body = {
        "text": "<|im_start|>user\nhello",
        "sampling_params": {"max_new_tokens": 5, "ignore_eos": True, "temperature": 0},
        "return_logprob": True,
        "return_prompt_token_ids": True,
        "top_logprobs_num": 3,
        "rid": "mine",
    }
    answer = await client.post("/generate", body)
    ids, meta = answer["output_ids"], answer["meta_info"]
    assert answer["prompt_token_ids"] == reference.processor.tokenizer.encode(body["text"])
    assert meta["id"] == "mine" and meta["prompt_tokens"] == len(answer["prompt_token_ids"]) and meta["completion_tokens"] == 5
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert meta["weight_version"] == "0" and meta["weight_versions"] == [{"version": "0", "start": 0, "end": 5}]
    assert [row[1] for row in meta["output_token_logprobs"]] == ids and meta["output_token_logprobs_length"] == 5
    for row, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert len(top) == 3 and top[0][:2] == row[:2]
    assert answer["text"] == reference.processor.tokenizer.decode(ids, skip_special_tokens=True)
    plain = await client.post("/generate", {"input_ids": IDS, "sampling_params": {"max_new_tokens": 2, "n": 3}})
    assert isinstance(plain, list) and len(plain) == 3
    assert "output_token_logprobs" not in plain[0]["meta_info"] and "prompt_token_ids" not in plain[0]


async def test_seeds_repeat_and_n_gives_different_answers(client: Client):
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 8, "sampling_seed": 11, "n": 3, "ignore_eos": True}}
    first, second = [[a["output_ids"] for a in await client.post("/generate", body)] for _ in range(2)]
    assert first == second and len(set(map(tuple, first))) == 3
    body["sampling_params"].pop("sampling_seed")
    assert [a["output_ids"] for a in await client.post("/generate", body)] != first


async def test_a_link_out_of_the_media_folder_is_refused(client: Client, tmp_path, reference: Reference):
    secret = tmp_path / "secret.png"
    secret.write_bytes(Image.from_array(np.zeros((32, 32, 3), np.uint8)).bytes())
    (client.root / "link.png").symlink_to(secret)
    (client.root / "real.png").write_bytes(secret.read_bytes())
    ids = [reference.processor.placeholder_ids["image"], *IDS]
    body = {"input_ids": ids, "image_data": ["link.png"], "sampling_params": {"max_new_tokens": 1}}
    assert "no such file" in (await client.post("/generate", body, 400))["error"]["message"]
    for good in ("real.png", str(client.root / "real.png"), "../media/real.png"):
        await client.post("/generate", {**body, "image_data": [good]})


async def test_a_file_that_changed_is_read_again(client: Client, reference: Reference):
    path = client.root / "changing.png"
    ids = reference.processor.tokenizer.encode("<|vision_start|><|image_pad|><|vision_end|>?")
    body = {"input_ids": ids, "image_data": ["changing.png"], "return_logprob": True, "return_prompt_token_ids": True}
    for shade, size in ((0, 32), (250, 64)):
        image = Image.from_array(np.full((size, size, 3), shade, np.uint8))
        path.write_bytes(image.bytes())
        answer = await client.post("/generate", {**body, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}})
        expected = reference.logprobs(answer["prompt_token_ids"], answer["output_ids"], [image])
        got = [row[0] for row in answer["meta_info"]["output_token_logprobs"]]
        np.testing.assert_allclose(got, expected, atol=1e-4)


async def test_the_engine_counts_equal_prompts_once(client: Client):
    before = (await client.get("/server_info"))["stats"]
    body = {"input_ids": list(range(100, 150)), "sampling_params": {"max_new_tokens": 2, "n": 16, "ignore_eos": True}}
    await client.post("/generate", body)
    after = (await client.get("/server_info"))["stats"]
    assert after["prompt_tokens"] - before["prompt_tokens"] == 50
    assert after["steps"] - before["steps"] == 2


async def test_a_client_that_goes_away_ends_its_request(client: Client):
    body = {"input_ids": IDS, "rid": "gone", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
    call = asyncio.ensure_future(client.post("/generate", body))
    async with asyncio.timeout(30):
        while not (await client.get("/server_info"))["running"]:
            pass
        call.cancel()
        while (await client.get("/server_info"))["running"]:
            pass
    assert (await client.get("/server_info"))["in_flight"] == 0
    await client.post("/generate", {**body, "sampling_params": {"max_new_tokens": 1}})  # the rid is free again


async def test_a_rid_in_use_is_refused(client: Client):
    body = {"input_ids": IDS, "rid": "twice", "sampling_params": {"max_new_tokens": 1}}
    await client.post("/pause_generation", {"mode": "in_place"})
    first = asyncio.ensure_future(client.post("/generate", body))
    async with asyncio.timeout(30):
        while not (await client.get("/server_info"))["waiting"]:
            pass
        assert "in use" in (await client.post("/generate", body, 400))["error"]["message"]
    await client.post("/continue_generation", {})
    await first


async def test_abort_while_paused_answers_with_what_there_is(client: Client):
    await client.post("/pause_generation", {"mode": "in_place"})
    call = asyncio.ensure_future(client.post("/generate", {"input_ids": IDS, "rid": "held"}))
    async with asyncio.timeout(30):
        while not (await client.get("/server_info"))["waiting"]:
            pass
    await client.post("/abort_request", {"rid": "held"})
    answer = await call
    assert answer["meta_info"]["finish_reason"]["type"] == "abort" and answer["output_ids"] == []
    await client.post("/continue_generation", {})


async def test_memory_is_not_released_under_running_requests(client: Client):
    await client.post("/pause_generation", {"mode": "in_place"})
    call = asyncio.ensure_future(client.post("/generate", {"input_ids": IDS, "sampling_params": {"max_new_tokens": 1}}))
    async with asyncio.timeout(30):
        while not (await client.get("/server_info"))["waiting"]:
            pass
    assert "in flight" in (await client.post("/release_memory_occupation", {}, 400))["error"]["message"]
    await client.post("/continue_generation", {})
    await call


async def test_release_by_tag_and_refusals_on_the_way_back(client: Client):
    path = str(resolve_model("relax/tiny-omni"))
    await client.post("/release_memory_occupation", {})
    assert "released" in (await client.post("/generate", {"input_ids": IDS}, 503))["error"]["message"]
    assert "released" in (await client.post("/update_weights_from_disk", {"model_path": path}, 400))["message"]
    await client.post("/resume_memory_occupation", {"tags": ["weights"]})
    assert "kv_cache" in (await client.post("/generate", {"input_ids": IDS}, 503))["error"]["message"]
    await client.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert "no weights" in (await client.post("/generate", {"input_ids": IDS}, 503))["error"]["message"]
    assert (await client.post("/v1/chat/completions", {"messages": []}, 503))["code"] == 503
    await client.post("/update_weights_from_disk", {"model_path": path, "weight_version": 0})
    await client.post("/generate", {"input_ids": IDS})


async def test_health_generate_generates(client: Client):
    before = (await client.get("/server_info"))["stats"]["new_tokens"]
    async with client.session.get(client.url + "/health_generate") as response:
        assert response.status == 200
    assert (await client.get("/server_info"))["stats"]["new_tokens"] == before + 1
    assert (await client.get("/v1/models"))["data"][0]["max_model_len"] == 4096


# ------------------------------------------------------------------------------------------------------------------ chat


def chat(**options) -> dict:
    return {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "ignore_eos": True, **options}


async def test_chat_with_all_media_matches_the_model(client: Client, reference: Reference):
    image = Image.from_array(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    audio = Audio.from_array(0.4 * np.sin(np.arange(20_000) / 7))
    (client.root / "chat.png").write_bytes(image.bytes())
    content = [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "chat.png"}},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(audio.bytes()).decode(), "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": audio.data_uri()}},
    ]
    body = chat(messages=[{"role": "user", "content": content}], logprobs=True, top_logprobs=2, n=2)
    body |= {"return_token_ids": True, "return_prompt_token_ids": True}
    answer = await client.post("/v1/chat/completions", body)
    assert answer["object"] == "chat.completion" and len(answer["choices"]) == 2
    for choice in answer["choices"]:
        rows = choice["logprobs"]["content"]
        expected = reference.logprobs(choice["prompt_token_ids"], choice["response_token_ids"], [image, audio, audio])
        np.testing.assert_allclose([row["logprob"] for row in rows], expected, atol=1e-4)
        assert len(rows[0]["top_logprobs"]) == 2 and choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["usage"]["prompt_tokens"] == len(answer["choices"][0]["prompt_token_ids"])
    assert answer["metadata"]["weight_version"] == "0"


async def test_chat_streams_the_text_of_the_whole_answer(client: Client):
    body = chat(temperature=0, max_tokens=40, logprobs=True)
    whole = await client.post("/v1/chat/completions", body)
    events = await client.events("/v1/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    choices = [c for e in events for c in e["choices"]]
    text = "".join(c["delta"].get("content", "") for c in choices)
    assert text == whole["choices"][0]["message"]["content"]
    tokens = [row["token"] for c in choices if c.get("logprobs") for row in c["logprobs"]["content"]]
    assert tokens == [row["token"] for row in whole["choices"][0]["logprobs"]["content"]]
    assert choices[-1]["finish_reason"] == "length" and events[-1]["usage"]["completion_tokens"] == 40
    assert (
        "stream"
        in (await client.post("/v1/chat/completions", {**body, "stream": True, "return_token_ids": True}, 400))["message"]
    )


async def test_two_streamed_choices_do_not_mix(client: Client):
    body = chat(sampling_seed=0, seed=3, n=2, max_tokens=30)
    whole = await client.post("/v1/chat/completions", body)
    texts = ["", ""]
    for event in await client.events("/v1/chat/completions", {**body, "stream": True}):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [c["message"]["content"] for c in whole["choices"]] and texts[0] != texts[1]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_reads_tool_calls(client: Client, reference: Reference, stream: bool):
    """The model is led through `<tool_call>guess(7)</tool_call>` token by token, by biasing one token a call."""
    tools = [{"type": "function", "function": {"name": "guess", "parameters": {"properties": {"number": {"type": "integer"}}}}}]
    answer = await client.post("/v1/chat/completions", chat(tools=tools, return_prompt_token_ids=True, max_tokens=1))
    with_tools = answer["choices"][0]["prompt_token_ids"]
    assert "guess(number)" in reference.processor.decode(with_tools)
    message = [{"role": "assistant", "content": None, "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "guess", "arguments": '{"number": 7}'}}]},
        {"role": "tool", "tool_call_id": "a", "content": "higher"}]  # fmt: skip
    body = chat(
        messages=[{"role": "user", "content": "play"}, *message], tools=tools, return_prompt_token_ids=True, max_tokens=1
    )
    answer = await client.post("/v1/chat/completions", body)
    assert "<tool_call>guess(7)</tool_call>" in reference.processor.decode(answer["choices"][0]["prompt_token_ids"])
    call = reference.processor.tokenizer.encode("<tool_call>")[0]
    body = chat(tools=tools, max_tokens=3, logit_bias={str(call): 100}, stream=stream)
    if stream:
        deltas = [c["delta"] for e in await client.events("/v1/chat/completions", body) for c in e["choices"]]
        calls = [call for d in deltas for call in d.get("tool_calls", [])]
        assert "".join(d.get("content", "") for d in deltas) == ""
    else:
        message = (await client.post("/v1/chat/completions", body))["choices"][0]["message"]
        calls, content = message["tool_calls"], message["content"]
        assert not content
    assert calls and all(c["type"] == "function" for c in calls)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"messages": [{"role": "nobody", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "malformed"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]},
            "fetched",
        ),
        ({"messages": ["hello"]}, "malformed"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 3}, "logprobs"),
        ({"max_tokens": 0.5}, "max_new_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_wrong_chats_get_400_and_a_reason(client: Client, extra, says):
    assert says in (await client.post("/v1/chat/completions", chat(**extra), 400))["message"]


# ------------------------------------------------------------------------------------------------------- special weights


@pytest.fixture(scope="module")
def placeholder_lover(tmp_path_factory):
    """Weights whose most likely tokens are always media placeholders and brackets."""
    folder = tmp_path_factory.mktemp("lover")
    source = resolve_model("relax/tiny-omni")
    weights = load_file(source / "model.safetensors")
    head = weights["lm_head.weight"]
    direction = torch.randn(head.shape[1], generator=torch.Generator().manual_seed(0))
    for i, token in enumerate(Reference(source).processor.banned_ids):
        head[token] = direction * (50 if i % 2 else -50)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


async def test_placeholders_are_never_sampled_by_a_model_that_wants_them(
    client: Client, reference: Reference, placeholder_lover
):
    banned = set(reference.processor.banned_ids)
    raw = load_file(placeholder_lover / "model.safetensors")["lm_head.weight"]
    assert sum(int(i) in banned for i in (raw.norm(dim=1)).topk(len(banned)).indices) == len(banned)
    await client.post("/update_weights_from_disk", {"model_path": str(placeholder_lover), "weight_version": "lover"})
    for temperature in (0, 1, 3):
        options = {"max_new_tokens": 60, "n": 4, "ignore_eos": True, "temperature": temperature}
        body = {"input_ids": IDS, "sampling_params": options, "return_logprob": True}
        for answer in await client.post("/generate", body):
            assert not banned & set(answer["output_ids"])
            assert min(row[0] for row in answer["meta_info"]["output_token_logprobs"]) > -30
            assert answer["meta_info"]["weight_version"] == "lover"
    await client.post("/update_weights_from_disk", {"model_path": str(resolve_model("relax/tiny-omni")), "weight_version": 0})


async def test_a_forward_that_fails_is_a_500_and_the_engine_goes_on(client: Client, tmp_path):
    weights = load_file(resolve_model("relax/tiny-omni") / "model.safetensors")
    weights["lm_head.weight"].fill_(torch.nan)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    await client.post("/update_weights_from_disk", {"model_path": str(tmp_path)})
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    assert "not finite" in (await client.post("/generate", body, 500))["error"]["message"]
    assert (await client.post("/v1/chat/completions", chat(), 500))["code"] == 500
    events = await client.events("/generate", {**body, "stream": True})
    assert "not finite" in events[-1]["error"]["message"]
    await client.post("/update_weights_from_disk", {"model_path": str(resolve_model("relax/tiny-omni")), "weight_version": 0})
    assert len((await client.post("/generate", body))["output_ids"]) == 4

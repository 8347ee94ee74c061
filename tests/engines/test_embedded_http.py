"""The embedded engine's HTTP: error bodies, media, streams, banned ids, failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from engine_reference import Reference
from relax_server.engines.process import EngineProcess
from relax_server.engines.settings import EngineSettings
from relax_server.models.catalog import resolve_model
from safetensors.torch import load_file, save_file

from relax_sdk import Audio, Image, Message, Text

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Client:
    """Raw calls to one engine."""

    def __init__(self, url: str, token: str, root) -> None:
        self.url, self.token, self.root = url, token, root
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60), headers=headers)

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
        resolve_model("relax/tiny-omni"), folder / "log", EngineSettings(media_root=folder / "media", max_total_tokens=8192)
    )
    await process.start()
    it = Client(process.url, process.token, folder / "media")
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
    body["sampling_params"]["sampling_seed"] = [7, 11, 8]
    assert [a["output_ids"] for a in await client.post("/generate", body)][1] == first[0]
    for wrong, says in (([7, 8], "2 seeds for n = 3"), (["7", 8, 9], "allowed: int"), (2**64, "allowed: int")):
        body["sampling_params"]["sampling_seed"] = wrong
        assert says in (await client.post("/generate", body, 400))["error"]["message"]


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
    await client.post("/update_weights_from_disk", {"model_path": path, "weight_version": 0})
    await client.post("/generate", {"input_ids": IDS})


async def test_health_generate_generates(client: Client):
    before = (await client.get("/server_info"))["stats"]["new_tokens"]
    async with client.session.get(client.url + "/health_generate") as response:
        assert response.status == 200
    assert (await client.get("/server_info"))["stats"]["new_tokens"] == before + 1


async def test_media_by_path_and_by_data_uri_match_the_model(client: Client, reference: Reference):
    image = Image.from_array(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    audio = Audio.from_array(0.4 * np.sin(np.arange(20_000) / 7))
    (client.root / "seen.png").write_bytes(image.bytes())
    messages = [Message("user", (Text("see"), image, audio, audio))]
    body = {
        "input_ids": reference.processor.render(messages, []).ids,
        "image_data": ["seen.png"],
        "audio_data": [audio.data_uri()] * 2,
        "sampling_params": {"max_new_tokens": 8, "ignore_eos": True, "n": 2},
        "return_logprob": True,
        "return_prompt_token_ids": True,
    }
    answers = await client.post("/generate", body)
    assert len(answers) == 2
    for answer in answers:
        expected = reference.logprobs(answer["prompt_token_ids"], answer["output_ids"], [image, audio, audio])
        got = [row[0] for row in answer["meta_info"]["output_token_logprobs"]]
        np.testing.assert_allclose(got, expected, atol=1e-4)


async def test_a_stream_of_two_answers_does_not_mix_them(client: Client):
    options = {"max_new_tokens": 30, "ignore_eos": True, "n": 2, "sampling_seed": 3}
    whole = await client.post("/generate", {"input_ids": IDS, "sampling_params": options})
    grown: dict[int, list[int]] = {0: [], 1: []}
    for event in await client.events("/generate", {"input_ids": IDS, "sampling_params": options, "stream": True}):
        known = grown[event["index"]]
        assert event["output_ids"][: len(known)] == known
        grown[event["index"]] = event["output_ids"]
    assert [grown[0], grown[1]] == [answer["output_ids"] for answer in whole] and grown[0] != grown[1]


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
    events = await client.events("/generate", {**body, "stream": True})
    assert "not finite" in events[-1]["error"]["message"]
    await client.post("/update_weights_from_disk", {"model_path": str(resolve_model("relax/tiny-omni")), "weight_version": 0})
    assert len((await client.post("/generate", body))["output_ids"]) == 4


async def test_only_its_health_is_told_to_strangers_and_the_token_is_nowhere_to_be_seen(client: Client):
    async with aiohttp.ClientSession() as stranger:
        for method, path, status in (("GET", "/health", 200), ("GET", "/server_info", 401), ("POST", "/pause_generation", 401)):
            async with stranger.request(method, client.url + path) as answer:
                assert answer.status == status
    assert (await client.get("/server_info"))["paused"] is False
    assert client.token not in (client.root.parent / "log").read_text()
    seen = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
    assert seen and not [command for command in seen if client.token in command]

"""Tokens, features and positions of the built-in models against transformers."""

import numpy as np
import pytest
import torch
from relax_server.models.catalog import resolve_model
from relax_server.models.families.qwen3_omni import audio_tokens
from relax_server.models.media_features import fit_size, patchify
from relax_server.models.processor import Processor
from relax_server.models.tool_calls import split_tool_calls
from transformers import Qwen2VLImageProcessorPil, Qwen3OmniMoeThinkerForConditionalGeneration

from relax_sdk import AssistantMessage, Audio, ConfigError, Image, Message, Text, TokenError, ToolCall, Video

TOOLS = [{"type": "function", "function": {"name": "guess", "parameters": {"properties": {"number": {"type": "integer"}}}}}]


@pytest.fixture(scope="module")
def omni() -> Processor:
    return Processor.load(resolve_model("relax/tiny-omni"))


@pytest.fixture(scope="module")
def parts() -> dict[str, Audio | Image | Video]:
    rng = np.random.default_rng(0)
    return {
        "audio": Audio.from_array(0.3 * np.sin(np.arange(40_000) / 5)),
        "image": Image.from_array(rng.integers(0, 255, (64, 96, 3), dtype=np.uint8)),
        "video": Video.from_array(rng.integers(0, 255, (7, 64, 64, 3), dtype=np.uint8), fps=3),
    }


@pytest.mark.parametrize("order", [["audio", "image", "video"], ["video", "audio"], ["image", "image", "audio"], []])
def test_positions_are_those_of_transformers(omni, parts, order):
    content = [x for kind in order for x in (parts[kind], Text(f"a {kind}"))] or [Text("words")]
    rendered = omni.render([Message("user", tuple(content))])
    features = [omni.features(m.bytes(), m.ref.sha256, m.kind) for m in rendered.media]
    ids = omni.expand(rendered.ids, features)
    assert omni.collapse(ids) == rendered.ids

    by_kind = {kind: [f for f in features if f.kind == kind] for kind in ("audio", "image", "video")}
    model = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(omni.path)
    expected = model.get_rope_index(
        torch.tensor([ids]),
        image_grid_thw=torch.tensor([f.grid for f in by_kind["image"]]) if by_kind["image"] else None,
        video_grid_thw=torch.tensor([f.grid for f in by_kind["video"]]) if by_kind["video"] else None,
        attention_mask=torch.ones(1, len(ids)),
        audio_seqlens=torch.tensor([f.tensor.shape[1] for f in by_kind["audio"]]) if by_kind["audio"] else None,
        second_per_grids=torch.tensor([f.second_per_grid for f in by_kind["video"]]) if by_kind["video"] else None,
    )[0][:, 0]
    np.testing.assert_allclose(omni.positions(ids, features), expected.numpy(), atol=1e-5)


def test_patches_are_those_of_transformers():
    pixels = np.random.default_rng(1).integers(0, 255, (64, 96, 3), dtype=np.uint8)
    theirs = Qwen2VLImageProcessorPil(
        patch_size=16, size=dict(shortest_edge=32 * 32, longest_edge=10**6), image_mean=[0.5] * 3, image_std=[0.5] * 3
    )([pixels], return_tensors="np")
    ours, grid = patchify((pixels[None].astype(np.float32) / 255 - 0.5) / 0.5, 16, 2, 2)
    np.testing.assert_allclose(ours, theirs["pixel_values"], atol=1e-6)
    assert [grid] == [tuple(g) for g in theirs["image_grid_thw"]]


def test_audio_token_count_is_what_the_tower_gives(omni):
    model = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(omni.path)
    for seconds in (0.02, 0.1, 0.5, 1.0, 2.5, 4.0):
        sound = Audio.from_array(0.1 * np.sin(np.arange(max(1, int(16_000 * seconds))) / 7))
        item = omni.features(sound.bytes(), sound.ref.sha256, "audio")
        mask = torch.ones(1, item.tensor.shape[1], dtype=torch.long)
        out = model.model.get_audio_features(torch.from_numpy(item.tensor)[None], mask).last_hidden_state
        assert out.shape[0] == item.n_tokens == audio_tokens(item.tensor.shape[1])


def test_fit_size_keeps_bounds_and_multiples():
    assert fit_size(64, 64, 32, 1024, 10**6) == (64, 64)
    height, width = fit_size(4000, 3000, 32, 1024, 196 * 1024)
    assert height % 32 == width % 32 == 0 and height * width <= 196 * 1024
    assert fit_size(8, 8, 32, 4096, 10**6) == (64, 64)


@pytest.mark.parametrize("name", ["relax/tiny-omni", "relax/tiny-qwen3"])
@pytest.mark.parametrize("tools", [(), ({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},)])
def test_a_rendered_conversation_is_what_the_tokenizer_makes_of_it(name, tools):
    processor = Processor.load(resolve_model(name))
    messages = [Message("system", (Text("Be brief."),)), Message("user", (Text("How far? Ünïcödé <|im_end|> 日本"),))]
    rows = [{"role": m.role, "content": m.text} for m in messages]
    theirs = processor.tokenizer.apply_chat_template(
        rows, tools=list(tools) or None, add_generation_prompt=True, tokenize=False
    )
    wanted = processor.tokenizer.encode(theirs, add_special_tokens=False)
    assert processor.render(messages, tools).ids == wanted


def test_turns_appended_are_the_turns_rendered_whole(omni):
    first = [Message("user", (Text("hear"),))]
    answer = AssistantMessage(content=(Text("A"),))
    more = [Message("user", (Text("see"),))]
    whole = omni.render([*first, answer, *more]).ids
    ids = omni.render(first).ids + omni.encode_action(answer)
    assert ids + omni.render_append(more, closed=True).ids == whole
    cut = omni.render(first).ids + omni.encode_action(answer)[:-1]
    assert cut + omni.render_append(more, closed=False).ids == whole


def test_a_tool_call_round_trips(omni):
    call = AssistantMessage(tool_calls=(ToolCall("call_0", "guess", {"number": 5}),))
    ids = omni.encode_action(call)
    assert ids[-1] in omni.eos_ids
    assert omni.parse(ids, "stop", TOOLS).tool_calls == call.tool_calls


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>guess(5)</tool_call>",
        "<tool_call>guess(number=5)",
        '<tool_call>{"name":"guess","arguments":{"number":5}}</tool_call>',
    ],
)
def test_tool_call_forms(text):
    rest, calls, _ = split_tool_calls([f"so: {text}"], TOOLS)
    assert rest == "so: " and [(c.name, c.arguments) for c in calls] == [("guess", {"number": 5})]


@pytest.mark.parametrize(
    "text", ["guess(", "guess(1,2)", "7", '{"name": 3}', '{"name":"guess","arguments":[1]}', "guess(open('x'))"]
)
def test_a_call_that_cannot_be_read_says_so(text):
    (call,) = split_tool_calls([f"<tool_call>{text}</tool_call>"], TOOLS)[1]
    assert call.error is not None and "cannot be read" in call.error


def test_placeholder_mismatches_name_both_counts(omni, parts):
    with pytest.raises(TokenError, match=r"1 media placeholders .* for 0 media"):
        omni.render([Message("user", (Text("<|image_pad|>"),))])
    sound = parts["audio"]
    item = omni.features(sound.bytes(), sound.ref.sha256, "audio")
    with pytest.raises(TokenError, match=r"0 media placeholders .* but 1 media"):
        omni.expand([20, 21], [item])
    ids = omni.expand(omni.render([Message("user", (sound,))]).ids, [item])
    with pytest.raises(TokenError, match="placeholders"):
        omni.positions([i for n, i in enumerate(ids) if n != ids.index(omni.placeholder_ids["audio"])], [item])


def test_a_text_model_refuses_media(parts):
    text = Processor.load(resolve_model("relax/tiny-qwen3"))
    with pytest.raises(TokenError, match="text only"):
        text.render([Message("user", (parts["image"],))])


def test_media_tokens_are_banned_and_the_end_of_turn_is_not(omni):
    assert set(omni.placeholder_ids.values()) < set(omni.banned_ids)
    assert not set(omni.eos_ids) & set(omni.banned_ids)


def test_an_unknown_model_lists_the_built_in_ones(tmp_path):
    with pytest.raises(ConfigError, match="relax/tiny-omni"):
        resolve_model("relax/gigantic")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_two_processes_may_build_a_model_at_once(tmp_path, monkeypatch):
    import concurrent.futures

    monkeypatch.setenv("RELAX_CACHE", str(tmp_path))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: resolve_model("relax/tiny-llama", seed=7), range(2)))
    assert folders[0] == folders[1] and [p.name for p in (tmp_path / "models").iterdir()] == [folders[0].name]


def test_seeds_give_different_weights_and_the_same_seed_the_same():
    from safetensors.numpy import load_file

    a, b = (load_file(resolve_model("relax/tiny-llama", seed=s) / "model.safetensors") for s in (0, 1))
    assert any(not np.array_equal(a[k], b[k]) for k in a)

"""Token recording: whatever an episode says and shows, what is trained on is exactly what was sampled."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relax_server.engines.base import Generation
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor
from relax_server.rollout.recorder import TokenRecorder
from relax_server.rollout.rendering import Renderer

from relax_sdk import (
    AssistantMessage,
    Audio,
    EngineError,
    EpisodeError,
    Image,
    Message,
    Status,
    Text,
    TokenError,
    ToolCall,
    Trajectory,
    Video,
)
from relax_sdk.media import from_ref
from relax_sdk.trajectory import VersionSpan

OMNI = Processor.load(resolve_model("relax/tiny-omni"))
RNG = np.random.default_rng(0)
MEDIA = [
    Image.from_array(RNG.integers(0, 255, (64, 64, 3), dtype=np.uint8)),
    Image.from_array(RNG.integers(0, 255, (64, 128, 3), dtype=np.uint8)),
    Audio.from_array(0.3 * np.sin(np.arange(8_000) / 9)),
    Video.from_array(RNG.integers(0, 255, (6, 64, 64, 3), dtype=np.uint8)),
]
EOS = OMNI.eos_ids[-1]
ORDINARY = [i for i in range(OMNI.vocab_size) if i not in OMNI.banned_ids]

words = st.text(st.characters(codec="utf-8", exclude_characters="<>|"), min_size=1, max_size=12).map(Text)
part = st.one_of(words, st.sampled_from(MEDIA))
message = st.builds(lambda role, parts: Message(role, tuple(parts)), st.just("user"), st.lists(part, min_size=1, max_size=3))
response = st.builds(
    lambda ids, closed: [i for i in ids if i != EOS] + [EOS] * closed,
    st.lists(st.sampled_from(ORDINARY), max_size=8),
    st.booleans(),
).filter(bool)
turn = st.tuples(st.lists(message, min_size=1, max_size=2), response)


def features(media: list[Any]) -> list[Any]:
    return [OMNI.features(m.bytes(), m.ref.sha256, m.kind) for m in media]


def call(recorder: TokenRecorder, messages: list[Message], ids: list[int], **changes: Any) -> AssistantMessage:
    """One model call, by an engine that expands as the model does."""
    plan = recorder.plan(messages)
    prompt = recorder.prompt(plan, features(plan.new_media))
    seen = OMNI.expand(prompt.ids, features(prompt.media))
    spans = [VersionSpan(len(recorder.turns), 0, len(ids))]
    generation = Generation(seen, list(ids), [-0.5 * (i + 1) for i in range(len(ids))], spans, "stop")
    generation = dataclasses.replace(generation, **changes)
    made = recorder.record(prompt, generation, [m.ref for m in prompt.media], "scripted://a", 0.0)
    return recorder.answer(plan, prompt, made)


def test_turns_that_go_on_share_their_tokens() -> None:
    """Each keeps its whole prompt: as integers of its own they took 35 bytes a token."""
    text = Processor.load(resolve_model("relax/tiny-qwen3"))
    recorder, messages = TokenRecorder(Renderer(text)), [Message("user", (Text("look here"),))]
    for _ in range(4):
        plan = recorder.plan(messages)
        prompt = recorder.prompt(plan, [])
        seen = [int(str(id)) for id in prompt.expanded]  # other objects, as what an engine sends
        generation = Generation(seen, [300, text.eos_ids[-1]], [-0.5, -0.5], [VersionSpan(0, 0, 2)], "stop")
        made = recorder.record(prompt, generation, [], "scripted://a", 0.0)
        assert made.prompt_ids is prompt.ids and made.prompt_ids == seen
        messages = [*messages, recorder.answer(plan, prompt, made), Message("user", (Text("on"),))]
    for before, after in itertools.pairwise(turn.prompt_ids for turn in recorder.turns):
        assert max(after) > 256 and all(a is b for a, b in zip(before, after, strict=False))


def trajectory(recorder: TokenRecorder) -> Trajectory:
    return Trajectory("t", "e", "0", 0, "g", 0, 1, 0, Status.COMPLETED, turns=recorder.turns)


def trained(sample: Any) -> list[int]:
    return [i for i, m in zip(sample.ids, sample.loss_mask, strict=True) if m]


@settings(max_examples=150, deadline=None)
@given(st.lists(turn, min_size=1, max_size=5))
def test_any_conversation_is_one_sample_whose_trained_tokens_are_the_responses(turns):
    recorder, messages = TokenRecorder(Renderer(OMNI)), []
    for observation, ids in turns:
        messages += observation
        messages.append(call(recorder, messages, ids))
    (sample,) = trajectory(recorder).samples()
    assert trained(sample) == [i for _, ids in turns for i in ids]
    assert sample.media == [m.ref for observation, _ in turns for message in observation for m in message.media]
    assert OMNI.expand(OMNI.collapse(sample.ids), features(_load(sample.media))) == sample.ids
    n = len(sample.ids)
    assert len(sample.logprobs) == len(sample.versions) == len(sample.turn) == n
    assert [lp for lp, m in zip(sample.logprobs, sample.loss_mask, strict=True) if not m] == [0.0] * (n - len(trained(sample)))
    assert [v for v in sample.versions if v >= 0] == [i for i, (_, ids) in enumerate(turns) for _ in ids]


def _load(refs: list[Any]) -> list[Any]:
    by_sha = {m.ref.sha256: m for m in MEDIA}
    return [by_sha[ref.sha256] for ref in refs]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(message, min_size=1, max_size=2), response.filter(lambda ids: EOS in ids)), min_size=2, max_size=4
    )
)
def test_appended_turns_give_the_tokens_of_the_whole_conversation(turns):
    """Where the responses are texts that encode back to their own ids, appending and rendering anew must agree."""
    recorder, messages = TokenRecorder(Renderer(OMNI)), []
    for observation, _ in turns:
        messages += observation
        messages.append(call(recorder, messages, [*OMNI.tokenizer.encode("ok", add_special_tokens=False), EOS]))
    assert recorder.turns[-1].prompt_ids == OMNI.expand(
        OMNI.render(messages[:-1]).ids, features([m for message in messages for m in message.media])
    )


@settings(max_examples=80, deadline=None)
@given(st.lists(turn, min_size=2, max_size=4), st.data())
def test_rewritten_history_starts_a_new_sample_and_no_response_is_lost(turns, data):
    recorder, messages = TokenRecorder(Renderer(OMNI)), []
    rewritten = 0
    for index, (observation, ids) in enumerate(turns):
        if index and data.draw(st.booleans()):
            messages, rewritten = [Message("system", (Text(f"summary {index}"),))], rewritten + 1
        messages += observation
        messages.append(call(recorder, messages, ids))
    samples = trajectory(recorder).samples()
    assert len(samples) == 1 + rewritten
    assert [i for s in samples for i in trained(s)] == [i for _, ids in turns for i in ids]


@pytest.mark.parametrize("sends_control_tokens", [True, False])
def test_answers_of_equal_text_are_told_apart_by_their_control_tokens(sends_control_tokens):
    """Where an agent leaves them out, as OpenAI's messages know no such field, the last of such answers is gone on from."""
    recorder, asked = TokenRecorder(Renderer(OMNI)), [Message("user", (Text("think"),))]
    text, marks = OMNI.tokenizer.encode("hm"), sorted(set(OMNI.answers.control) - set(OMNI.eos_ids) - set(OMNI.banned_ids))
    answers = [[*text, EOS], [*text, marks[0], EOS], [*text, marks[1], EOS]]
    shown = [call(recorder, asked, ids) for ids in answers]
    assert {a.text for a in shown} == {"hm"} and [len(a.control_tokens) for a in shown] == [0, 1, 1]
    for answer, ids in zip(shown, answers, strict=True):
        sent = answer.to_openai()
        if not sends_control_tokens:
            sent.pop("control_tokens", None)
            ids = answers[0]  # an answer without any is taken for itself first
        plan = recorder.plan([*asked, Message.from_openai(sent), *asked])
        assert plan.base_expanded[-len(ids) :] == ids
    dropped = TokenRecorder(Renderer(OMNI))
    for ids in answers[1:]:
        call(dropped, asked, ids)
    plan = dropped.plan([*asked, AssistantMessage(content=(Text("hm"),)), *asked])
    assert plan.base_expanded[-len(answers[2]) :] == answers[2]
    again = call(dropped, [*asked, AssistantMessage(content=(Text("hm"),)), *asked], answers[0])
    plan = dropped.plan([*asked, AssistantMessage(content=(Text("hm"),)), *asked, again, *asked])
    assert len(dropped.turns[-1].prompt_ids) < len(plan.base_expanded) == len(dropped.turns[-1].prompt_ids) + len(answers[0])


def test_a_turn_counts_its_tool_calls_that_cannot_be_read():
    recorder = TokenRecorder(Renderer(OMNI))
    messages = [Message("user", (Text("call"),))]
    for text in ("<tool_call>guess(</tool_call> <tool_call>{}</tool_call>", "<tool_call>guess(x=1)</tool_call>", "no call"):
        answer = call(recorder, messages, [*OMNI.tokenizer.encode(text), EOS])
        messages += [answer, Message("user", (Text("again"),))]
    assert [turn.unreadable_calls for turn in recorder.turns] == [2, 0, 0]


@settings(max_examples=60, deadline=None)
@given(st.lists(turn, min_size=2, max_size=4))
def test_a_conversation_that_went_through_json_is_recognised(turns):
    recorder, messages = TokenRecorder(Renderer(OMNI)), []
    refs = {m.ref.key: m.ref for m in MEDIA}
    for observation, ids in turns:
        messages = [Message.from_openai(m.to_openai(), refs) for m in messages] + list(observation)
        answer = call(recorder, [_with_bytes(m) for m in messages], ids)
        messages.append(answer)
    assert len(trajectory(recorder).samples()) == 1


def _with_bytes(message: Message) -> Message:
    by_sha = {m.ref.sha256: m for m in MEDIA}
    content = tuple(p if isinstance(p, Text) else by_sha[p.ref.sha256] for p in message.content)
    return dataclasses.replace(message, content=content)


USER, AGAIN = Message("user", (Text("hi"),)), Message("user", (Text("again"),))


def test_bytes_that_are_no_text_survive_a_later_turn():
    """Half a character: decoded and encoded again it would be another token."""
    recorder = TokenRecorder(Renderer(OMNI))
    half = OMNI.tokenizer.encode("é", add_special_tokens=False)[:1]
    answer = call(recorder, [USER], half)
    assert OMNI.tokenizer.encode(answer.text, add_special_tokens=False) != half
    call(recorder, [USER, answer, AGAIN], [EOS])
    assert recorder.turns[1].prompt_ids[: len(recorder.turns[0].prompt_ids) + 1] == recorder.turns[0].prompt_ids + half


def test_the_same_prompt_can_be_asked_again_and_each_answer_continued():
    recorder = TokenRecorder(Renderer(OMNI))
    first, second = call(recorder, [USER], [50, EOS]), call(recorder, [USER], [60, EOS])
    call(recorder, [USER, first, AGAIN], [51, EOS])
    call(recorder, [USER, second, AGAIN], [61, EOS])
    prompts = [t.prompt_ids for t in recorder.turns]
    assert prompts[0] == prompts[1]
    assert prompts[2][len(prompts[0]) :][:2] == [50, EOS] and prompts[3][len(prompts[0]) :][:2] == [60, EOS]


def test_tool_calls_and_tool_messages_are_appended():
    recorder = TokenRecorder(Renderer(OMNI))
    ids = [*OMNI.tokenizer.encode("<tool_call>guess(4)</tool_call>", add_special_tokens=False), EOS]
    answer = call(recorder, [USER], ids)
    assert answer.tool_calls
    call(recorder, [USER, answer, Message("tool", (Text("higher"),), tool_call_id=answer.tool_calls[0].id)], [EOS])
    assert len(trajectory(recorder).samples()) == 1


def test_another_number_of_placeholders_than_ours_is_told_with_both():
    recorder = TokenRecorder(Renderer(OMNI))
    shown = Message("user", (MEDIA[0], Text("?")))
    (item,) = features([MEDIA[0]])
    wire = OMNI.render([shown]).ids
    seen = OMNI.expand(wire, [item])
    at = seen.index(OMNI.placeholder_ids["image"])
    seen[at:at] = [seen[at]] * 3
    with pytest.raises(TokenError, match=rf"image 0: {item.n_tokens + 3} for {item.n_tokens}.*same preprocessor settings"):
        call(recorder, [shown], [EOS], prompt_ids=seen)
    assert recorder.turns == []


def test_other_tokens_than_were_sent_are_told_with_the_place():
    recorder = TokenRecorder(Renderer(OMNI))
    seen = OMNI.render([USER]).ids
    with pytest.raises(TokenError, match=f"{len(seen)} for {len(seen)} before expansion, the first difference at 3"):
        call(recorder, [USER], [EOS], prompt_ids=[*seen[:3], 77, *seen[4:]])
    with pytest.raises(TokenError, match=f"{len(seen) - 1} for {len(seen)} .* at {len(seen) - 1}"):
        call(recorder, [USER], [EOS], prompt_ids=seen[:-1])


@pytest.mark.parametrize(
    "changes, error, expected",
    [
        (dict(logprobs=[-1.0]), EngineError, "1 logprobs for 2 response tokens"),
        (dict(logprobs=[-1.0, float("nan")]), EngineError, "NaN"),
        (dict(weight_versions=[VersionSpan(0, 0, 1)]), EngineError, "do not cover 2"),
        (dict(response_ids=[50, OMNI.placeholder_ids["image"]]), TokenError, "holds media placeholders"),
    ],
)
def test_answers_that_do_not_fit_together_are_refused(changes, error, expected):
    with pytest.raises(error, match=expected):
        call(TokenRecorder(Renderer(OMNI)), [USER], [50, EOS], **changes)


def test_there_must_be_something_to_answer():
    recorder = TokenRecorder(Renderer(OMNI))
    with pytest.raises(EpisodeError, match="no messages"):
        recorder.plan([])
    answer = call(recorder, [USER], [EOS])
    with pytest.raises(EpisodeError, match="nothing follows"):
        recorder.plan([USER, answer])


def test_a_model_without_media_refuses_them_by_kind():
    text = Processor.load(resolve_model("relax/tiny-qwen3"))
    with pytest.raises(TokenError, match=r"text only, not .*image"):
        TokenRecorder(Renderer(text)).plan([Message("user", (MEDIA[0],))])


def test_equal_prompts_are_rendered_once(monkeypatch):
    rendered = []
    original = OMNI.render
    monkeypatch.setattr(OMNI, "render", lambda messages, tools=(): rendered.append(1) or original(messages, tools))
    renderer = Renderer(OMNI)
    for _ in range(16):
        call(TokenRecorder(renderer), [Message("user", (from_ref(MEDIA[0].ref, MEDIA[0].bytes()), Text("?")))], [EOS])
    call(TokenRecorder(renderer), [Message("user", (MEDIA[1], Text("?")))], [EOS])
    assert len(rendered) == 2


def test_messages_with_tool_calls_can_be_rendered_without_a_cache():
    history = [USER, AssistantMessage(tool_calls=(ToolCall("call_0", "guess", {"number": 4}),)), AGAIN]
    recorder = TokenRecorder(Renderer(OMNI))
    call(recorder, history, [EOS])
    assert "guess" in OMNI.decode(recorder.turns[0].prompt_ids)

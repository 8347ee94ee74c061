"""Trajectories show themselves: as safe text, and as HTML in which media play and nothing of a stranger is markup."""

from __future__ import annotations

import base64
import math
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from relax_sdk import Audio, Group, Image, MediaStore, Status, Text, Trajectory, Turn, Video, showing
from relax_sdk.messages import AssistantMessage, Message, ToolCall
from relax_sdk.recorded import RecordedTrajectory, Trajectories

SOUND = Audio.from_array(np.sin(np.linspace(0, 200, 4000)).astype(np.float32))
PICTURE = Image.from_array(np.full((8, 8, 3), 9, np.uint8))
FILM = Video.from_array(np.zeros((4, 16, 16, 3), np.uint8))


def episode(*messages: Message, media=(), **fields) -> RecordedTrajectory:
    values = dict(split="train", reward=0.25, rewards={"env": 0.5, "length": -0.25}) | fields
    turns = [Turn([1, 2], [3, 4, 5], [0.0] * 3, media=[part.ref for part in media])]
    shown = [message.to_openai() for message in messages]
    return RecordedTrajectory("run/train/3/1", "e-v0", "1", 3, "run/train/3", 1, 4, 7, Status.COMPLETED, turns, shown, **values)


class Elements(HTMLParser):
    """The elements of a page and their attributes; each must be closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in ("img", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def sources(self, tag: str) -> list[str]:
        return [str(attributes["src"]) for name, attributes in self.found if name == tag]


def stored(tmp_path, *media) -> str:
    store = MediaStore(tmp_path / "media")
    for item in media:
        store.put(item)
    return str(tmp_path / "media")


def test_media_play_with_the_very_bytes(tmp_path):
    folder = stored(tmp_path, SOUND, PICTURE, FILM)
    t = episode(Message("user", (SOUND, Text("and"), PICTURE, FILM)), media=(SOUND, PICTURE, FILM), media_folder=folder)
    page = Elements(t._repr_html_())
    for tag, part in (("audio", SOUND), ("img", PICTURE), ("video", FILM)):
        (source,) = page.sources(tag)
        head, _, data = source.partition(";base64,")
        assert head == f"data:{part.ref.mime}" and base64.b64decode(data) == part.bytes()


def test_media_of_the_last_observation_are_found_in_the_store(tmp_path):
    t = episode(Message("tool", (SOUND,), tool_call_id="1"), media_folder=stored(tmp_path, SOUND))
    assert len(Elements(t._repr_html_()).sources("audio")) == 1


@pytest.mark.parametrize("limit", ["ITEM_BYTES", "SHOWN_BYTES"])
def test_large_media_are_named_with_their_file(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(showing, limit, SOUND.ref.size + 10)
    other = Audio.from_array(np.zeros(4000 if limit == "SHOWN_BYTES" else 9000, np.float32))
    folder = stored(tmp_path, SOUND, other)
    html = episode(Message("user", (SOUND, other)), media=(SOUND, other), media_folder=folder)._repr_html_()
    assert len(Elements(html).sources("audio")) == 1
    assert str(MediaStore(folder).path(other.ref)) in html


def test_without_a_store_media_are_named():
    t = episode(Message("user", (SOUND, PICTURE)), media=(SOUND, PICTURE))
    page = Elements(t._repr_html_())
    assert not page.sources("audio") and not page.sources("img")
    assert f"<audio 0.25 s, {SOUND.ref.sha256[:12]}>" in str(t) and f"<image 8×8, {PICTURE.ref.sha256[:12]}>" in str(t)


def test_texts_of_strangers_are_texts():
    bad = "<script>alert('1')</script>\x1b[2J"
    call = ToolCall("1", bad, {"x": bad})
    t = episode(Message("user", (Text(bad),)), AssistantMessage(tool_calls=(call,)), error=bad, rewards={bad: 1.0})
    t = replace(t, id=bad, env=bad)
    for page in (t._repr_html_(), Group("g", "e", 0, [t])._repr_html_(), Trajectories([t])._repr_html_()):
        assert {"script", "alert"}.isdisjoint(tag for tag, _ in Elements(page).found) and "\x1b" not in page
    assert "\x1b" not in str(t)


def test_what_a_trajectory_says_as_text():
    t = episode(
        Message("system", (Text("Listen."),)),
        Message("user", (Text("which tone?"), SOUND)),
        AssistantMessage(content=(Text("let me hear"),), tool_calls=(ToolCall("1", "play", {"from": 2}),)),
        step=12,
        advantage=-0.5,
        media=(SOUND,),
    )
    assert str(t).splitlines() == [
        "run/train/3/1: reward 0.250 (env 0.5, length -0.25)",
        "  e-v0, task 3; completed; 1 turn, 3 tokens; member 1 of 4; split train; step 12; advantage -0.5; seed 7",
        "system: Listen.",
        f"user: which tone? <audio 0.25 s, {SOUND.ref.sha256[:12]}>",
        "assistant: let me hear → play(from=2)",
    ]
    plain = Trajectory(**{name: value for name, value in vars(t).items() if name in Trajectory.__dataclass_fields__})
    assert str(plain).splitlines()[2:] == str(t).splitlines()[2:]
    assert repr(plain) == "Trajectory('run/train/3/1', reward=0.25, status='completed', turns=1, tokens=3)"


def test_a_group_stands_side_by_side_and_shares_one_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(showing, "SHOWN_BYTES", SOUND.ref.size * 2)
    folder = stored(tmp_path, SOUND)
    members = [episode(Message("user", (SOUND,)), media=(SOUND,), media_folder=folder, reward=float(i)) for i in range(3)]
    page = Group("g", "e", 0, list(members))._repr_html_()
    assert len(Elements(page).sources("audio")) == 2
    assert [f"reward {i}.000" in page for i in range(3)] == [True] * 3


def test_many_are_a_table_and_a_frame():
    many = Trajectories([episode(AssistantMessage(content=(Text("B" * 200),))), episode(Message("user"))])
    table = many._repr_html_()
    assert "B" * 80 + "…" in table and table.count("<tr>") == 3
    assert list(many.frame["rewards/length"]) == [-0.25, -0.25] and list(many.frame["tokens"]) == [3, 3]


def test_an_episode_that_failed_has_no_reward():
    t = replace(episode(Message("user", (Text("hi"),)), error="it raised"), status=Status.FAILED, info={"failure": "EnvError"})
    assert str(t).startswith("run/train/3/1: no reward: EnvError") and "no reward: EnvError" in t._repr_html_()
    assert "<td style='text-align:left'>–</td>" in Trajectories([t])._repr_html_()
    assert math.isnan(Trajectories([t, episode()]).frame.reward[0])


def test_an_example_of_the_warm_up_has_no_reward():
    t = episode(Message("user", (Text("hi"),)), split="warmup")
    assert str(t).startswith("run/train/3/1: no reward: an example of the warm-up")
    assert "<td style='text-align:left'>–</td>" in Trajectories([t])._repr_html_()
    assert math.isnan(Trajectories([t, episode()]).frame.reward[0])

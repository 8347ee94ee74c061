"""Trajectories for people: as text in a terminal, and as a chat with players in a notebook."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from relax_sdk.errors import MediaError
from relax_sdk.media import MediaStore
from relax_sdk.media_places import media_places
from relax_sdk.printable import printable
from relax_sdk.probing import MediaKey, MediaRef

MEDIA = "media"
"""Folder of the media store inside a run folder."""
ITEM_BYTES = 4 << 20
"""A larger media item is named instead of being put into a notebook."""
SHOWN_BYTES = 24 << 20
"""Media of one display together; what comes after is named."""
ANSWER = 80
"""Characters of an answer in a table."""

WARMUP = "warmup"
"""The split of examples, which no policy answered."""
COLOURS = {"system": "#8a8f98", "user": "#3b82c4", "assistant": "#2f9e63", "tool": "#b7791f"}
_CARD = "border:1px solid rgba(128,128,128,.35);border-radius:6px;padding:8px 10px;margin:4px 0;max-width:60em"
_SMALL = "font-size:85%;opacity:.75"
_SAID = "padding:2px 0 2px 8px;margin:6px 0"
_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere"


class Shown(Protocol):
    """What is shown of an episode: a `Trajectory`, which says what its fields are."""

    id: str
    env: str
    task_index: int
    group_index: int
    group_size: int
    seed: int
    turns: Any
    messages: list[dict[str, Any]]
    reward: float
    rewards: dict[str, float]
    error: str | None

    @property
    def status(self) -> str:
        """How it ended."""
        ...

    @property
    def failure(self) -> str | None:
        """What it failed with; None: it did not."""
        ...

    @property
    def n_response_tokens(self) -> int:
        """Tokens of all answers."""
        ...


class Shelf:
    """The media that an episode names, as far as their bytes are at hand.

    Args:
        turns: say what each item is.
        folder: of the media store; None: no bytes are at hand.
    """

    def __init__(self, turns: Iterable[Any], folder: str | Path | None) -> None:
        self._refs: dict[MediaKey, MediaRef] = {ref.key: ref for turn in turns for ref in turn.media}
        self._store = MediaStore(folder) if folder is not None and Path(folder).is_dir() else None

    def find(self, key: MediaKey) -> MediaRef | None:
        """What is known of an item: from the turns, else from the stored file; None: nothing."""
        if key in self._refs or self._store is None:
            return self._refs.get(key)
        kind, sha256 = key
        try:
            return self._store.find(sha256, kind)
        except MediaError:
            return None

    def read(self, ref: MediaRef) -> bytes | None:
        """The bytes of an item; None: they are not at hand."""
        try:
            return self._store.get(ref) if self._store is not None else None
        except (MediaError, OSError):
            return None

    def path(self, ref: MediaRef) -> Path | None:
        """The file of an item; None: it is not at hand."""
        path = self._store.path(ref) if self._store is not None else None
        return path if path is not None and path.exists() else None


def media_label(kind: str, sha256: str, ref: MediaRef | None) -> str:
    """A media item in words: kind, size or length, and the beginning of its hash."""
    facts = [kind]
    if ref is not None:
        facts += [f"{ref.width}×{ref.height}"] if ref.width else []
        facts += [f"{ref.duration:.2f} s"] if ref.duration is not None else []
    return f"<{' '.join(facts)}, {sha256[:12]}>"


def parts_of(message: dict[str, Any]) -> Iterator[str | MediaKey]:
    """Texts and media of an OpenAI message, in order; media as their keys."""
    content = message.get("content") or ""
    if isinstance(content, str):
        if content:
            yield content
        return
    for part in content:
        if part.get("type") == "text":
            yield str(part.get("text", ""))
            continue
        for place in media_places([{"content": [part]}]):
            if place.name is not None:
                yield place.kind, place.name


def calls_of(message: dict[str, Any]) -> list[str]:
    """Tool calls of an OpenAI message as `name(argument=value)`."""
    return [_call(call.get("function", {})) for call in message.get("tool_calls") or ()]


def _call(function: dict[str, Any]) -> str:
    arguments = function.get("arguments") or "{}"
    try:
        values = json.loads(arguments) if isinstance(arguments, str) else arguments
        shown = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in values.items())
    except (ValueError, AttributeError):
        shown = str(arguments)
    return f"{function.get('name', '?')}({shown})"


def last_answer(trajectory: Shown) -> str:
    """What the policy wrote last, its tool calls included; empty where it wrote nothing."""
    for message in reversed(trajectory.messages):
        if message.get("role") == "assistant":
            return " ".join([*(part for part in parts_of(message) if isinstance(part, str)), *calls_of(message)])
    return ""


def facts_of(trajectory: Shown) -> list[str]:
    """What is known of an episode beside its messages, in words."""
    t = trajectory
    facts = [f"{t.env}, task {t.task_index}", f"{t.status}"]
    facts += [f"{_number_of(len(t.turns), 'turn')}, {_number_of(t.n_response_tokens, 'token')}"]
    facts += [f"member {t.group_index} of {t.group_size}"] if t.group_size > 1 else []
    for name in ("split", "step", "advantage", "staleness", "gap"):
        value = getattr(t, name, None)
        if value is not None:
            facts.append(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}")
    return [*facts, f"seed {t.seed}"]


def _number_of(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "s")


def unscored(trajectory: Shown) -> str | None:
    """Why an episode has no reward: it failed, or is an example of the warm-up, which nothing scores. None: it has one."""
    return trajectory.failure or ("an example of the warm-up" if getattr(trajectory, "split", None) == WARMUP else None)


def rewards_of(trajectory: Shown) -> str:
    """The reward and what it is made of, or why there is none."""
    if (why := unscored(trajectory)) is not None:
        return f"no reward: {why}"
    parts = ", ".join(f"{name} {value:.3g}" for name, value in trajectory.rewards.items())
    return f"reward {trajectory.reward:.3f}" + (f" ({parts})" if parts else "")


# ---------------------------------------------------------------------------------------------------------------- text


def trajectory_text(trajectory: Shown, folder: str | Path | None = None) -> str:
    """An episode as lines of text, safe to print.

    Args:
        trajectory: to be shown.
        folder: of the media store, for what the turns do not say of the media.
    """
    shelf = Shelf(trajectory.turns, folder)
    lines = [f"{trajectory.id}: {rewards_of(trajectory)}", f"  {'; '.join(facts_of(trajectory))}"]
    if trajectory.error:
        lines.append(f"  error: {trajectory.error}")
    for message in trajectory.messages:
        shown = [p if isinstance(p, str) else media_label(*p, shelf.find(p)) for p in parts_of(message)]
        shown += [f"→ {call}" for call in calls_of(message)]
        lines.append(f"{message.get('role', '?')}: " + " ".join(shown).replace("\n", "\n    "))
    return printable("\n".join(lines))


# ---------------------------------------------------------------------------------------------------------------- HTML


def trajectory_html(trajectory: Shown, folder: str | Path | None = None) -> str:
    """An episode as a chat: texts, images, players of its sounds and films, tool calls, rewards.

    Args:
        trajectory: to be shown.
        folder: of the media store; None: media are named only.

    Returns:
        HTML without scripts; media stand in it as data URIs, items above 4 MiB and beyond 24 MiB together are named.
    """
    return _Page().trajectory(trajectory, folder)


def group_html(trajectories: Sequence[Shown]) -> str:
    """Episodes of one group side by side, as `trajectory_html`."""
    page = _Page()
    cards = [page.trajectory(t, getattr(t, "media_folder", None)) for t in trajectories]
    cells = "".join(f'<div style="flex:1 1 22em;min-width:18em">{card}</div>' for card in cards)
    return f'<div style="display:flex;flex-wrap:wrap;gap:8px;align-items:flex-start">{cells}</div>'


def table_html(trajectories: Sequence[Shown]) -> str:
    """Episodes as a table with a line for each."""
    head = ("", "id", "reward", "status", "turns", "tokens", "last answer")
    rows = ["".join(f"<th style='text-align:left'>{name}</th>" for name in head)]
    for index, t in enumerate(trajectories):
        answer = last_answer(t)
        answer = answer if len(answer) <= ANSWER else answer[:ANSWER] + "…"
        reward = "–" if unscored(t) is not None else f"{t.reward:.3f}"
        cells = (index, t.id, reward, t.status, len(t.turns), t.n_response_tokens, answer or t.error or "")
        rows.append("".join(f"<td style='text-align:left'>{_escape(cell)}</td>" for cell in cells))
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def sample_line(sample: Mapping[str, Any]) -> str:
    """A sample answer in one line: which one, the end of what was asked, the answer, the reward."""
    asked, answer = (printable(" ".join(str(sample[name]).split())) for name in ("asked", "answer"))
    asked = asked if len(asked) <= ANSWER else "…" + asked[-ANSWER:]
    answer = answer if len(answer) <= ANSWER else answer[:ANSWER] + "…"
    return f"{sample['which']}: {asked!r} → {answer!r} · reward {sample['reward']}"


def samples_html(samples: Sequence[Mapping[str, Any]], folder: str | Path | None) -> str:
    """Sample answers of a step side by side, with the media that they are about.

    Args:
        samples: as in the metrics of a step.
        folder: of the media store; None: media are named only.

    Returns:
        HTML without scripts, as of `trajectory_html`.
    """
    page, shelf = _Page(), Shelf((), folder)
    cells = []
    for sample in samples:
        head = f"<b>{_escape(sample['which'])} · reward {_escape(sample['reward'])}</b> "
        head += f"<span style='{_SMALL}'>task {_escape(sample['task'])}</span>"
        media = "".join(page.media((item["kind"], item["sha256"]), shelf) for item in sample["media"])
        texts = "".join(
            f"<div style='{_SAID};border-left:3px solid {COLOURS[role]};{_TEXT}'>{_escape(text)}</div>"
            for role, text in (("user", sample["asked"]), ("assistant", sample["answer"]))
        )
        cells.append(f'<div style="flex:1 1 22em;min-width:18em;{_CARD}">{head}{media}{texts}</div>')
    return f'<div style="display:flex;flex-wrap:wrap;gap:8px;align-items:flex-start">{"".join(cells)}</div>'


def _escape(value: Any) -> str:
    return html.escape(printable(str(value)))


class _Page:
    """One display, and how many bytes of media it may still take."""

    def __init__(self) -> None:
        self._left = SHOWN_BYTES

    def trajectory(self, trajectory: Shown, folder: str | Path | None) -> str:
        shelf = Shelf(trajectory.turns, folder)
        head = f"<b>{_escape(rewards_of(trajectory))}</b><br><span style='{_SMALL}'>{_escape(trajectory.id)} · "
        head += " · ".join(map(_escape, facts_of(trajectory))) + "</span>"
        if trajectory.error:
            head += f"<div style='color:#c0392b;{_TEXT}'>{_escape(trajectory.error)}</div>"
        return f"<div style='{_CARD}'>{head}{''.join(self._message(m, shelf) for m in trajectory.messages)}</div>"

    def _message(self, message: dict[str, Any], shelf: Shelf) -> str:
        role = str(message.get("role", "?"))
        body = "".join(
            f"<div style='{_TEXT}'>{_escape(part)}</div>" if isinstance(part, str) else self.media(part, shelf)
            for part in parts_of(message)
        )
        body += "".join(f"<div style='{_TEXT}'><code>→ {_escape(call)}</code></div>" for call in calls_of(message))
        style = f"{_SAID};border-left:3px solid {COLOURS.get(role, '#8a8f98')}"
        return f"<div style='{style}'><div style='{_SMALL}'>{_escape(role)}</div>{body or '<i>nothing</i>'}</div>"

    def media(self, key: MediaKey, shelf: Shelf) -> str:
        """An item as a picture or player, or by its name where its bytes are not at hand or too many."""
        ref = shelf.find(key)
        label = _escape(media_label(*key, ref))
        data = shelf.read(ref) if ref is not None and ref.size <= min(ITEM_BYTES, self._left) else None
        if ref is None or data is None:
            path = shelf.path(ref) if ref is not None else None
            return f"<div><code>{label}</code> {_escape(path) if path else ''}</div>"
        self._left -= len(data)
        uri = html.escape(f"data:{ref.mime};base64,{base64.b64encode(data).decode('ascii')}")
        if ref.kind == "image":
            zoom = "min-width:112px;image-rendering:pixelated;" if (ref.width or 0) < 112 else ""
            return f'<img src="{uri}" alt="{label}" title="{label}" style="{zoom}max-width:100%;max-height:24em">'
        if ref.kind == "audio":
            return f'<audio controls preload="metadata" src="{uri}" title="{label}"></audio>'
        size = "min-width:192px;max-width:100%;max-height:24em"
        return f'<video controls loop muted src="{uri}" title="{label}" style="{size}"></video>'

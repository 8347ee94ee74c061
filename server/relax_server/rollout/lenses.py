"""Lenses: what stands between an environment and its policy, and changes what is shown; the environment knows nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from relax_sdk.evals.blank import blank
from relax_sdk.media import Media
from relax_sdk.messages import Message

Show = Callable[[list[Message]], list[Message]]
"""Gets each observation of one episode in order, and gives what the policy is shown in its place. It may take long."""
Lens = Callable[[int], Show]
"""Makes the `Show` of an episode of the task with this index."""


class Recording:
    """Changes nothing and remembers what was shown."""

    def __init__(self) -> None:
        self.shown: dict[int, list[Message]] = {}
        """All messages of the last episode of each task."""

    def __call__(self, task: int) -> Show:
        seen = self.shown[task] = []

        def show(messages: list[Message]) -> list[Message]:
            seen.extend(messages)
            return messages

        return show

    def media(self, kind: str) -> dict[int, list[Media]]:
        """Media of one kind by task, in the order they were shown; tasks without any are left out."""
        found = {task: [p for m in seen for p in m.media if p.kind == kind] for task, seen in self.shown.items()}
        return {task: parts for task, parts in sorted(found.items()) if parts}


def blanked(kinds: Collection[str]) -> Lens:
    """Silence and grey in place of all media of some kinds, of the same length and size."""

    def change(part: Media) -> Media:
        return blank(part) if part.kind in kinds else part

    return lambda task: lambda messages: [message.map_media(change) for message in messages]


def exchanged(kind: str, media: Mapping[int, Sequence[Media]], donors: Mapping[int, int]) -> Lens:
    """The n-th item of a kind is the n-th that the task's donor was shown; where that has fewer, it begins anew.

    Args:
        kind: of the media that are exchanged; all others stay.
        media: of this kind by task, as `Recording.media` has them.
        donors: whose media each task gets; a task without a donor is shown its own.
    """

    def lens(task: int) -> Show:
        given, count = media.get(donors.get(task, task), ()), 0

        def change(part: Media) -> Media:
            nonlocal count
            if part.kind != kind or not given:
                return part
            count += 1
            return given[(count - 1) % len(given)]

        return lambda messages: [message.map_media(change) for message in messages]

    return lens


def another_task_s(shown: Mapping[int, Sequence[Message]], donors: Mapping[int, int]) -> Lens:
    """The n-th message of the user is the n-th that the task's donor was shown, or the last it had."""

    def lens(task: int) -> Show:
        given, count = [m for m in shown.get(donors.get(task, task), ()) if m.role == "user"], 0

        def change(message: Message) -> Message:
            nonlocal count
            if message.role != "user" or not given:
                return message
            count += 1
            return given[min(count, len(given)) - 1]

        return lambda messages: [change(message) for message in messages]

    return lens

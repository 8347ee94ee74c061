"""Sample answers as trackers are told of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_sdk.errors import MediaError
from relax_sdk.media import MediaStore
from relax_sdk.probing import MediaRef

MEDIA_STEPS = 50
"""Steps between two whose sample answers are shown with their media; the first step's are, too."""
UPLOAD_BYTES = 16 << 20
"""Media larger than that are not sent to another host."""


@dataclass(frozen=True)
class SampleMedia:
    """An image, sound or film that a sample answer is about."""

    ref: MediaRef
    path: Path
    """The very bytes that the model got."""


@dataclass(frozen=True)
class SampleAnswer:
    """What the model was asked last, and what it answered."""

    which: str
    """`best` or `worst` of its step, or `an answer` where all earned the same."""
    asked: str
    answer: str
    reward: str
    media: tuple[SampleMedia, ...] = ()
    """The last media of its prompt, as far as their bytes are at hand."""


def sample_answers(samples: Iterable[Mapping[str, Any]], store: Path) -> list[SampleAnswer]:
    """The samples of a step's metrics.

    Args:
        samples: as `relax_server.roles.batch_figures` makes them.
        store: folder of the run's media.
    """
    return [
        SampleAnswer(
            sample["which"], sample["asked"], sample["answer"], sample["reward"], tuple(_media(sample["media"], store))
        )
        for sample in samples
    ]


def _media(items: Sequence[Mapping[str, Any]], store: Path) -> Iterable[SampleMedia]:
    if not store.is_dir():
        return
    kept = MediaStore(store)
    for item in items:
        try:
            ref = kept.find(item["sha256"], item["kind"])
        except MediaError:  # damaged since; the trainer has told of it, or will
            continue
        if ref is not None:
            yield SampleMedia(ref, kept.path(ref))


def has_media(step: int) -> bool:
    """Whether the samples of a step are shown with their media."""
    return step == 1 or step % MEDIA_STEPS == 0


def uploads(step: int, samples: Iterable[SampleAnswer]) -> Iterator[tuple[SampleAnswer, SampleMedia]]:
    """The media of a step that are sent to another host, each with its sample."""
    for sample in samples if has_media(step) else ():
        yield from ((sample, item) for item in sample.media if item.ref.size <= UPLOAD_BYTES)


def sample_text(sample: SampleAnswer) -> str:
    """A sample answer as Markdown."""
    asked, answer = (text.replace("`", "'") for text in (sample.asked, sample.answer))
    return f"**{sample.which}**, reward {sample.reward}\n\n```\n{asked}\n```\n\n```\n{answer}\n```"

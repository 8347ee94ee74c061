"""No shortcut: nothing but the sound, the colour or the motion itself tells the answer. Linear probes say so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from relax_envs import tone
from sklearn.linear_model import LogisticRegression

from relax_sdk.media import decode_audio, decode_image, decode_video

ROWS, TRAINED = 600, 400
CHANCE_LIMIT = 0.6
"""For two classes and 200 held-out rows: 2.8 standard deviations above chance (the rows are fixed)."""

CHANCE_LIMIT_OF_FOUR = 0.34


def probe(features: np.ndarray, answers: np.ndarray, penalty: float = 100.0) -> float:
    """Held-out accuracy of a linear classifier; features [n, d]."""
    scaled = (features - features[:TRAINED].mean(0)) / (features[:TRAINED].std(0) + 1e-6)
    model = LogisticRegression(C=1 / penalty, max_iter=300).fit(scaled[:TRAINED], answers[:TRAINED])
    return float(model.score(scaled[TRAINED:], answers[TRAINED:]))


class Clips:
    """Decoded clips float32 [n, 8, 64, 64, 3], and their answers."""

    def __init__(self, some: list[dict[str, Any]]) -> None:
        self.answers = np.array([row["answer"] for row in some])
        self.frames = np.stack([decode_video(row["video"].bytes())[0] for row in some]).astype(np.float32)

    def places(self) -> np.ndarray:
        """The square's place on the torus in every frame, as an angle [n, 8]."""
        brightness = self.frames.mean((2, 4))
        return np.angle(brightness @ np.exp(2j * np.pi * np.arange(64) / 64))


@pytest.fixture(scope="module")
def clips(first_rows: Any) -> Clips:
    return Clips(first_rows("motion", ROWS))


@pytest.fixture(scope="module")
def shuffled(first_rows: Any) -> Clips:
    return Clips(first_rows("motion-shuffled", ROWS))


def moved_right(clips: Clips) -> np.ndarray:
    """Whether the square's steps, each taken the short way round, add up to the right."""
    steps = np.angle(np.exp(1j * np.diff(clips.places(), axis=1)))
    return np.where(steps.sum(1) > 0, "B", "A")


def test_the_whole_clip_tells_the_direction(clips: Clips) -> None:
    assert (moved_right(clips) == clips.answers).mean() == 1.0


@pytest.mark.parametrize("frame", range(8))
def test_a_single_frame_says_nothing_of_the_direction(clips: Clips, frame: int) -> None:
    picture = clips.frames[:, frame].reshape(ROWS, 16, 4, 16, 4, 3).mean((2, 4)).reshape(ROWS, -1)
    assert probe(picture, clips.answers) <= CHANCE_LIMIT


@pytest.mark.parametrize("frame", [0, 1, 4, 7])
def test_the_square_drags_no_trail(clips: Clips, frame: int) -> None:
    """Video coding could leave traces behind a moving edge: columns around the square, moved to one place."""
    place = np.round(clips.places()[:, frame] / (2 * np.pi) * 64).astype(int)
    columns = clips.frames[:, frame].mean(1)
    edges = np.abs(np.diff(clips.frames[:, frame], axis=1)).mean(1)
    around = np.stack([np.roll(np.hstack([c, e]), 32 - p, 0) for c, e, p in zip(columns, edges, place, strict=True)])
    assert probe(around.reshape(ROWS, -1), clips.answers) <= CHANCE_LIMIT
    assert probe((around - around[:, ::-1]).reshape(ROWS, -1), clips.answers) <= CHANCE_LIMIT


def test_the_probes_can_see(clips: Clips) -> None:
    """The same probe on a task that a single frame does tell: the half in which the square stands."""
    half = np.where(np.sin(clips.places()[:, 0]) > 0, "A", "B")
    picture = clips.frames[:, 0].reshape(ROWS, 16, 4, 16, 4, 3).mean((2, 4)).reshape(ROWS, -1)
    assert probe(picture, half) > 0.9


def test_shuffled_frames_say_nothing_of_the_direction(shuffled: Clips) -> None:
    assert abs((moved_right(shuffled) == shuffled.answers).mean() - 0.5) < 0.06
    steps = np.angle(np.exp(1j * np.diff(shuffled.places(), axis=1)))
    moments = np.hstack([steps, np.sin(steps), np.cos(steps), np.sin(shuffled.places()), np.cos(shuffled.places())])
    assert probe(moments, shuffled.answers) <= CHANCE_LIMIT
    film = shuffled.frames.reshape(ROWS, 8, 8, 8, 8, 8, 3).mean((3, 5, 6)).reshape(ROWS, -1)
    assert probe(film, shuffled.answers) <= CHANCE_LIMIT


def test_the_moments_of_ordered_frames_tell_it(clips: Clips) -> None:
    steps = np.angle(np.exp(1j * np.diff(clips.places(), axis=1)))
    assert probe(np.hstack([steps, np.sin(steps)]), clips.answers) > 0.9


def numbers(ref: Any) -> list[float]:
    """All that a reference says without the bytes being decoded."""
    digest = bytes.fromhex(ref.sha256)
    plain = [ref.size, ref.size**2, ref.width, ref.height, ref.duration, ref.sampling_rate, ref.fps]
    return [float(x or 0) for x in plain] + [float(b) for b in digest[:8]]


@pytest.mark.parametrize(
    ("name", "column", "classes"),
    [("tone", "audio", 4), ("colour", "image", 4), ("motion", "video", 2), ("motion-shuffled", "video", 2)],
)
def test_size_and_header_say_nothing(name: str, column: str, classes: int, first_rows: Any) -> None:
    rows = first_rows(name, ROWS)
    features = np.array([numbers(row[column].ref) for row in rows])
    answers = np.array([row["answer"] for row in rows])
    assert probe(features, answers, penalty=1.0) <= {2: CHANCE_LIMIT, 4: CHANCE_LIMIT_OF_FOUR}[classes]
    headers = {(r.mime, r.width, r.height, r.duration, r.sampling_rate, r.fps) for r in (row[column].ref for row in rows)}
    assert len(headers) == 1, "only size and hash differ at all"


def test_tones_are_where_they_should_be(first_rows: Any) -> None:
    for row in first_rows("tone", 40):
        spectrum = np.abs(np.fft.rfft(decode_audio(row["audio"].bytes())))
        assert abs(spectrum.argmax() / tone.TONES["ABCD".index(row["answer"])] - 1) < 0.035
        assert decode_audio(row["audio"].bytes()).shape == (16_000,)


def test_loudness_does_not_tell_the_tone(first_rows: Any) -> None:
    rows = first_rows("tone", ROWS)
    waves = [decode_audio(row["audio"].bytes()) for row in rows]
    features = np.array([[np.abs(w).max(), w.std(), w.mean(), w[0], w[-1]] for w in waves])
    assert probe(features, np.array([row["answer"] for row in rows]), penalty=1.0) <= CHANCE_LIMIT_OF_FOUR


def test_only_the_square_tells_the_colour(first_rows: Any) -> None:
    rows = first_rows("colour", ROWS)
    pixels = np.stack([decode_image(row["image"].bytes()) for row in rows]).astype(float)
    answers = np.array([row["answer"] for row in rows])
    ground = np.hstack([pixels[:, r, c] for r in (0, -1) for c in (0, -1)])
    assert pixels.shape == (ROWS, 64, 64, 3)
    assert probe(pixels[:, 26:38, 26:38].mean((1, 2)), answers, penalty=0.01) > 0.9
    assert probe(ground, answers, penalty=1.0) <= CHANCE_LIMIT_OF_FOUR

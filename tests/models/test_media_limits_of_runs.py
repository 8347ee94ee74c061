"""What a run limits of media: frames, tokens and whether films are heard, in every process that reads its model folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from heard_films import heard_film
from relax_server.models.catalog import resolve_model
from relax_server.models.families import TABLE
from relax_server.models.processor import Processor
from relax_server.models.shared_features import SharedFeatures

from relax_sdk import Audio, ConfigError, Image, MediaError, Video
from relax_sdk.media import Media
from relax_sdk.media_config import MediaConfig
from relax_sdk.soundtrack import decode_soundtrack

SEES = [family for family in TABLE.values() if family.media is not None]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in models from the usual cache, and folders with settings in one of this test."""
    import relax_server.models.catalog as catalog

    real = catalog.with_media
    monkeypatch.setattr(catalog, "with_media", lambda folder, media, _: real(folder, media, tmp_path / "cache"))


def processor_of(family, **media) -> Processor:
    return Processor.load(resolve_model(family.tiny, 0, MediaConfig(**media)))


def features(processor: Processor, item: Media):
    made = processor.features(item.bytes(), item.ref.sha256, item.kind)
    told = Processor.load(processor.path).outline(item.bytes(), item.ref)
    assert (told.n_tokens, told.grid, told.times) == (made.n_tokens, made.grid, made.times)
    assert (told.sound and told.sound.n_tokens) == (made.sound and made.sound.n_tokens)
    return made


def film(frames: int = 40, size: int = 128, fps: float = 8) -> Video:
    return Video.from_array(np.random.default_rng(0).integers(0, 255, (frames, size, size, 3), dtype=np.uint8), fps=fps)


@pytest.mark.parametrize("family", SEES, ids=lambda f: f.name)
def test_frames_and_tokens_stay_within_the_limits(family) -> None:
    free, slow = features(processor_of(family), film()), features(processor_of(family, fps=2), film())
    assert free.grid and free.grid[0] == 8  # 16 frames, as the processor has it
    assert slow.grid and slow.grid[0] == 5 and slow.second_per_grid == pytest.approx(1.0)  # 10 frames of 5 seconds
    few = features(processor_of(family, max_frames=4), film())
    assert few.grid and few.grid[0] == 2
    for most in (3, 20):
        limited = processor_of(family, max_tokens=most)
        for item in (film(), film(3), film(16, 64), Image.from_array(np.zeros((300, 200, 3), np.uint8))):
            assert 0 < features(limited, item).n_tokens <= most
    if family.media.audio is not None:
        with pytest.raises(MediaError, match=r"more than media.max_tokens = 20; give a shorter one"):
            features(processor_of(family, max_tokens=20), Audio.from_array(np.zeros(80_000)))


def test_a_folder_with_settings_is_the_same_model_and_is_found_again() -> None:
    plain = resolve_model("relax/tiny-omni")
    assert resolve_model("relax/tiny-omni", 0, MediaConfig()) == plain
    folder = resolve_model("relax/tiny-omni", 0, MediaConfig(fps=2))
    assert folder != plain and resolve_model("relax/tiny-omni", 0, MediaConfig(fps=2)) == folder
    assert (folder / "model.safetensors").resolve() == (plain / "model.safetensors").resolve()
    assert resolve_model(str(folder), 0, MediaConfig(max_frames=4)) not in (folder, plain)
    assert Processor.load(folder)._extract.config.digest != Processor.load(plain)._extract.config.digest


def test_models_that_cannot_follow_the_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tiny-qwen3-v\d+-seed0 \(qwen3\) takes text only; leave media out"):
        resolve_model("relax/tiny-qwen3", 0, MediaConfig(fps=2))
    with pytest.raises(ConfigError, match=r"does not hear films; choose a Qwen2.5-Omni or Qwen3-Omni thinker"):
        resolve_model("relax/tiny-qwen3-vl", 0, MediaConfig(use_audio_in_video=True))
    with pytest.raises(ConfigError, match="max_frames"):
        MediaConfig(max_frames=1)


def test_a_soundtrack_is_what_was_written() -> None:
    wave = decode_soundtrack(heard_film().bytes())
    assert wave is not None and abs(len(wave) - 80_000) < 3000
    spectrum = np.abs(np.fft.rfft(wave[8000:72_000]))
    assert abs(spectrum.argmax() / 4 - 440) < 2
    assert decode_soundtrack(film().bytes()) is None
    with pytest.raises(MediaError):
        decode_soundtrack(b"no film at all")


@pytest.mark.parametrize("family", [f for f in SEES if f.media.audio_in_video], ids=lambda f: f.name)
def test_frames_of_a_heard_film_have_the_tokens_that_its_sound_leaves(family) -> None:
    free = features(processor_of(family, use_audio_in_video=True), heard_film())
    assert free.sound is not None
    most = free.n_tokens - 8
    made = features(processor_of(family, use_audio_in_video=True, max_tokens=most), heard_film())
    assert made.sound is not None and made.sound.n_tokens == free.sound.n_tokens
    assert free.sound.n_tokens < made.n_tokens <= most
    with pytest.raises(MediaError, match=r"more than media.max_tokens"):
        features(processor_of(family, use_audio_in_video=True, max_tokens=free.sound.n_tokens), heard_film())


@pytest.mark.parametrize("family", [f for f in SEES if f.media.audio_in_video], ids=lambda f: f.name)
def test_a_heard_film_has_the_tokens_and_positions_of_transformers(family, tmp_path: Path) -> None:
    from relax_sdk import Message, Text

    processor = processor_of(family, use_audio_in_video=True)
    clip, silent = heard_film(), film(8, 64)
    message = Message("user", (Text("look"), clip, Text("and tell"), Image.from_array(np.zeros((64, 64, 3), np.uint8))))
    rendered = processor.render([message])
    made = [features(processor, m) for m in rendered.media]
    assert made[0].sound is not None and features(processor, silent).sound is None
    ids = processor.expand(rendered.ids, made)
    assert processor.collapse(ids) == rendered.ids
    runs = [kind for kind, _, _ in processor.placeholders(ids)]
    assert len(runs) > 6 and {"video", "audio", "image"} == set(runs)  # the sound is between the frames
    model = family.model_class().from_pretrained(processor.path)
    expected = model.get_rope_index(
        torch.tensor([ids]),
        image_grid_thw=torch.tensor([made[1].grid]),
        video_grid_thw=torch.tensor([made[0].grid]),
        attention_mask=torch.ones(1, len(ids)),
        use_audio_in_video=True,
        audio_seqlens=torch.tensor([made[0].sound.tensor.shape[1]]),
        second_per_grids=torch.tensor([made[0].second_per_grid]),
    )[0][:, 0]
    np.testing.assert_allclose(processor.positions(ids, made), expected.numpy(), atol=1e-4)
    shared = SharedFeatures(tmp_path, "x")
    shared.put(clip.ref.sha256, made[0])
    again = shared.get(clip.ref.sha256, "video")
    assert again is not None and again.n_tokens == made[0].n_tokens and again.sound is not None
    np.testing.assert_array_equal(again.sound.tensor, made[0].sound.tensor)

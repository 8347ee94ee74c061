"""Films as Qwen3-VL's own processor samples, resizes and times them, and sounds as Qwen2.5-Omni's own prepares them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from relax_server.models.catalog import resolve_model
from relax_server.models.families.qwen2_5_omni import audio_tokens
from relax_server.models.media_features import fit_film
from relax_server.models.processor import Processor
from relax_server.models.processor_config import FrameSampling, ProcessorConfig

from relax_sdk import Audio, MediaError, Video
from relax_sdk.media import decode_audio


@pytest.mark.parametrize("fps", [None, 2, 60])
@pytest.mark.parametrize(("count", "rate"), [(2, 8.0), (7, 3.0), (40, 8.0), (301, 29.97)])
def test_frames_are_those_that_qwen3_vl_takes(count: int, rate: float, fps: float | None) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    theirs = Qwen3VLVideoProcessor.sample_frames(
        SimpleNamespace(fps=None, min_frames=4, max_frames=16), SimpleNamespace(total_num_frames=count, fps=rate), fps=fps
    )
    ours = FrameSampling(True, fps, None, min_frames=4, max_frames=16, temporal=2, evenly=True)(count, rate)
    assert list(ours) == list(dict.fromkeys(theirs.tolist()))  # of a shorter film, theirs takes frames twice where fps is None


@pytest.mark.parametrize("n", [2, 3, 8, 33])
@pytest.mark.parametrize(("height", "width"), [(20, 500), (64, 64), (480, 640), (1080, 1920)])
@pytest.mark.parametrize("most", [40_000, 10**6])
def test_frames_have_the_size_that_qwen3_vl_gives_them(n: int, height: int, width: int, most: int) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    settings = ProcessorConfig.load(resolve_model("relax/tiny-qwen3-vl")).video
    wanted = smart_resize(n, height, width, temporal_factor=2, factor=32, min_pixels=settings.min_pixels, max_pixels=most)
    assert fit_film(n, height, width, settings, most) == wanted


def test_a_film_is_told_the_times_that_qwen3_vl_tells() -> None:
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    from relax_sdk import Message, Text

    processor = Processor.load(resolve_model("relax/tiny-qwen3-vl"))
    film = Video.from_array(np.zeros((7, 64, 64, 3), np.uint8), fps=3)
    item = processor.features(film.bytes(), film.ref.sha256, "video")
    wanted = Qwen3VLProcessor._calculate_timestamps(SimpleNamespace(), list(range(7)), 3.0, 2)
    assert item.times == pytest.approx(wanted)
    text = processor.decode(processor.expand(processor.render([Message("user", (Text("see"), film))]).ids, [item]))
    pads = "<|video_pad|>" * (item.n_tokens // 4)
    told = "".join(f"<{t:.1f} seconds><|vision_start|>{pads}<|vision_end|>" for t in wanted)
    assert f"see<|vision_start|>{told}<|vision_end|><|im_end|>" in text


@pytest.mark.parametrize("samples", [100, 481, 16_000, 16_100, 37_001])
def test_sounds_are_those_that_qwen2_5_omni_hears(samples: int) -> None:
    from transformers import WhisperFeatureExtractor

    processor = Processor.load(resolve_model("relax/tiny-qwen2.5-omni"))
    wave = np.random.default_rng(0).normal(0, 0.2, samples).clip(-1, 1).astype(np.float32)
    sound = Audio.from_array(wave)
    wave = decode_audio(sound.bytes())  # 16 bits were kept
    item = processor.features(sound.bytes(), sound.ref.sha256, "audio")
    told = processor._extract.outline(sound.bytes(), sound.ref)
    theirs = WhisperFeatureExtractor(feature_size=128)(
        wave, sampling_rate=16_000, padding="max_length", return_attention_mask=True, return_tensors="np"
    )
    n = int(theirs["attention_mask"].sum())
    assert item.n_tokens == told.n_tokens == audio_tokens(item.tensor.shape[1]) > 0
    assert item.tensor.shape[1] == max(n, 3)
    np.testing.assert_allclose(item.tensor[:, :n], theirs["input_features"][0][:, :n], atol=2e-4)


def test_a_sound_that_qwen2_5_omni_would_cut_is_refused() -> None:
    processor = Processor.load(resolve_model("relax/tiny-qwen2.5-omni"))
    sound = Audio.from_array(np.zeros(31 * 16_000))
    with pytest.raises(MediaError, match=r"31\.0 s: the model's processor takes 30 s at most"):
        processor.features(sound.bytes(), sound.ref.sha256, "audio")

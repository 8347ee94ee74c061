"""Files of all kinds become the features that the model's own processor makes of them, and as many tokens."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
from relax_server.models.catalog import resolve_model
from relax_server.models.families.qwen3_omni import QWEN3_OMNI
from relax_server.models.media_features import NO_TENSOR, FeatureExtractor, patchify
from relax_server.models.processor import Processor
from relax_server.models.processor_config import FrameSampling, ProcessorConfig

from benchmarks.media_files import make_files
from benchmarks.media_table import HUB, compare, failures, make_folders, reference, with_pillow
from benchmarks.peers import processors
from relax_sdk import Audio, ConfigError, Image, MediaError, Video
from relax_sdk.measuring import sound_length
from relax_sdk.media import decode_audio, decode_video
from relax_sdk.probing import probe

PYTHON = os.environ.get("RELAX_PROCESSORS_PYTHON", "")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    found = make_files(tmp_path_factory.mktemp("media") / "files")
    assert len(found) >= 40
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_folders(tmp_path_factory.mktemp("folders"))


@pytest.mark.parametrize("name", ["tiny", "nested"])
def test_pictures_and_sounds_are_those_of_transformers_without_torchvision(name, files, folders, tmp_path):
    folder = with_pillow(folders[name], tmp_path / "pillow")
    still = [file for file in files if not file.name.startswith("video-")]
    rows = compare(folder, still, processors.table(folder, still, "pil"))
    assert len(rows) == len(still) and failures(rows) == []


@pytest.mark.parametrize("name", ["tiny", "hub", "counted"])
def test_an_outline_tells_what_the_features_are_without_their_tensor(name, files, folders):
    """Also of sounds whose length at the model's rate is not whole, and of films that only PyAV opens."""
    extract = FeatureExtractor(ProcessorConfig.load(folders[name]), QWEN3_OMNI.media)
    for file in files:
        data, kind = file.read_bytes(), file.name.split("-", 1)[0]
        ref = probe(data, kind)  # type: ignore[arg-type]
        features = dataclasses.replace(extract(data, ref.kind), tensor=NO_TENSOR)
        assert extract.outline(data, ref) == features, file.name


@pytest.mark.parametrize("rate", [7999, 11_025, 16_000, 44_100, 96_000])
def test_the_length_of_a_sound_is_told_to_the_sample(rate):
    rng = np.random.default_rng(rate)
    for n in (1, 2, rate // 7, rate + 1, *rng.integers(1, 3 * rate, 20)):
        soundfile.write(file := io.BytesIO(), np.zeros(n, np.int16), rate, format="WAV")
        assert sound_length(file.getvalue()) == len(decode_audio(file.getvalue())), n


@pytest.mark.nightly
@pytest.mark.skipif(not PYTHON, reason="needs transformers with torchvision: make .venv-processors, RELAX_PROCESSORS_PYTHON=…")
@pytest.mark.parametrize("name", ["tiny", "hub", "nested", "counted"])
def test_all_files_are_those_of_transformers_with_torchvision(name, files, folders):
    rows = compare(folders[name], files, reference(PYTHON, folders[name], files[0].parent))
    assert len(rows) == len(files) and failures(rows) == []


def test_the_filter_is_the_one_that_the_folder_names(files, folders, tmp_path):
    """Pillow's and torchvision's agree in nearly all pixels and not in all: rounding, and the order of the two directions."""
    pillow = FeatureExtractor(ProcessorConfig.load(with_pillow(folders["tiny"], tmp_path / "pillow")), QWEN3_OMNI.media)
    tensors = FeatureExtractor(ProcessorConfig.load(folders["tiny"]), QWEN3_OMNI.media)
    data = (files[0].parent / "image-rgb.jpg").read_bytes()
    a, b = pillow(data, "image"), tensors(data, "image")
    assert a.grid == b.grid
    levels = np.abs(a.tensor - b.tensor) * 127.5
    assert levels.max() > 1.5 and (levels < 2.5).mean() > 0.98


def test_frames_of_a_film_are_resized_as_torchvision_does_it(folders, tmp_path):
    """Transformers' processors of films have no other way; `torch.nn.functional.interpolate` is what torchvision calls."""
    import torch
    from torch.nn.functional import interpolate

    scene = np.random.default_rng(0).integers(0, 255, (4, 50, 90, 3), dtype=np.uint8)
    film = Video.from_array(scene, fps=4)
    frames, _ = decode_video(film.bytes())
    for name in ("tiny", "nested"):
        config = ProcessorConfig.load(with_pillow(folders[name], tmp_path / name))  # of images, which films do not follow
        features = FeatureExtractor(config, QWEN3_OMNI.media)(film.bytes(), "video")
        settings = config.video
        assert features.grid is not None
        size = features.grid[1] * settings.patch, features.grid[2] * settings.patch
        assert size != frames.shape[1:3]
        mode = {2: "bilinear", 3: "bicubic"}[settings.resample]
        pixels = torch.from_numpy(frames).permute(0, 3, 1, 2).contiguous()
        resized = interpolate(pixels, size=size, mode=mode, antialias=True, align_corners=False).permute(0, 2, 3, 1).numpy()
        normal = (resized / np.float32(255) - np.float32(settings.mean)) / np.float32(settings.std)
        expected, grid = patchify(normal.astype(np.float32), settings.patch, settings.merge, settings.temporal)
        assert grid == features.grid
        np.testing.assert_allclose(features.tensor, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "tokens"), [((5, 900), 14), ((900, 5), 14), ((1, 1), 1), ((10, 1990), 15), ((64, 64), 4), ((1, 200), 15)]
)
def test_tokens_of_pictures_of_extreme_shapes(shape, tokens):
    """As Qwen2-VL's `smart_resize` has them: a side that rounds to nothing does not count as one patch."""
    image = Image.from_array(np.zeros((*shape, 3), np.uint8))
    processor = Processor.load(resolve_model("relax/tiny-omni"))
    assert processor.features(image.bytes(), image.ref.sha256, "image").n_tokens == tokens


@pytest.mark.parametrize(("seconds", "tokens"), [(0.001, 1), (0.0126, 1), (0.05, 1), (0.1, 2), (1.0, 13)])
def test_tokens_of_short_sounds(seconds, tokens):
    sound = Audio.from_array(0.1 * np.sin(np.arange(max(1, round(16_000 * seconds))) / 7))
    processor = Processor.load(resolve_model("relax/tiny-omni"))
    assert processor.features(sound.bytes(), sound.ref.sha256, "audio").n_tokens == tokens


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, 12),
        ({"do_sample_frames": False}, 12),
        ({"size": dict(shortest_edge=128 * 32 * 32, longest_edge=768 * 32 * 32)}, 432),
        ({"fps": 1, "min_frames": 2}, 4),
        ({"fps": None, "num_frames": 4}, 8),
        ({"processor_class": "Qwen3OmniMoeProcessor"}, 432),
    ],
    ids=["as built", "all frames", "larger frames", "fewer a second", "a number of them", "the omni class"],
)
def test_tokens_of_a_film_follow_the_folder(settings, tokens, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("relax/tiny-omni"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    own = folder / "video_preprocessor_config.json"
    own.write_text(json.dumps(json.loads(own.read_text()) | settings))
    film = Video.from_array(np.zeros((6, 64, 64, 3), np.uint8), fps=4)
    features = Processor.load(folder).features(film.bytes(), film.ref.sha256, "video")
    assert features.n_tokens == tokens


# ------------------------------------------------------------------------------------------------------ frame sampling

ALL = dict(enabled=True, fps=None, num_frames=None, min_frames=4, max_frames=768, temporal=2)


@pytest.mark.parametrize(
    ("settings", "count", "fps", "expected"),
    [
        (dict(enabled=False, fps=1.0), 5, 25.0, [0, 1, 2, 3, 4]),
        ({}, 5, 25.0, [0, 1, 2, 3, 4]),
        (dict(fps=2.0), 50, 25.0, [0, 12, 25, 37]),
        (dict(fps=2.0), 100, 25.0, [0, 12, 25, 37, 50, 62, 75, 87]),
        (dict(fps=2.0), 7, 25.0, [0, 1, 3, 5]),
        (dict(fps=60.0, max_frames=4), 40, 25.0, [0, 10, 20, 30]),
        (dict(fps=60.0), 7, 25.0, [0, 1, 2, 3, 4, 5]),
        (dict(fps=2.0), 1, 25.0, [0]),
        (dict(num_frames=4), 10, 0.0, [0, 2, 5, 7]),
    ],
)
def test_frames_are_sampled_as_the_processor_does(settings, count, fps, expected):
    assert list(FrameSampling(**(ALL | settings))(count, fps)) == expected


def test_a_film_with_fewer_frames_than_the_processor_takes_is_refused():
    with pytest.raises(MediaError, match="takes 16 frames of a film and this one has 7"):
        FrameSampling(**(ALL | dict(num_frames=16)))(7, 4.0)


def test_a_film_that_does_not_state_its_frames_per_second_is_refused_where_they_count():
    with pytest.raises(MediaError, match="does not state its frames per second"):
        FrameSampling(**(ALL | dict(fps=2.0)))(7, 0.0)


# -------------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"image_processor_type": "CLIPImageProcessor"},
            "'CLIPImageProcessor' is not known here; known: Qwen2VL",
        ),
        ({"video_processor_type": "Glm4vVideoProcessor"}, "video_processor_type = 'Glm4vVideoProcessor'"),
        ({"dither": 0.1}, "engine and trainer would not hear the same"),
        ({"fps": 2, "num_frames": 4}, "set one of them"),
        ({"fps": -1}, r"fps = -1 .* above 0"),
        ({"resample": 4}, r"resample = 4; allowed for torchvision's filters: .*3 \(bicubic\)"),
        ({"size": {"height": 4, "width": 4}, "min_pixels": None, "max_pixels": None}, "shortest_edge and longest_edge"),
        ({"patch_size": 14}, "the model's patch_size is 16 and its processor configuration's patch_size is 14"),
        ({"feature_size": 80}, "the model's num_mel_bins is 128 and its processor configuration's feature_size is 80"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(changes, why, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("relax/tiny-omni"), folder, ignore=shutil.ignore_patterns("*.safetensors", "video_*"))
    (folder / "preprocessor_config.json").write_text(json.dumps(HUB | {"processor_class": None} | changes))
    with pytest.raises(ConfigError, match=why):
        Processor.load(folder)


def test_a_folder_without_processor_configuration_is_refused(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("relax/tiny-omni"), folder, ignore=shutil.ignore_patterns("*.safetensors", "*processor*"))
    with pytest.raises(ConfigError, match=r"no preprocessor_config\.json and no processor_config\.json"):
        Processor.load(folder)

"""What the model saw of media: the same samples and pixels that its processor makes, by a process that may die."""

import hashlib
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image as PILImage
from relax_server.models.families.qwen3_omni import QWEN3_OMNI
from relax_server.models.media_features import FeatureExtractor, patchify
from relax_server.models.processor_config import ProcessorConfig
from relax_server.viewer import seen
from relax_server.viewer.bundle import write_bundle
from relax_server.viewer.folders import FolderSource
from relax_server.viewer.journals import Journals
from relax_server.viewer.pages import File, Pages
from viewed_runs import make_run

from relax_sdk.errors import MediaError
from relax_sdk.media import Audio, Image, MediaRef, MediaStore, Video, decode_audio


def test_what_is_shown_is_what_the_processor_makes(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    extract = FeatureExtractor(config := ProcessorConfig.load(folder / "hf"), QWEN3_OMNI.media)
    rng = np.random.default_rng(0)
    items = [
        Audio.from_array(np.sin(np.arange(9000, dtype=np.float32) / 9), 8000),
        Image.from_array(rng.integers(0, 255, (50, 70, 3), np.uint8)),
        Video.from_array(rng.integers(0, 255, (12, 48, 64, 3), np.uint8), fps=4.0),
    ]
    store, source, pages = MediaStore(folder / "media"), FolderSource([tmp_path], Journals()), Pages()

    def get(path: str) -> bytes:
        answer = pages.answer(source, path.removeprefix("data/").split("/"), {})
        assert isinstance(answer, File)
        return answer.path.read_bytes()

    for item in items:
        ref, data = store.put(item), item.bytes()
        told = pages.answer(source, ["runs", "tone", "seen", f"{ref.sha256}.json"], {})
        assert isinstance(told, dict) and told["kind"] == ref.kind
        features = extract(data, ref.kind)
        assert told["tokens"] == features.n_tokens > 0
        if ref.kind == "audio":
            wave, rate = soundfile.read(io.BytesIO(get(told["wave"])), dtype="float32")
            assert (rate, told["samples"]) == (16_000, len(wave))
            np.testing.assert_allclose(wave, decode_audio(data), atol=1e-4)
            assert told["features"]["shape"] == list(features.tensor.shape)
            continue
        pixels = np.stack([np.asarray(PILImage.open(io.BytesIO(get(frame)))) for frame in told["frames"]])
        settings = config.image if ref.kind == "image" else config.video
        mean, std = (np.asarray(values, np.float32) for values in (settings.mean, settings.std))
        normal = (pixels.astype(np.float32) * np.float32(settings.scale) - mean) / std
        tensor, grid = patchify(normal, settings.patch, settings.merge, settings.temporal)
        assert grid == features.grid
        np.testing.assert_array_equal(tensor, features.tensor)
        if ref.kind == "video":
            assert len(told["times"]) == len(told["frames"]) and told["times"][0] == 0
    pages.close()


def test_an_item_that_kills_its_process_is_told_and_the_others_go_on(tmp_path: Path, monkeypatch) -> None:
    folder = make_run(tmp_path)
    bad, store = MediaRef("b" * 64, "image/png", 1), MediaStore(folder / "media")
    good = store.put(Image.from_array(np.zeros((8, 8), np.uint8)))
    dying = tmp_path / "python"
    script = ["#!/bin/sh", "read -r line", f'case "$line" in *{"b" * 64}*) kill -9 $$;; esac']
    dying.write_text("\n".join([*script, f'echo "$line" | {sys.executable} "$@"', ""]))
    dying.chmod(0o755)
    monkeypatch.setattr(seen.sys, "executable", str(dying))
    (tmp_path / "out").mkdir()
    seen.make([(bad, tmp_path / "none"), (good, store.path(good))], folder / "hf", tmp_path / "out")
    assert "ended with code -9" in (tmp_path / "out" / f"{'b' * 64}.json").read_text()
    assert (tmp_path / "out" / f"{good.sha256}-0.png").is_file()


def test_what_could_not_be_made_is_made_when_it_is_asked_for_again(tmp_path: Path, monkeypatch) -> None:
    folder = make_run(tmp_path)
    ref = MediaStore(folder / "media").put(Image.from_array(np.zeros((8, 8), np.uint8)))
    source, pages = FolderSource([tmp_path], Journals()), Pages()
    path = ["runs", "tone", "seen", f"{ref.sha256}.json"]
    with monkeypatch.context() as patched:
        patched.setattr(seen.sys, "executable", "/bin/false")
        with pytest.raises(MediaError, match="ended with code 1"):
            pages.answer(source, path, {})
    told = pages.answer(source, path, {})
    assert isinstance(told, dict) and len(told["frames"]) == 1
    pages.close()


def test_damaged_media_and_unknown_ones_are_told(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    source, pages = FolderSource([tmp_path], Journals()), Pages()
    store = MediaStore(folder / "media")
    good = Image.from_array(np.zeros((64, 64), np.uint8)).bytes()
    data = good[: len(good) // 2]
    sha256 = hashlib.sha256(data).hexdigest()
    path = store.path(MediaRef(sha256, "image/png", len(data)))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    errors = []
    for name in (sha256, "0" * 64, "../config"):
        try:
            pages.answer(source, ["runs", "tone", "seen", f"{name}.json"], {})
        except Exception as error:
            errors.append(str(error))
    assert "damaged image" in errors[0] and errors[1].startswith("no media") and errors[2].startswith("no media")
    pages.close()


def test_a_site_holds_what_the_model_saw(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", groups=1)
    (page := tmp_path / "page").mkdir()
    (page / "index.html").write_text("")
    write_bundle([tmp_path / "runs"], tmp_path / "site", None, page)
    files = list((tmp_path / "site/data/runs/tone/seen").iterdir())
    assert sorted(file.suffix for file in files if file.suffix != ".png") == [".json"] * 3 + [".wav"]
    import orjson

    for file in files:
        if file.suffix == ".json":
            told = orjson.loads(file.read_bytes())
            for url in told.get("frames") or [told["wave"]]:
                assert (tmp_path / "site" / url).is_file()


def test_a_run_without_a_model_of_its_own_shows_what_the_one_of_its_settings_saw(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs")
    (folder / "hf").rename(model := tmp_path / "a model")
    config = json.loads((folder / "config.json").read_text())
    ref = MediaStore(folder / "media").put(Image.from_array(np.zeros((50, 70, 3), np.uint8)))
    for media, size in (({}, (64, 64)), ({"max_tokens": 2}, (32, 32))):
        (folder / "config.json").write_text(json.dumps(config | {"model": str(model), "media": media}))
        pages = Pages()
        told = pages.answer(FolderSource([tmp_path / "runs"], Journals()), ["runs", "tone", "seen", f"{ref.sha256}.json"], {})
        assert isinstance(told, dict) and (told["height"], told["width"]) == size
        pages.close()

"""Media features in shared memory: read instead of prepared again, bounded, and never depended on."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
from relax_server.models.catalog import resolve_model
from relax_server.models.media_features import MediaFeatures
from relax_server.models.processor import Processor
from relax_server.models.shared_features import SharedFeatures

from relax_sdk import Audio, Image, Video


def media(kind: str):
    rng = np.random.default_rng(0)
    if kind == "image":
        return Image.from_array(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8))
    if kind == "video":
        return Video.from_array(rng.integers(0, 255, (5, 32, 32, 3), dtype=np.uint8))
    return Audio.from_array(0.1 * rng.standard_normal(8000))


def features(n: int = 4) -> MediaFeatures:
    return MediaFeatures("image", np.full((n, 3), n, np.float32), n, (1, 2, n))


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
def test_another_process_reads_what_the_first_prepared(tmp_path, kind, monkeypatch):
    path, item = resolve_model("relax/tiny-omni"), media(kind)
    first, second = Processor.load(path, tmp_path), Processor.load(path, tmp_path)
    made = first.features(item.bytes(), item.ref.sha256, item.kind)
    monkeypatch.setattr(second, "_extract", lambda *_: pytest.fail("prepared again"))
    read = second.features(item.bytes(), item.ref.sha256, item.kind)
    np.testing.assert_array_equal(read.tensor, made.tensor)
    assert dataclasses.replace(read, tensor=made.tensor) == made


def test_processors_of_other_settings_prepare_their_own(tmp_path):
    """A reference or a teacher may have another model folder than the policy."""
    path, item = resolve_model("relax/tiny-omni"), media("image")
    other = tmp_path / "other"
    shutil.copytree(path, other)
    settings = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps(settings | {"image_mean": [0.1, 0.2, 0.3]}))
    shared = tmp_path / "shared"
    shared.mkdir()
    made = [Processor.load(p, shared).features(item.bytes(), item.ref.sha256, item.kind) for p in (path, other)]
    alone = Processor.load(other).features(item.bytes(), item.ref.sha256, item.kind)
    np.testing.assert_array_equal(made[1].tensor, alone.tensor)
    assert not np.array_equal(made[0].tensor, made[1].tensor)


def test_what_is_missing_or_damaged_is_not_there(tmp_path):
    shared = SharedFeatures(tmp_path, "s")
    assert shared.get("a", "image") is None
    shared.put("a", features())
    assert shared.get("a", "audio") is None
    (tmp_path / "image-a-s").write_bytes(b"\x00" * 20)
    assert shared.get("a", "image") is None


def test_the_oldest_go_when_the_bound_is_reached(tmp_path):
    shared = SharedFeatures(tmp_path, "s", max_bytes=3 * features().tensor.nbytes)
    for name in "abcde":
        shared.put(name, features())
    assert [name for name in "abcde" if shared.get(name, "image")] == ["c", "d", "e"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["image-c-s", "image-d-s", "image-e-s"]


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    shared = SharedFeatures(tmp_path / "file" / "folder", "s")
    shared.put("a", features())
    assert shared.get("a", "image") is None

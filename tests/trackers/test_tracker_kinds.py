"""Each tracker that ships, by what it leaves: files of TensorBoard and W&B, a database of MLflow, a page for Prometheus."""

from __future__ import annotations

import asyncio
import io
import json
import struct
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as PILImage
from relax_server.trackers import TrackedRun, Trackers, delivery, make_trackers, samples, tensorboard_media
from relax_server.trackers.base import End
from relax_server.trackers.mlflow import MlflowTracker
from relax_server.trackers.prometheus import PrometheusTracker
from relax_server.trackers.samples import SampleAnswer, sample_answers
from relax_server.trackers.tensorboard import TensorBoardTracker
from relax_server.trackers.wandb import WandbTracker

import relax_sdk as relax
from relax_sdk.config import RunConfig, TrackingConfig
from relax_sdk.media import MediaStore

SAMPLES = [{"which": "best", "task": 3, "asked": "A or B?", "answer": "`B`", "reward": "0.500", "media": []}]
Play = Callable[..., None]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Shows steps of a run in one tracker; the run's folder is `tone`."""
    monkeypatch.setattr(
        delivery, "CLOSE_SECONDS", 120.0
    )  # their packages are imported first, which takes long on a busy machine
    folder = tmp_path / "tone"
    folder.mkdir()

    def play(name: str, *steps: int, resumed: bool = False, end: End = "done", **options: Any) -> None:
        run = TrackedRun(folder, RunConfig("tone-v0", steps=7), resumed)
        warnings: list[str] = []
        trackers = Trackers(make_trackers(TrackingConfig((name,), {name: options})), run, warnings.append)
        trackers.begin()
        for step in steps:
            row = {"step": step, "reward": step / 10, "rewards": {"env": step / 10}, "loss": float("inf")}
            trackers.row(row | ({"samples": SAMPLES} if step == 1 else {}))
        if len(steps) > 1:
            trackers.row({"step": steps[0], "reward": steps[0] / 10, "eval_reward": 0.75})
            trackers.warning(2, "reward does not rise")
        asyncio.run(trackers.close(end))
        assert warnings == []

    return play


def test_tensorboard_has_scalars_and_the_sample(play: Play, tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    play("tensorboard", 1, 2)
    events = EventAccumulator(str(tmp_path / "tone" / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [
        (1, pytest.approx(0.1)),
        (2, pytest.approx(0.2)),
    ]
    assert [(event.step, event.value) for event in events.Scalars("eval_reward")] == [(1, 0.75)]
    assert set(events.Tags()["scalars"]) == {"step", "reward", "rewards/env", "eval_reward"}
    (event,) = events.Tensors("sample/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert "reward 0.500" in text and "A or B?" in text and "'B'" in text
    assert events.SummaryMetadata("sample/text_summary").plugin_data.plugin_name == "text"


def stored(folder: Path, *media: relax.Image | relax.Audio | relax.Video) -> list[dict[str, str]]:
    """Media in the store of a run, as its samples name them."""
    store = MediaStore(folder / "media")
    return [{"kind": item.kind, "sha256": store.put(item).sha256} for item in media]


def test_tensorboard_shows_and_plays_what_the_model_was_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rng = np.random.default_rng(0)
    picture = relax.Image.from_array(rng.integers(0, 256, (8, 12, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    PILImage.new("RGB", (6, 4), "red").save(buffer, "WEBP")
    foreign = relax.Image.from_bytes(buffer.getvalue())
    sound = relax.Audio.from_array((rng.random(800) - 0.5).astype(np.float32), 8000)
    film = relax.Video.from_array(rng.integers(0, 256, (6, 16, 16, 3), dtype=np.uint8), 4.0)
    samples = [
        SAMPLES[0] | {"media": stored(tmp_path, picture, sound, film)},
        SAMPLES[0] | {"which": "worst", "media": [*stored(tmp_path, foreign), {"kind": "image", "sha256": "0" * 64}]},
    ]
    shown = sample_answers(samples, tmp_path / "media")
    assert [[item.ref.kind for item in sample.media] for sample in shown] == [["image", "audio", "video"], ["image"]]
    tracker = TensorBoardTracker()
    tracker.begin(TrackedRun(tmp_path, RunConfig("tone-v0")))
    for step in (1, 10, 50):
        tracker.samples(step, shown)
    monkeypatch.setattr(tensorboard_media, "ITEM_BYTES", len(sound.bytes()) - 1)
    tracker.samples(100, shown)
    tracker._left = 0
    tracker.samples(150, shown)
    tracker.close("done")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    best = events.Images("sample/best/image/0")
    assert [image.step for image in best] == [1, 50, 100] and best[0].encoded_image_string == picture.bytes()
    assert (best[0].width, best[0].height) == (12, 8)
    (played, again) = events.Audio("sample/best/audio/1")
    assert played.encoded_audio_string == sound.bytes() and (played.sample_rate, played.length_frames) == (8000, 800)
    assert again.step == 50, "it is too large then"
    with PILImage.open(io.BytesIO(events.Images("sample/best/video/2")[0].encoded_image_string)) as animation:
        assert animation.format == "GIF" and getattr(animation, "n_frames", 1) == 6 and animation.size == (16, 16)
    with PILImage.open(io.BytesIO(events.Images("sample/worst/image/0")[0].encoded_image_string)) as image:
        assert image.format == "PNG" and image.size == (6, 4)
    texts = [event.step for event in events.Tensors("sample/text_summary")]
    assert texts == [1, 10, 50, 100, 150]


def shown_media(folder: Path) -> list[SampleAnswer]:
    """A sample with media of each kind, which lie in a run folder."""
    rng = np.random.default_rng(0)
    picture = relax.Image.from_array(rng.integers(0, 256, (8, 12, 3), dtype=np.uint8))
    sound = relax.Audio.from_array((rng.random(800) - 0.5).astype(np.float32), 8000)
    film = relax.Video.from_array(rng.integers(0, 256, (6, 16, 16, 3), dtype=np.uint8), 4.0)
    return sample_answers([SAMPLES[0] | {"media": stored(folder, picture, sound, film)}], folder / "media")


def test_wandb_and_mlflow_get_the_very_media_of_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    shown, run = shown_media(tmp_path), TrackedRun(tmp_path, RunConfig("tone-v0"))
    given = sorted(item.path.read_bytes() for item in shown[0].media)
    for tracker in (WandbTracker(), MlflowTracker(f"sqlite:///{tmp_path / 'mlflow.db'}")):
        tracker.begin(run)
        tracker.samples(50, shown)
        tracker.samples(60, shown)  # texts alone
        with monkeypatch.context() as limits:
            limits.setattr(samples, "UPLOAD_BYTES", 10)
            tracker.samples(100, shown)
        tracker.close("done")
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    sent = [file for kind in ("images", "audio", "videos") for file in (folder / "files" / "media" / kind).rglob("*.*")]
    assert sorted(file.read_bytes() for file in sent) == given
    kept = [file for file in (tmp_path / "mlruns").rglob("samples/step_*/*")]
    assert sorted(file.read_bytes() for file in kept) == given


def wandb_records(folder: Path) -> list[Any]:
    """What W&B has written into a folder of an offline run: records in the log format of LevelDB, after 7 bytes of its own."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    (file,) = folder.glob("run-*.wandb")
    data, at, whole, records = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the end of a block that holds no header
            at += 32768 - at % 32768
            continue
        _, size, part = struct.unpack_from("<IHB", data, at)  # checksum, length, and 1: whole, 2: first, 3: middle, 4: last
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if part in (1, 4):
            records.append(Record.FromString(whole))
            whole = b""
    return records


def test_wandb_offline_keeps_figures_settings_and_the_id(play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    play("wandb", 1, 2, project="tones", tags=["test"])
    (first,) = (tmp_path / "tone" / "wandb").glob("offline-run-*")
    first = first.rename(tmp_path / "first")  # the other one would have its name if it began in the same second
    play("wandb", 3, resumed=True, project="tones", end="failed")
    (second,) = (tmp_path / "tone" / "wandb").glob("offline-run-*")
    rows, ids, ends, settings, alerts = [], set(), [], {}, []
    for folder in (first, second):
        for record in wandb_records(folder):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                items = record.history.item
                rows.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
            elif kind == "run":
                ids.add((record.run.project, record.run.display_name, record.run.run_id))
                settings |= {update.key: json.loads(update.value_json) for update in record.run.config.update}
            elif kind == "exit":
                ends.append(record.exit.exit_code)
            elif kind == "alert":
                alerts.append(record.alert.text)
    assert [(row["step"], row["reward"]) for row in rows if "reward" in row] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert [(row["step"], row["eval_reward"]) for row in rows if "eval_reward" in row] == [(1, 0.75)], "later than step 2"
    assert [row["rewards/env"] for row in rows if "rewards/env" in row] == [0.1, 0.2, 0.3]
    assert [row["step"] for row in rows if "sample/path" in row] == [1]
    noted = json.loads((tmp_path / "tone" / "trackers" / "wandb.json").read_text())
    assert ids == {("tones", "tone", noted["id"])}, "one run, though it was started twice"
    assert settings["env"] == "tone-v0" and settings["steps"] == 7
    assert ends == [0, 1] and alerts == ["step 2: reward does not rise"]


def test_mlflow_goes_on_with_its_run(play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)  # artifacts of a local store lie there
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    play("mlflow", 1, 2, tracking_uri=uri, experiment="tones", end="stopped")
    client = MlflowClient(tracking_uri=uri)
    (experiment,) = [found for found in client.search_experiments() if found.name == "tones"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "KILLED" and run.info.run_name == "tone"
    play("mlflow", 3, tracking_uri=uri, experiment="tones", resumed=True)
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "reward")
    assert sorted((metric.step, metric.value) for metric in history) == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "eval_reward")] == [1]
    assert run.data.metrics["rewards/env"] == 0.3
    assert run.data.params["env"] == "tone-v0" and run.data.params["optimizer.lr"]
    assert run.data.tags["relax.warning"] == "step 2: reward does not rise"
    assert [file.path for file in client.list_artifacts(run.info.run_id, "samples")] == ["samples/step_000001.md"]


def test_prometheus_serves_the_newest_figures_while_the_run_goes_on(tmp_path: Path):
    tracker = PrometheusTracker(port=0)
    run = TrackedRun(tmp_path, RunConfig("tone-v0"))
    tracker.begin(run)
    url = json.loads((tmp_path / "trackers" / "prometheus.json").read_text())["url"]

    def lines() -> list[str]:
        page = urllib.request.urlopen(url, timeout=10).read().decode().replace(f'{{env="tone-v0",run="{run.name}"}}', "")
        return [line for line in page.splitlines() if not line.startswith("#")]

    assert lines() == ["relax_run_warnings_total 0.0"]
    tracker.figures(1, {"reward": 0.1, "rewards/env": 0.2, "failures/EnvError": 3})
    tracker.figures(2, {"reward": 0.2})
    tracker.figures(1, {"eval_reward": 0.75})  # held out, of the step before
    tracker.warning(2, "reward does not rise")
    expected = ["relax_run_reward 0.2", "relax_run_step 2.0", "relax_run_eval_reward 0.75", "relax_run_warnings_total 1.0"]
    assert sorted(lines()) == sorted(expected), "what only an older step had is no figure of this one"
    tracker.figures(3, {"rewards/env": 0.5, "rewards/style": 1.0})
    tracker.figures(3, {"eval_reward": 0.8})
    labels = f'{{env="tone-v0",name="env",run="{run.name}"}}'
    assert f"relax_run_rewards{labels} 0.5" in lines() and "relax_run_eval_reward 0.8" in lines()
    tracker.close("done")
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=10)

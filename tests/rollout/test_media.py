"""Media on their way through episodes: once decoded, in any turn, and what happens to bad ones."""

import dataclasses
import io
import tempfile
from collections import Counter
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
from PIL import Image as PILImage
from relax_server.models import media_features
from relax_server.models.catalog import resolve_model
from relax_server.models.media_features import NO_TENSOR
from relax_server.models.processor import Processor
from relax_server.rollout import RolloutWorker
from relax_server.rollout.media import MediaIntake
from relax_server.rollout.threads import CallThreads
from relax_server.training.batch import make_batch, read_features

import relax_sdk as relax
from relax_sdk import Audio, EnvSpec, Image, RunConfig, Status, Video
from relax_sdk.media import MediaStore
from relax_sdk.trajectory import encode_group

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 255, (64, 96, 3), dtype=np.uint8)
WAVE = (0.3 * np.sin(np.arange(16_000) / 9)).astype(np.float32)
FRAMES = RNG.integers(0, 255, (8, 64, 64, 3), dtype=np.uint8)


class Shows(relax.Env):
    """Shows `show[turn]()`, which is made when it is asked for, and ends after the last."""

    modalities = {"image", "audio", "video"}

    def __init__(self, show):
        self.show, self.turn = show, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.show[0](), {}

    def step(self, action):
        self.turn += 1
        last = self.turn == len(self.show)
        return None if last else self.show[self.turn](), 1.0, last, False, {}


def animation():
    """The bytes of a GIF of eight pictures, which is an image and a film."""
    buffer = io.BytesIO()
    first, *rest = (PILImage.fromarray(pixels) for pixels in FRAMES)
    first.save(buffer, format="GIF", save_all=True, append_images=rest, duration=250)
    return buffer.getvalue()


def cut_video():
    """An MP4 with its index in front and 60 % of its pictures: the header reads well, the frames do not."""
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        with av.open(file.name, "w", options={"movflags": "faststart"}) as container:
            stream = container.add_stream("libx264", rate=4)
            stream.height = stream.width = 64
            stream.pix_fmt = "yuv420p"
            for pixels in FRAMES:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            container.mux(stream.encode())
        data = Path(file.name).read_bytes()
    return Video.from_bytes(data[: int(len(data) * 0.6)])


def header_only():
    buffer = io.BytesIO()
    soundfile.write(buffer, WAVE[:0], 16_000, format="WAV")
    return Audio.from_bytes(buffer.getvalue())


def nan_file():
    buffer = io.BytesIO()
    wave = WAVE.copy()
    wave[100:110] = np.nan
    soundfile.write(buffer, wave, 16_000, format="WAV", subtype="FLOAT")
    return Audio.from_bytes(buffer.getvalue())


def huge_image():
    buffer = io.BytesIO()
    PILImage.new("1", (12_000, 12_000)).save(buffer, format="PNG")
    return Image.from_bytes(buffer.getvalue())


def cut_image():
    buffer = io.BytesIO()
    PILImage.fromarray(PIXELS).save(buffer, format="PNG")
    return Image.from_bytes(buffer.getvalue()[:-2000])


BAD = {
    "missing file": (lambda: Image.from_file("/nowhere/cat.png"), r"/nowhere/cat\.png: cannot be read"),
    "huge image": (huge_image, "12000x12000 pixels, more than the limit"),
    "truncated image": (cut_image, "damaged image"),
    "truncated mp4": (cut_video, "truncated video|damaged video|no frame"),
    "header-only wav": (header_only, "no samples"),
    "NaN samples": (lambda: Audio.from_array(np.full(100, np.nan)), "100 of 100 samples are NaN"),
    "NaN samples in a file": (nan_file, "10 samples that are NaN"),
    "text for an image": (lambda: Image.from_bytes(b"hello"), "not a readable image"),
    "only a reference": (lambda: Image.from_array(PIXELS + 1).to_ref(), "carries no bytes"),
}


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("name", BAD)
async def test_bad_media_fail_the_episode_with_the_place_and_the_cause(bench, name, turn):
    make, expected = BAD[name]
    show = [lambda: "look", make][1 - turn :] if turn else [make]
    made = bench(Shows, kwargs={"show": show}, max_retries=0)
    trajectory = (await made.group(5)).trajectories[0]
    assert trajectory.status is Status.FAILED
    stage = "step" if turn else "reset"
    with pytest.raises(AssertionError, match=rf"^test-v0, train task 5, sample 0, turn {turn}, {stage}: .*({expected})"):
        raise AssertionError(trajectory.error)
    assert made.worker.stats().failures == {"MediaError": 1}


async def test_the_failure_policy_is_followed_for_bad_media(bench):
    made = bench(Shows, kwargs={"show": [cut_video]}, max_retries=2, group_size=2)
    result = await made.group()
    assert result.group is None and result.failures == {"MediaError": 6}


async def test_what_is_stored_is_counted_without_being_decoded_for_its_features(tmp_path, monkeypatch):
    """Sixteen frames of 4096 x 4096 took 1.9 GiB of the process that only counts their tokens."""
    processor, threads = Processor.load(resolve_model("relax/tiny-omni")), CallThreads("media", 2)
    intake = MediaIntake(MediaStore(tmp_path), processor, threads, 60.0)
    media = [Image.from_array(PIXELS), Audio.from_array(WAVE), Video.from_array(FRAMES)]
    with monkeypatch.context() as patched:
        for name in ("decode_image", "decode_audio", "decode_video"):
            patched.delattr(media_features, name)
        taken = await intake.take(media)
    threads.close()
    for item, prepared in zip(media, taken, strict=True):
        features = processor.features(item.bytes(), item.ref.sha256, item.ref.kind)
        assert prepared.features == dataclasses.replace(features, tensor=NO_TENSOR)


async def test_media_in_every_turn_reach_engine_store_and_trajectory(bench, processor):
    show = [
        lambda: [Image.from_array(PIXELS), "what?"],
        lambda: ["and", Audio.from_array(WAVE), "and", Image.from_array(255 - PIXELS)],
        lambda: [Video.from_array(FRAMES), Audio.from_array(WAVE)],
    ]
    made = bench(Shows, kwargs={"show": show})
    result = await made.group()
    trajectory = result.trajectories[0]
    assert trajectory.status is Status.COMPLETED, trajectory.error
    kinds = [["image"], ["image", "audio", "image"], ["image", "audio", "image", "video", "audio"]]
    assert [[m.kind for m in turn.media] for turn in trajectory.turns] == kinds
    assert [[item.ref.kind for item in request.media] for request in made.engine.requests] == kinds
    (sample,) = trajectory.samples()
    assert [kind for kind, _, _ in processor.placeholders(sample.ids)] == kinds[-1]
    for ref in sample.media:
        assert made.store.get(ref) and processor.features(made.store.get(ref), ref.sha256, ref.kind)
    urls = [
        p[p["type"]]["url"]
        for m in trajectory.messages
        if isinstance(m["content"], list)
        for p in m["content"]
        if "url" in p["type"]
    ]
    assert urls == [f"relax-media:{ref.sha256}" for ref in sample.media]
    assert len(encode_group(result.group)) < 20_000, "a trajectory holds references, not bytes"


async def test_the_same_bytes_are_an_image_and_a_film_in_one_episode(bench, processor):
    show = [
        lambda: [Image.from_bytes(animation()), "and moving:", Video.from_bytes(animation())],
        lambda: [Video.from_bytes(animation()), Image.from_bytes(animation())],
    ]
    made = bench(Shows, kwargs={"show": show})
    trajectory = (await made.group()).trajectories[0]
    assert trajectory.status is Status.COMPLETED, trajectory.error
    (sample,) = trajectory.samples()
    kinds = ["image", "video", "video", "image"]
    assert [ref.kind for ref in sample.media] == kinds and len({ref.sha256 for ref in sample.media}) == 1
    assert [(item.ref.kind, item.ref.mime) for item in made.engine.requests[-1].media] == [(k, f"{k}/gif") for k in kinds]
    batch = make_batch([sample], processor, read_features([sample], processor, made.store.get))
    assert [item.kind for item in batch.media] == ["image", "video"]
    assert batch.media[0].n_tokens != batch.media[1].n_tokens
    counts = [length for _, _, length in processor.placeholders(sample.ids)]
    assert counts == [batch.media[kind == "video"].n_tokens for kind in kinds]
    shown, features = processor.shown_fps([batch.media[1]])[0], read_features([sample], processor, made.store.get)
    assert shown and sample.shown_fps == [None, shown, shown, None]
    faster = dataclasses.replace(sample, shown_fps=[None, shown, 2 * shown, None])
    with pytest.raises(relax.TokenError, match=f"to the engine at {2 * shown} frames per second and is shown here at {shown}"):
        make_batch([faster], processor, features)
    with pytest.raises(relax.TokenError, match="frames per second of 1 media items, and it has 4"):
        make_batch([dataclasses.replace(sample, shown_fps=[shown])], processor, features)


async def test_media_of_the_last_observation_are_stored_though_the_policy_never_sees_them(bench):
    class Farewell(Shows):
        def step(self, action):
            return Image.from_array(PIXELS), 1.0, True, False, {}

    made = bench(Farewell, kwargs={"show": [lambda: "hi"]})
    trajectory = (await made.group()).trajectories[0]
    assert trajectory.messages[-1]["content"][0]["image_url"]["url"].startswith("relax-media:")
    assert made.store.path(Image.from_array(PIXELS).ref).exists()


async def test_media_of_a_group_are_decoded_once(bench, monkeypatch):
    counts = Counter()
    original = relax.MediaStore.put

    def put(self, media):
        counts[media.ref.sha256] += 1
        return original(self, media)

    monkeypatch.setattr(relax.MediaStore, "put", put)
    read = []
    monkeypatch.setattr(
        relax.MediaStore, "load", lambda self, ref, load=relax.MediaStore.load: read.append(ref) or load(self, ref)
    )
    made = bench(Shows, kwargs={"show": [lambda: [Video.from_array(FRAMES), Image.from_array(PIXELS)]]}, group_size=16)
    result = await made.group()
    assert len(result.group.trajectories) == 16 and len(read) == 2, "the history of an episode is not looked up again"
    assert sorted(counts.values()) == [1, 1] and made.worker.policies.intake.decoded == 2


async def test_a_model_that_lacks_a_modality_is_refused_at_the_start(bench, tmp_path):
    made = bench(Shows, kwargs={"show": []})
    text = Processor.load(resolve_model("relax/tiny-qwen3"))
    spec, config = EnvSpec("test-v0", Shows), RunConfig(env="test-v0", model="relax/tiny-qwen3")
    with pytest.raises(relax.ConfigError, match="shows audio, image, video, but the model relax/tiny-qwen3 takes text only"):
        RolloutWorker(spec, config, text, made.pool, made.store, made.journal, "run")


async def test_media_that_the_class_did_not_announce_are_an_error_of_the_episode(bench, tmp_path):
    """A text model and an environment that shows an image all the same."""

    class Sneaky(relax.Env):
        def reset(self, *, seed=None, options=None):
            return Image.from_array(PIXELS), {}

        def step(self, action):
            return None, 0.0, True, False, {}

    made = bench(Sneaky, max_retries=0)
    text = Processor.load(resolve_model("relax/tiny-qwen3"))
    worker = RolloutWorker(EnvSpec("test-v0", Sneaky), made.worker.config, text, made.pool, made.store, made.journal, "run")
    made.worker, old = worker, made.worker
    trajectory = (await made.group()).trajectories[0]
    assert trajectory.status is Status.FAILED and "takes text only, not ['image']" in trajectory.error
    await old.close()


async def test_a_conversation_that_is_kept_holds_no_bytes_and_can_be_looked_at(bench):
    seen = []

    async def agent(session):
        seen.extend(await session.reset())
        outcome = await session.step(await session.generate(seen))
        seen.extend(outcome.observation)
        await session.step(await session.generate(seen))

    show = [lambda: [Image.from_array(PIXELS), "what?"], lambda: Audio.from_array(WAVE)]
    made = bench(Shows, kwargs={"show": show})
    made.worker.context.agent = agent
    trajectory = (await made.group()).trajectories[0]
    assert trajectory.status is Status.COMPLETED, trajectory.error
    image, audio = (item for message in seen for item in message.media)
    assert image._data is None and image.bytes() == Image.from_array(PIXELS).bytes()
    assert audio._data is None and audio.bytes() == Audio.from_array(WAVE).bytes()

"""Run folders with real journals, media and tokenizers, made in milliseconds, for tests of the viewer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
from relax_server.journal import open_journal
from relax_server.journal.trained import TrainedGroup, TrainedSample, TrainedTrajectory

from relax_sdk.config import RayConfig, RunConfig, SamplingParams
from relax_sdk.media import Audio, Image, MediaRef, MediaStore, Video
from relax_sdk.trajectory import Group, Status, Trajectory, Turn, VersionSpan

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|audio_pad|>", "<|video_pad|>"]
PADS = {"image": 2, "audio": 3, "video": 4}
"""Ids of the placeholders."""
PATCHES = {
    **{"size": {"shortest_edge": 1024, "longest_edge": 200704}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    **{"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "resample": 3, "rescale_factor": 1 / 255},
}
PROCESSORS = {
    "preprocessor_config.json": PATCHES
    | {"image_processor_type": "Qwen2VLImageProcessor", "feature_extractor_type": "WhisperFeatureExtractor"}
    | {"feature_size": 128, "sampling_rate": 16_000},
    "video_preprocessor_config.json": PATCHES
    | {"video_processor_type": "Qwen2VLVideoProcessor", "do_sample_frames": True, "fps": 60, "min_frames": 2, "max_frames": 16},
}
"""How the small built-in model prepares media, by file of its folder."""
SEED = (1 << 62) + 1
"""The seed of every episode: more than a browser's numbers hold."""


def make_tokenizer(folder: Path) -> None:
    """A model folder without weights: a byte-level tokenizer with the placeholders of an omni model, and its processors."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: id for id, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3_omni_moe_thinker"} | {f"{kind}_token_id": id for kind, id in PADS.items()})
    )
    for name, settings in PROCESSORS.items():
        (folder / name).write_text(json.dumps(settings))


def ids_of(folder: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids


def keep_media(folder: Path) -> list[MediaRef]:
    """A picture, a sound and a film in the run's store."""
    store, x = MediaStore(folder / "media"), np.linspace(0, 1, 4000, dtype=np.float32)
    frames = np.zeros((4, 32, 32, 3), np.uint8)
    items = [Image.from_array(frames[0]), Audio.from_array(np.sin(440 * x), 8000), Video.from_array(frames, fps=2.0)]
    return [store.put(item) for item in items]


def make_group(number: int, run: str, hf: Path, media: list[MediaRef], split: str = "train", size: int = 4) -> Group:
    """A group of two-turn episodes with all kinds of media; the member at 3 has failed."""
    id = f"{run}/{split}/{number}"
    asked = [PADS[ref.kind] for ref in media for _ in range(3)] + ids_of(hf, "<|im_start|>where?")
    answers, told = [ids_of(hf, "left é<|im_end|>"), ids_of(hf, "up<|im_end|>")], ids_of(hf, " no, ")
    members = []
    for index in range(size):
        failed = index == 3
        turns = [] if failed else _turns(asked, answers, told, media, number)
        content = [{"type": f"{ref.kind}_url", f"{ref.kind}_url": {"url": f"relax-media:{ref.sha256}"}} for ref in media]
        messages = [
            {"role": "user", "content": [*content, {"type": "text", "text": f"where? task {number}"}]},
            {"role": "assistant", "content": "left é"},
            {"role": "user", "content": "no, "},
            {"role": "assistant", "content": "up"},
        ]
        members.append(
            Trajectory(
                *(f"{id}/{index}", "omni-v0", "1", number, id, index, size, SEED),
                status=Status.FAILED if failed else Status.COMPLETED,
                turns=turns,
                messages=messages[:1] if failed else messages,
                reward=0.0 if failed else index / size,
                rewards={} if failed else {"env": index / size, "form": 1.0},
                error="ValueError: boom" if failed else None,
                timings={"total": 0.5},
                info={"shown": float("nan"), "answer": "right"},
            )
        )
    return Group(id, "omni-v0", number, members)


def _turns(asked: list[int], answers: list[list[int]], told: list[int], media: list[MediaRef], version: int) -> list[Turn]:
    turns, prompt = [], asked
    for answer in answers:
        sampling = SamplingParams(max_new_tokens=8, sampling_seed=SEED)
        spans = [VersionSpan(version, 0, len(answer))]
        turns.append(
            Turn(list(prompt), answer, [-0.25] * len(answer), spans, media=media, sampling=sampling, engine="http://e")
        )
        prompt = [*prompt, *answer, *told]
    return turns


def record(group: Group, step: int) -> TrainedGroup:
    """What a step might have made of a group: its failed member was left out."""
    members = []
    for t in group.trajectories:
        if t.status is Status.FAILED:
            continue
        n = sum(t.samples()[0].loss_mask)
        values = [np.full(n, value, np.float32) for value in (-0.5, 1.5, 0.75)]
        values[1][0] = np.nan
        members.append(TrainedTrajectory(t.id, 0.75, 0.25, [TrainedSample(*values)]))
    return TrainedGroup(group.id, step, step, members)


def make_run(
    parent: Path, name: str = "tone", groups: int = 3, steps: int = 2, trained: bool = True, url: str | None = None
) -> Path:
    """A run folder: settings, metrics of `steps` steps, and a journal of `groups` groups, of which step 1 took the first.

    The journal is a file in the folder, or at the URL.
    """
    folder = parent / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps(dataclasses.asdict(RunConfig(env="omni-v0", steps=2, ray=RayConfig(journal=url))))
    )
    make_tokenizer(folder / "hf")
    media = keep_media(folder)
    add_steps(folder, 1, steps)
    (folder / "run.lock").write_text("")
    (folder / "logs").mkdir()
    (folder / "logs" / "rollout.log").write_text("".join(f"line {n}\n" for n in range(1000)))
    (folder / "checkpoints" / "step_000002").mkdir(parents=True)
    journal = open_journal(url or folder / "journal.db")
    made = [make_group(number, name, folder / "hf", media) for number in range(groups)]
    journal.commit_many(made, name)
    journal.commit(make_group(0, name, folder / "hf", media, "eval", size=1), name, "eval")
    if trained:
        (lease,) = journal.lease(1, name, "policy", 0, 10, 60.0).leases
        journal.record_trained(name, [record(lease.group, 1)])
        journal.ack([lease.group.id], name, "policy", 2)
    journal.close()
    return folder


def add_steps(folder: Path, first: int, last: int) -> None:
    """Lines of metrics as a run writes them."""
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(first, last + 1):
            row = {"step": step, "time": 1000.0 + step, "reward": step / 10, "rewards": {"env": step / 10}, "paused": False}
            row |= {"staleness_histogram": {"0": 4}, "sample": {"asked": "?", "answer": "!"}}
            row |= {"eval_reward": 0.5, "eval_ci95": 0.1} if step == 2 else {}
            file.write(json.dumps(row) + "\n")


def make_omni(parent: Path) -> Path:
    """A run of two groups whose sound and film are long enough to be heard and seen."""
    folder = make_run(parent, "omni", groups=2)
    media = playable(folder)
    with_media = open_journal(folder / "journal.db")
    with_media.commit(make_group(7, "omni", folder / "hf", media), "omni")
    with_media.close()
    return folder


def playable(folder: Path) -> list[MediaRef]:
    """A picture, two seconds of a rising tone, and two seconds of film."""
    store, x = MediaStore(folder / "media"), np.linspace(0, 2, 32_000, dtype=np.float32)
    y, z = np.mgrid[0:48, 0:64].astype(np.uint8)
    picture = np.stack([y * 5, z * 4, np.full_like(y, 90)], axis=-1)
    frames = np.stack([np.roll(picture, 4 * n, axis=1) for n in range(16)])
    sweep = (0.5 * np.sin(2 * np.pi * (300 + 500 * x) * x)).astype(np.float32)
    return [
        store.put(item)
        for item in (Image.from_array(picture), Audio.from_array(sweep, 16_000), Video.from_array(frames, fps=8.0))
    ]

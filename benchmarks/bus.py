"""Samples and megabytes a second from a finished group to the trainer: over the TransferQueue bus, the local bus, and raw
TransferQueue.

    python -m benchmarks.bus [--groups 64] [--repeats 5] [--folder .]

A group has 16 samples; a batch has 16 groups of text, or 2 with media: one sound of 1 MB in every sample. `text` has 50 to 400
tokens a sample. The buses carry media as references: a sound is written to the media folder by the rollout's side, with the
checks that go with it, and read from there by the trainer's. Raw TransferQueue has no journal and no media folder: the same
group goes through it as bytes, and each sound as a field of its sample, either one put a sample (a row is a sample), or one put
a group (a row is a sample, all of a group's rows in one put). Its figures are those of data in memory only, which a dead
process loses.

*end to end* is commit, or put, until the batch is decoded in the trainer's hands with its sounds; *of it take* is what the
trainer waits for when the groups are there already: lease, feed, read and decode, without the sounds. Both sides are in one
process, one after the other, the queue's actors in theirs. *fields* is one array of 400 floats for each sample of a batch, put
by one role and got by another, per group. Every figure is the median over the repeats, in which the ways take turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from relax_server.bus.base import Bus
from relax_server.bus.cluster import join_cluster, ray
from relax_server.bus.field_queue import FieldQueue
from relax_server.bus.local import LocalBus
from relax_server.bus.transfer_queue import TransferQueueBus
from relax_server.journal import open_journal
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack
from transfer_queue import TransferQueueClient
from transfer_queue.controller import TransferQueueController
from transfer_queue.storage.simple_storage import SimpleStorageUnit

import relax_sdk as relax
from benchmarks.report import save
from relax_sdk.trajectory import Group, Status, Trajectory, Turn, VersionSpan, decode_group, encode_group

SIZE = 16
"""Samples of a group."""
SOUND_SAMPLES = 500_000
"""Samples of 16 bits: 1 MB."""
KINDS = {"text": 16, "media": 2}
"""Groups of a batch."""
LONG = 120.0
MB = 1e6

Measured = dict[str, float]
"""Seconds by what took them, for all groups together."""


def make_group(index: int, sounds: list[relax.Audio]) -> Group:
    """One-turn trajectories of random ids; each hears one of the sounds, if there are any."""
    draw = np.random.default_rng(index)
    trajectories = []
    for i in range(SIZE):
        response = int(draw.integers(50, 400))
        turn = Turn(
            prompt_ids=draw.integers(0, 150_000, 50).tolist(),
            response_ids=draw.integers(0, 150_000, response).tolist(),
            response_logprobs=draw.normal(-1.0, 0.5, response).tolist(),
            weight_versions=[VersionSpan(0, 0, response)],
            media=[sounds[i].ref] if sounds else [],
        )
        trajectories.append(
            Trajectory(f"g{index}-{i}", "bench", "0", index, f"g{index}", i, SIZE, i, Status.COMPLETED, [turn], reward=float(i))
        )
    return Group(f"g{index}", "bench", index, trajectories)


def make_sounds(index: int) -> list[relax.Audio]:
    """Noise, so that nothing compresses."""
    draw = np.random.default_rng(index)
    waves = (draw.uniform(-0.5, 0.5, SOUND_SAMPLES).astype(np.float32) for _ in range(SIZE))
    return [relax.Audio.from_array(wave, 16_000) for wave in waves]


def timed(times: Measured, name: str, work: Callable[[], Any]) -> Any:
    """Add the seconds of `work`."""
    began = time.perf_counter()
    result = work()
    times[name] = times.get(name, 0.0) + time.perf_counter() - began
    return result


def through_bus(
    open_bus: Callable[[Any], Bus], groups: list[Group], sounds: list[list[relax.Audio]], batch: int, folder: Path
) -> Measured:
    """Commit, take and ack all groups."""
    journal, store = open_journal(folder / "journal.db"), relax.MediaStore(folder / "media")
    bus, times = open_bus(journal), Measured()
    try:
        for start in range(0, len(groups), batch):
            part = groups[start : start + batch]

            def commit(part: list[Group] = part, start: int = start) -> None:
                for own in sounds[start : start + batch]:
                    for sound in own:
                        store.put(sound)
                journal.commit_many(part, "bench")

            timed(times, "commit", commit)
            found = timed(times, "take", lambda: bus.take(batch, 0, 0, LONG))
            got = timed(times, "read media", lambda found=found: read_media(found.groups, store))
            assert [group.id for group in found.groups] == [group.id for group in part] and got == sum(map(len, sounds)) / (
                len(groups) / batch
            )
            timed(times, "ack", lambda part=part: bus.ack([group.id for group in part], 1))
    finally:
        bus.close()
        journal.close()
    return times


def read_media(groups: list[Group], store: relax.MediaStore) -> int:
    """Read every sound; returns how many."""
    refs = [ref for group in groups for t in group.trajectories for turn in t.turns for ref in turn.media]
    assert all(len(store.get(ref)) == ref.size for ref in refs)
    return len(refs)


def through_raw(
    client: Any, name: str, groups: list[Group], sounds: list[list[relax.Audio]], batch: int, whole: bool
) -> Measured:
    """Put, get and clear all groups' samples as TransferQueue's users do."""
    times = Measured()
    for start in range(0, len(groups), batch):
        part, partition = range(start, min(start + batch, len(groups))), f"{name}-{start}"

        def put(part: range = part, partition: str = partition) -> None:
            for g in part:
                rows = sample_rows(groups[g], sounds[g] if sounds else [])
                for some in [rows] if whole else [rows[i : i + 1] for i in range(len(rows))]:
                    client.put(some, partition_id=partition)

        def get(partition: str = partition) -> list[Any]:
            meta = client.get_meta(list(FIELDS if sounds else FIELDS[:1]), batch * SIZE, partition, task_name="train")
            assert meta.size == batch * SIZE
            return [decode_group(bytes(row)) for row in client.get_data(meta)["sample"].tolist()]

        timed(times, "commit", put)
        timed(times, "take", get)
        timed(times, "ack", lambda partition=partition: client.clear_partition(partition))
    return times


FIELDS = ("sample", "sound")


def sample_rows(group: Group, sounds: list[relax.Audio]) -> TensorDict:
    """A group's samples, one a row."""
    alone = [encode_group(Group(group.id, group.env, group.task_index, [t])) for t in group.trajectories]
    columns: dict[str, Any] = {"sample": NonTensorStack(*alone)}
    if sounds:
        waves = [np.frombuffer(sound.bytes(), np.uint8) for sound in sounds]
        columns["sound"] = torch.from_numpy(np.stack(waves))
    return TensorDict(columns, batch_size=SIZE)


def field_time(groups: list[Group], folder: Path, queue: str) -> float:
    """Milliseconds a group to put one array for each of its samples, and to get it."""
    journal = open_journal(folder / "journal.db")
    bus, role = TransferQueueBus(journal, "bench", name=queue), FieldQueue("bench", name=queue)
    journal.commit_many(groups, "bench")
    found = bus.take(len(groups), 0, 0, LONG)
    assert found is not None
    rows = role.take_fields(["group"], len(groups), "reference", LONG)
    ids = [row.group_id for row in rows]
    values = [np.zeros((SIZE, 400), np.float32) for _ in ids]
    began = time.perf_counter()
    role.put_fields(ids, {"ref_log_probs": values})
    got = bus.get_fields(ids, ["ref_log_probs"], LONG)
    seconds = time.perf_counter() - began
    assert got is not None and len(got) == len(ids)
    role.close()
    bus.close()
    journal.close()
    return 1e3 * seconds / len(ids)


def measure(kind: str, groups: list[Group], sounds: list[list[relax.Audio]], repeats: int, folder: Path, queue: str, raw: Any):
    """The table's rows of one kind of samples."""
    batch = KINDS[kind]

    def on_disk(open_bus: Callable[[Any], Bus]) -> Measured:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            return through_bus(open_bus, groups, sounds, batch, Path(place))

    ways: dict[str, Callable[[int], Measured]] = {
        "local bus": lambda _: on_disk(lambda journal: LocalBus(journal, "bench")),
        "TransferQueue bus": lambda _: on_disk(lambda journal: TransferQueueBus(journal, "bench", name=queue)),
        "raw, a sample a put": lambda i: through_raw(raw, f"{kind}-s{i}", groups, sounds, batch, whole=False),
        "raw, a group a put": lambda i: through_raw(raw, f"{kind}-g{i}", groups, sounds, batch, whole=True),
    }
    runs: dict[str, list[Measured]] = {name: [] for name in ways}
    for i in range(repeats):
        for name, way in ways.items():
            runs[name].append(way(i))
            print(f"{kind}, {name}: {', '.join(f'{what} {s:.2f} s' for what, s in runs[name][-1].items())}", flush=True)
    payload = sum(len(encode_group(group)) for group in groups)
    size = payload + sum(sound.ref.size for group in sounds for sound in group)
    return [row_of(kind, name, found, len(groups) * SIZE, size) for name, found in runs.items()]


def row_of(kind: str, way: str, runs: list[Measured], samples: int, size: int) -> dict[str, Any]:
    total = statistics.median(sum(run.values()) for run in runs)
    take = statistics.median(run["take"] for run in runs)
    return {
        "samples": kind,
        "kB a sample": round(size / samples / 1e3, 1),
        "way": way,
        "end to end, samples/s": round(samples / total),
        "end to end, MB/s": round(size / total / MB, 1),
        "of it take, samples/s": round(samples / take),
        "durable": "no" if way.startswith("raw") else "yes",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64, help="of text per repeat, a multiple of 16; an eighth with media")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    arguments = parser.parse_args()
    if arguments.groups < SIZE or arguments.groups % SIZE:
        parser.error(f"--groups must be a multiple of {SIZE}")
    join_cluster(None)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        keeper = TransferQueueBus(open_journal(Path(place) / "keeper.db"), "keeper", name="bench")
        raw = raw_client()
        rows, n = [], arguments.groups
        for kind, groups in (("text", n), ("media", n // 8)):
            sounds = [make_sounds(i) for i in range(groups)] if kind == "media" else []
            made = [make_group(i, sounds[i] if sounds else []) for i in range(groups)]
            rows += measure(kind, made, sounds, arguments.repeats, arguments.folder, "bench", raw)
        fields = []
        for i in range(arguments.repeats):
            (Path(place) / str(i)).mkdir()
            fields.append(field_time([make_group(g, []) for g in range(SIZE)], Path(place) / str(i), "bench"))
        print(f"fields of a group, put and got: {statistics.median(fields):.2f} ms")
        keeper.close()
        raw.close()
    ray.shutdown()
    settings = {"groups": n, "group_size": SIZE, "repeats": arguments.repeats, "batch": KINDS}
    save("bus", rows, settings=settings, fields_ms_a_group=round(statistics.median(fields), 3))


def raw_client() -> Any:
    """Upstream's own controller and storage unit, and its client."""
    controller = TransferQueueController.options(num_cpus=0).remote(polling_mode=True)
    storage = SimpleStorageUnit.options(num_cpus=0).remote(config={})
    asked: list[Any] = [controller.get_zmq_server_info.remote(), storage.get_zmq_server_info.remote()]
    addresses = ray.get(asked, timeout=LONG)
    client: Any = TransferQueueClient("bench", addresses[0])
    client.initialize_storage_manager("SimpleStorage", {"zmq_info": {"unit": addresses[1]}})
    client.actors = controller, storage  # they end with their handles
    return client


if __name__ == "__main__":
    main()

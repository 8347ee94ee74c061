"""What TransferQueue 0.1.11 does wrong when it is used as it comes, each beside the bus, which does not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from queue_cluster import close_bus
from relax_server.journal import open_journal
from relax_server.journal.base import Journal
from sample_groups import make_group

pytest.importorskip("relax_server.bus.transfer_queue", reason="needs the extra `ray`: Ray and TransferQueue")
import numpy as np
import ray
import torch
from relax_server.bus.field_queue import FieldQueue
from relax_server.bus.transfer_queue import TransferQueueBus
from tensordict import TensorDict
from transfer_queue import GRPOGroupNSampler, SequentialSampler, TransferQueueClient
from transfer_queue.controller import TransferQueueController
from transfer_queue.storage.simple_storage import SimpleStorageUnit

from relax_sdk.trajectory import encode_group

RUN, LONG, SOON = "run-1", 60.0, 1.5


@dataclass
class Raw:
    """Upstream's controller and storage unit, started as `transfer_queue.init` starts them, but asking for no CPU."""

    controller: Any
    storage: Any
    clients: list[Any]

    def client(self) -> Any:
        addresses = ray.get([self.controller.get_zmq_server_info.remote(), self.storage.get_zmq_server_info.remote()])
        return connect(addresses, self.clients)


def connect(addresses: Sequence[Any], clients: list[Any]) -> Any:
    """A client as `transfer_queue.get_client` gives one."""
    client = TransferQueueClient(f"test-{len(clients)}", addresses[0])
    client.initialize_storage_manager("SimpleStorage", {"zmq_info": {"unit": addresses[1]}})
    clients.append(client)
    return client


@pytest.fixture(scope="module")
def raw(ray_cluster: None) -> Iterator[Raw]:
    controller = TransferQueueController.options(num_cpus=0).remote(polling_mode=True)
    raw = Raw(controller, SimpleStorageUnit.options(num_cpus=0).remote(config={}), [])
    yield raw
    for client in raw.clients:
        client.close()
    ray.kill(raw.controller)
    ray.kill(raw.storage)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = open_journal(tmp_path / "journal.db")
    yield journal
    journal.close()


@pytest.fixture
def bus(shared_queue: str, journal: Journal) -> Iterator[TransferQueueBus]:
    bus = TransferQueueBus(journal, RUN, name=shared_queue)
    yield bus
    close_bus(bus)


@pytest.fixture
def inside(bus: TransferQueueBus) -> Iterator[Any]:
    """Upstream's client, connected to the queue of the bus."""
    assert bus._actors is not None
    clients: list[Any] = []
    yield connect(bus._actors.addresses, clients)
    clients[0].close()


@pytest.fixture
def role(shared_queue: str) -> Iterator[FieldQueue]:
    role = FieldQueue(RUN, name=shared_queue)
    yield role
    role.close()


def put(client: Any, partition: str, key: str, value: int, tag: dict[str, int] | None = None) -> None:
    """What `kv_put` does."""
    meta = client.kv_retrieve_meta([key], partition, create=True)
    if tag:
        meta.update_custom_meta([tag])
    client.put(TensorDict({"x": torch.tensor([[value]])}, batch_size=1), metadata=meta)


def fetch(client: Any, partition: str, n: int, task: str = "train") -> list[int]:
    meta = client.get_meta(["x"], n, partition, mode="fetch", task_name=task)
    return [int(row) for row in client.get_data(meta)["x"].unbind()] if meta.size else []


def commit(journal: Journal, *ids: str, tokens: int = 4) -> None:
    for id in ids:
        journal.commit(make_group(id, tokens=tokens), RUN)


def take(bus: TransferQueueBus, n: int) -> list[str]:
    batch = bus.take(n, 0, 0, LONG)
    assert batch is not None
    return [group.id for group in batch.groups]


def on(actor: Any, work: Callable[[Any], Any]) -> Any:
    """Run a function in an actor; it has to be a nested one, which travels by value."""
    return ray.get(actor.__ray_call__.remote(work), timeout=LONG)


# ------------------------------------------------------------------------------------------------- 1: groups that are mixed


def test_upstreams_group_sampler_mixes_groups_that_finish_interleaved(raw: Raw) -> None:
    client = raw.client()
    ray.get(raw.controller.register_sampler.remote(GRPOGroupNSampler(n_samples_per_prompt=4)))
    for i, group in enumerate([0, 1, 0, 1, 0, 1, 0]):
        put(client, "mixed", f"{group}-{i}", group)
    assert fetch(client, "mixed", 4) == [0, 1, 0, 1], "one 'group', and not even complete"
    ray.get(raw.controller.register_sampler.remote(SequentialSampler()))


def test_the_bus_hands_out_whole_groups(bus: TransferQueueBus, role: FieldQueue, journal: Journal) -> None:
    commit(journal, "a", "b")
    take(bus, 2)
    for row in role.take_fields(["group", "n_trajectories"], 2, "train", LONG):
        members = [t.group_id for t in row.fields["group"].trajectories]
        assert members == [row.group_id] * row.fields["n_trajectories"] == [row.group_id] * 2


# ----------------------------------------------------------------------------------------------------------- 2: late writers


def test_a_late_writer_overwrites_upstreams_rows_of_another_partition(raw: Raw) -> None:
    client = raw.client()
    old = client.put(TensorDict({"x": torch.tensor([[1], [2]])}, batch_size=2), partition_id="late-0")
    client.clear_partition("late-0")
    new = client.put(TensorDict({"x": torch.tensor([[10], [20]])}, batch_size=2), partition_id="late-1")
    assert set(old.global_indexes) & set(new.global_indexes)
    client.put(TensorDict({"x": torch.tensor([[7], [8]])}, batch_size=2), metadata=old)
    assert {7, 8} & set(fetch(client, "late-1", 2)), "no error, and the wrong data"


def test_a_late_writer_of_the_bus_reaches_no_other_row(bus: TransferQueueBus, inside: Any, journal: Journal) -> None:
    commit(journal, *"abcd")
    take(bus, 2)
    old = inside.kv_retrieve_meta(["a", "b"], bus._places["a"])
    bus.ack(["a", "b"], 1)
    take(bus, 2)
    new = inside.kv_retrieve_meta(["c", "d"], bus._places["c"])
    assert not set(old.global_indexes) & set(new.global_indexes)
    late = old.select_fields([])
    inside.put(TensorDict({"version_min": torch.tensor([[99], [99]])}, batch_size=2), metadata=late)
    rows = bus.get_fields(["c", "d"], ["group", "version_min"], LONG)
    assert rows is not None
    assert [row.fields["version_min"] for row in rows] == [0, 0]
    assert [row.fields["group"].id for row in rows] == ["c", "d"]


# --------------------------------------------------------------------------------------------------- 3: tags after the data


def test_upstreams_rows_are_ready_before_their_tags_are_there(raw: Raw) -> None:
    producer, consumer, n = raw.client(), raw.client(), 200
    thread = threading.Thread(target=lambda: [put(producer, "tags", f"k{i}", i, {"weight_version": i}) for i in range(n)])
    thread.start()
    tagged: list[bool] = []
    while len(tagged) < n:
        meta = consumer.get_meta(["x"], 1, "tags", mode="fetch", task_name="train")
        if meta.size:
            tagged.append("weight_version" in meta.custom_meta[0])
    thread.join(LONG)
    assert not all(tagged)


def test_rows_of_the_bus_have_their_versions_from_the_start(bus: TransferQueueBus, role: FieldQueue, journal: Journal) -> None:
    n = 100
    for i in range(n):
        journal.commit(make_group(f"g{i}", versions=(i,)), RUN)
    thread = threading.Thread(target=lambda: [bus.take(10, n, n, LONG) for _ in range(n // 10)])
    thread.start()
    versions: list[int] = []
    while len(versions) < n:
        rows = role.take_fields(["version_min"], 7, "train", LONG)
        assert rows
        versions += [row.fields["version_min"] for row in rows]
    thread.join(LONG)
    assert sorted(versions) == list(range(n))


# --------------------------------------------------------------------------------------------- 4: one starved consumer


def test_a_starved_consumer_stops_upstreams_controller_for_everybody(raw: Raw) -> None:
    starved, other = raw.client(), raw.client()
    put(other, "starved", "k", 1)
    on(raw.controller, lambda self: setattr(self, "polling_mode", False))  # its default
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(fetch, starved, "starved", 5)
        answered = True
        while answered and not waiting.done():
            asked = pool.submit(other.get_partition_list)
            try:
                asked.result(SOON)
            except TimeoutError:
                answered = False
        assert not answered, f"a call of another client, about something else, had no answer within {SOON} s"
        assert "starved" in asked.result(LONG)
        assert waiting.exception(LONG) is not None
    on(raw.controller, lambda self: setattr(self, "polling_mode", True))


def test_a_starved_role_of_the_bus_waits_alone(bus: TransferQueueBus, role: FieldQueue, journal: Journal) -> None:
    commit(journal, *"abcde")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(role.take_fields, ["never"], 5, "train", LONG)
        assert [take(bus, 1) for _ in range(5)] == [[id] for id in "abcde"]
        assert not waiting.done()
        role.put_fields(["a"], {"never": [1]})
        assert [row.group_id for row in waiting.result(LONG)] == ["a"]


# ------------------------------------------------------------------------------------------------------ 5: consumed for ever


def test_a_consumed_key_of_upstream_that_is_put_again_is_not_served_again(raw: Raw) -> None:
    client = raw.client()
    put(client, "again", "k", 1)
    assert fetch(client, "again", 1) == [1]
    put(client, "again", "k", 2)
    assert fetch(client, "again", 1) == []


def test_a_group_that_is_taken_again_from_the_bus_is_served_again(
    bus: TransferQueueBus, role: FieldQueue, journal: Journal
) -> None:
    commit(journal, "a")
    for _ in range(2):
        assert take(bus, 1) == ["a"]
        assert [row.group_id for row in role.take_fields(["group"], 1, "train", LONG)] == ["a"]
        assert role.take_fields(["group"], 1, "train", 0.0) == []
        assert bus.restore(0) == 1


# ------------------------------------------------------------------------------------------- 6 and 7: rows that are views


def held_bytes(storage: Any) -> int:
    """Bytes that a storage unit keeps alive for its rows, each buffer counted once."""

    def measure(self: Any) -> int:
        buffers = {}
        for column in self.storage_data.field_data.values():
            for value in column.values():
                if isinstance(value, torch.Tensor):
                    buffers[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
                elif isinstance(value, np.ndarray):
                    root: Any = value
                    while isinstance(root, np.ndarray) and root.base is not None:
                        root = root.base
                    buffers[id(root)] = memoryview(root).nbytes
        return sum(buffers.values())

    return on(storage, measure)


def size_on_disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_upstreams_batch_stays_whole_in_memory_and_is_written_once_for_each_row(raw: Raw, tmp_path: Path) -> None:
    client, row = raw.client(), 100_000
    before = held_bytes(raw.storage)
    batch = TensorDict({"x": torch.ones(10, row, dtype=torch.uint8)}, batch_size=10)
    meta = client.put(batch, partition_id="views")
    client.save_storage_checkpoint(str(tmp_path))
    assert size_on_disk(tmp_path) > 10 * 10 * row, "the batch's bytes, squared"
    client.clear_samples(meta.select_samples(list(range(9))))
    assert held_bytes(raw.storage) - before >= 10 * row, "one row is left, and nothing is freed"
    client.clear_partition("views")


def test_rows_of_the_bus_are_freed_and_written_one_by_one(
    bus: TransferQueueBus, inside: Any, journal: Journal, tmp_path: Path
) -> None:
    ids = [f"g{i}" for i in range(10)]
    commit(journal, *ids, tokens=5000)
    row = len(encode_group(make_group("g0", tokens=5000)))
    assert bus._actors is not None
    storage = bus._actors.storages[0]
    assert held_bytes(storage) < row
    assert take(bus, 10) == ids
    assert 10 * row <= held_bytes(storage) < 11 * row
    inside.save_storage_checkpoint(str(tmp_path / "saved"))
    assert 10 * row <= size_on_disk(tmp_path / "saved") < 11 * row
    bus.ack(ids[:9], 1)
    assert held_bytes(storage) < 2 * row

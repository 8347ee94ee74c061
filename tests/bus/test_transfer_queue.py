"""The bus over TransferQueue: what roles exchange, and that nothing is lost or served twice whatever happens to the queue."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from queue_cluster import close_bus, end_process, pid_of, stop_process
from relax_server.journal import open_journal
from relax_server.journal.base import Journal, JournalCounts
from sample_groups import make_group

from relax_sdk.errors import BusError, ConfigError, RunError
from relax_sdk.media import MediaRef

bus_module = pytest.importorskip("relax_server.bus.transfer_queue", reason="needs the extra `ray`: Ray and TransferQueue")
fields_module = pytest.importorskip("relax_server.bus.field_queue")
TransferQueueBus, FieldQueue = bus_module.TransferQueueBus, fields_module.FieldQueue

RUN, LONG = "run-1", 60.0
REBUILD = 200.0
"""On a busy machine a queue may take a minute to start."""
OpenBus = Callable[..., Any]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = open_journal(tmp_path / "journal.db")
    yield journal
    journal.close()


@pytest.fixture
def open_bus(shared_queue: str, journal: Journal) -> Iterator[OpenBus]:
    buses: list[Any] = []

    def open_(consumer: str = "trainer", **settings: Any) -> Any:
        buses.append(TransferQueueBus(journal, RUN, consumer, **{"name": shared_queue, "call_timeout": 10.0} | settings))
        return buses[-1]

    yield open_
    for bus in buses:
        close_bus(bus)


@pytest.fixture
def bus(open_bus: OpenBus) -> Any:
    return open_bus()


@pytest.fixture
def role(shared_queue: str) -> Iterator[Any]:
    """Another role's end."""
    role = FieldQueue(RUN, name=shared_queue, call_timeout=10.0)
    yield role
    role.close()


def commit(journal: Journal, *ids: str) -> None:
    for id in ids:
        journal.commit(make_group(id), RUN)


def ids_of(found: Any) -> list[str]:
    return [item.group_id if hasattr(item, "group_id") else item.id for item in getattr(found, "groups", found)]


# ------------------------------------------------------------------------------------------------------------------ fields


def test_roles_work_on_rows_as_soon_as_their_fields_are_there(bus: Any, role: Any, journal: Journal) -> None:
    commit(journal, *"abc")
    batch = bus.take(3, 0, 0, LONG)
    assert role.take_fields(["ref_log_probs"], 3, "advantages", 0.0) == []
    rows = role.take_fields(["group", "n_tokens"], 2, "reference", LONG)
    assert [row.fields["group"] for row in rows] == batch.groups[:2]
    assert [row.fields["n_tokens"] for row in rows] == [8, 8]
    values = [np.arange(4, dtype=np.float32), np.ones((2, 3))]
    assert role.put_fields(["a", "b"], {"ref_log_probs": values}) == []
    ready = role.take_fields(["ref_log_probs", "version_min"], 3, "advantages", LONG)
    assert ids_of(ready) == ["a", "b"], "the third has no such field yet"
    np.testing.assert_array_equal(ready[1].fields["ref_log_probs"], values[1])
    assert bus.get_fields(["a", "b", "c"], ["ref_log_probs"], 0.0) is None
    role.put_fields(["c"], {"ref_log_probs": [np.zeros(0, np.float32)]})
    found = bus.get_fields(["c", "a"], ["ref_log_probs"], LONG)
    assert ids_of(found) == ["c", "a"]
    np.testing.assert_array_equal(found[1].fields["ref_log_probs"], values[0])
    found[1].fields["ref_log_probs"][0] = 7.0  # it may be written to


def test_processes_of_one_task_share_the_rows_and_a_restarted_one_gets_all_again(
    bus: Any, role: Any, journal: Journal, shared_queue: str
) -> None:
    commit(journal, *"abcd")
    bus.take(4, 0, 0, LONG)
    other = FieldQueue(RUN, name=shared_queue)
    assert ids_of(role.take_fields(["group"], 2, "reference", LONG)) == ["a", "b"]
    assert ids_of(other.take_fields(["group"], 4, "reference", LONG)) == ["c", "d"]
    assert role.take_fields(["group"], 1, "reference", 0.0) == []
    other.close()
    role.retake("reference")
    assert ids_of(role.take_fields(["group"], 4, "reference", LONG)) == ["a", "b", "c", "d"]


def test_rows_leave_with_their_ack_and_late_fields_are_told(bus: Any, role: Any, journal: Journal) -> None:
    commit(journal, *"abc")
    bus.take(2, 0, 0, LONG)
    bus.take(1, 0, 0, LONG)
    assert len(role.take_fields(["group"], 3, "reference", LONG)) == 3
    bus.ack(["a"], 1)
    bus.forget(["c"])
    assert role.put_fields(["a", "b", "c"], {"x": [1, 2, 3]}) == ["a", "c"]
    assert bus.get_fields(["a"], ["group"], 0.0) is None
    assert role.get_fields(["b"], ["x"], LONG)[0].fields["x"].tolist() == [2]
    assert journal.counts(RUN) == JournalCounts(leased=2, acked=1)


def test_runs_in_one_queue_do_not_see_each_other(bus: Any, journal: Journal, shared_queue: str) -> None:
    commit(journal, "a")
    bus.take(1, 0, 0, LONG)
    stranger = FieldQueue(RUN + "/trainer", name=shared_queue)
    assert stranger.take_fields(["group"], 1, "reference", 0.05) == []
    assert stranger.put_fields(["a"], {"x": [1]}) == ["a"]
    stranger.close()


def test_media_travel_as_references(bus: Any, role: Any, journal: Journal) -> None:
    group = make_group("a")
    ref = MediaRef(sha256="0" * 64, mime="image/png", size=3_000_000, width=1024, height=1024)
    group.trajectories[0].turns[0].media = [ref]
    journal.commit(group, RUN)
    bus.take(1, 0, 0, LONG)
    (row,) = role.take_fields(["group"], 1, "reference", LONG)
    assert row.fields["group"].trajectories[0].turns[0].media == [ref]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"x": [1]}, "1 values for 2 groups"),
        ({"group": [1, 2]}, "belongs to the bus"),
        ({"x": [1, {"a": 1}]}, "give an array of numbers"),
    ],
)
def test_fields_that_make_no_sense_are_refused(role: Any, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        role.put_fields(["a", "b"], fields)


# ------------------------------------------------------------------------------------------------------- failures, restarts


def test_every_group_is_delivered_once_though_actors_are_killed_in_mid_use(bus: Any, role: Any, journal: Journal) -> None:
    groups = [make_group(f"g{i:02d}", tokens=1 + i) for i in range(60)]
    journal.commit_many(groups, RUN)
    taken: list[str] = []
    counted: list[int] = []
    reached, done = threading.Event(), threading.Event()

    def count() -> None:
        while not done.is_set():
            rows = role.take_fields(["group", "n_tokens"], 4, "count", 0.2)
            role.put_fields(ids_of(rows), {"count": [row.fields["n_tokens"] for row in rows]})

    def train() -> None:
        for step in range(30):
            ids = ids_of(bus.take(2, 0, 0, LONG))
            counted.extend(int(row.fields["count"][0]) for row in bus.get_fields(ids, ["count"], REBUILD))
            taken.extend(ids)
            if step % 5 == 4:
                bus.ack(taken[-10:], step)
            if step in (7, 18):
                reached.set()

    trainer, counter = threading.Thread(target=train), threading.Thread(target=count)
    trainer.start()
    counter.start()
    for victim in ("storage", "controller"):
        assert reached.wait(REBUILD)
        reached.clear()
        actors = bus._actors
        end_process(pid_of(actors.controller if victim == "controller" else actors.storages[0]))
    trainer.join(REBUILD)
    done.set()
    counter.join(REBUILD)
    assert bus._actors != actors, "the last kill was noticed"
    assert taken == [group.id for group in groups], "each once, in order"
    assert counted == [2 * (1 + i) for i in range(60)]
    assert journal.counts(RUN) == JournalCounts(acked=60)


def test_a_queue_that_hangs_is_replaced_and_without_a_new_one_the_groups_are_ready_again(
    open_bus: OpenBus, journal: Journal
) -> None:
    commit(journal, *"abc")
    bus = open_bus(call_timeout=3.0)
    assert ids_of(bus.take(1, 0, 0, LONG)) == ["a"]
    pid = pid_of(bus._actors.controller)
    stop_process(pid)
    try:
        bus.repair_timeout = 0.0
        with pytest.raises(BusError, match="the journal still holds its groups"):
            bus.take(2, 0, 0, LONG)
        assert journal.counts(RUN) == JournalCounts(ready=2, leased=1)
        bus.repair_timeout = REBUILD
        assert ids_of(bus.take(2, 0, 0, LONG)) == ["b", "c"]
        assert ids_of(bus.get_fields(["a", "c"], ["group"], LONG)) == ["a", "c"]
    finally:
        end_process(pid)


def test_a_trainer_that_restarts_leaves_no_row_of_the_last_one(open_bus: OpenBus, role: Any, journal: Journal) -> None:
    commit(journal, *"abc")
    first = open_bus()
    first.take(2, 0, 0, LONG)
    first.ack(["a"], 1)
    assert ids_of(role.take_fields(["group"], 9, "reference", LONG)) == ["b"]
    second = open_bus()
    assert second.restore(1) == 1
    assert role.take_fields(["group"], 9, "reference", 0.0) == []
    assert ids_of(second.take(2, 0, 0, LONG)) == ["b", "c"]
    assert ids_of(role.take_fields(["group"], 9, "reference", LONG)) == ["b", "c"]


def test_a_role_without_a_queue_waits_a_while_and_says_so(ray_cluster: None) -> None:
    lonely = FieldQueue(RUN, name="nobody", repair_timeout=0.1)
    with pytest.raises(BusError, match="no bus has started one yet"):
        lonely.take_fields(["group"], 1, "reference", 0.0)
    lonely.close()
    with pytest.raises(BusError, match="closed"):
        lonely.take_fields(["group"], 1, "reference", 0.0)


def run_process(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_a_role_in_another_process_joins_by_address(bus: Any, journal: Journal, shared_queue: str) -> None:
    import ray

    code = """
import sys
from relax_server.bus.field_queue import FieldQueue
role = FieldQueue("run-1", address=sys.argv[1], name=sys.argv[2])
rows = role.take_fields(["group"], 2, "reference", 60.0)
groups = [row.fields["group"] for row in rows]
role.put_fields([g.id for g in groups], {"rewards": [[t.reward for t in g.trajectories] for g in groups]})
role.close()
"""
    commit(journal, "a", "b")
    bus.take(2, 0, 0, LONG)
    done = run_process(code, ray.get_runtime_context().gcs_address, shared_queue)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [row.fields["rewards"].tolist() for row in bus.get_fields(["a", "b"], ["rewards"], LONG)] == [[0.0, 1.0]] * 2


@pytest.mark.nightly
def test_a_process_that_has_no_ray_starts_one_and_ends_it(tmp_path: Path) -> None:
    code = """
import sys
from relax_server.journal import open_journal
from relax_server.bus.transfer_queue import TransferQueueBus
from sample_groups import make_group
import ray
journal = open_journal(sys.argv[1])
journal.commit(make_group("a"), "run")
assert not ray.is_initialized()
bus = TransferQueueBus(journal, "run", storage_units=2)
assert ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"], "the queue reserves no CPU"
print(bus.take(1, 0, 0, 30.0).groups[0].id, len(bus._actors.storages))
bus.close()
assert not ray.is_initialized()
"""
    done = run_process(code, str(tmp_path / "journal.db"))
    assert done.stdout.split() == ["a", "2"], done.stderr[-2000:]


def test_importing_the_buses_imports_neither_ray_nor_torch() -> None:
    code = "import sys, relax_server.bus, relax_server.bus.local; print({'ray', 'torch', 'transfer_queue'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


def test_a_trainer_whose_fields_do_not_come_says_so_and_one_that_is_stopped_waits_no_longer(bus: Any, journal: Journal) -> None:
    from relax_server.roles.field_worker import wait_for_fields

    commit(journal, "a", "b")
    bus.take(2, 0, 0, LONG)
    bus.put_fields(["a"], {"advantages": [np.ones(2)]})
    with pytest.raises(RunError, match=r"fields advantages of 2 groups were not all there within 0.3 s.*advantages.log"):
        wait_for_fields(bus, ["a", "b"], ["advantages"], lambda: False, 0.3)
    assert wait_for_fields(bus, ["a", "b"], ["advantages"], lambda: True) is None
    bus.put_fields(["b"], {"advantages": [np.ones(2)]})
    assert ids_of(wait_for_fields(bus, ["b", "a"], ["advantages"], lambda: False)) == ["b", "a"]


# ------------------------------------------------------------------------------------------------------------------- ahead


def taken(role: Any, n: int, seconds: float) -> set[str]:
    """`n` groups that a role gets one after the other."""
    found: set[str] = set()
    while len(found) < n:
        more = ids_of(role.take_fields(["group"], 1, "reference", seconds))
        assert more, f"nothing after {found}"
        found |= set(more)
    return found


def test_roles_get_groups_before_the_trainer_asks_for_them(open_bus: OpenBus, role: Any, journal: Journal) -> None:
    bus = open_bus(ahead=2)
    commit(journal, "a")
    assert ids_of(bus.take(1, 0, 0, LONG)) == ["a"]
    commit(journal, *"bcd")
    assert taken(role, 3, LONG) == {"a", "b", "c"}
    assert role.take_fields(["group"], 1, "reference", 0.2) == [], "two ahead are as many as are allowed"
    role.put_fields(["b", "c"], {"x": [1, 2]})
    assert ids_of(bus.take(2, 0, 0, LONG)) == ["b", "c"]
    assert [int(row.fields["x"][0]) for row in bus.get_fields(["b", "c"], ["x"], LONG)] == [1, 2]
    assert ids_of(role.take_fields(["group"], 1, "reference", LONG)) == ["d"]
    bus.ack(["a", "b", "c"], 1)
    bus.release_ahead()
    assert journal.counts(RUN) == JournalCounts(ready=1, acked=3)
    assert role.put_fields(["d"], {"x": [3]}) == ["d"], "it has left the queue"


def test_groups_fed_ahead_are_dropped_when_they_are_too_old_at_the_take(open_bus: OpenBus, role: Any, journal: Journal) -> None:
    bus = open_bus(ahead=4)
    commit(journal, "a")
    assert ids_of(bus.take(1, 0, 1, LONG)) == ["a"]
    commit(journal, "b", "c")
    assert len(role.take_fields(["group"], 3, "reference", LONG)) >= 1
    end = time.monotonic() + LONG
    while journal.counts(RUN).leased < 3:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert bus.take(1, 2, 1, 0.0) is None
    assert journal.counts(RUN) == JournalCounts(leased=1, stale=2)
    journal.commit(make_group("d", versions=(2, 2)), RUN)
    batch = bus.take(1, 2, 1, LONG)
    assert (ids_of(batch), batch.dropped) == (["d"], 2)
    assert role.put_fields(["b", "c"], {"x": [1, 2]}) == ["b", "c"]


def test_what_was_fed_ahead_is_fed_again_to_the_next_queue(open_bus: OpenBus, role: Any, journal: Journal) -> None:
    bus = open_bus(ahead=4)
    commit(journal, "a")
    assert ids_of(bus.take(1, 0, 0, LONG)) == ["a"]
    commit(journal, "b", "c")
    assert taken(role, 3, LONG) == {"a", "b", "c"}
    end_process(pid_of(bus._actors.controller))
    assert taken(role, 3, REBUILD) == {"a", "b", "c"}, "though the trainer asks for nothing meanwhile"
    assert ids_of(bus.take(2, 0, 0, REBUILD)) == ["b", "c"]
    assert journal.counts(RUN) == JournalCounts(leased=3)

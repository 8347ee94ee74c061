"""One connection to one queue: rows are put, got, handed out and cleared, and no call takes longer than its limit.

A row is a group. Its index, fields and readiness are TransferQueue's; what is put into a field comes back as it was. Rows are
put and read through TransferQueue's storage manager, one level below `TransferQueueClient.put` and `get_data`: those also set
the number of torch's threads, and send a request for tags with every put, which the bus does not use.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack
from transfer_queue.client import AsyncTransferQueueClient
from transfer_queue.metadata import BatchMeta

from relax_server.bus.queue_actors import QueueActors, QueueFailed

T = TypeVar("T")
Fields = dict[str, Any]
"""Values of a row by field name: numpy arrays, numbers, strings or bytes."""

ID = "id"
"""The field that holds the key of its row."""

CHECK_SECONDS = 1.0
"""A call that takes this long makes us ask whether the queue lives."""
CLOSE_SECONDS = 5.0
IO_THREADS = 2


class QueueClient:
    """Bounded calls on a queue; every method raises `QueueFailed` when the queue is dead, hangs, or refuses.

    Calls may come from any thread; TransferQueue's own code runs in one thread of the client.
    """

    def __init__(self, actors: QueueActors, timeout: float) -> None:
        """Connect.

        Args:
            actors: the queue.
            timeout: seconds a call may take.

        Raises:
            QueueFailed: it does not answer.
        """
        self.actors, self.timeout = actors, timeout
        controller, *storages = actors.addresses
        self._client: Any = AsyncTransferQueueClient(f"relax-{uuid.uuid4().hex[:8]}", controller, zmq_io_threads=IO_THREADS)
        try:
            self._client.initialize_storage_manager("SimpleStorage", {"zmq_info": dict(enumerate(storages))})
        except Exception as error:  # a handshake that fails is reported in many ways
            self._client.close()
            raise QueueFailed(f"the queue's controller does not answer: {error}") from error
        self._checked = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="queue client", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Ask the queue's actors whether they live, at most once in `CHECK_SECONDS`; requests of ours notice few failures."""
        if time.monotonic() - self._checked > CHECK_SECONDS:
            self.actors.check(self.timeout)
            self._checked = time.monotonic()

    # ------------------------------------------------------------------------------------------------------------- rows

    def put(self, partition: str, rows: Mapping[str, Fields]) -> None:
        """Put new rows by key, each in a put of its own: it is ready, and can be cleared, without the others."""
        self._call(self._put(partition, rows))

    def update(self, partition: str, rows: Mapping[str, Fields]) -> set[str]:
        """Put the same further fields into rows that are there; returns the keys of those that are not, which are left out."""
        return self._call(self._update(partition, rows))

    def get(self, partition: str, keys: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]] | None:
        """Fields of rows by key; None while one of them is not there yet."""
        return self._call(self._get(partition, keys, names))

    def fetch(self, partition: str, names: Sequence[str], n: int, task: str) -> dict[str, dict[str, Any]]:
        """Up to `n` rows that have all of these fields and that `task` has not had, by key; it has had them from now on."""
        return self._call(self._fetch(partition, names, n, task))

    def keys(self) -> dict[str, list[str]]:
        """The keys of all rows by partition, oldest first."""
        return {partition: list(keys) for partition, keys in self._call(self._client.async_kv_list()).items()}

    def partitions(self) -> list[str]:
        """All partitions, oldest first."""
        return list(self._call(self._client.async_get_partition_list()))

    def reset(self, partition: str, task: str) -> None:
        """Hand out to `task` again what it has had."""
        self._call(self._client.async_reset_consumption(partition, task))

    def clear(self, partition: str, keys: Sequence[str]) -> None:
        """Remove rows; those that are not there do no harm."""
        self._call(self._clear(partition, keys))

    def drop(self, partition: str) -> None:
        """Remove a partition with all of its rows."""
        self._call(self._client.async_clear_partition(partition))

    def close(self) -> None:
        """Release the sockets; the queue goes on."""
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result(CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()
            self._client.close()

    # -------------------------------------------------------------------------------------------- inside the client's thread

    async def _put(self, partition: str, rows: Mapping[str, Fields]) -> None:
        meta = await self._client.async_kv_retrieve_meta(list(rows), partition, create=True)
        single = [meta.select_samples([i]) for i in range(len(rows))]
        puts = [self._write(one, [row | {ID: key}]) for one, (key, row) in zip(single, rows.items(), strict=True)]
        await asyncio.gather(*puts)

    async def _update(self, partition: str, rows: Mapping[str, Fields]) -> set[str]:
        meta, found = await self._find(partition, list(rows))
        if found:
            await self._write(meta, [rows[key] for key in found])
        return set(rows) - set(found)

    async def _write(self, meta: BatchMeta, rows: Sequence[Fields]) -> None:
        columns = {name: NonTensorStack(*(row[name] for row in rows)) for name in rows[0]}
        await self._client.storage_manager.put_data(TensorDict(columns, batch_size=len(rows)), meta)

    async def _get(self, partition: str, keys: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]] | None:
        meta, found = await self._find(partition, list(keys))
        if len(found) < len(keys) or not set(names) <= set(meta.field_names):
            return None
        return await self._read(meta, [*names, ID])

    async def _fetch(self, partition: str, names: Sequence[str], n: int, task: str) -> dict[str, dict[str, Any]]:
        fields, rows = [*names, ID], {}
        while len(rows) < n:
            meta = await self._client.async_get_meta(fields, 1, partition, mode="fetch", task_name=task)
            if not meta.size:
                break
            rows |= await self._read(meta, fields)
        return rows

    async def _read(self, meta: BatchMeta, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        data = await self._client.storage_manager.get_data(meta.select_fields(list(dict.fromkeys(names))))
        columns = {name: data.get(name).tolist() for name in names}
        return {key: {name: columns[name][i] for name in names} for i, key in enumerate(columns[ID])}

    async def _find(self, partition: str, keys: list[str]) -> tuple[BatchMeta, list[str]]:
        """Find which rows are there, and their keys in the same order."""
        meta = await self._client.async_kv_retrieve_meta(keys, partition)
        if meta.size in (0, len(keys)):
            return meta, keys[: meta.size]
        return meta, await self._client.async_kv_retrieve_keys(meta.global_indexes, partition)

    async def _clear(self, partition: str, keys: Sequence[str]) -> None:
        meta, found = await self._find(partition, list(keys))
        if found:
            await self._client.async_clear_samples(meta)

    # ------------------------------------------------------------------------------------------------------------ time limits

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, self.timeout), self._loop)
        try:
            return self._result(future)
        except QueueFailed:
            future.cancel()
            raise
        except TimeoutError as error:
            future.cancel()
            raise QueueFailed(f"the queue did not answer within {self.timeout:g} s") from error
        except Exception as error:  # TransferQueue raises RuntimeError, ValueError, KeyError, zmq's and asyncio's errors
            raise QueueFailed(f"the queue refused a call: {type(error).__name__}: {error}") from error

    def _result(self, future: Future[T]) -> T:
        """The result, asking now and then whether the queue lives: TransferQueue goes on waiting for a dead one."""
        end = time.monotonic() + self.timeout + CHECK_SECONDS
        while True:
            try:
                return future.result(CHECK_SECONDS)
            except TimeoutError:
                if future.done() or time.monotonic() > end:
                    raise
                self.actors.check(end - time.monotonic())


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CLOSE_SECONDS)

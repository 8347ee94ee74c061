"""Groups per second committed to and leased from the journal, against raw sqlite3 moving the same bytes.

    python -m benchmarks.journal [--groups 64] [--repeats 5] [--folder .]

The raw side writes the journal's own payloads into one table of one column, in one transaction each, with the same
durability (write-ahead log, `synchronous=FULL`) and without (`NORMAL`): the difference is what fsync costs on this disk.
It neither encodes, checks nor indexes. Every figure is the median over the repeats of the median over the calls.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from relax_server.journal import open_journal
from relax_server.journal.payload import pack, unpack

from benchmarks.report import save
from relax_sdk.trajectory import Group, Status, Trajectory, Turn, VersionSpan

SIZE = 16
"""Trajectories of a group, and groups of a lease."""
VOCABULARY = 150_000
LENGTHS = (50, 2000)
"""Tokens of a trajectory: a quarter prompt, the rest response."""

Times = dict[str, float]
"""Milliseconds by operation."""


def make_group(index: int, tokens: int) -> Group:
    """One-turn trajectories of random ids and logprobs: what compresses worst."""
    draw = random.Random(index)
    id, prompt, response = f"g{index}", tokens // 4, tokens - tokens // 4
    turns = [
        Turn(
            prompt_ids=[draw.randrange(VOCABULARY) for _ in range(prompt)],
            response_ids=[draw.randrange(VOCABULARY) for _ in range(response)],
            response_logprobs=[-3 * draw.random() for _ in range(response)],
            weight_versions=[VersionSpan(1, 0, response)],
        )
        for _ in range(SIZE)
    ]
    return Group(
        id,
        "bench",
        index,
        [
            Trajectory(
                f"{id}-{i}", "bench", "0", index, id, i, SIZE, i, Status.COMPLETED, [turn], reward=1.0, rewards={"env": 1.0}
            )
            for i, turn in enumerate(turns)
        ],
    )


def milliseconds(call: Callable[[Any], Any], arguments: Sequence[Any]) -> tuple[float, list[Any]]:
    """Median time of a call over its arguments, and what it returned."""
    times, results = [], []
    for argument in arguments:
        began = time.perf_counter()
        results.append(call(argument))
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times), results


def journal_times(file: Path, groups: Sequence[Group]) -> Times:
    """The journal's operations, each on every group or every batch of 16."""
    journal, aside, rounds = open_journal(file), open_journal(file.with_suffix(".many")), range(len(groups) // SIZE)
    times: Times = {}
    times["commit"], _ = milliseconds(lambda group: journal.commit(group, "run"), groups)
    again = [groups[i * SIZE : (i + 1) * SIZE] for i in rounds]
    times["commit_many16"], _ = milliseconds(lambda batch: aside.commit_many(batch, "run"), again)
    aside.close()
    times["lease16"], found = milliseconds(lambda _: journal.lease(SIZE, "run", "a", 1, 0, 600.0), rounds)
    assert all(len(result.leases) == SIZE for result in found)
    times["poll"], _ = milliseconds(lambda _: journal.lease(SIZE, "run", "a", 1, 0, 600.0), range(50))
    times["renew"], _ = milliseconds(lambda _: journal.renew("run", "a", 600.0), range(5))
    ids = [[lease.group.id for lease in result.leases] for result in found]
    times["ack16"], _ = milliseconds(lambda batch: journal.ack(batch, "run", "a", 1), ids)
    journal.close()
    return times


def raw_times(file: Path, payloads: Sequence[bytes], synchronous: str) -> Times:
    """Insert the same bytes one transaction each, and read them 16 at a time, by sqlite3 alone."""
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    connection.execute("CREATE TABLE payloads (seq INTEGER PRIMARY KEY, data BLOB)")

    def insert(payload: bytes) -> None:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO payloads (data) VALUES (?)", (payload,))
        connection.execute("COMMIT")

    def read(batch: int) -> list[Any]:
        low = batch * SIZE
        return connection.execute("SELECT data FROM payloads WHERE seq > ? AND seq <= ?", (low, low + SIZE)).fetchall()

    inserted, _ = milliseconds(insert, payloads)
    fetched, _ = milliseconds(read, range(len(payloads) // SIZE))
    connection.close()
    return {f"raw insert {synchronous}": inserted, f"raw read16 {synchronous}": fetched}


def codec_times(groups: Sequence[Group], payloads: Sequence[bytes]) -> Times:
    """What of a commit and a lease is encoding and decoding."""
    packed, _ = milliseconds(pack, groups)
    unpacked, _ = milliseconds(lambda payload: unpack(payload, ""), payloads)
    return {"pack": packed, "unpack16": SIZE * unpacked}


def measure(folder: Path, tokens: int, count: int, repeats: int) -> Times:
    """Every time, as the median over `repeats`; the two sides take turns."""
    groups = [make_group(i, tokens) for i in range(count)]
    payloads = [pack(group) for group in groups]
    runs: list[Times] = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            at = Path(place)
            times = journal_times(at / "journal.db", groups) | codec_times(groups, payloads)
            for synchronous in ("FULL", "NORMAL"):
                times |= raw_times(at / f"{synchronous}.db", payloads, synchronous)
            runs.append(times)
    found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return found | {"payload KiB": statistics.mean(map(len, payloads)) / 1024}


def rows_of(tokens: int, t: Times) -> list[dict[str, Any]]:
    """The table: the journal beside the same bytes by hand."""

    def row(operation: str, per_call: int, ours: float, raw: float | None = None, codec: float | None = None) -> dict[str, Any]:
        return {
            "tokens per trajectory": tokens,
            "operation": operation,
            "ms": round(ours, 3),
            "of it coding, ms": None if codec is None else round(codec, 3),
            "raw sqlite3, ms": None if raw is None else round(raw, 3),
            "groups/s": round(per_call / ours * 1e3),
            "raw groups/s": None if raw is None else round(per_call / raw * 1e3),
        }

    return [
        row("commit 1 group", 1, t["commit"], t["raw insert FULL"], t["pack"]),
        row(f"commit {SIZE} groups together", SIZE, t["commit_many16"], SIZE * t["raw insert FULL"], SIZE * t["pack"]),
        row(f"lease {SIZE} groups", SIZE, t["lease16"], t["raw read16 FULL"], t["unpack16"]),
        row(f"ack {SIZE} groups", SIZE, t["ack16"]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64, help="committed per repeat; a multiple of 16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    arguments = parser.parse_args()
    if arguments.groups < SIZE or arguments.groups % SIZE:
        parser.error(f"--groups must be a multiple of {SIZE}")
    found = {tokens: measure(arguments.folder, tokens, arguments.groups, arguments.repeats) for tokens in LENGTHS}
    rows = [row for tokens, times in found.items() for row in rows_of(tokens, times)]
    details = {str(tokens): {name: round(value, 4) for name, value in times.items()} for tokens, times in found.items()}
    settings = {"groups": arguments.groups, "group_size": SIZE, "repeats": arguments.repeats}
    for tokens, times in details.items():
        fsync = times["raw insert FULL"] - times["raw insert NORMAL"]
        print(
            f"{tokens} tokens: payload {times['payload KiB']:.0f} KiB, fsync {fsync:.2f} ms, empty poll {times['poll']:.2f} ms"
        )
    save("journal", rows, settings=settings, milliseconds=details)


if __name__ == "__main__":
    main()

"""Groups per second committed to and leased from the journal, against raw sqlite3 moving the same bytes.

    python -m benchmarks.journal [--groups 64] [--repeats 5] [--folder .]

The raw side writes the journal's own payloads into one table of one column, in one transaction each, with the same
durability (write-ahead log, `synchronous=FULL`) and without (`NORMAL`): the difference is what fsync costs on this disk.
It neither encodes, checks nor indexes. Every figure is the median over the repeats of the median over the calls. CPU time
is of this process; on a machine with other work it is steadier than wall time.
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
"""Milliseconds by operation; `… cpu` is the CPU time of it."""


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


def timed(times: Times, name: str, call: Callable[[Any], Any], arguments: Sequence[Any]) -> list[Any]:
    """Note the median wall and CPU time of a call over its arguments; returns what it returned."""
    wall, cpu, results = [], [], []
    for argument in arguments:
        began, cpu_began = time.perf_counter(), time.process_time()
        results.append(call(argument))
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - cpu_began)
    times[name], times[f"{name} cpu"] = 1e3 * statistics.median(wall), 1e3 * statistics.median(cpu)
    return results


def journal_times(file: Path, groups: Sequence[Group]) -> Times:
    """The journal's operations, each on every group or every batch of 16."""
    journal, aside, rounds = open_journal(file), open_journal(file.with_suffix(".many")), range(len(groups) // SIZE)
    times: Times = {}
    timed(times, "commit", lambda group: journal.commit(group, "run"), groups)
    again = [groups[i * SIZE : (i + 1) * SIZE] for i in rounds]
    timed(times, "commit_many16", lambda batch: aside.commit_many(batch, "run"), again)
    aside.close()
    found = timed(times, "lease16", lambda _: journal.lease(SIZE, "run", "a", 1, 0, 600.0), rounds)
    assert all(len(result.leases) == SIZE for result in found)
    timed(times, "poll", lambda _: journal.lease(SIZE, "run", "a", 1, 0, 600.0), range(50))
    timed(times, "renew", lambda _: journal.renew("run", "a", 600.0), range(5))
    ids = [[lease.group.id for lease in result.leases] for result in found]
    timed(times, "ack16", lambda batch: journal.ack(batch, "run", "a", 1), ids)
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

    times: Times = {}
    timed(times, f"raw insert {synchronous}", insert, payloads)
    timed(times, f"raw read16 {synchronous}", read, range(len(payloads) // SIZE))
    connection.close()
    return times


def codec_times(groups: Sequence[Group], payloads: Sequence[bytes]) -> Times:
    """What of a commit and a lease is encoding and decoding."""
    times: Times = {}
    timed(times, "pack", pack, groups)
    timed(times, "unpack", lambda payload: unpack(payload, ""), payloads)
    return times


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

    def row(operation: str, groups: int, name: str, raw: str | None = None, coding: str | None = None) -> dict[str, Any]:
        raw_ms = None if raw is None else t[raw] * (groups if "insert" in raw else 1)
        return {
            "tokens per trajectory": tokens,
            "operation": operation,
            "ms": round(t[name], 3),
            "CPU ms": round(t[f"{name} cpu"], 3),
            "of it coding": None if coding is None else round(t[f"{coding} cpu"] * groups, 3),
            "raw sqlite3, ms": None if raw_ms is None else round(raw_ms, 3),
            "groups/s": round(groups / t[name] * 1e3),
            "raw groups/s": None if raw_ms is None else round(groups / raw_ms * 1e3),
        }

    return [
        row("commit 1 group", 1, "commit", "raw insert FULL", "pack"),
        row(f"commit {SIZE} groups together", SIZE, "commit_many16", "raw insert FULL", "pack"),
        row(f"lease {SIZE} groups", SIZE, "lease16", "raw read16 FULL", "unpack"),
        row(f"ack {SIZE} groups", SIZE, "ack16"),
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

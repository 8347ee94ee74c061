"""Runs of thousands of short text episodes, made through the journal: for the page's tests and its benchmark."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from relax_server.journal import open_journal

from relax_sdk.config import RunConfig
from relax_sdk.trajectory import Group, Status, Trajectory, Turn, VersionSpan

MANY = 10_000
GROUP = 8


def make_many(parent: Path, name: str = "many", count: int = MANY, tokens: int = 12) -> Path:
    """A run of `count` text episodes of at most `tokens` answered ones; every hundredth has failed."""
    folder = parent / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(RunConfig(env="parity-v0", steps=100))))
    journal = open_journal(folder / "journal.db")
    groups = [text_group(number, name, tokens) for number in range(count // GROUP)]
    journal.commit_many(groups, name)
    journal.close()
    return folder


def text_group(number: int, run: str, tokens: int = 12) -> Group:
    """A group of one-turn episodes without media."""
    id = f"{run}/train/{number}"
    return Group(id, "parity-v0", number, [_text_episode(id, number, index, tokens) for index in range(GROUP)])


def _text_episode(group: str, number: int, index: int, tokens: int) -> Trajectory:
    failed = (number * GROUP + index) % 100 == 99
    answer = [40 + (number + index + n) % 20 for n in range(1 + (number + 3 * index) % tokens)]
    turn = Turn(
        [70, 71, 72], answer, [-0.1 * (n % 30 + 1) for n in range(len(answer))], [VersionSpan(number // 50, 0, len(answer))]
    )
    said = [{"role": "user", "content": f"is {number} even?"}, {"role": "assistant", "content": f"answer {index} of {number}"}]
    return Trajectory(
        *(f"{group}/{index}", "parity-v0", "1", number, group, index, GROUP, number),
        status=Status.FAILED if failed else Status.COMPLETED,
        turns=[] if failed else [turn],
        messages=said[:1] if failed else said,
        reward=0.0 if failed else ((number * 7 + index) % 11) / 10,
        rewards={} if failed else {"env": ((number * 7 + index) % 11) / 10},
        error="TimeoutError: the tool did not answer" if failed else None,
        timings={"generate": 0.2, "step": 0.01, "total": 0.21},
    )

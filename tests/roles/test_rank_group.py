"""The processes of the trainer as one role: who is heard, and whose end is told of, whatever order it comes in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from relax_server.roles.messages import Died, Warn
from relax_server.roles.rank_group import RankGroup


@dataclass(frozen=True)
class First:
    """What is sent to a rank first, as far as the group looks at it."""

    weights: Path
    rank: int = 0
    meeting: Path | None = None


class Member:
    """A process of the group whose end comes when the test says so; as a real one, it tells no more of an earlier start."""

    def __init__(self, name: str, hear: Callable[[Any], None]) -> None:
        self.name, self.hear, self.generation = name, hear, 0
        self.killed = True
        self.while_starting: Callable[[], None] = lambda: None

    async def start(self, first: Any) -> None:
        self.generation += 1
        self.killed = False
        self.while_starting()

    def end(self) -> Callable[[], None]:
        """Kill it; what is returned brings the news of its end."""
        generation, self.killed = self.generation, True

        def told() -> None:
            if generation == self.generation:
                self.hear(Died(self.name, generation, -9, Path("log")))

        return told

    def alive(self) -> bool:
        return not self.killed

    def kill(self) -> None:
        self.killed = True


class Group:
    def __init__(self, ranks: int) -> None:
        self.heard: list[Any] = []
        self.members: list[Member] = []
        placement: Any = SimpleNamespace(role=self._role)
        self.group = RankGroup(placement, "policy", Path("run"), self.heard.append, 1, ranks)

    def _role(self, name: str, folder: Path, hear: Callable[[Any], None], threads: int) -> Member:
        self.members.append(Member(name, hear))
        return self.members[-1]

    async def start(self) -> None:
        first: Any = First(Path("weights"))
        await self.group.start(first)


async def test_an_end_that_is_told_while_the_next_start_goes_on_does_not_end_that() -> None:
    """All ranks were killed at once, as those of a trainer that hangs; the last one's end comes late."""
    trainer = Group(2)
    await trainer.start()
    first, second = (member.end() for member in trainer.members)
    first()
    assert len(trainer.heard) == 1
    trainer.members[0].while_starting = lambda: (second(), trainer.members[1].hear(Warn("late", "policy")))
    await trainer.start()
    assert all(member.alive() for member in trainer.members) and len(trainer.heard) == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
async def test_the_end_of_all_is_told_once(order: tuple[int, ...]) -> None:
    trainer = Group(3)
    for number in (1, 2):
        await trainer.start()
        news = [member.end() for member in trainer.members]
        for rank in order:
            news[rank]()
        assert len(trainer.heard) == number and isinstance(trainer.heard[-1], Died)


async def test_the_end_of_one_kills_the_others() -> None:
    trainer = Group(3)
    await trainer.start()
    trainer.members[1].end()()
    assert not trainer.group.alive() and len(trainer.heard) == 1

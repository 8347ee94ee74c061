"""Any order of commits, leases, acks, crashes, restores and clock jumps: nothing lost, nothing trained twice, nothing stale."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from relax_server.journal import open_journal
from relax_server.journal.base import Journal, JournalCounts
from sample_groups import ManualClock, make_group

from relax_sdk.errors import JournalError

RUN, TTL = "run-1", 60.0
CONSUMERS = ("a", "b")
consumers = st.sampled_from(CONSUMERS)


@dataclass
class Entry:
    """What the model knows of one group."""

    id: str
    version: int
    state: str = "ready"
    consumer: str | None = None
    session: int = 0
    expires: float = 0.0
    checkpoint: int | None = None


class JournalMachine(RuleBasedStateMachine):
    """Each consumer has its own journal over the same file, as two processes would; the model is a list in commit order."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.clock = ManualClock()
        self.model: list[Entry] = []
        self.version = self.checkpoint = 0
        self.session = dict.fromkeys(CONSUMERS, 0)
        self.journals: dict[str, Journal] = {}
        self.abandoned: list[Journal] = []
        self.trained: list[tuple[int, str]] = []
        """(checkpoint, group): what a checkpoint's weights have seen; told by acks alone, not by the model."""
        for consumer in CONSUMERS:
            self.open(consumer)

    def open(self, consumer: str) -> None:
        self.journals[consumer] = open_journal(self.folder / "journal.db", clock=self.clock)
        self.session[consumer] += 1

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            for journal in (*self.journals.values(), *self.abandoned):
                journal.close()
            shutil.rmtree(self.folder)

    # ---------------------------------------------------------------------------------------------------------- the model

    def mine(self, entry: Entry, consumer: str) -> bool:
        return entry.consumer == consumer and entry.session == self.session[consumer]

    def free(self, entry: Entry, consumer: str) -> bool:
        lapsed = entry.state == "leased" and entry.expires <= self.clock.now and not self.mine(entry, consumer)
        return entry.state == "ready" or lapsed

    def held(self, consumer: str) -> list[Entry]:
        return [e for e in self.model if e.state == "leased" and e.consumer == consumer]

    # ---------------------------------------------------------------------------------------------------------- the rules

    @rule(consumer=consumers, lag=st.sampled_from([0, 0, 0, 1, 3]), count=st.integers(1, 3))
    def commit(self, consumer: str, lag: int, count: int) -> None:
        for _ in range(count):
            entry = Entry(f"g{len(self.model)}", max(0, self.version - lag))
            group = make_group(entry.id, versions=(entry.version, self.version, None), task_index=len(self.model), tokens=1)
            assert self.journals[consumer].commit(group, RUN)
            self.model.append(entry)

    @precondition(lambda self: self.model)
    @rule(consumer=consumers, data=st.data())
    def commit_again(self, consumer: str, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.model))
        assert not self.journals[consumer].commit(make_group(entry.id), RUN)

    @rule(consumer=consumers, n=st.integers(1, 3), max_staleness=st.integers(0, 2))
    def lease(self, consumer: str, n: int, max_staleness: int) -> None:
        result = self.journals[consumer].lease(n, RUN, consumer, self.version, max_staleness, TTL)
        served = [lease.group.id for lease in result.leases]
        for entry in self.model:
            entry.expires = min(entry.expires, self.clock.now + TTL)
        free = [e for e in self.model if self.free(e, consumer)]
        stale = [e for e in free if self.version - e.version > max_staleness]
        for entry in stale:
            entry.state, entry.consumer = "stale", None
        fresh = [e for e in free if e.state != "stale"]
        expected = fresh[:n] if len(fresh) >= n else []
        assert (served, result.dropped) == ([e.id for e in expected], len(stale))
        assert all(self.version - lease.group.version_min <= max_staleness for lease in result.leases)
        for entry in expected:
            entry.state, entry.consumer, entry.session = "leased", consumer, self.session[consumer]
            entry.expires = self.clock.now + TTL

    @rule(consumer=consumers)
    def renew(self, consumer: str) -> None:
        held = [e for e in self.held(consumer) if self.mine(e, consumer)]
        assert self.journals[consumer].renew(RUN, consumer, TTL) == len(held)
        for entry in held:
            entry.expires = self.clock.now + TTL

    @precondition(lambda self: any(self.held(consumer) for consumer in CONSUMERS))
    @rule(consumer=consumers)
    def train_and_checkpoint(self, consumer: str) -> None:
        """A step on all that is held, a checkpoint, its ack; new weights."""
        held = self.held(consumer)
        self.version += bool(held)
        self.checkpoint += 1
        assert self.journals[consumer].ack([e.id for e in held], RUN, consumer, self.checkpoint) == len(held)
        for entry in held:
            entry.state, entry.checkpoint = "acked", self.checkpoint
            self.trained.append((self.checkpoint, entry.id))

    @precondition(lambda self: self.model)
    @rule(consumer=consumers, data=st.data())
    def ack_anything(self, consumer: str, data: st.DataObject) -> None:
        """An ack of what is not held is refused; a repeated one changes nothing."""
        entry = data.draw(st.sampled_from(self.model))
        if entry.consumer == consumer and entry.state == "acked":
            assert self.journals[consumer].ack([entry.id], RUN, consumer, self.checkpoint) == 1
        elif entry.consumer != consumer or entry.state != "leased":
            try:
                self.journals[consumer].ack([entry.id], RUN, consumer, self.checkpoint)
            except JournalError:
                return
            raise AssertionError(f"{consumer} could ack {entry}")

    @rule(consumer=consumers, back=st.integers(0, 3))
    def restore(self, consumer: str, back: int) -> None:
        """The trainer goes back: what later checkpoints held has not been trained on."""
        self.checkpoint = max(0, self.checkpoint - back)
        again = [e for e in self.model if e.state == "acked" and (e.checkpoint or 0) > self.checkpoint] + self.held(consumer)
        assert self.journals[consumer].restore(RUN, consumer, self.checkpoint) == len(again)
        for entry in again:
            entry.state, entry.consumer, entry.checkpoint = "ready", None, None
        self.trained = [(checkpoint, id) for checkpoint, id in self.trained if checkpoint <= self.checkpoint]

    @rule(consumer=consumers, gracefully=st.booleans())
    def die_and_open_again(self, consumer: str, gracefully: bool) -> None:
        if gracefully:
            self.journals[consumer].close()
        else:
            self.abandoned.append(self.journals[consumer])
        self.open(consumer)

    @rule(seconds=st.sampled_from([1.0, TTL - 1, TTL, TTL, 10 * TTL, -1.0, -1000 * TTL]))
    def clock_moves(self, seconds: float) -> None:
        self.clock.advance(seconds)

    # ------------------------------------------------------------------------------------------------------- the promises

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "model"):
            return
        states = [e.state for e in self.model]
        lapsed = sum(e.state == "leased" and e.expires <= self.clock.now for e in self.model)
        expected = JournalCounts(
            ready=states.count("ready") + lapsed,
            leased=states.count("leased") - lapsed,
            acked=states.count("acked"),
            stale=states.count("stale"),
        )
        assert self.journals["a"].counts(RUN) == expected
        assert self.journals["b"].task_indices(RUN) == list(range(len(self.model)))

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        seen = [id for _, id in getattr(self, "trained", [])]
        assert len(seen) == len(set(seen))


TestJournal = JournalMachine.TestCase
TestJournal.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

"""A controller's claim of its run: refused while another one gives signs of life, taken when it gives none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from relax_server.journal import open_journal
from relax_server.journal.base import Journal
from relax_server.roles import claim as claims
from relax_server.roles.claim import Claim

from relax_sdk.errors import ConfigError
from relax_sdk.run_lock import Holder

RUN = "run"


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, seconds in dict(BEAT_SECONDS=0.02, LOOK_SECONDS=0.05, LAPSE_SECONDS=1.0).items():
        monkeypatch.setattr(claims, name, seconds)
    opened = open_journal(tmp_path / "journal.db")
    yield opened
    opened.close()


def elsewhere(pid: int) -> Holder:
    return Holder(pid, "vm7", "another machine", 1, 0.0)


async def test_a_program_that_gives_signs_of_life_keeps_its_run(journal: Journal):
    first, waited = Claim(journal, RUN, elsewhere(1)), []
    await first.take(waited.append)
    assert not waited
    beating = asyncio.create_task(first.keep(pytest.fail))
    with pytest.raises(ConfigError, match="in use by process 1 on vm7, since "):
        await Claim(journal, RUN, elsewhere(2)).take(waited.append)
    assert "waiting for a sign of life of process 1 on vm7" in waited[0]
    assert not beating.done()
    beating.cancel()
    await first.end()
    await Claim(journal, RUN, elsewhere(2)).take(pytest.fail)


async def test_a_program_without_a_sign_of_life_loses_its_run_and_is_told_when_it_comes_back(journal: Journal):
    first, lost = Claim(journal, RUN, elsewhere(1)), []
    await first.take(pytest.fail)
    await Claim(journal, RUN, elsewhere(2)).take(lambda text: None)
    await asyncio.wait_for(first.keep(lost.append), 10)
    assert "another program has taken run 'run'" in lost[0]


async def test_a_controller_that_is_started_again_for_the_same_program_goes_on_at_once(journal: Journal):
    program = elsewhere(1)
    await Claim(journal, RUN, program).take(pytest.fail)
    await Claim(journal, RUN, program).take(pytest.fail)

"""The end of a log, however long the log is, and however slowly its disk answers."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from relax_server.log_tail import BYTES, log_tail


async def test_the_last_lines_are_shown_and_no_more_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte of nothing: who reads it all fails
        file.seek(0, 2)
        file.write(b"".join(b"line %d \xff\n" % number for number in range(100)))
    assert await log_tail(log, 2) == "line 98 \ufffd\nline 99 \ufffd"
    assert len(await log_tail(log, 10**6)) <= BYTES


async def test_a_short_log_is_shown_whole_and_a_missing_one_is_empty(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("one\ntwo")
    assert await log_tail(tmp_path / "log") == "one\ntwo"
    assert await log_tail(tmp_path / "none") == ""


async def test_the_event_loop_goes_on_while_a_disk_does_not_answer(tmp_path: Path) -> None:
    """A pipe that nobody writes to is opened as slowly as a file on a network folder that hangs."""
    pipe = tmp_path / "log"
    os.mkfifo(pipe)
    reading = asyncio.create_task(log_tail(pipe))
    async with asyncio.timeout(30):
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert not reading.done()
        os.close(os.open(pipe, os.O_WRONLY))  # opened as soon as somebody reads
        assert await reading == ""  # a pipe has no end to look for

"""A process of its own that works on a journal; what it has done it says on stdout, one JSON line each.

python worker.py commit FILE PREFIX COUNT [BARRIER]  commit groups; with a barrier, stop for good in the second group
python worker.py lease FILE CONSUMER N               wait for a line on stdin, then lease until nothing is left
python worker.py open FILE                           wait for a line on stdin, then open
python worker.py refused FILE                        as a user without rights: open, commit, and say the error
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from relax_server.journal import open_journal
from relax_server.journal.sql import SqlJournal
from sample_groups import make_group
from sqlalchemy import event

from relax_sdk.errors import JournalError

RUN = "run-1"


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def commit(file: str, prefix: str, count: str, barrier: str = "") -> None:
    journal = open_journal(file)
    assert isinstance(journal, SqlJournal)
    for i in range(int(count)):
        if barrier and i == 1:
            stop_at(journal, barrier)
        group = make_group(f"{prefix}{i}", versions=(0,) * 4, task_index=i, tokens=5000)
        journal.commit(group, RUN)
        say(group.id)


def stop_at(journal: SqlJournal, barrier: str) -> None:
    """Say so and wait to be killed, inside the transaction of the next group, before its COMMIT or a certain statement."""

    def pass_by(what: str) -> None:
        if barrier in what:
            say({"waiting at": barrier})
            threading.Event().wait(60)
            os._exit(3)  # nobody killed us: the test has failed

    event.listen(journal.engine, "before_cursor_execute", lambda _c, _cursor, statement, *_: pass_by(statement))
    event.listen(journal.engine, "commit", lambda connection: pass_by("COMMIT" if connection.info.pop("wrote", False) else ""))
    event.listen(
        journal.engine, "after_cursor_execute", lambda c, _cursor, statement, *_: c.info.update(wrote="INSERT" in statement)
    )


def lease(file: str, consumer: str, n: str) -> None:
    journal = open_journal(file)
    say("ready")
    sys.stdin.readline()
    while leases := journal.lease(int(n), RUN, consumer, 0, 0, 600.0).leases:
        say([lease.group.id for lease in leases])


def open_only(file: str) -> None:
    say("ready")
    sys.stdin.readline()
    say(open_journal(file).counts(RUN).total)


def refused(file: str) -> None:
    if os.geteuid() == 0:  # root may write anywhere
        os.setgid(65534)
        os.setuid(65534)
    try:
        open_journal(file).commit(make_group("g"), RUN)
    except JournalError as error:
        say(str(error))


if __name__ == "__main__":
    {"commit": commit, "lease": lease, "open": open_only, "refused": refused}[sys.argv[1]](*sys.argv[2:])

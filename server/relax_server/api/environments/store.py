"""Registered environments in the journal's database, which every server on it knows."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import delete, insert, select

from relax_sdk.errors import JournalError
from relax_sdk.hosting.protocol import Description
from relax_server.api.environments.source import EnvSource
from relax_server.api.keys import Key
from relax_server.gateway.errors import ApiError
from relax_server.journal.schema import envs
from relax_server.journal.sql import SqlJournal
from relax_server.rollout.threads import CallThreads

DATABASE_SECONDS = 60.0


class EnvStore:
    """The table of environments; its methods raise `JournalError` where the database cannot be read or written.

    Args:
        journal: whose database it is.
        threads: wait for the database.
    """

    def __init__(self, journal: SqlJournal, threads: CallThreads) -> None:
        self._journal, self._threads = journal, threads

    async def ids(self) -> list[str]:
        """Names of all that are registered, at whichever server."""
        return await self._threads.call(self._ids, limit=DATABASE_SECONDS)

    async def read(self, env: str) -> tuple[str, EnvSource, Description] | None:
        """Id of the key that registered an environment, where its code comes from, and what it is; None: nobody registered it.

        Raises:
            JournalError: another version wrote it, in a form that this one does not know.
        """
        return await self._threads.call(self._read, env, limit=DATABASE_SECONDS)

    async def write(self, row: dict[str, Any], key: Key) -> None:
        """Keep an environment in place of the one of its name.

        Raises:
            ApiError: 409, the name is another key's.
        """
        await self._threads.call(self._write, row, key, limit=DATABASE_SECONDS)

    async def delete(self, env: str) -> None:
        """Forget an environment."""
        await self._threads.call(self._delete, env, limit=DATABASE_SECONDS)

    def _ids(self) -> list[str]:
        with self._journal.reading("list environments") as connection:
            return list(connection.execute(select(envs.c.id)).scalars())

    def _read(self, env: str) -> tuple[str, EnvSource, Description] | None:
        with self._journal.reading(f"look up environment {env}") as connection:
            row = connection.execute(select(envs).where(envs.c.id == env)).mappings().first()
        if row is None:
            return None
        try:
            source = msgspec.msgpack.decode(row["source"], type=EnvSource)
            return row["key"], source, msgspec.msgpack.decode(row["description"], type=Description)
        except msgspec.DecodeError as error:
            raise JournalError(f"environment {env} was registered by another version ({error}); register it again") from error

    def _write(self, row: dict[str, Any], key: Key) -> None:
        with self._journal.writing(f"register environment {row['id']}") as connection:
            owner = connection.execute(select(envs.c.key).where(envs.c.id == row["id"])).scalar()
            if owner not in (None, key.id) and not key.may("admin"):  # it came while this one was being loaded
                raise ApiError(409, f"{row['id']} belongs to another key; choose another id", "name_taken", "id")
            connection.execute(delete(envs).where(envs.c.id == row["id"]))
            connection.execute(insert(envs).values(row))

    def _delete(self, env: str) -> None:
        with self._journal.writing(f"remove environment {env}") as connection:
            connection.execute(delete(envs).where(envs.c.id == env))

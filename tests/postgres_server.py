"""A real PostgreSQL server for tests, with data of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest


def program(name: str) -> str | None:
    """Where a program of PostgreSQL is, or None."""
    found = shutil.which(name)
    packaged = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return found or (str(packaged[-1]) if packaged else None)


class PostgresServer:
    """`initdb` and `postgres`; as another user where we are root, as PostgreSQL wants it."""

    def __init__(self, initdb: str, postgres: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="relax-postgres-"))
        self.who: dict[str, Any] = {}
        if os.getuid() == 0:
            self.who = {"user": "nobody", "group": "nogroup", "extra_groups": []}
            shutil.chown(self.folder, "nobody", "nogroup")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        data, log = str(self.folder / "data"), self.folder.parent / f"{self.folder.name}.log"
        command = [initdb, "-D", data, "-U", "relax", "--auth=trust", "--no-sync", "-E", "UTF8"]
        subprocess.run(command, check=True, capture_output=True, cwd=self.folder, timeout=120, **self.who)
        options = ["-c", "listen_addresses=127.0.0.1", "-c", "fsync=off", "-c", "max_connections=200"]
        self.command = [postgres, "-D", data, "-p", str(self.port), "-k", str(self.folder), *options]
        self.log = log
        self.start()

    def start(self) -> None:
        """Start it and wait until it answers."""
        import psycopg

        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, cwd=self.folder, **self.who)
        end = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(self.url("postgres")).close()
                return
            except psycopg.OperationalError:
                assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
                time.sleep(0.1)

    def url(self, database: str) -> str:
        return f"postgresql://relax@127.0.0.1:{self.port}/{database}"

    def make(self) -> str:
        """The URL of a new, empty database."""
        import psycopg

        name = f"test_{uuid.uuid4().hex}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return self.url(name)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """It answers nobody while the block lasts, and its connections stay."""
        processes = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.log.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server for the whole session."""
    initdb, server = program("initdb"), program("postgres")
    if initdb is None or server is None:
        pytest.skip("PostgreSQL is not installed on this machine: apt install postgresql")
    it = PostgresServer(initdb, server)
    yield it
    it.close()

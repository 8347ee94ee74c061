"""`RunLock`: one program at a time carries out the run in a folder; the lock dies with its holder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from relax_sdk.errors import ConfigError

LOCK = "run.lock"
"""The file that is locked while a program carries the run out, and says who that is. It stays; the lock does not."""

NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
"""What a file system answers that cannot lock files, such as Lustre without its option `flock`."""


@dataclass(frozen=True)
class Holder:
    """A program that carries out a run."""

    pid: int
    host: str
    machine: str
    """The boot and the process namespace in which `pid` means something; hosts and containers may share a name."""
    born: int
    """When the process began, in clock ticks since the boot: process ids are given again."""
    since: float
    """When it took the run; Unix seconds."""
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    """The same for all that works for this program, also for a controller that was started again."""

    @classmethod
    def here(cls) -> Holder:
        """This process, taking a run now."""
        return cls(os.getpid(), socket.gethostname(), _machine(), born(os.getpid()) or 0, time.time())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Holder:
        """The holder that `dataclasses.asdict` was made of.

        Raises:
            KeyError, TypeError, ValueError: it was made of something else.
        """
        kinds: dict[str, type] = dict(pid=int, host=str, machine=str, born=int, since=float, id=str)
        return cls(**{name: kind(values[name]) for name, kind in kinds.items()})

    def ended(self) -> bool:
        """Whether the process is known to be gone; of another machine's nothing is known."""
        return self.machine == _machine() and born(self.pid) != self.born

    def __str__(self) -> str:
        """`process 4711 on vm1, since 3 min`."""
        return f"process {self.pid} on {self.host}, since {_age(time.time() - self.since)}"


class RunLock:
    """The right to carry out the run in a folder, for one program at a time.

    An operating system's lock (`flock`): it is given back when the process ends, whatever ends it. Over NFS it holds for all
    hosts unless the file system is mounted with `nolock` or `local_lock`; there, and where `enforced` is false, two programs on
    different hosts are told apart by the claim in the journal alone (`relax_server.roles.claim`).

    Args:
        folder: of the run; it exists.
        holder: who is named to others.
    """

    def __init__(self, folder: Path, holder: Holder) -> None:
        self.folder, self.holder = folder, holder
        self.enforced = False
        """Whether the file system has locks; known once it is held."""
        self._file: IO[bytes] | None = None

    def acquire(self) -> None:
        """Take the run.

        Raises:
            ConfigError: another program has it, or the folder cannot be written.
        """
        path = self.folder / LOCK
        try:
            file = path.open("a+b", buffering=0)
        except OSError as error:
            raise cannot_write(self.folder, error) from error
        try:
            self.enforced = _lock(file)
            if not self.enforced:
                file.close()
                return
            file.seek(0)
            file.truncate()
            file.write(json.dumps(asdict(self.holder)).encode())
        except BlockingIOError:
            other = _read(file)
            file.close()
            raise ConfigError(in_use(self.folder, other)) from None
        except OSError as error:
            file.close()
            raise cannot_write(self.folder, error) from error
        self._file = file
        _held.add(self)

    def release(self) -> None:
        """Give the run back; without effect where it is not held."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self._file.seek(0)
            self._file.truncate()
        self._forget()

    def _forget(self) -> None:
        file, self._file = self._file, None
        _held.discard(self)
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _after_fork() -> None:
    """A forked process shares the lock's file, and would hold the lock after our end."""
    for lock in list(_held):
        lock._forget()


os.register_at_fork(after_in_child=_after_fork)


def in_use(folder: Path | str, holder: Holder | None) -> str:
    """What a second program is told."""
    who = str(holder) if holder is not None else "another program, which has just begun or is ending"
    stop = f"stop it first (kill {holder.pid} there ends it with a checkpoint)" if holder is not None else "try again"
    return f"the run in {folder} is in use by {who}; {stop}, or choose another folder"


def cannot_write(folder: Path, error: OSError) -> ConfigError:
    """The error for a run folder that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ConfigError(f"no room for the run folder {folder}: the disk is full; free some, or choose another with folder=…")
    return ConfigError(f"the run folder {folder} cannot be written ({error.strerror}); choose another with folder=…")


def _lock(file: IO[bytes]) -> bool:
    """Lock a file; False where the file system has no locks.

    Raises:
        BlockingIOError: another one has it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return False
        if error.errno == errno.EACCES:  # how some file systems say that it is taken
            raise BlockingIOError(*error.args) from error
        raise
    return True


def _read(file: IO[bytes]) -> Holder | None:
    """Who is named in a lock file; None where nobody is, or not yet."""
    try:
        file.seek(0)
        return Holder.from_dict(json.loads(file.read()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _machine() -> str:
    """The boot of this machine and the namespace of process ids; as much of it as the system tells."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return "/".join(parts)


def born(pid: int) -> int | None:
    """When a process began, in clock ticks since the boot; None where it is gone, 0 where the system does not tell."""
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            return 0
        return 0
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _age(seconds: float) -> str:
    """`40 s`, `3 min`, `5 h`, `2 days`."""
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"

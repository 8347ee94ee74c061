"""What a worker gives up where uploads are trusted and run without the sandbox: the network and, if it is root's, its user."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from relax_server.api.environments.sandbox import FIRST_UID, UIDS

_PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS = 8, 38
_CLONE_NEWNET, _CLONE_NEWUSER = 0x4000_0000, 0x1000_0000
_CAP_DAC_READ_SEARCH = 2
_libc = ctypes.CDLL(None, use_errno=True)


def leave_network() -> None:
    """Move into an empty network of its own; as a normal user, together with a user namespace."""
    if _libc.unshare(_CLONE_NEWNET) != 0 and (os.geteuid() == 0 or _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0):
        print(f"warning: the network cannot be forbidden here ({os.strerror(ctypes.get_errno())})", file=sys.stderr, flush=True)


def drop_rights(folder: Path) -> None:
    """Change from root to a user of the worker's own; others have nothing to drop."""
    if os.geteuid() == 0:
        uid = FIRST_UID + os.getpid() % UIDS
        os.chown(folder, uid, uid)
        os.setgroups([])
        os.setgid(uid)
        # A Python that only root can read, such as one below /root, takes the right to read files.
        private = not all(_open_to_all(Path(path)) for path in (sys.prefix, sys.base_prefix, *sys.path) if path)
        if private:
            _libc.prctl(_PR_SET_KEEPCAPS, 1)
        os.setuid(uid)
        if private:
            _keep_capability(_CAP_DAC_READ_SEARCH)
            print("warning: only root can read this Python, so environments may read all files", file=sys.stderr, flush=True)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _open_to_all(path: Path) -> bool:
    """Whether everybody can get to a folder or file; one that is not there needs no reading."""
    try:
        path = path.resolve()
        return not path.exists() or all(folder.stat().st_mode & 0o001 for folder in (path, *path.parents) if folder.is_dir())
    except OSError:
        return False


def _keep_capability(number: int) -> None:
    header = (ctypes.c_uint32 * 2)(0x2008_0522, 0)
    data = (ctypes.c_uint32 * 6)(1 << number, 1 << number, 0, 0, 0, 0)
    if _libc.capset(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capset")

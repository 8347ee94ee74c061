"""Tokens of engines: read from a file, kept for this user's other programs, and found by the address of an engine."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

from relax_sdk.errors import ConfigError
from relax_server.guard import TOKEN, is_loopback
from relax_server.models.catalog import cache_root

ALLOWED = r"[\x21-\x7e]{16,512}"
"""Visible ASCII, so that it can be sent as a header, and long enough not to be guessed."""


def check_token(token: str, where: str) -> str:
    """A token that can be used.

    Args:
        token: what was given.
        where: for the message, which does not show it.

    Raises:
        ConfigError: too short or too long, or with characters that no header can have.
    """
    if not re.fullmatch(ALLOWED, token):
        raise ConfigError(f"{where} holds no token of an engine: 16 to 512 visible ASCII characters without spaces")
    return token


def read_token(file: Path | None) -> str:
    """The token that a user has given, in the first line of a file or in `RELAX_ENGINE_TOKEN`; empty: none.

    Raises:
        ConfigError: the file cannot be read, or what was given cannot be a token.
    """
    if file is None:
        given = os.environ.get(TOKEN, "")
        return check_token(given, f"${TOKEN}") if given else ""
    try:
        return check_token(file.read_text().partition("\n")[0].strip(), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {file} cannot be read ({error})") from error


def take_token() -> str:
    """The token of the engine that this process is, from `RELAX_ENGINE_TOKEN`, which no process below it inherits then.

    Raises:
        ConfigError: none was given.
    """
    token = read_token(None)
    if not token:
        raise ConfigError(f"an engine wants a token that its callers have to show; give it one in ${TOKEN}")
    del os.environ[TOKEN]
    return token


def find_token(url: str) -> str:
    """The token of an engine that runs: from `RELAX_ENGINE_TOKEN`, or, on this machine, as `keep_token` has kept it.

    Args:
        url: of the engine.

    Returns:
        The token; empty where none is known, as for a server that wants none.

    Raises:
        ConfigError: what is in the variable cannot be a token.
    """
    given = read_token(None)
    parts = urlsplit(url)
    if given or parts.port is None or not is_loopback(parts.hostname or ""):
        return given
    return _read(_file(parts.port))[0]


def keep_token(url: str, token: str) -> Path:
    """Keep the token of an engine of this process where only this user's programs find it; `forget_tokens` ends that.

    Args:
        url: where it answers, on this machine.
        token: its token.

    Returns:
        The file.

    Raises:
        ConfigError: it cannot be written.
    """
    path = _file(urlsplit(url).port or 0)
    new = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep()
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{token}\n{os.getpid()}\n")
        new.replace(path)
    except OSError as error:
        why = f"the engine's token cannot be kept in {path} ({error}); $RELAX_CACHE names another folder"
        raise ConfigError(why) from error
    return path


def forget_tokens() -> None:
    """Remove what this process has kept: its engines have ended."""
    for path in _files():
        if _read(path)[1] == os.getpid():
            path.unlink(missing_ok=True)


def _file(port: int) -> Path:
    return cache_root() / "engines" / f"{socket.gethostname()}-{port}.token"  # a home folder may be that of many machines


def _files() -> list[Path]:
    return list((cache_root() / "engines").glob(f"{socket.gethostname()}-*.token"))


def _read(path: Path) -> tuple[str, int]:
    """Token and process of a file; empty where there is none, or its process has ended: somebody else may listen there now."""
    with contextlib.suppress(OSError, ValueError):
        token, pid = path.read_text().split()
        os.kill(int(pid), 0)
        return token, int(pid)
    return "", 0


def _sweep() -> None:
    """Remove what processes of this machine have left that were killed."""
    for path in _files():
        if not _read(path)[1]:
            path.unlink(missing_ok=True)

"""The service's folder is for its user alone: it holds keys, what others have said, and what they have trained."""

from __future__ import annotations

import os
from pathlib import Path

from relax_sdk.errors import ConfigError

_OTHERS = 0o077


def write_for_this_user_alone() -> None:
    """Files that this process and those that it starts write from now on are nobody else's to read, wherever they are."""
    os.umask(_OTHERS)


def private_folder(folder: Path) -> Path:
    """A folder that nobody else can enter, made if needed; see also `write_for_this_user_alone`, which this does first.

    Files that an earlier version wrote there for others to read, and logs, are closed to them.

    Raises:
        ConfigError: it cannot be made, or belongs to another user.
    """
    write_for_this_user_alone()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in (folder, *folder.glob("*"), *folder.glob("logs/*")):
            mode = path.lstat().st_mode
            if mode & _OTHERS and not path.is_symlink():
                path.chmod(mode & ~_OTHERS & 0o7777)
    except OSError as error:
        why = error.strerror if not isinstance(error, PermissionError) else "it belongs to another user"
        raise ConfigError(f"folder {folder} cannot be made this user's alone ({why}); name another") from error
    return folder

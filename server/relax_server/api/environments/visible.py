"""What a worker sees of this machine's files: the system's programs and libraries, Python, and the packages that it imports."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Folders, or links into /usr."""
_SETTINGS = (
    *("ld.so.cache", "localtime", "timezone", "alternatives", "mime.types", "fonts", "nsswitch.conf"),
    *("ssl/certs", "ssl/openssl.cnf", "pki/tls/certs", "pki/ca-trust", "ca-certificates", "crypto-policies"),
)
"""Below /etc: what libraries look up. Neither users nor passwords."""
_NETWORK_SETTINGS = ("resolv.conf", "hosts", "services", "protocols", "gai.conf", "host.conf")
_FOLDERS = tuple(map(Path, ("/dev", "/etc", "/etc/ssl", "/etc/pki", "/etc/pki/tls", "/nix", "/var")))
_DEVICES = ("null", "zero", "full", "random", "urandom")
_INSTALLED = ("site-packages", "dist-packages")
_IMPORTABLE = (".py", ".so", ".dist-info", ".egg-info")


def mounts(size: int, hidden: Path, network: bool) -> list[str]:
    """Options of bubblewrap: a root that can only be read, and `/tmp`, which is also where shared memory is.

    Args:
        size: bytes that `/tmp` may hold.
        hidden: a folder that is not shown wherever it lies.
        network: whether to show what looking up names takes.
    """
    shown = list(python_paths())
    parents = {parent for path in shown for parent in path.parents} | set(_FOLDERS)
    options = ["--perms", "1777", "--size", str(size), "--tmpfs", "/tmp"]
    for folder in sorted(parents - {Path("/"), Path("/tmp")}):
        options += ["--perms", "0755", "--dir", str(folder)]  # those that bubblewrap makes are open to nobody but root
    options += _system(network)
    for path in shown:
        options += ["--ro-bind", str(path), str(path)]
    options += ["--symlink", "/tmp", "/dev/shm", "--symlink", "/tmp", "/var/tmp", "--proc", "/proc"]
    for place in {hidden, hidden.resolve()}:
        if any(place.is_relative_to(path) for path in (Path("/usr"), *shown)):
            options += ["--perms", "0000", "--size", "4096", "--tmpfs", str(place), "--remount-ro", str(place)]
    return [*options, "--remount-ro", "/"]


def _system(network: bool) -> list[str]:
    """Options for programs, libraries, what they look up, and devices."""
    options = ["--ro-bind", "/usr", "/usr", "--ro-bind-try", "/nix/store", "/nix/store"]
    for name in _SYSTEM:
        path = Path("/", name)
        if path.is_symlink():
            options += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            options += ["--ro-bind", str(path), str(path)]
    for name in (*_SETTINGS, *(_NETWORK_SETTINGS if network else ())):
        options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name in _DEVICES:
        options += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        options += ["--symlink", f"/proc/self/{target}", f"/dev/{name}"]
    return options


def python_paths() -> Iterator[Path]:
    """Folders and files outside /usr that this Python and what it imports are read from, none of them inside another.

    Of a folder of sources, such as that of an editable installation, only what can be imported is among them.
    """
    wanted = {path for place in (sys.prefix, sys.base_prefix, sys.exec_prefix) for path in _both(place)}
    for place in (*sys.path, *_editable()):
        for path in _both(place) if place else ():
            if not any(path.is_relative_to(root) for root in wanted):
                with contextlib.suppress(PermissionError):  # Python passes over it, too
                    wanted.update([*_importable(path)] if path.exists() else [])
    return (path for path in sorted(wanted) if not _inside(path, wanted))


def _inside(path: Path, wanted: set[Path]) -> bool:
    return path.is_relative_to("/usr") or any(parent in wanted for parent in path.parents)


def _both(place: str) -> set[Path]:
    """A path as it is named, and where it leads."""
    path = Path(os.path.abspath(place))
    return {path, path.resolve()}


def _importable(folder: Path) -> Iterator[Path]:
    if not folder.is_dir() or folder.name in _INSTALLED:
        yield folder
        return
    for entry in folder.iterdir():
        if entry.suffix in _IMPORTABLE or _is_package(entry):
            yield entry


def _is_package(folder: Path) -> bool:
    try:
        return (folder / "__init__.py").is_file()
    except PermissionError:  # a folder that this user may not look into, such as another's cache
        return False


def _editable() -> Iterator[str]:
    """Folders of packages that setuptools has installed as links: its finders know them."""
    for name, module in list(sys.modules.items()):
        if name.startswith("__editable__"):
            for path in getattr(module, "MAPPING", {}).values():
                yield os.path.dirname(path)

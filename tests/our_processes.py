"""The processes that a test has started, directly or not."""

import contextlib

import psutil


def children(recursive: bool = False) -> dict[psutil.Process, list[str]]:
    """Those that are alive, with their command lines; one that ends meanwhile is left out."""
    found = {}
    for process in psutil.Process().children(recursive=recursive):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, too
            if process.status() != psutil.STATUS_ZOMBIE:
                found[process] = process.cmdline()
    return found

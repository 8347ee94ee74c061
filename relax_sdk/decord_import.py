"""The import of decord, whose libraries are kept to itself."""

from __future__ import annotations

import ctypes
import sys
import threading
from types import ModuleType

_lock = threading.Lock()


def import_decord() -> ModuleType:
    """Import decord without giving the whole process its libraries.

    It loads them for everybody, with a zlib of 2005 among them. A pygame that is imported later would call that one, and could
    read no PNG, which Gymnasium's environments draw with.

    Returns:
        The module `decord`.
    """
    with _lock:
        if "decord" not in sys.modules:
            for_all = ctypes.RTLD_GLOBAL
            ctypes.RTLD_GLOBAL = ctypes.RTLD_LOCAL
            try:
                import decord  # noqa: F401
            finally:
                ctypes.RTLD_GLOBAL = for_all
        return sys.modules["decord"]

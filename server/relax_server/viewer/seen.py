"""What the model saw of media: made on request by a process that may die of it, and kept for a while."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_sdk.errors import MediaError
from relax_sdk.media import MediaRef
from relax_server.gateway.errors import unknown
from relax_server.models.processor_config import PREPROCESSOR, PROCESSOR
from relax_server.viewer.base import ViewedRun
from relax_server.viewer.media import found_media, path_of, run_url

SECONDS = 45
"""Seconds that making one item may take."""
KEPT = 64
"""Items that are kept, the last ones that were asked for."""
MIMES = {".wav": "audio/wav", ".png": "image/png"}
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "TMPDIR", "OMP_NUM_THREADS")
"""Environment variables that the process gets; none of them holds a secret."""


class Seen:
    """Files of what models saw, one item made at a time; safe to use from several threads."""

    def __init__(self) -> None:
        self._root = tempfile.TemporaryDirectory(prefix="relax-view-", ignore_cleanup_errors=True)
        self._kept: OrderedDict[tuple[Path, str], Path] = OrderedDict()
        self._lock = threading.Lock()

    def page(self, run: ViewedRun, sha256: str) -> dict[str, Any]:
        """What is told of an item, the URLs of its files among it.

        Raises:
            ApiError: there is no such item, or no model whose processor is known.
            MediaError: it cannot be made.
        """
        return with_urls(json.loads((self._made(run, sha256) / f"{sha256}.json").read_text()), run)

    def file(self, run: ViewedRun, name: str) -> tuple[Path, str]:
        """A file of an item, by its name in a URL, and its MIME type.

        Raises:
            ApiError, MediaError: as `page`.
        """
        folder = self._made(run, name[:64])
        found = {path.name: path for path in folder.iterdir()}.get(name)
        if found is None or found.suffix not in MIMES:
            raise unknown("file", name[:80])
        return found, MIMES[found.suffix]

    def close(self) -> None:
        """Remove all files."""
        self._root.cleanup()

    def _made(self, run: ViewedRun, sha256: str) -> Path:
        ref, model = found_media(run, sha256), model_of(run)
        if ref is None:
            raise unknown("media", sha256, f" in run {run.name!r}")
        if model is None:
            raise unknown("model", run.name, ": no processor for media is known of this run's model")
        with self._lock:
            known = self._kept.get((model, sha256))
            if known is None:
                known = Path(tempfile.mkdtemp(dir=self._root.name))
                try:
                    make([(ref, path_of(run, ref))], model, known)
                    told = json.loads((known / f"{sha256}.json").read_text())
                    if "error" in told:  # it may be another the next time: a busy machine, a lack of memory
                        raise MediaError(told["error"])
                except BaseException:
                    shutil.rmtree(known, ignore_errors=True)
                    raise
                self._kept[model, sha256] = known
            self._kept.move_to_end((model, sha256))
            while len(self._kept) > KEPT:
                shutil.rmtree(self._kept.popitem(last=False)[1], ignore_errors=True)
            return known


def with_urls(told: dict[str, Any], run: ViewedRun) -> dict[str, Any]:
    """The same with URLs in place of the names of files."""
    place = f"{run_url(run.name)}/seen/"
    urls = {"frames": [place + name for name in told["frames"]]} if "frames" in told else {"wave": place + told["wave"]}
    return told | urls


def model_of(run: ViewedRun) -> Path | None:
    """The model folder of a run that says how its media are prepared; None: there is none."""
    folders = run.model_folders()
    return next((model for model in folders if any((model / name).is_file() for name in (PROCESSOR, PREPROCESSOR))), None)


def make(items: Sequence[tuple[MediaRef, Path]], model: Path, out: Path) -> None:
    """Make the files of items in a folder; one that kills the process is told as its error, and the next ones go on.

    Args:
        items: with the files of their bytes.
        model: folder of the model that saw them.
        out: folder, which exists.
    """
    left = list(items)
    while left:
        facts = ("sha256", "mime", "size")
        lines = [json.dumps({name: getattr(ref, name) for name in facts} | {"path": str(path)}) for ref, path in left]
        command = [sys.executable, "-m", "relax_server.viewer.seeing", str(model), str(out), str(SECONDS)]
        around = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        try:
            ended = subprocess.run(
                command, input="\n".join(lines), env=around, capture_output=True, text=True, timeout=SECONDS * len(left)
            )
            why = f"the process that decodes it ended with code {ended.returncode}: {ended.stderr.strip()[-300:]}"
        except subprocess.TimeoutExpired:
            why = f"it was not ready within {SECONDS * len(left)} s"
        left = [(ref, path) for ref, path in left if not (out / f"{ref.sha256}.json").is_file()]
        if left:
            (out / f"{left.pop(0)[0].sha256}.json").write_text(json.dumps({"error": why}))

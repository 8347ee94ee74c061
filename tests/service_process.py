"""`relax serve` as a process, for tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx


@dataclass
class Service:
    """A running service."""

    url: str
    folder: Path
    process: subprocess.Popen[bytes]
    key: str = ""

    def client(self, key: str | None = None) -> httpx.Client:
        """For plain requests."""
        secret = self.key if key is None else key
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60.0)

    def open(self, **body: Any) -> dict[str, Any]:
        """A new session."""
        with self.client() as client:
            answer = client.post("/v1/sessions", json=body)
        assert answer.status_code == 201, answer.text
        return answer.json()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


MANY_REFUSALS = ("--refusals-per-second", "100000")
"""Tests are refused more often than a tenant."""


def start(folder: Path, *arguments: str, port: int = 0, key: str = "") -> Service:
    """Start `relax serve` and wait until it is ready."""
    command = [sys.executable, "-m", "relax_sdk.cli", "serve", "--folder", str(folder), "--port", str(port), *arguments]
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "serve.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"})
    end = time.monotonic() + 120
    while "ready at " not in log.read_text():
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.05)
    url = log.read_text().split("ready at ")[1].split()[0]
    return Service(url, folder, process, key)

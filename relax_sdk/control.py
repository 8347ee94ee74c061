"""`RunControl`: the engines of a training run on this machine, while it goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from relax_sdk.errors import ConfigError, RunError

CONTROL = "control.json"
"""The file of a run folder that holds, while the run goes on, address, key, and the process that answers."""

ANSWER_SECONDS = 30.0
POLL_SECONDS = 0.5


def read_control(folder: Path) -> dict[str, Any]:
    """Address (`url`) and `key` of a run's control.

    Raises:
        RunError: the run is not going on, or its control is not for this user.
    """
    path = folder / CONTROL
    try:
        control = json.loads(path.read_text())
        return {
            "url": str(control["url"]),
            "key": str(control["key"]),
            "host": str(control["host"]),
            "pid": int(control["pid"]),
        }
    except FileNotFoundError:
        raise RunError(
            f"no run is going on in {folder} (there is no {CONTROL}); is it a run folder, and has it begun?"
        ) from None
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}); only the user who started the run may") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged ({error}); it is written anew when the run is resumed") from error


class RunControl:
    """Lists, adds and removes engines of a run that goes on.

    Args:
        folder: of the run.

    Raises:
        RunError: no run goes on there.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._control = read_control(self.folder)
        headers = {"Authorization": f"Bearer {self._control['key']}"}
        self._client = httpx.Client(base_url=self._control["url"], headers=headers, timeout=ANSWER_SECONDS, trust_env=False)

    def list(self) -> list[dict[str, Any]]:
        """Every engine: `id`, `kind`, `url`, `state`, `reason`, `external`, `version`, `running`, `answered`, `failed`.

        Raises:
            RunError: the run has ended.
        """
        return self._send("GET", "/v1/engines")["engines"]

    def add(
        self,
        id: str | None = None,
        url: str | None = None,
        kind: str | None = None,
        token: str | None = None,
        weights: str | None = None,
    ) -> dict[str, Any]:
        """Begin to add an engine; one that is there already stays as it is.

        Args:
            id: its name; None: a free one.
            url: of one that runs already; None: one is started.
            kind: of the one at `url`; None: as the run's own.
            token: of the one at `url`; None: what the run finds for it, in `RELAX_ENGINE_TOKEN` or on this machine.
            weights: how the one at `url` gets new weights: `folder`, it reads those that the run has written; `broadcast`, they
                are sent to it over the network, which SGLang alone takes. None: `folder`.

        Returns:
            It as it is now: `state` is `starting`, or `current` when it is in use.

        Raises:
            ConfigError: not a name, URL or kind that this run takes, or taken.
            RunError: the run has ended.
        """
        told = dict(id=id, url=url, kind=kind, token=token, weights=weights)
        return self._send("POST", "/v1/engines", {name: value for name, value in told.items() if value is not None})

    def remove(self, id: str, drain_seconds: float | None = None) -> dict[str, Any]:
        """Begin to remove an engine; one that is gone already is no error.

        Args:
            id: its name.
            drain_seconds: for its calls in flight; None: the run's own limit.

        Returns:
            It as it is now: `state` is `draining` or `gone`.

        Raises:
            ConfigError: it is the last one.
            RunError: the run has ended.
        """
        query = "" if drain_seconds is None else f"?drain_seconds={drain_seconds:g}"
        return self._send("DELETE", f"/v1/engines/{quote(id, safe='')}{query}")

    def wait(self, id: str, until: Callable[[str], bool], seconds: float, sleep: Callable[[float], None]) -> dict[str, Any]:
        """Look at an engine until it is in some state.

        Args:
            id: its name.
            until: whether a state will do; `gone` where there is no such engine.
            seconds: to wait at most.
            sleep: called between two looks.

        Returns:
            It as it was at the last look, whether or not it is in such a state.

        Raises:
            RunError: the run has ended.
        """
        left = seconds
        while True:
            engine = next((row for row in self.list() if row["id"] == id), {"id": id, "state": "gone", "reason": ""})
            if until(engine["state"]) or left <= 0:
                return engine
            sleep(POLL_SECONDS)
            left -= POLL_SECONDS

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> RunControl:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        control = self._control
        try:
            response = self._client.request(method, path, json=body)
            answer = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise RunError(
                f"the run in {self.folder} does not answer at {control['url']} ({error or type(error).__name__}); it was "
                f"process {control['pid']} on {control['host']}. If that is gone, the run has died: "
                f"relax train --resume {self.folder}"
            ) from error
        if response.is_success:
            return answer
        message = answer.get("error", {}).get("message", response.text) if isinstance(answer, dict) else response.text
        raise (ConfigError if response.status_code in (400, 404, 409) else RunError)(message)

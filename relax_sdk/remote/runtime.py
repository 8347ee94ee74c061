"""`ServiceRuntime`: a run is submitted to a service, and followed from here."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relax_sdk.client import Client, Event, RemoteRun
from relax_sdk.config import RunConfig, SamplingParams
from relax_sdk.errors import ConfigError, RunError, ServiceError
from relax_sdk.evaluation import Evaluation
from relax_sdk.findings import Finding
from relax_sdk.hosting import host
from relax_sdk.messages import AssistantMessage, Message
from relax_sdk.run import METRICS
from relax_sdk.runtime import Job, Observer, Provide, Tell

NOTE = "service.json"
"""The file of the run folder that says which run of which service it follows, and how far."""


class ServiceRuntime:
    """Carries out runs at a service.

    Args:
        url: of the service.
        key: where the service wants one.
        provide: how the environment gets there. `host`: it stays here, and the service steps it. `upload`: its code is sent.
            `installed`: the service has it. Default: `installed` for those that ship with Relax Gym, else `host`.
    """

    def __init__(self, url: str, key: str | None = None, provide: Provide | None = None) -> None:
        self.url, self.key, self.provide = url, key, provide

    def fit(self, job: Job, observer: Observer) -> None:
        """Follow the run to its end, or to Ctrl-C, after which it goes on there.

        Raises:
            ConfigError: the agent is a function, which cannot be sent.
            ServiceError: the service refuses, or cannot be reached.
            RunError: the run failed there.
        """
        if callable(job.agent):
            raise ConfigError("agent: a function cannot be sent to a service; give a command, or train without server=…")
        note = _Note(job.folder)
        with Client(self.url, self.key) as client, self._environment(job, client, observer):
            if note.run is None:
                observer.stage(f"submitting to {self.url}")
                agent = [job.agent] if isinstance(job.agent, str) else job.agent
                config = {name: value for name, value in job.config.to_dict().items() if name != "env"}
                note.write(self.url, None, 0)  # its submission is known before it is made, so that it is not made twice
                command = list(agent) if agent is not None else None
                run = client.run(job.spec.id, config=config, agent=command, idempotency_key=note.submission)
                note.write(self.url, run.id, 0)
            else:
                run = client.get_run(note.run)
                if run.state.state in ("failed", "cancelled"):
                    run.resume()
            try:
                self._follow(run, note, observer, job.folder)
            except KeyboardInterrupt:
                observer.warn(
                    f"run {run.id} goes on at {self.url}; follow it with Trainer(…, server={self.url!r}, "
                    f"folder={str(job.folder)!r}).fit(resume=True); end it with Client(…).get_run({run.id!r}).cancel()"
                )
                raise

    def open_model(self, job: Job, tell: Tell) -> ServiceModel:
        """The run's trained model, at the service."""
        note = _Note(job.folder)
        if note.run is None:
            raise RunError(f"{job.folder} follows no run of a service yet")
        return ServiceModel(Client(self.url, self.key), note.run, self._environment, job)

    def examine(self, folder: Path, config: RunConfig) -> list[Finding]:
        """Whether the service answers."""
        try:
            with Client(self.url, self.key) as client:
                client.models()
        except ServiceError as error:
            return [Finding("problem", str(error), f"is a service running at {self.url}, and is the key right?")]
        return [Finding("ok", f"the service at {self.url} answers")]

    @contextlib.contextmanager
    def _environment(self, job: Job, client: Client, observer: Observer | None) -> Iterator[None]:
        """The environment is at the service while this lasts."""
        provide = self.provide or ("installed" if job.spec.load().__module__.partition(".")[0] == "relax_envs" else "host")
        if provide == "host":
            if observer is not None:
                observer.stage(f"hosting {job.spec.id} for {self.url}")
            with host(job.spec, self.url, self.key):
                yield
            return
        if provide == "upload":
            client.upload_env(job.spec)
        yield

    def _follow(self, run: RemoteRun, note: _Note, observer: Observer, folder: Path) -> None:
        with (folder / METRICS).open("a", buffering=1) as metrics:
            for event in run.events(note.seen):
                if event.kind == "step":  # JSON knows no NaN, which some figures are
                    row = {name: float("nan") if value is None else value for name, value in event.data.items()}
                    observer.step(row)
                    metrics.write(json.dumps(row) + "\n")
                self._tell(event, observer)
                note.write(self.url, run.id, event.id)
                if event.kind == "finished" and event.data["state"] != "completed":
                    why = event.data["error"] or event.data["state"]
                    raise RunError(f"run {run.id} at {self.url} ended after step {event.data['step']}: {why}")

    def _tell(self, event: Event, observer: Observer) -> None:
        if event.kind == "stage":
            observer.stage(event.data["text"])
        elif event.kind == "warning":
            observer.warn(event.data["text"])


class ServiceModel:
    """A trained model at a service."""

    def __init__(self, client: Client, run: str, environment: Any, job: Job) -> None:
        self._client, self._job, self._environment = client, job, environment
        self._run = client.get_run(run)

    def evaluate(self, split: str, limit: int, tell: Tell) -> Evaluation:
        """Play a split greedily; an environment that stays here is hosted meanwhile."""
        with self._environment(self._job, self._client, None):
            return self._run.evaluate(split, limit)

    def generate(self, messages: list[Message], sampling: SamplingParams) -> AssistantMessage:
        """One answer."""
        return self._run.generate(messages, sampling)

    def close(self) -> None:
        """Close the connection; the service puts the model away by itself."""
        self._client.close()


class _Note:
    """Remembers in a run folder which run of a service it follows."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / NOTE
        self.run: str | None = None
        self.seen = 0
        """Id of the last event."""
        self.submission = uuid.uuid4().hex
        """The idempotency key that the run is submitted with."""
        try:
            known = json.loads(self._file.read_text())
            self.run, self.seen, self.submission = known["run"], known["seen"], known["submission"]
        except FileNotFoundError:
            return
        except (OSError, ValueError, LookupError) as error:
            raise ConfigError(f"{self._file} cannot be read ({error}); remove it to begin a new run") from error

    def write(self, url: str, run: str | None, seen: int) -> None:
        """Note how far it was followed."""
        self.run, self.seen = run, seen
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(json.dumps({"url": url, "run": run, "seen": seen, "submission": self.submission}))
        temporary.replace(self._file)

"""The `local` runtime: all roles as processes on this machine, no Ray."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from relax_sdk.config import RunConfig
from relax_sdk.doctor import examine_machine
from relax_sdk.endpoint import Endpoint, EndpointEvaluation
from relax_sdk.errors import RunError
from relax_sdk.findings import Finding
from relax_sdk.registry import EnvSpec
from relax_sdk.replay import EpisodeReplay
from relax_sdk.runtime import Job, Observer, Tell
from relax_sdk.stop_signals import Interrupted, StopSignals
from relax_server.roles.checks import check_engine
from relax_server.roles.launch import Launch
from relax_server.roles.local_model import LocalModel
from relax_server.roles.loop_thread import LoopThread
from relax_server.roles.replay import replay_episode
from relax_server.rollout.endpoint import evaluate_endpoint


def await_end(run: Callable[[], Coroutine[Any, Any, None]], request_stop: Callable[[bool], None], observer: Observer) -> None:
    """Carry a run out in a thread, and wait for its end; signals ask it to stop.

    Args:
        run: carries it out.
        request_stop: called in the thread's event loop; with `True` for the end at once.
        observer: told how a run ended that was asked to stop.

    Raises:
        RelaxError: what the run ended with.
        Interrupted: a signal stopped it.
    """
    thread = LoopThread()
    try:
        with StopSignals(lambda at_once: thread.call(request_stop, at_once)) as signals:
            try:
                thread.submit(run()).result()
            except RunError as error:
                if signals.caught is None:
                    raise
                thread.call(observer.warn, str(error))
            if signals.caught is not None:
                raise Interrupted(signals.caught)
    finally:
        thread.close()


class LocalRuntime:
    """Carries out runs on this machine."""

    def fit(self, job: Job, observer: Observer) -> None:
        """Train to the last step; Ctrl-C, SIGTERM and SIGHUP end with a checkpoint where there is something to keep.

        Raises:
            ConfigError: environment, model and settings do not fit together.
            RunError: the run ended early; it can be resumed.
            Interrupted: a signal stopped it; a `KeyboardInterrupt`.
        """
        check_engine(job.config)
        launch = Launch(job, observer)
        await_end(launch.run, launch.request_stop, observer)

    def open_model(self, job: Job, tell: Tell) -> LocalModel:
        """Start an engine and a rollout process with the run's trained weights."""
        return LocalModel(job, tell)

    def evaluate_endpoint(
        self, spec: EnvSpec, config: RunConfig, endpoint: Endpoint, split: str, limit: int | None, tell: Tell
    ) -> EndpointEvaluation:
        """Play a split with a model elsewhere; no engine is started."""
        thread = LoopThread()
        try:
            return thread.submit(
                evaluate_endpoint(spec, config, endpoint, split, limit, lambda played: tell(str(played)))
            ).result()
        finally:
            thread.close()

    def replay_episode(self, job: Job, episode: str, model: str | None, tell: Tell) -> EpisodeReplay:
        """Play one recorded episode again, see `relax_sdk.replay`; an engine is started only for a model."""
        thread = LoopThread()
        try:
            return thread.submit(replay_episode(job, episode, model, tell)).result()
        finally:
            thread.close()

    def examine(self, folder: Path, config: RunConfig) -> list[Finding]:
        """Whether this machine can train."""
        return examine_machine(folder)

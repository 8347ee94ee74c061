"""The `local` runtime: all roles as processes on this machine, no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from pathlib import Path
from signal import SIGINT
from typing import Any, TypeVar

from relax_sdk.config import RunConfig
from relax_sdk.doctor import examine_machine
from relax_sdk.endpoint import Endpoint
from relax_sdk.errors import ConfigError, RunError
from relax_sdk.evals.plan import EvalPlan
from relax_sdk.evals.play import EvalResults
from relax_sdk.evals.senses import SensesResults
from relax_sdk.evaluation import Evaluation, Played
from relax_sdk.exporting import Exported, ExportRequest
from relax_sdk.findings import Finding
from relax_sdk.mask import MaskExplanation
from relax_sdk.model_export import ExportedModel, ModelExport
from relax_sdk.planning import MemoryPlan, PlanRequest
from relax_sdk.recorded import RecordedTrajectory, TrajectoryFilter
from relax_sdk.registry import EnvSpec
from relax_sdk.replay import EpisodeReplay
from relax_sdk.rescoring import Rescored
from relax_sdk.runtime import Job, Observer, Tell
from relax_sdk.stop_signals import Interrupted, StopSignals
from relax_sdk.trajectory import Group
from relax_server.roles.checks import check_engine
from relax_server.roles.evaluating import check_senses, play_evaluation
from relax_server.roles.launch import Launch, note_failed_start
from relax_server.roles.layout import RunLayout
from relax_server.roles.local_model import LocalModel
from relax_server.roles.looking import read_group, read_trajectories
from relax_server.roles.loop_thread import LoopThread
from relax_server.roles.masks import explain_mask
from relax_server.roles.model_export import export_model
from relax_server.roles.replay import replay_episode
from relax_server.roles.rescoring import rescore
from relax_server.roles.senses_at_end import check_senses_at_end
from relax_server.rollout.endpoint import evaluate_endpoint

T = TypeVar("T")


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


def _until_stopped(playing: Coroutine[Any, Any, T]) -> T:
    """Play in a thread, until it is over or a signal cancels it; it has closed what it opened when this returns.

    Raises:
        Interrupted: a signal stopped it.
    """
    thread, tasks = LoopThread(), list[asyncio.Task[Any]]()

    async def carried() -> T:
        tasks.extend(filter(None, [asyncio.current_task()]))
        return await playing

    def stop(at_once: bool) -> None:
        for task in tasks:
            thread.call(task.cancel)

    try:
        with StopSignals(stop) as signals:
            try:
                return thread.submit(carried()).result()
            except CancelledError:
                raise Interrupted(signals.caught or SIGINT) from None
    finally:
        thread.close()


class LocalRuntime:
    """Carries out runs on this machine."""

    def fit(self, job: Job, observer: Observer) -> None:
        """Train to the last step, and check the senses where `eval.check_senses` asks for it.

        Ctrl-C, SIGTERM and SIGHUP end with a checkpoint where there is something to keep.

        Raises:
            ConfigError: environment, model and settings do not fit together.
            RunError: the run ended early; it can be resumed.
            Interrupted: a signal stopped it; a `KeyboardInterrupt`.
        """
        try:
            check_engine(job.config)
        except ConfigError as error:
            note_failed_start(job, observer, error)
            raise
        launch = Launch(job, observer)
        await_end(launch.run, launch.request_stop, observer)
        check_senses_at_end(job, observer, self.play_senses)

    def open_model(self, job: Job, tell: Tell) -> LocalModel:
        """Start an engine and a rollout process with the run's trained weights."""
        return LocalModel(job, tell)

    def evaluate_endpoint(
        self, spec: EnvSpec, config: RunConfig, endpoint: Endpoint, split: str, limit: int | None, tell: Tell
    ) -> Evaluation:
        """Play a split with a model elsewhere; no engine is started."""
        thread = LoopThread()
        try:
            return thread.submit(
                evaluate_endpoint(spec, config, endpoint, split, limit, lambda played: tell(str(played)))
            ).result()
        finally:
            thread.close()

    def play_evaluation(self, job: Job, plan: EvalPlan, tell: Tell, on_played: Callable[[Played], None]) -> EvalResults:
        """Play what the job's folder does not hold yet, see `relax_sdk.evals`; a signal ends it, and nothing is lost.

        Raises:
            Interrupted: a signal stopped it.
        """
        return _until_stopped(play_evaluation(job, plan, tell, on_played))

    def play_senses(self, job: Job, plan: EvalPlan, model: str, tell: Tell) -> SensesResults:
        """Play the passes of the blindness check, see `relax_sdk.evals.check`.

        Raises:
            Interrupted: a signal stopped it.
        """
        return _until_stopped(check_senses(job, plan, model, tell))

    def replay_episode(self, job: Job, episode: str, model: str | None, tell: Tell) -> EpisodeReplay:
        """Play one recorded episode again, see `relax_sdk.replay`; an engine is started only for a model."""
        thread = LoopThread()
        try:
            return thread.submit(replay_episode(job, episode, model, tell)).result()
        finally:
            thread.close()

    def rescore(self, job: Job, wanted: TrajectoryFilter, movers: int, tell: Tell) -> Rescored:
        """Score recorded episodes again, see `relax_sdk.rescoring`."""
        thread = LoopThread()
        try:
            return thread.submit(rescore(job, wanted, movers, tell)).result()
        finally:
            thread.close()

    def read_trajectories(self, folder: Path, config: RunConfig, wanted: TrajectoryFilter) -> list[RecordedTrajectory]:
        """Recorded trajectories of a run, see `relax_sdk.recorded`."""
        return read_trajectories(config, RunLayout(folder), wanted)

    def read_group(self, folder: Path, config: RunConfig, id: str) -> Group:
        """A recorded group of a run, see `relax_sdk.recorded`."""
        return read_group(config, RunLayout(folder), id)

    def explain_mask(self, folder: Path, config: RunConfig, episode: str) -> MaskExplanation:
        """Explain the tokens of a recorded episode, see `relax_sdk.mask`."""
        return explain_mask(config, RunLayout(folder), episode)

    def export(self, folder: Path, config: RunConfig, request: ExportRequest) -> Exported:
        """Write recorded episodes out, see `relax_sdk.exporting`."""
        from relax_server.roles.exports import export  # takes the libraries `datasets` and pyarrow, which take a second

        return export(config, RunLayout(folder), request)

    def export_model(self, folder: Path, config: RunConfig, request: ModelExport) -> ExportedModel:
        """Write the model of a checkpoint out, see `relax_sdk.model_export`."""
        return export_model(config, RunLayout(folder), request)

    def plan_memory(self, request: PlanRequest) -> MemoryPlan:
        """Say what every rank of a trainer would hold, see `relax_sdk.planning`."""
        from relax_server.training.memory_plan import plan

        return plan(request)

    def examine(self, folder: Path, config: RunConfig) -> list[Finding]:
        """Whether this machine can train."""
        return examine_machine(folder)

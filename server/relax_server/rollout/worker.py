"""`RolloutWorker`: plays groups of a run as far as admission allows, makes them durable, and evaluates on the side."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from relax_sdk.config import RunConfig, SamplingParams
from relax_sdk.errors import ConfigError, RelaxError, RunError
from relax_sdk.media import MediaStore
from relax_sdk.messages import AssistantMessage, Message
from relax_sdk.registry import EnvSpec
from relax_sdk.session import Agent
from relax_sdk.tasks import TaskSplit
from relax_sdk.trajectory import Group, Status, Trajectory
from relax_server.journal.base import Journal
from relax_server.rollout.admission import Admission
from relax_server.rollout.commits import Committer
from relax_server.rollout.context import RolloutContext, default_agent
from relax_server.rollout.evaluation import EvalResult, Evaluator, OnPlayed
from relax_server.rollout.failed_attempts import FailedAttempts, Failures
from relax_server.rollout.group import GroupTask, play_group
from relax_server.rollout.media import MediaIntake
from relax_server.rollout.policy import EnginePolicies
from relax_server.rollout.pool import EnginePool
from relax_server.rollout.rendering import Renderer
from relax_server.rollout.rows import ROW_TIMEOUT, TaskRows
from relax_server.rollout.stats import Rate, RolloutStats
from relax_server.rollout.task_failures import TaskFailures
from relax_server.rollout.threads import CallThreads
from relax_server.rollout.traces import Traces
from relax_server.timeline import Timeline

if TYPE_CHECKING:
    from relax_server.models.processor import Processor

ENV_THREADS = 256
MEDIA_THREADS = 4
COMMIT_LANES = 10_000
"""First lane of the timeline for commits, below those of the groups."""
STOP_TIMEOUT = 3.0
"""Seconds in which cancelled episodes must end."""


class RolloutWorker:
    """Plays the episodes of one run in one event loop.

    `run()` plays train groups until `stop()`, as many as the run's steps need. `update` tells it what the trainer consumed;
    without that it waits at `(batches_ahead + 1) * groups_per_step` groups (`RunConfig.batches_ahead`). `evaluate` and
    `generate` work with and without `run()`.

    Args:
        spec: the environment.
        config: of the run.
        processor: of the model that the engines serve.
        engines: hold the current weights.
        store: media go here.
        journal: groups go here.
        run: name of the run in the journal.
        agent: plays the episodes; default: the built-in tool loop if the environment has tools, else the chat loop.
        timeline: gets a span per group and per evaluation.
        warmup_agent: plays the episodes of the format warm-up, whose answers need no model; default: `agent`. Where agents are
            processes of their own, one of the built-in loops.
        traces: get the spans of episodes; default: off.

    Raises:
        ConfigError: the environment shows media that the model does not take, or has no tasks.
        RegistryError: the environment or the default agent cannot be found.
    """

    def __init__(
        self,
        spec: EnvSpec,
        config: RunConfig,
        processor: Processor,
        engines: EnginePool,
        store: MediaStore,
        journal: Journal,
        run: str,
        agent: Agent | None = None,
        timeline: Timeline | None = None,
        warmup_agent: Agent | None = None,
        traces: Traces | None = None,
    ) -> None:
        env_class = spec.load()
        missing = set(env_class.modalities) - processor.modalities
        if missing:
            raise ConfigError(
                f"{spec.id} shows {', '.join(sorted(missing))}, but the model {config.model} takes "
                f"{', '.join(sorted(processor.modalities)) or 'text only'}; choose another model"
            )
        self.spec, self.config, self.run_name = spec, config, run
        self.processor, self.pool, self.journal = processor, engines, journal
        engines.updates_per_batch = config.algorithm.updates_per_batch
        self.version = 0
        self.timeline = timeline or Timeline(None, "rollout")
        self.admission = Admission(config.batches_ahead, config.rollout.groups_per_step, config.steps)
        self._threads = CallThreads("environment", ENV_THREADS)
        self._media_threads = CallThreads("media", MEDIA_THREADS)
        self._rows = TaskRows(spec, self._media_threads)
        self._gate = asyncio.Event()
        self._gate.set()
        intake = MediaIntake(store, processor, self._media_threads, config.rollout.step_timeout)
        self.policies = EnginePolicies(Renderer(processor), intake, engines, self._gate, config.training.replay_routes)
        self.context = RolloutContext(
            run=run,
            spec=spec,
            env_class=env_class,
            config=config.rollout,
            agent=agent or default_agent(env_class),
            policies=self.policies,
            threads=self._threads,
            slots=asyncio.Semaphore(config.rollout.concurrency),
            traces=traces or Traces(),
        )
        self.warmup_agent = warmup_agent or self.context.agent
        self._committer = Committer(journal, run)
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._groups: set[asyncio.Task[None]] = set()
        self._stopping = self._draining = False
        self._error: BaseException | None = None
        self.failed_attempts = FailedAttempts.of_run(self._committer, config.rollout.keep_failed)
        """Keeps those of training, of the warm-up and of evaluations."""
        self._failures = Failures(config.rollout, self.failed_attempts)
        train = self._rows.splits["train"]
        self._task_failures = TaskFailures(len(train) if train.finite else None)
        self._episodes, self._tokens = Rate(), Rate()
        self.warmup_played = self.warmup_episodes = 0
        """Episodes of the format warm-up that have ended, and how many there will be."""
        self.evaluator = Evaluator(self.context, self._rows, self._committer, self._count, self.failed_attempts)
        self._calls = itertools.count()

    # ---------------------------------------------------------------------------------------------------- training

    async def run(self) -> None:
        """Play train groups in task order, as far as admission allows, until `stop` or `drain`.

        After a restart it goes on where the journal ends: groups that are there are not played again, and those not yet
        consumed count as outstanding.

        Raises:
            RunError: too many groups in a row had no usable episode, too large a share of the attempts failed, the tasks ran
                out, or the journal failed.
        """
        indices = await self._resume()
        try:
            while not (self._stopping or self._draining) and self._error is None:
                if self.admission.open and self._gate.is_set():
                    await self._start_group(next(indices))
                else:
                    await self._wait_for_change()
            while self.admission.in_flight and not self._stopping and self._error is None:
                await self._wait_for_change()
        finally:
            await self._cancel_all()
        if isinstance(self._error, RunError):
            raise self._error
        if self._error is not None:
            raise self._run_error(self._error) from self._error

    def update(self, *, version: int | None = None, consumed: int | None = None, dropped: int | None = None) -> None:
        """Tell the worker how far training is; called in its event loop.

        To be called whenever weights were published or groups were dropped, and before `run()` when a run goes on: `acked`
        groups, which the journal knows, are only those inside a checkpoint.

        Args:
            version: of the weights that all engines hold now.
            consumed: groups inside published steps, in total since the run began.
            dropped: groups that were dropped as stale, in total since the run began.
        """
        if version is not None:
            self.version = self.pool.version = version
        if consumed is not None:
            self.admission.consumed = consumed
        if dropped is not None:
            self.admission.dropped = dropped
        self._changed.set()

    def pause(self) -> None:
        """Start no groups and send no model calls until `resume`; calls in flight go on, and no clock runs for those held."""
        self._gate.clear()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._gate.set()
        self._changed.set()

    def stop(self) -> None:
        """End `run` now: episodes in flight are cancelled, their groups are not committed."""
        self._stopping = True
        self._changed.set()

    async def drain(self) -> None:
        """End `run` when the groups in flight are committed, and wait for that; no new ones start."""
        self._draining = True
        self._changed.set()
        await self._idle.wait()

    async def close(self) -> None:
        """Stop everything and let the threads go; the worker cannot be used afterwards."""
        self.stop()
        await self._cancel_all()
        for task in self.context.tasks:
            task.cancel()
        if self.context.tasks:
            await asyncio.wait(self.context.tasks, timeout=STOP_TIMEOUT)
        await self._committer.close()
        self._threads.close()
        self._media_threads.close()

    async def _resume(self) -> Iterator[int]:
        """Count what is in the journal; returns the task indices still to play, in order."""

        def read() -> tuple[Any, set[int]]:
            return self.journal.counts(self.run_name), set(self.journal.task_indices(self.run_name))

        counts, played = await self._media_threads.call(read, limit=ROW_TIMEOUT)
        admission = self.admission
        admission.committed = counts.total - counts.empty
        self._failures.limits.any_usable = admission.committed > 0
        admission.consumed = max(admission.consumed, counts.acked)
        admission.dropped = max(admission.dropped, counts.given_up)
        return (index for index in itertools.count() if index not in played)

    async def _start_group(self, index: int) -> None:
        self.admission.in_flight += 1
        self._idle.clear()
        try:
            row = await self._rows.row("train", index)
        except BaseException as error:
            self._left()
            if isinstance(error, asyncio.CancelledError):
                raise
            self._error = error
            return
        rollout = self.config.rollout
        task = GroupTask(
            id=f"{self.run_name}/train/{index}",
            split="train",
            task_index=index,
            row=row,
            size=rollout.group_size,
            seed=self.config.seed,
            sampling=self.config.sampling,
            on_failure=rollout.on_failure,
            max_retries=rollout.max_retries,
        )
        self._launch(self._train_group(task))

    async def _train_group(self, task: GroupTask) -> None:
        committed = 0
        try:
            with self.timeline.overlapping("group", task=task.task_index, version=self.version):
                result = await play_group(self.context, task)
            self._task_failures.count(task.task_index, result.failures.total())
            if result.group is not None:
                self._count(result.group.counted)
            why = await self._failures.ended(self.spec.id, result, result.group)
            if why is not None and self._error is None:
                self._error = RunError(f"run {self.run_name}: {why}. Mend the environment and resume the run")
            if result.group is not None:
                with self.timeline.overlapping("commit", first_lane=COMMIT_LANES, task=task.task_index):
                    committed = int(await self._committer.commit(result.group, "train"))
        except Exception as error:
            self._error = error
        finally:
            self._left(committed)

    def _left(self, committed: int = 0) -> None:
        """A group is no longer in flight: it is committed, or lost."""
        self.admission.in_flight -= 1
        self.admission.committed += committed
        self._changed.set()
        if self.admission.in_flight == 0:
            self._idle.set()

    def _run_error(self, error: BaseException) -> RunError:
        what = str(error) if isinstance(error, RelaxError) else f"{type(error).__name__}: {error}"
        return RunError(f"run {self.run_name}: the rollout stopped with {self.admission.committed} groups committed: {what}")

    # -------------------------------------------------------------------------------------------------- evaluation

    async def evaluate(
        self,
        limit: int | None = None,
        greedy: bool = True,
        *,
        split: str = "eval",
        step: int | None = None,
        on_played: OnPlayed | None = None,
    ) -> EvalResult:
        """Play a split once, one episode a task, beside training.

        Episodes that fail every time count in `failures` alone. Groups go to the journal with split `eval`.

        Args:
            limit: tasks at most; default: `config.eval.limit`.
            greedy: with temperature 0.
            split: of the tasks.
            step: names the evaluation in the ids of its groups; default: the weight version.
            on_played: told after each episode how far it is.

        Raises:
            ConfigError: there is no such split.
            RunError: no episode was usable.
            JournalError: a group could not be written.
        """
        sampling = replace(self.config.sampling, temperature=0.0) if greedy else self.config.sampling
        label = f"{split}/{self.version if step is None else step}" + ("" if greedy else "-sampled")
        tasks = await self.evaluator.tasks(split, limit or self.config.eval.limit, sampling, self.config.seed)
        with self.timeline.span(f"evaluation of {label}", tasks=len(tasks)):
            return await self.evaluator.play(label, tasks, on_played)

    # ------------------------------------------------------------------------------------------------------- by hand

    async def generate(self, messages: Sequence[Message], sampling: SamplingParams | None = None) -> AssistantMessage:
        """Ask the model; nothing is recorded.

        Raises:
            MediaError, TokenError, EngineError, EpisodeTimeout: as in an episode.
        """
        key = f"{self.run_name}/by-hand/{next(self._calls)}"
        timeout = self.config.rollout.turn_timeout
        return await self.policies.ask_once(messages, sampling or self.config.sampling, timeout, key)

    # ------------------------------------------------------------------------------------------------------- warm-up

    async def first_rows(self, n: int) -> list[dict[str, Any]]:
        """The first rows of the train split, at most `n`; only before `run`.

        Raises:
            ConfigError: a row is not a mapping.
            EpisodeTimeout: a streamed dataset took too long.
        """
        return await self._rows.first(n)

    # ------------------------------------------------------------------------------------------------------- display

    async def commit(self, group: Group, split: str) -> bool:
        """Make a group durable that was played outside `run`.

        Returns:
            False when it was there already.

        Raises:
            JournalError: it could not be written.
        """
        return await self._committer.commit(group, split)

    @property
    def splits(self) -> Mapping[str, TaskSplit]:
        """The tasks by split."""
        return self._rows.splits

    def stats(self) -> RolloutStats:
        """A look at the worker now."""
        tally, admission = self.context.tally, self.admission
        return RolloutStats(
            in_flight=admission.in_flight,
            outstanding=admission.outstanding,
            limit=admission.limit,
            committed=admission.committed,
            consumed=admission.consumed,
            dropped=admission.dropped,
            version=self.version,
            paused=not self._gate.is_set(),
            states={state: count for state, count in tally.states.items() if count},
            episodes_per_second=self._episodes.per_second,
            tokens_per_second=self._tokens.per_second,
            failures=dict(tally.failures),
            failed_groups_in_a_row=self._failures.limits.in_a_row,
            last_errors=list(tally.errors),
            threads_given_up=self._threads.abandoned + self._media_threads.abandoned,
            threads_stuck=self._threads.stuck + self._media_threads.stuck,
            ignored_cancel=tally.ignored_cancel,
            unlike_groups=tally.unlike_groups,
            tasks=self._task_failures.tasks,
            tasks_played=self._task_failures.played,
            failed_attempts=self._task_failures.attempts,
            failing_tasks_total=self._task_failures.failing,
            failing_tasks=self._task_failures.worst,
            ended=sum(count for state, count in tally.states.items() if isinstance(state, Status)),
            warmup=(self.warmup_played, self.warmup_episodes),
            engines=self.pool.stats(),
        )

    # ------------------------------------------------------------------------------------------------------- parts

    def _count(self, trajectories: Sequence[Trajectory]) -> None:
        self._episodes.add(len(trajectories))
        self._tokens.add(sum(t.n_response_tokens for t in trajectories))

    def _launch(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._groups.add(task)
        task.add_done_callback(self._groups.discard)

    async def _wait_for_change(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    async def _cancel_all(self) -> None:
        """Cancel the train groups; an evaluation goes on."""
        for task in self._groups:
            task.cancel()
        if self._groups:
            await asyncio.wait(self._groups, timeout=STOP_TIMEOUT)

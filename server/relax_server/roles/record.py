"""What a run says: to whoever watches it, and into its folder, from one place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from relax_sdk.evaluation import Evaluation
from relax_sdk.findings import Finding
from relax_sdk.run import Run
from relax_sdk.runtime import Job, Observer
from relax_sdk.silence import missing
from relax_sdk.watch import Watch
from relax_server.roles.events import LEVELS, EventKind, EventLog, RunEvent
from relax_server.roles.layout import RunLayout
from relax_server.trackers import TrackedRun, Tracker, Trackers


class Warns(Protocol):
    """Says that something was dropped, retried or restarted."""

    def __call__(self, text: str, kind: EventKind = "warning", role: str = "") -> None:
        """Say it.

        Args:
            text: what it is.
            kind: `warning`, `restart` or `alarm`.
            role: that it is about; empty: the run.
        """
        ...


class RunRecord:
    """An observer of a run that keeps in `events.jsonl` what it is told, and passes it on.

    An event that cannot be written, as on a full disk, ends the run at its next step: what is told may come from anywhere,
    and an error would be lost there.

    Args:
        job: the run; nobody else may be carrying it out.
        observer: is told all that a person is to see at once.
        examples: whether the environment defines `format_example`; None: not known.
        trackers: by name; they show the figures of steps, and what people are warned of.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(
        self, job: Job, observer: Observer, examples: bool | None = None, trackers: Mapping[str, Tracker] | None = None
    ) -> None:
        self._job, self._observer, self._examples = job, observer, examples
        self.trackers = Trackers(trackers or {}, TrackedRun(job.folder, job.config, job.resume), self.warn)
        self._log = EventLog(RunLayout(job.folder).events)
        self._watch = Watch(job.config, examples)
        self._error: OSError | None = None
        self.step_done = 0
        """The last optimizer step that was told of."""
        self.stage_text = ""
        """What is being done when it is not a step; empty while steps are made."""
        self.queue: float | None = None
        """Groups that were ready when the last step's batch was taken."""

    # ----------------------------------------------------------------------------------------------------- beginning and end

    def started(self, restarted: str = "") -> None:
        """The run begins, or goes on; what it lacks is told before its first step.

        Args:
            restarted: how the controller before this one ended, of which people have been told.
        """
        self.trackers.begin()
        if restarted:
            self._write("restart", restarted, role="controller")
        how = "goes on" if self._job.resume else "begins"
        self._write("started", f"the run {how}: {self._job.config.env}, {self._job.config.model}, {self._job.config.mode}")
        for finding in missing(self._job.config, self._examples):
            self._find(finding, finding.sentence)

    def begin(self, step: int) -> None:
        """Steps are counted from here on; those of an earlier start are known to the watch over what is learnt."""
        rows = Run(self._job.folder, self._job.config).metrics
        self._watch = Watch(self._job.config, self._examples, [row for row in rows if row["step"] <= step])
        self.step_done = step

    def ended(self, error: BaseException | None, stopped: bool) -> None:
        """The run is over.

        Args:
            error: that it ended with; None: it is done.
            stopped: it was asked to stop.
        """
        if error is None:
            self._write("ended", f"done after step {self.step_done}")
        else:
            self._write("stopped" if stopped else "failed", reason_of(error))
        self._log.close()

    # --------------------------------------------------------------------------------------------------------------- on the way

    def stage(self, text: str) -> None:
        """Tell what is being done when it is not a step; counts behind a colon are shown and not kept."""
        begins = text.partition(":")[0] != self.stage_text.partition(":")[0]
        self.stage_text = text
        if begins:
            self._write("stage", text)
        self._observer.stage(text)

    def step(self, metrics: dict[str, Any]) -> None:
        """Tell the figures of a step, and what they let one find.

        Raises:
            OSError: something that was told before could not be written.
        """
        self._show(metrics)
        self._judge(metrics)

    def figures(self, row: dict[str, Any]) -> None:
        """Show trackers a row as it was written to `metrics.jsonl`; one of an older step comes again with its evaluation."""
        self.trackers.row(row)

    def warn(self, text: str, kind: EventKind = "warning", role: str = "") -> None:
        """Tell that something was dropped, retried or restarted; see `Warns`."""
        self._write(kind, text, role=role)
        self._observer.warn(text)

    def evaluated(self, row: dict[str, Any], result: Evaluation, newest: dict[str, Any]) -> None:
        """Keep that an evaluation has ended; tell its figures with the newest step's figures, and what it lets one find.

        Args:
            row: all figures of the step whose weights were evaluated, with those of the evaluation.
            result: of the evaluation.
            newest: figures of the newest step, which are told again.

        Raises:
            OSError: something that was told before could not be written.
        """
        failed = f", {sum(result.failures.values())} failed" if result.failures else ""
        what = f"held-out reward {result.mean_reward:.3f} ± {result.ci95:.3f} over {result.n} episodes{failed}"
        self._write("evaluation", what, step=row["step"])
        self._show(newest | {name: value for name, value in row.items() if name.startswith("eval_")})
        self._judge(row)

    def saved(self, step: int, folder: Path) -> None:
        """Keep that a checkpoint is complete."""
        self._write("checkpoint", f"checkpoint {folder.name}", step=step, role="policy")

    def _show(self, metrics: dict[str, Any]) -> None:
        """Tell the observer the figures of the newest step."""
        if self._error is not None:
            raise self._error
        self.stage_text, self.step_done = "", int(metrics["step"])
        self.queue = metrics.get("queue", self.queue)
        self._observer.step(metrics)

    def _judge(self, row: dict[str, Any]) -> None:
        """Tell what a row of figures, new or with its evaluation, lets one find; it is found at the newest step."""
        for finding in self._watch.step(row):
            self._find(finding, f"step {self.step_done}: {finding.sentence}")

    def _find(self, finding: Finding, shown: str) -> None:
        self._write("finding", finding.what, finding)
        self._observer.warn(shown)

    def _write(
        self, kind: EventKind, what: str, finding: Finding | None = None, *, step: int | None = None, role: str = ""
    ) -> None:
        level, advice = (finding.level, finding.advice) if finding is not None else (LEVELS.get(kind, "ok"), "")
        step = self.step_done if step is None else step
        if level != "ok":
            self.trackers.warning(step, f"{what}: {advice}" if advice else what)
        try:
            self._log.add(RunEvent(kind, what, step, level, advice, role))
        except OSError as error:
            self._error = self._error or error


def reason_of(error: BaseException) -> str:
    """Why a run ended, in words: the error's own, or its name where it has none."""
    return str(error) or type(error).__name__

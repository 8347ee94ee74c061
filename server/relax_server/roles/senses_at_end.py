"""The blindness check at the end of a run that asks for it; its verdicts are events of the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from relax_sdk.errors import RelaxError
from relax_sdk.evals.check import check_subject, default_limit
from relax_sdk.evals.plan import EvalPlan, beside
from relax_sdk.evals.play import Subject
from relax_sdk.evals.senses import SensesResults
from relax_sdk.findings import Finding
from relax_sdk.run import WEIGHTS
from relax_sdk.runtime import Job, Observer, Tell
from relax_server.roles.events import EventLog, RunEvent
from relax_server.roles.layout import RunLayout

FOLDER = "senses"
"""The folder of the check in that of the run; a later check is `senses-2`."""


def check_senses_at_end(
    job: Job, observer: Observer, play: Callable[[Job, EvalPlan, str, Tell], SensesResults]
) -> list[Finding]:
    """Play the check with the weights of a run that is done, and note its verdicts in the events of the run.

    A check that fails does not make the run fail: it is told as a warning.

    Args:
        job: the run; nothing is played where `eval.check_senses` is False.
        observer: of the run.
        play: plays the passes.

    Returns:
        The verdicts.

    Raises:
        Interrupted: a signal stopped the check; the run itself is done.
    """
    if not job.config.eval.check_senses:
        return []
    limit, weights = default_limit(job.config), job.folder / WEIGHTS
    plan = EvalPlan(limit=limit, weights=weights, version=job.config.steps, label=job.folder.name)
    subject, told = Subject(job.spec, job.config, job.agent, plan), "checking what the policy uses of what it is shown"
    observer.stage(told)
    try:
        out = beside(job.folder / FOLDER)
        report = check_subject(subject, out, play, lambda text: observer.stage(f"{told}: {text}"))
    except RelaxError as error:
        why = f"the senses could not be checked: {error}. `relax check-senses {job.folder}` does it again"
        _note(job, [RunEvent("warning", why, job.config.steps, "note")])
        observer.warn(why)
        return []
    found = report.findings or [Finding("ok", "nothing but text is shown: there are no senses to check")]
    _note(job, [RunEvent("finding", f.what, job.config.steps, f.level, f.advice) for f in found])
    return found


def _note(job: Job, events: list[RunEvent]) -> None:
    with contextlib.closing(EventLog(RunLayout(job.folder).events)) as log:
        for event in events:
            log.add(event)

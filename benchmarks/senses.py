"""The blindness check: does it name four planted faults, and pass five honest environments whose policies were trained?

python -m benchmarks.senses [NAME …]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import relax_sdk as relax
from benchmarks import blind_envs as envs
from benchmarks.report import save
from relax_sdk.run import WEIGHTS

TASKS = 64
"""Tasks of each check."""


@dataclass(frozen=True)
class Case:
    """One environment, a policy that is trained, and what the check must say."""

    env: str
    steps: int
    """Optimizer steps of the training; 0: the policy is that of `trained_in`."""
    kind: str = ""
    """The verdict that must name the fault: a kind of media, or `text`; empty: there is no fault."""
    says: str = ""
    """Words of that verdict."""
    trained_in: str = ""
    """The honest environment whose policy is played, where nothing can be learnt in the faulty one."""


HONEST = (
    Case("tone-v0", 60),
    Case("colour-v0", 100),
    Case("motion-v0", 90),
    Case("numbered-colour", 120),
    Case("omni-quiz-v0", 300),
)
FAULTS = (
    Case("dropped-video", 5, "video", "they are dropped"),
    Case("blanked-audio", 5, "audio", "are blank (silent)"),
    Case("leaked-answer", 60, "text", "leaks: with all media"),
    Case("swapped-images", 0, "image", "swapped between samples", trained_in="colour-v0"),
)


def register() -> None:
    """Register the environments of this benchmark, each with the settings of the one that it is made from."""
    made = (
        ("dropped-video", envs.DroppedVideo, "motion-v0"),
        ("blanked-audio", envs.BlankedAudio, "tone-v0"),
        ("leaked-answer", envs.LeakedAnswer, "colour-v0"),
        ("swapped-images", envs.SwappedImages, "colour-v0"),
        ("numbered-colour", envs.NumberedColour, "colour-v0"),
    )
    for name, env, origin in made:
        relax.register(name, env, defaults=dict(relax.get_spec(origin).defaults))


def train(env: str, steps: int, folder: Path) -> Path:
    """Train in an environment, unless it was done for another case; the folder of the run."""
    run = folder / env
    if not run.exists():
        relax.Trainer(env, folder=run, eval={"every": 0, "limit": TASKS}).fit(steps, progress=False)
    return run


def check(case: Case, folder: Path) -> tuple[relax.SensesReport, float]:
    """Train and check; the report, and the seconds of the check."""
    of = next((honest for honest in HONEST if honest.env == case.trained_in), case)
    run, began = train(of.env, of.steps, folder), time.monotonic()
    out = folder / f"{case.env}-senses"
    what, model = (str(run), None) if of is case else (case.env, str(run / WEIGHTS))
    report = relax.check_senses(what, model, limit=TASKS, out=out, progress=False)
    return report, time.monotonic() - began


def right(case: Case, report: relax.SensesReport) -> bool:
    """Whether the verdicts are as they should be: the fault is named, or every kind of media is used."""
    if not case.kind:
        used = all(verdict.what.startswith("used: ") for verdict in report.verdicts.values())
        return report.ok and used and set(report.verdicts) == relax.get_spec(case.env).load().modalities
    verdict = report.verdicts.get(case.kind)
    return verdict is not None and verdict.level == "problem" and case.says in verdict.what


def main(names: Sequence[str]) -> None:
    register()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for case in (*HONEST, *FAULTS):
            if names and case.env not in names:
                continue
            began = time.monotonic()
            report, seconds = check(case, Path(temporary))
            base = report.results.find("as it is")
            said = "; ".join(finding.what for finding in report.findings)
            rows.append(
                {
                    "environment": case.env,
                    "planted": f"{case.kind}: {case.says}" if case.kind else None,
                    "as it should be": right(case, report),
                    "reward": sum(base.rewards.values()) / len(base.rewards) if base is not None and base.rewards else None,
                    "training, s": round(time.monotonic() - began - seconds, 1),
                    "check, s": round(seconds, 1),
                    "verdicts": said,
                }
            )
            print(f"{case.env}: {'as it should be' if rows[-1]['as it should be'] else 'WRONG'}\n{report}", flush=True)
    save("senses", rows, key="environment", bars={"faults named": len(FAULTS), "honest environments passed": len(HONEST)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of environments; default: all")
    main(parser.parse_args().names)

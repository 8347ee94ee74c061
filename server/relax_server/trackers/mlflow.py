"""MLflow: the extra `mlflow`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from relax_server.trackers.base import End, TrackedRun, Tracker, need
from relax_server.trackers.samples import SampleAnswer, sample_text, uploads

STATUS: dict[End, str] = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
HTTP_LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
"""MLflow's own limits add up to an hour for a server that is gone; what the user's environment says counts."""
BATCH = 500
"""Metrics in one request; a server takes 1,000."""


class MlflowTracker(Tracker):
    """Logs a run to MLflow; a run that goes on keeps its run id there.

    Args:
        tracking_uri: of a server (`http://host:5000`) or a store (`sqlite:////path/mlflow.db`); default: what
            `MLFLOW_TRACKING_URI` says, else MLflow's own default, a SQLite file in the current folder.
        experiment: its name; made if there is none.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str = "relax-gym") -> None:
        need("mlflow", "mlflow")
        self._uri, self._experiment = tracking_uri, experiment
        self._client: Any = None
        self._run_id = ""

    def begin(self, run: TrackedRun) -> None:
        for name, value in HTTP_LIMITS.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        self._client = client = MlflowClient(tracking_uri=self._uri)
        known = run.notes("mlflow").get("run_id")
        if known is not None:
            client.update_run(known, status="RUNNING")
            self._run_id = known
            return
        experiment = client.get_experiment_by_name(self._experiment)
        number = experiment.experiment_id if experiment is not None else client.create_experiment(self._experiment)
        self._run_id = client.create_run(number, run_name=run.name).info.run_id
        run.note("mlflow", {"run_id": self._run_id, "experiment": self._experiment})
        from mlflow.entities import Param

        params = [Param(name, text[:500]) for name, text in _texts(run.config.to_dict()) if text]
        for i in range(0, len(params), 100):
            client.log_batch(self._run_id, params=params[i : i + 100])

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in figures.items()]
        for i in range(0, len(metrics), BATCH):
            self._client.log_batch(self._run_id, metrics=metrics[i : i + BATCH])

    def samples(self, step: int, samples: Sequence[SampleAnswer]) -> None:
        self._client.log_text(self._run_id, "\n\n".join(map(sample_text, samples)), f"samples/step_{step:06d}.md")
        for _, item in uploads(step, samples):
            self._client.log_artifact(self._run_id, str(item.path), f"samples/step_{step:06d}")

    def warning(self, step: int, text: str) -> None:
        self._client.set_tag(self._run_id, "relax.warning", f"step {step}: {text}"[:500])

    def close(self, end: End) -> None:
        if self._run_id:
            self._client.set_terminated(self._run_id, STATUS[end])


def _texts(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Settings as (`section.field`, text)."""
    out: list[tuple[str, str]] = []
    for name, value in values.items():
        out += _texts(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(prefix + name, str(value))]
    return out

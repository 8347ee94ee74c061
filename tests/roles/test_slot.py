"""What an engine of a run is started with."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from relax_server.roles.slot import make_process

import relax_sdk as relax
from relax_sdk.runtime import Job


class Started:
    """A placement that remembers what it is to start."""

    def engine(self, kind: str, model_path: Path, log_path: Path, settings: Any, **more: Any) -> tuple[Path, Any, Any]:
        return log_path, settings, more


@pytest.mark.parametrize("kind", ["embedded", "sglang", "vllm"])
def test_every_engine_has_a_log_of_its_own_and_settings_that_travel(tmp_path, kind):
    trainer = relax.Trainer("tone-v0", engine=kind)
    job = Job(trainer.spec, trainer.config, tmp_path)
    stages: list[str] = []
    host: Any = Started()
    found = [make_process(id, job, host, tmp_path, version=3, stage=stages.append) for id in ("e1", "e2")]
    assert [log.name for log, _, _ in found] == ["engine-e1.log", "engine-e2.log"]  # type: ignore[misc]
    _, settings, more = found[0]  # type: ignore[misc]
    assert settings.weight_version == 3 and settings.media_root == tmp_path / "media"
    assert pickle.loads(pickle.dumps(settings)) == settings  # to a node of a Ray cluster
    if more["progress"] is not None:
        more["progress"]("loading")
    assert stages == {"embedded": [], "sglang": ["SGLang: loading"], "vllm": ["vLLM: loading"]}[kind]

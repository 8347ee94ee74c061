"""What an engine of a run is started with."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from relax_server.models.catalog import resolve_model
from relax_server.roles.slot import EngineSlot, make_process, start

import relax_sdk as relax
from relax_sdk.config import EngineKind
from relax_sdk.errors import EngineError
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


class Elsewhere:
    """A server that says of itself what it is told to say."""

    def __init__(self) -> None:
        self.url, self.info = "", {}

    async def tell(self, request: web.Request) -> web.Response:
        return web.json_response(self.info)


@pytest_asyncio.fixture
async def elsewhere() -> AsyncIterator[Elsewhere]:
    server, app = Elsewhere(), web.Application()
    app.router.add_get("/server_info", server.tell)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


SAYS: dict[str, dict[str, Any]] = {"embedded": {"engine": "embedded"}, "vllm": {"engine": "vllm"}, "sglang": {"tp_size": 1}}


@pytest.mark.parametrize("kind", ["embedded", "vllm"])
@pytest.mark.parametrize("really", ["embedded", "sglang", "vllm", "something that does not say"])
async def test_an_engine_elsewhere_is_what_it_was_added_as(tmp_path, elsewhere, kind: EngineKind, really: str):
    trainer = relax.Trainer("tone-v0", sampling={"top_p": 0.9})
    slot, elsewhere.info = EngineSlot("mine", kind, None, elsewhere.url), SAYS.get(really, {})
    starting = start(slot, Job(trainer.spec, trainer.config, tmp_path), tmp_path)
    if really in SAYS and really != kind:
        with pytest.raises(
            EngineError, match=f"of kind '{really}', and was added as '{kind}'; add it again with kind='{really}'"
        ):
            await starting
    else:
        await starting
        assert slot.started
        await slot.stop()


async def test_an_engine_whose_logprobs_the_run_cannot_train_on_is_refused(tmp_path, elsewhere):
    elsewhere.info = SAYS["sglang"]
    trainer = relax.Trainer("tone-v0", sampling={"top_p": 0.9})
    with pytest.raises(relax.ConfigError, match=r"top_p = 0\.9.*SGLang reports logprobs from before this cut"):
        await start(
            EngineSlot("mine", "sglang", None, elsewhere.url),
            Job(trainer.spec, trainer.config, tmp_path),
            resolve_model("relax/tiny-omni"),
        )

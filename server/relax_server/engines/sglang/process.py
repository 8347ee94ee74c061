"""A real SGLang server as a child process, from an environment of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import relax_sdk
import relax_server
from relax_sdk.errors import ConfigError, EngineError
from relax_server.engines.foreign import MAX_RUNNING, ForeignProcess, take_port
from relax_server.engines.sglang.client import SEEDED
from relax_server.engines.sglang.environment import INSIDE, SHIM, VENV, VERSION, SglangEnvironment, find_python, look
from relax_server.engines.venv import clean_environment
from relax_server.models.catalog import resolve_model
from relax_server.models.families import media_rule, require_served, takes_media
from relax_server.models.layout import architecture
from relax_server.models.media_settings import read_settings

PLUGIN = "relax_server.engines.sglang.plugin"

CPU_FLAGS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--mem-fraction-static": "0.5",
}
CPU_TOKENS = 65_536
"""KV slots on CPU, where SGLang would take half of the machine's memory."""


class SglangProcess(ForeignProcess):
    """One SGLang server; it ends when this process does."""

    _packages: Path | None = None

    venv = VENV
    stages = {
        r"Init torch distributed begin": "starting up",
        r"Load weight begin": "loading weights",
        r"Load weight end": "weights loaded",
        r"KV Cache is allocated": "memory taken",
        r"Capture cuda graph begin": "capturing CUDA graphs",
        r"Application startup complete": "answering",
    }

    async def start(self, timeout: float = 300.0) -> None:
        """Start it and wait until it answers requests; half a minute at best.

        Raises:
            ConfigError: no environment with SGLang, or a model that it cannot serve.
            EngineUnavailable: it ended or was not ready in time; the message holds the end of its log.
            EngineError: it is running already.
        """
        if self.alive():
            raise EngineError(f"the engine process {self.pid} is running already")
        began = time.monotonic()
        model = resolve_model(self._model)
        require_served(model, "sglang")
        if read_settings(model).use_audio_in_video:
            raise ConfigError(
                "media.use_audio_in_video = True: engine='sglang' does not hear films here; use engine='embedded'"
            )
        self._progress("looking for SGLang")
        environment = await look(find_python(self._settings.python))
        if environment.version != VERSION and not environment.cuda:
            raise ConfigError(
                f"{environment.python} has SGLang {environment.version}; on CPU only {VERSION} is known to run. "
                f"{VENV.build} installs that"
            )
        if environment.version != VERSION:
            self._progress(f"SGLang {environment.version}; {VERSION} is what this is tested with")
        if self._settings.releases_memory and not environment.cuda:
            raise ConfigError(
                "on a CPU SGLang does not give its memory back, which mode='colocate' needs; use mode='async', or "
                "engine='embedded'"
            )
        arch = next(iter(architecture(model)), None) if takes_media(model) else None
        if arch is not None and environment.missing:
            raise ConfigError(
                f"{environment.python} lacks {', '.join(environment.missing)}, which media need; "
                f"{environment.python} -m pip install them, or {VENV.build} builds an environment that has them"
            )
        port = take_port(self._settings.host, self._settings.port)
        command = [str(environment.python), "-m", "sglang.launch_server", *self._arguments(model, environment, arch, port)]
        self._drop_packages()
        self._packages = _package_folder()
        left = max(1.0, timeout - (time.monotonic() - began))
        await self._serve(command, self._variables(environment, arch), f"http://{self._settings.host}:{port}", left)

    async def stop(self, timeout: float = 10.0) -> None:
        """Ask it to end, and kill it if it has not after `timeout` seconds."""
        await super().stop(timeout)
        self._drop_packages()

    def _drop_packages(self) -> None:
        if self._packages is not None:
            shutil.rmtree(self._packages, ignore_errors=True)
            self._packages = None

    def _arguments(self, model: Path, environment: SglangEnvironment, arch: str | None, port: int) -> list[str]:
        arguments = [
            "--model-path",
            str(model),
            "--host",
            self._settings.host,
            "--port",
            str(port),
            "--dtype",
            self._settings.dtype,
        ]
        arguments += [
            "--weight-version",
            str(self._settings.weight_version),
            "--max-running-requests",
            str(self._settings.max_running or MAX_RUNNING),
        ]
        arguments += ["--skip-server-warmup", "--sleep-on-idle"]
        # Seeds are handed over by `inside/`; of the two samplers only this one takes them. The label is how clients know.
        arguments += ["--sampling-backend", "pytorch", "--extra-metric-labels", SEEDED]
        tokens = self._settings.max_total_tokens
        if not environment.cuda:
            arguments += [word for flag in CPU_FLAGS.items() for word in flag]
            arguments += ["--disable-cuda-graph", "--disable-overlap-schedule"]
            tokens = tokens or CPU_TOKENS
        if tokens is not None:
            arguments += ["--max-total-tokens", str(tokens)]
        if self._settings.return_routed_experts:
            arguments.append("--enable-return-routed-experts")
        if self._settings.releases_memory:
            arguments.append("--enable-memory-saver")
        if arch is not None:
            arguments += ["--enable-multimodal", "--mm-attention-backend", "sdpa"]
            rule = media_rule(model)
            if rule is not None and rule.audio is not None:
                arguments.append("--disable-cuda-graph")  # positions beside sounds are fractions, which a graph cannot take
        return [*arguments, *self._settings.flags]

    def _variables(self, environment: SglangEnvironment, arch: str | None) -> dict[str, str]:
        paths = [str(INSIDE), *([str(self._packages)] if arch is not None else [])]
        variables = clean_environment() | {"HF_HUB_OFFLINE": "1", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
        if not environment.cuda:
            threads = str(self._settings.threads)
            paths.append(str(SHIM))
            variables |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        if arch is not None:
            variables |= {
                "SGLANG_EXTERNAL_MODEL_PACKAGE": f"{PLUGIN}.models",
                "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": f"{PLUGIN}.processors",
                "SGLANG_EXTERNAL_MM_MODEL_ARCH": arch,
                # Its cache of media embeddings outlives a weight update: they would come from old towers.
                "SGLANG_VLM_CACHE_SIZE_MB": "0",
                "RELAX_MEDIA_ROOT": str(self._settings.media_root or ""),
                "RELAX_FEATURES": str(self._settings.features or ""),
            }
        variables["PYTHONPATH"] = os.pathsep.join(paths)
        return variables | dict(self._settings.env)


def _package_folder() -> Path:
    """A folder with our two packages and nothing else: what lies beside them would take the place of SGLang's own."""
    folder = Path(tempfile.mkdtemp(prefix="relax-packages-"))
    for package in (relax_sdk, relax_server):
        home = Path(str(package.__file__)).parent
        (folder / home.name).symlink_to(home, target_is_directory=True)
    return folder

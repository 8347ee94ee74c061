"""A real vLLM server as a child process, from an environment of its own."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_sdk.errors import ConfigError, EngineError
from relax_server.engines.foreign import MAX_RUNNING, ForeignProcess, take_port
from relax_server.engines.venv import clean_environment
from relax_server.engines.vllm.environment import VENV, VERSION, VllmEnvironment, look
from relax_server.models.catalog import resolve_model
from relax_server.models.layout import model_config

INSIDE = Path(__file__).with_name("inside")
MIDDLEWARE = ("relax_gate.Gate", "relax_guard.EngineGuard")
"""Loaded into it; the last one is asked first."""

BLOCK = 32
"""Tokens that share one piece of the KV cache on a CPU, where vLLM would take 128; only whole pieces are found again."""

CPU_TOKENS = 65_536
"""KV slots on a CPU, where vLLM would take half of the machine's memory."""


class VllmProcess(ForeignProcess):
    """One vLLM server for a text model; it ends when this process does."""

    venv = VENV
    stages = {
        r"Initializing a V1 LLM engine": "starting up",
        r"Starting to load model": "loading weights",
        r"Loading weights took": "weights loaded",
        r"KV cache size": "memory taken",
        r"Application startup complete": "answering",
    }

    async def start(self, timeout: float = 300.0) -> None:
        """Start it and wait until it answers requests; half a minute at best.

        Raises:
            ConfigError: no environment with vLLM, or a model or a setting that it cannot serve.
            EngineUnavailable: it ended or was not ready in time; the message holds the end of its log.
            EngineError: it is running already.
        """
        if self.alive():
            raise EngineError(f"the engine process {self.pid} is running already")
        began = time.monotonic()
        model = resolve_model(self._model)
        config = model_config(model)
        _require_text(self._model, config)
        if self._settings.return_routed_experts:
            raise ConfigError("vLLM does not hand out routed experts here; use engine='sglang' or 'embedded' to replay routes")
        self._progress("looking for vLLM")
        environment = await look(VENV.find(self._settings.python))
        if environment.version.partition("+")[0] != VERSION:
            raise ConfigError(
                f"{environment.python} has vLLM {environment.version}; only {VERSION} is known to do all that is needed. "
                f"{VENV.build} installs that"
            )
        if self._settings.releases_memory and not environment.cuda:
            raise ConfigError(
                "on a CPU vLLM does not give its memory back, which mode='colocate' needs; use mode='async', or "
                "engine='embedded'"
            )
        port = take_port(self._settings.host, self._settings.port)
        command = [str(environment.python), "-m", "vllm.entrypoints.openai.api_server"]
        command += self._arguments(model, config, environment, port)
        left = max(1.0, timeout - (time.monotonic() - began))
        await self._serve(command, self._variables(environment), f"http://{self._settings.host}:{port}", left)

    def _arguments(self, model: Path, config: Mapping[str, Any], environment: VllmEnvironment, port: int) -> list[str]:
        arguments = [
            "--model",
            str(model),
            "--served-model-name",
            self._model,
            "--host",
            self._settings.host,
            "--port",
            str(port),
        ]
        arguments += [
            "--dtype",
            self._settings.dtype,
            "--max-num-seqs",
            str(self._settings.max_running or MAX_RUNNING),
        ]
        arguments += [word for name in MIDDLEWARE for word in ("--middleware", name)]
        # Its own default is the same for every engine, and engines with one seed answer the same.
        arguments += ["--seed", str(random.getrandbits(31)), "--logprobs-mode", "processed_logprobs"]
        arguments += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
        tokens = self._settings.max_total_tokens
        if not environment.cuda:
            tokens = tokens or max(CPU_TOKENS, int(config.get("max_position_embeddings") or 0))
            arguments += ["--enforce-eager", "--block-size", str(BLOCK)]
        if tokens is not None:
            size = _bytes_per_token(config, self._settings.dtype)
            arguments += ["--kv-cache-memory-bytes", str(size * tokens)]
            longest = int(config.get("max_position_embeddings") or tokens)
            arguments += ["--max-model-len", str(min(tokens, longest))]
        if self._settings.releases_memory:
            arguments.append("--enable-sleep-mode")
        return [*arguments, *self._settings.flags]

    def _variables(self, environment: VllmEnvironment) -> dict[str, str]:
        variables = clean_environment() | {
            "PYTHONPATH": str(INSIDE),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # Longer than clients keep a connection: one that both let go at the same moment loses a request.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",
            "DO_NOT_TRACK": "1",
            "RELAX_WEIGHT_VERSION": str(self._settings.weight_version),
            "VLLM_API_KEY": self.token,
        }
        if not environment.cuda:
            threads = str(self._settings.threads)
            variables |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return variables | dict(self._settings.env)


def _require_text(name: str, config: Mapping[str, Any]) -> None:
    media = [key for key in ("vision_config", "audio_config", "thinker_config") if config.get(key)]
    if media:
        raise ConfigError(
            f"model {name!r} takes media ({', '.join(media)}), and vLLM serves text models here; use engine='embedded', or "
            "engine='sglang'"
        )


def _bytes_per_token(config: Mapping[str, Any], dtype: str) -> int:
    """Bytes that the keys and values of one token take in all layers."""
    heads = int(config["num_attention_heads"])
    width = int(config.get("head_dim") or config["hidden_size"] // heads)
    keys = int(config.get("num_key_value_heads") or heads)
    return 2 * int(config["num_hidden_layers"]) * keys * width * (4 if dtype == "float32" else 2)

"""A real vLLM server as a child process, from an environment of its own."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_sdk.errors import ConfigError, EngineError
from relax_server.engines.kept import KeptProcess, take_port
from relax_server.engines.venv import clean_environment
from relax_server.engines.vllm.environment import VENV, VERSION, VllmEnvironment, look
from relax_server.models.catalog import resolve_model
from relax_server.models.layout import model_config

INSIDE = Path(__file__).with_name("inside")
MIDDLEWARE = "relax_gate.Gate"

BLOCK = 32
"""Tokens that share one piece of the KV cache on a CPU, where vLLM would take 128; only whole pieces are found again."""

CPU_TOKENS = 65_536
"""KV slots on a CPU, where vLLM would take half of the machine's memory."""


class VllmProcess(KeptProcess):
    """One vLLM server for a text model; it ends when this process does. The interface is `EngineProcess`'s.

    Args:
        model_path: a model folder or a built-in name.
        log_path: where its output goes (appended).
        python: of vLLM's environment, or that environment's folder; None looks for it (`Venv.find`).
        media_root: not used, as it serves text.
        threads: of the model, on CPU.
        dtype: `float32` or `bfloat16`.
        host: the address that it listens on; it asks nobody who he is.
        port: 0 picks a free one.
        max_total_tokens: KV slots; None: on CPU 65,536, on GPU what vLLM finds room for.
        max_running: sequences in one batch.
        return_routed_experts: refused, as its completions do not carry them in a stream.
        weight_version: of the weights in `model_path`.
        features: not used, as it serves text.
        releases_memory: `release_memory` is to give it back, which vLLM does on a GPU only.
        flags: more of vLLM's own, such as `--tensor-parallel-size 2`; they come last and win.
        progress: told what it is doing while it starts.
        env: added to the child's environment.
    """

    name = "vLLM"
    stages = {
        r"Initializing a V1 LLM engine": "starting up",
        r"Starting to load model": "loading weights",
        r"Loading weights took": "weights loaded",
        r"KV cache size": "memory taken",
        r"Application startup complete": "answering",
    }

    def __init__(
        self,
        model_path: str | Path,
        log_path: str | Path,
        *,
        python: str | Path | None = None,
        media_root: str | Path | None = None,
        threads: int = 1,
        dtype: str = "float32",
        host: str = "127.0.0.1",
        port: int = 0,
        max_total_tokens: int | None = None,
        max_running: int = 256,
        return_routed_experts: bool = False,
        weight_version: int = 0,
        features: str | Path | None = None,
        releases_memory: bool = False,
        flags: Sequence[str] = (),
        progress: Callable[[str], None] = lambda what: None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(log_path, progress)
        self._model, self._python = str(model_path), python
        self._threads, self._dtype, self._host, self._port = threads, dtype, host, port
        self._max_total_tokens, self._max_running = max_total_tokens, max_running
        self._routes, self._version, self._releases_memory = return_routed_experts, weight_version, releases_memory
        self._flags, self._env = tuple(flags), dict(env or {})

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
        if self._routes:
            raise ConfigError("vLLM does not hand out routed experts here; use engine='sglang' or 'embedded' to replay routes")
        self._progress("looking for vLLM")
        environment = await look(VENV.find(self._python))
        if environment.version.partition("+")[0] != VERSION:
            raise ConfigError(
                f"{environment.python} has vLLM {environment.version}; only {VERSION} is known to do all that is needed. "
                f"{VENV.build} installs that"
            )
        if self._releases_memory and not environment.cuda:
            raise ConfigError(
                "on a CPU vLLM does not give its memory back, which mode='colocate' needs; use mode='async', or "
                "engine='embedded'"
            )
        port = take_port(self._host, self._port)
        command = [str(environment.python), "-m", "vllm.entrypoints.openai.api_server"]
        command += self._arguments(model, config, environment, port)
        left = max(1.0, timeout - (time.monotonic() - began))
        await self._serve(command, self._variables(environment), f"http://{self._host}:{port}", left)

    def _arguments(self, model: Path, config: Mapping[str, Any], environment: VllmEnvironment, port: int) -> list[str]:
        arguments = ["--model", str(model), "--served-model-name", self._model, "--host", self._host, "--port", str(port)]
        arguments += ["--dtype", self._dtype, "--max-num-seqs", str(self._max_running), "--middleware", MIDDLEWARE]
        # Its own default is the same for every engine, and engines with one seed answer the same.
        arguments += ["--seed", str(random.getrandbits(31)), "--logprobs-mode", "processed_logprobs"]
        arguments += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
        tokens = self._max_total_tokens
        if not environment.cuda:
            tokens = tokens or max(CPU_TOKENS, int(config.get("max_position_embeddings") or 0))
            arguments += ["--enforce-eager", "--block-size", str(BLOCK)]
        if tokens is not None:
            size = _bytes_per_token(config, self._dtype)
            arguments += ["--kv-cache-memory-bytes", str(size * tokens)]
            longest = int(config.get("max_position_embeddings") or tokens)
            arguments += ["--max-model-len", str(min(tokens, longest))]
        if self._releases_memory:
            arguments.append("--enable-sleep-mode")
        return [*arguments, *self._flags]

    def _variables(self, environment: VllmEnvironment) -> dict[str, str]:
        variables = clean_environment() | {
            "PYTHONPATH": str(INSIDE),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # Longer than clients keep a connection: one that both let go at the same moment loses a request.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",
            "DO_NOT_TRACK": "1",
            "RELAX_WEIGHT_VERSION": str(self._version),
        }
        if not environment.cuda:
            threads = str(self._threads)
            variables |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return variables | self._env


def _require_text(name: str, config: Mapping[str, Any]) -> None:
    media = [key for key in ("vision_config", "audio_config", "thinker_config") if config.get(key)]
    if media:
        raise ConfigError(
            f"model {name!r} takes media ({', '.join(media)}), and vLLM serves text models here; use engine='embedded', or "
            "engine='sglang'"
        )


def _bytes_per_token(config: Mapping[str, Any], dtype: str) -> int:
    """Of keys and values in all layers."""
    heads = int(config["num_attention_heads"])
    width = int(config.get("head_dim") or config["hidden_size"] // heads)
    keys = int(config.get("num_key_value_heads") or heads)
    return 2 * int(config["num_hidden_layers"]) * keys * width * (4 if dtype == "float32" else 2)

"""Answers of an engine: those of some hundred tokens are read in the event loop, large ones in a thread."""

from __future__ import annotations

import base64
import threading
from typing import Any

import numpy as np
import orjson
import pytest
from relax_server.engines.base import GenerateRequest
from relax_server.engines.http import LARGE, HttpEngine

from relax_sdk.config import SamplingParams
from relax_sdk.errors import EngineFaulty


class Answering(HttpEngine):
    """An engine that answers so, and tells where answers were read."""

    def __init__(self, raw: bytes) -> None:
        super().__init__("http://engine")
        self.raw, self.read_in = raw, list[threading.Thread]()

    async def _bytes(self, *_: Any) -> bytes:
        return self.raw

    def _read(self, answer: Any, request: GenerateRequest) -> Any:
        self.read_in.append(threading.current_thread())
        return super()._read(answer, request)


def answer(tokens: int, routes: np.ndarray | None = None, **changes: Any) -> bytes:
    meta: dict[str, Any] = {"finish_reason": {"type": "stop"}, "weight_version": "3"}
    meta["output_token_logprobs"] = [[-0.5, n, None] for n in range(tokens)]
    if routes is not None:
        meta |= {"routed_experts": base64.b64encode(routes.tobytes()).decode(), "routed_experts_shape": routes.shape}
    return orjson.dumps({"meta_info": meta, "output_ids": list(range(tokens)), "prompt_token_ids": [1, 2]} | changes)


@pytest.mark.parametrize("tokens", [300, 30_000])
async def test_only_large_answers_are_read_in_a_thread(tokens: int) -> None:
    routes = np.arange((tokens + 1) * 4, dtype=np.int32).reshape(tokens + 1, 2, 2)
    engine = Answering(answer(tokens, routes))
    request = GenerateRequest(input_ids=[1, 2], sampling=SamplingParams(), return_routed_experts=True)
    (generation,) = await engine.generate(request, 1.0)
    assert generation.response_ids == list(range(tokens)) and generation.routed_experts == routes.tobytes()
    assert (engine.read_in == [threading.current_thread()]) == (len(engine.raw) <= LARGE) == (tokens == 300)


async def test_a_large_answer_that_is_wrong_is_refused_as_a_small_one() -> None:
    for raw in (answer(30_000)[:-1], answer(30_000, output_ids=[1] * 30_000), answer(30_000, prompt_token_ids=None)):
        with pytest.raises(EngineFaulty):
            await Answering(raw).generate(GenerateRequest(input_ids=[1, 2], sampling=SamplingParams()), 1.0)

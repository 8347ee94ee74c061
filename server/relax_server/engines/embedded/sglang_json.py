"""SGLang's JSON: sampling parameters in, `meta_info` out."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from relax_sdk.trajectory import derive_seed
from relax_server.engines.embedded.core import Finish, RequestError, Sequence, new_seed
from relax_server.engines.embedded.sampling import Sampling


class UnknownSamplingKey(RequestError):
    """SGLang answers these with `error` as a bare string."""


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_p": (0, None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "min_new_tokens": (0, None),
    "no_stop_trim": (False, None),
    "stop_regex": (None, []),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "custom_params": (None,),
    "spaces_between_special_tokens": (True, False, None),
}
"""SGLang parameters that this engine does not have, and the values that mean they are not used."""

_KNOWN = {
    "max_new_tokens", "temperature", "top_p", "top_k", "stop", "stop_token_ids", "ignore_eos", "sampling_seed", "logit_bias",
    "skip_special_tokens", "n",
}  # fmt: skip


def parse_sampling(raw: Any, vocab_size: int, default_max_new_tokens: int = 128) -> tuple[Sampling, list[int]]:
    """Sampling parameters as SGLang names them, and the seeds of the `n` answers.

    Other than in SGLang, `sampling_seed` may be a list, a seed an answer.

    Raises:
        RequestError: a value outside its range, or a feature this engine does not have.
        UnknownSamplingKey: a name SGLang does not have.
    """
    if raw is None:
        raw = {}
    if not isinstance(raw, Mapping):
        raise RequestError(f"sampling_params must be an object, got {type(raw).__name__}")
    unknown = [key for key in raw if key not in _KNOWN and key not in _NEUTRAL]
    if unknown:
        raise UnknownSamplingKey(f"unexpected sampling parameters: {', '.join(map(str, unknown))}")
    for key, neutral in _NEUTRAL.items():
        if key in raw and raw[key] not in neutral:
            raise RequestError(f"sampling_params.{key} is not supported by the embedded engine (got {raw[key]!r})")
    stop = raw.get("stop") or ()
    bias = raw.get("logit_bias") or {}
    sampling = Sampling(
        max_new_tokens=_number(raw, "max_new_tokens", default_max_new_tokens, 1, 2**31, int),
        temperature=_number(raw, "temperature", 1.0, 0, 1e6),
        top_p=_number(raw, "top_p", 1.0, 1e-9, 1),
        top_k=_number(raw, "top_k", -1, -1, 2**31, int),
        stop_token_ids=_ids("stop_token_ids", raw.get("stop_token_ids") or (), vocab_size),
        stop=tuple([stop] if isinstance(stop, str) else _list("stop", stop, str)),
        ignore_eos=bool(raw.get("ignore_eos", False)),
        logit_bias=_bias(bias, vocab_size),
        skip_special_tokens=bool(raw.get("skip_special_tokens", True)),
    )
    if sampling.top_k == 0:
        raise RequestError("sampling_params.top_k = 0; allowed: -1 (all tokens) or 1 and more")
    return sampling, _seeds(raw.get("sampling_seed"), _number(raw, "n", 1, 1, 1024, int))


def _number(raw: Mapping[str, Any], key: str, default: Any, low: float, high: float, kind: type = float) -> Any:
    value = raw.get(key)
    if value is None:
        return default
    ok = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not ok:
        raise RequestError(f"sampling_params.{key} = {value!r}; allowed: {kind.__name__} from {low:g} to {high:g}")
    return kind(value)


def _list(key: str, value: Any, kind: type) -> list[Any]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, kind) and not isinstance(v, bool) for v in value):
        raise RequestError(f"{key} must be a list of {kind.__name__}")
    return list(value)


def _ids(key: str, value: Any, vocab_size: int) -> frozenset[int]:
    ids = _list(key, value, int)
    if any(not 0 <= i < vocab_size for i in ids):
        raise RequestError(f"{key} holds an id outside the vocabulary of {vocab_size}")
    return frozenset(ids)


def _bias(raw: Any, vocab_size: int) -> dict[int, float]:
    try:
        bias = {int(k): float(v) for k, v in raw.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise RequestError(f"logit_bias must map token ids to numbers ({error})") from error
    _ids("logit_bias", list(bias), vocab_size)
    return bias


def _seeds(raw: Any, n: int) -> list[int]:
    """One seed per answer: those that are given; where it is one, the first answer's; without any, random ones."""
    if raw is None:
        return [new_seed() for _ in range(n)]
    given = raw if isinstance(raw, list) else [raw]
    low, high = -(2**63), 2**64 - 1
    if not all(type(seed) is int and low <= seed <= high for seed in given):
        raise RequestError(f"sampling_params.sampling_seed = {raw!r}; allowed: int from {low:g} to {high:g}, or a list of them")
    if isinstance(raw, list) and len(given) != n:
        raise RequestError(f"sampling_params.sampling_seed has {len(given)} seeds for n = {n} answers")
    first = [seed % 2**64 for seed in given]
    return first + [derive_seed(first[0], i) for i in range(len(first), n)]


def finish_json(finish: Finish, n_tokens: int) -> dict[str, Any]:
    """`finish_reason` of meta_info."""
    if finish.type == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.type == "length":
        return {"type": "length", "length": n_tokens}
    return {"type": "abort", "message": finish.message, "status_code": None, "err_type": None}


def version_spans(versions: list[str]) -> list[dict[str, Any]]:
    """Runs of one weight version over the response tokens."""
    spans, start = [], 0
    for version, run in groupby(versions):
        end = start + sum(1 for _ in run)
        spans.append({"version": version, "start": start, "end": end})
        start = end
    return spans


def meta_info(sequence: Sequence, n: int, current_version: str, began: float, logprobs: bool) -> dict[str, Any]:
    """`meta_info` of the first `n` response tokens.

    Args:
        current_version: reported for a response without tokens.
        began: `time.perf_counter()` at the request's arrival.
    """
    finish = sequence.finish
    versions = sequence.versions[:n]
    meta: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": None if finish is None else finish_json(finish, n),
        "prompt_tokens": len(sequence.prompt),
        "completion_tokens": n,
        "cached_tokens": sequence.cached_tokens,
        "weight_version": versions[-1] if versions else current_version,
        "weight_versions": version_spans(versions),
        "num_retractions": sequence.n_retractions,
        "e2e_latency": time.perf_counter() - began,
    }
    if logprobs:
        ids = sequence.out_ids
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [[sequence.logprobs[i], ids[i], None] for i in range(n)]
        meta["output_token_logprobs_length"] = n
        if sequence.sampling.top_logprobs:
            meta["output_top_logprobs"] = [[[p, id, None] for p, id in row] for row in sequence.top[:n]]
    if sequence.routed_experts is not None and finish is not None:
        meta["routed_experts"] = base64.b64encode(sequence.routed_experts.tobytes()).decode("ascii")
        meta["routed_experts_shape"] = list(sequence.routed_experts.shape)
    return meta

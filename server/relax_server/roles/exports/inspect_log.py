"""The format `inspect`: a log of Inspect (`.eval`, schema version 2), one sample an episode, for `inspect view`.

A `.eval` file is a zip of JSON: `header.json`, `summaries.json`, `_journal/start.json` and one file a sample. The forms are
those of `inspect_ai.log.EvalLog` 0.3; https://inspect.aisi.org.uk/eval-logs.html describes them.
"""

from __future__ import annotations

import base64
import json
import math
import zipfile
from collections import Counter, defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from relax_sdk.media import MediaRef
from relax_sdk.media_places import media_places
from relax_sdk.recorded import RecordedTrajectory
from relax_sdk.showing import last_answer
from relax_sdk.trajectory import Status
from relax_server.roles.exports.base import USABLE, Source
from relax_server.rollout.failed_attempts import FAILED

SCHEMA_VERSION = 2
_FORMATS = {
    "audio": {"audio/wav": "wav", "audio/mpeg": "mp3"},
    "video": {"video/mp4": "mp4", "video/mpeg": "mpeg", "video/quicktime": "mov"},
}
"""Media that Inspect has a word for; others are named in a text."""
_STOPS = {"stop": "stop", "length": "max_tokens"}
_LIMITS = {Status.TRUNCATED: "message", Status.TIMED_OUT: "time"}


def write_inspect(source: Source, folder: Path) -> dict[str, int]:
    """Write one log for each split.

    Returns:
        Samples by split.
    """
    logs: dict[str, _Log] = {}
    try:
        for trajectory in source.trajectories():
            if trajectory.split not in logs:
                logs[trajectory.split] = _Log(source, folder, trajectory.split)
            logs[trajectory.split].add(trajectory)
    finally:
        for log in logs.values():
            log.close()
    return {split: len(log.summaries) for split, log in logs.items()}


class _Log:
    """One `.eval` file."""

    def __init__(self, source: Source, folder: Path, split: str) -> None:
        self._source, self._split = source, split
        self.summaries: list[dict[str, Any]] = []
        self._attempts: Counter[str] = Counter()
        """Failed attempts by their sample: those at one position of a group are several, and each gets an epoch of its own."""
        self._completed = 0
        self._values: defaultdict[str, list[float]] = defaultdict(list)
        run, config = source.layout.folder.name, source.config
        created = datetime.fromtimestamp((source.layout.folder / "config.json").stat().st_mtime, UTC)
        self._created = created.isoformat(timespec="seconds")
        sampling = config.sampling
        self._eval = {
            "created": self._created,
            "task": f"{config.env}/{split}",
            "task_id": f"{run}-{split}",
            "eval_id": f"{run}-{split}",
            "run_id": run,
            "dataset": {"name": f"{config.env} [{split}]"},
            "model": str(config.model),
            "model_generate_config": {"temperature": sampling.temperature, "max_tokens": sampling.max_new_tokens},
            "config": {},
            "metadata": {"run": run, "seed": config.seed, "mode": config.mode},
        }
        stamp = f"{self._created}".replace(":", "-")
        self._zip = zipfile.ZipFile(folder / f"{stamp}_{run}_{split}.eval", "w", zipfile.ZIP_DEFLATED)
        self._write("_journal/start.json", {"version": SCHEMA_VERSION, "eval": self._eval, "plan": {}})

    def add(self, trajectory: RecordedTrajectory) -> None:
        """Write an episode."""
        sample = _sample(self._source, trajectory)
        if self._split == FAILED:
            self._attempts[sample["id"]] += 1
            sample["epoch"] = self._attempts[sample["id"]]
        self._write(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", sample)
        kept = ("id", "epoch", "input", "target", "scores", "metadata", "uuid")
        summary = {name: sample[name] for name in kept} | {"input": _short(trajectory), "completed": True}
        error = sample.get("error")
        self.summaries.append(summary | ({"error": error["message"]} if error else {}))
        self._completed += trajectory.status in USABLE
        for name, score in sample["scores"].items():
            self._values[name].append(score["value"])

    def close(self) -> None:
        """Write what stands over all samples."""
        scores = [
            {"name": name, "scorer": name, "scored_samples": len(values), "metrics": _metrics(values)}
            for name, values in self._values.items()
        ]
        results = {"total_samples": len(self.summaries), "completed_samples": self._completed, "scores": scores}
        self._eval["dataset"] |= {"samples": len({summary["id"] for summary in self.summaries})}
        self._eval["config"] = {"epochs": max((summary["epoch"] for summary in self.summaries), default=1)}
        stats = {"started_at": self._created, "completed_at": self._created}
        header = {"version": SCHEMA_VERSION, "status": "success", "eval": self._eval, "plan": {}}
        self._write("summaries.json", self.summaries)
        self._write("header.json", header | {"results": results, "stats": stats})
        self._zip.close()

    def _write(self, name: str, value: Any) -> None:
        self._zip.writestr(name, json.dumps(value, ensure_ascii=False))


def _metrics(values: list[float]) -> dict[str, Any]:
    n, mean = len(values), sum(values) / len(values)
    found = {"mean": mean}
    if n > 1:
        found["stderr"] = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)
    return {name: {"name": name, "value": value} for name, value in found.items()}


def _short(trajectory: RecordedTrajectory) -> str:
    """The first observation in a line."""
    content = next((m.get("content") or "" for m in trajectory.messages if m["role"] == "user"), "")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return " ".join(part.get("text") or f"<{part['type'].removesuffix('_url')}>" for part in parts)[:500]


def _sample(source: Source, t: RecordedTrajectory) -> dict[str, Any]:
    """An episode as an `EvalSample`; episodes of one group, or failed attempts at it, are epochs of one sample."""
    messages = [_message(source, t, message) for message in t.messages]
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    prompt = sum(len(turn.prompt_ids) for turn in t.turns)
    usage = {"input_tokens": prompt, "output_tokens": t.n_response_tokens, "total_tokens": prompt + t.n_response_tokens}
    model = str(source.config.model)
    scores = {} if t.failure is not None else t.rewards | {"reward": t.reward}
    facts = {name: getattr(t, name) for name in ("id", "task_index", "seed", "step", "advantage", "staleness", "attempts")}
    sample: dict[str, Any] = {
        "id": t.group_id.removeprefix(f"{source.layout.folder.name}/").replace("/", "-"),
        "epoch": t.group_index + 1,
        "uuid": t.id,
        "input": messages[:first],
        "target": "",
        "messages": messages,
        "output": _output(t, messages, model, usage),
        "scores": {name: {"value": value, "answer": last_answer(t)} for name, value in scores.items()},
        "metadata": facts | {"status": str(t.status), "env_version": t.env_version},
        "model_usage": {model: usage},
        "total_time": t.timings.get("total"),
        "working_time": t.timings.get("generate"),
    }
    if t.error is not None:
        sample["error"] = {"message": t.error, "traceback": "", "traceback_ansi": ""}
    elif t.status in _LIMITS:
        sample["limit"] = {"type": _LIMITS[t.status], "limit": source.config.rollout.max_turns}
    return sample


def _output(t: RecordedTrajectory, messages: list[dict[str, Any]], model: str, usage: dict[str, int]) -> dict[str, Any]:
    last = next((message for message in reversed(messages) if message["role"] == "assistant"), None)
    if last is None:
        return {"model": model, "choices": []}
    reason = "tool_calls" if last.get("tool_calls") else _STOPS.get(t.turns[-1].finish_reason if t.turns else "", "unknown")
    return {"model": model, "choices": [{"message": last, "stop_reason": reason}], "usage": usage}


def _message(source: Source, t: RecordedTrajectory, message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    parts = content if isinstance(content, str) else [_part(source, t, part) for part in content]
    out: dict[str, Any] = {"role": message["role"], "content": parts}
    if message.get("tool_calls"):
        out["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    if message.get("tool_call_id") is not None:
        out["tool_call_id"] = message["tool_call_id"]
    return out


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"id": call["id"], "function": function["name"], "arguments": json.loads(function["arguments"]), "type": "function"}


def _part(source: Source, t: RecordedTrajectory, part: dict[str, Any]) -> dict[str, Any]:
    if not any(place.name for place in media_places([{"content": [part]}])):
        return {"type": "text", "text": part.get("text", "")}
    (ref,) = source.media(t, [{"content": [part]}])
    data = source.read(ref)
    return (
        _played(ref, data)
        if data is not None
        else {"type": "text", "text": f"<{ref.kind} {ref.sha256[:12]}, its file is gone>"}
    )


def _played(ref: MediaRef, data: bytes) -> dict[str, Any]:
    uri = f"data:{ref.mime};base64,{base64.b64encode(data).decode('ascii')}"
    if ref.kind == "image":
        return {"type": "image", "image": uri}
    form = _FORMATS[ref.kind].get(ref.mime)
    if form is None:
        return {"type": "text", "text": f"<{ref.kind} {ref.sha256[:12]}, {ref.mime}>"}
    return {"type": ref.kind, ref.kind: uri, "format": form}

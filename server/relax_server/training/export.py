"""The process that writes a checkpoint as a model folder: `python -m relax_server.training.export`, asked on stdin in JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from relax_sdk.errors import RelaxError
from relax_sdk.run import read_config
from relax_server.training.model import LogprobModel


def main() -> None:
    """Answer on the last line of stdout: the step and the files, or the error."""
    asked = json.load(sys.stdin)
    try:
        answer = export(asked)
    except RelaxError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(answer), flush=True)


def export(asked: dict[str, Any]) -> dict[str, Any]:
    """Read the weights of a checkpoint and write them as a model folder.

    Args:
        asked: `run`, `model`, `checkpoint` and `to`, which are folders, and `shard_size` in bytes.

    Returns:
        `step`, the training steps in the weights, and `files`, which hold them.

    Raises:
        RelaxError: see `relax_sdk.model_export.export_model`.
    """
    config = read_config(Path(asked["run"]))
    training = replace(config.training, attention="auto", experts="auto")  # those of a GPU cannot be had on a CPU
    model = LogprobModel(Path(asked["model"]), training=training, seed=config.seed, tuning=config.tuning)
    step = model.restore_weights(Path(asked["checkpoint"]))
    return {"step": step, "files": model.export(Path(asked["to"]), asked["shard_size"])}


if __name__ == "__main__":
    main()

"""Weights & Biases: the extra `wandb`; the key is the one of `wandb login` or `WANDB_API_KEY`."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from relax_server.trackers.base import End, TrackedRun, Tracker, need
from relax_server.trackers.samples import SampleAnswer, uploads

INIT_SECONDS = 60.0
FINISH_SECONDS = 25.0


def _players() -> dict[str, tuple[Callable[..., Any], frozenset[str]]]:
    """What shows media of a kind, and the endings of the files that it takes."""
    import wandb

    return {
        "image": (wandb.Image, frozenset({".png", ".jpg", ".jpeg", ".gif", ".bmp"})),
        "audio": (wandb.Audio, frozenset({".wav", ".mp3", ".flac", ".ogg"})),
        "video": (wandb.Video, frozenset({".mp4", ".webm"})),
    }


class WandbTracker(Tracker):
    """Logs a run to Weights & Biases; a run that goes on keeps its id there.

    Figures are logged over the metric `step`, as the held-out evaluation of an older step ends later than the steps after it,
    which W&B's own counter does not allow.

    Args:
        project: of W&B.
        entity: user or team; default: that of the login.
        mode: `offline` keeps everything in `wandb/` of the run folder, for `wandb sync`; default: what `WANDB_MODE` says, else
            online.
        group: of W&B, for runs that belong together, such as seeds of one experiment.
        tags: of the run.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(
        self,
        project: str = "relax-gym",
        entity: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        need("wandb", "wandb")
        self._init: dict[str, Any] = dict(project=project, entity=entity, mode=mode, group=group, tags=list(tags) or None)
        self._run: Any = None

    def begin(self, run: TrackedRun) -> None:
        import wandb

        known = run.notes("wandb").get("id")
        settings = wandb.Settings(
            init_timeout=INIT_SECONDS,
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
            console="off",
            silent=True,
            disable_code=True,  # neither the user's code nor the state of the git repository leaves the machine
            disable_git=True,
        )
        self._run = wandb.init(
            **self._init,
            id=known,
            name=run.name,
            resume="allow" if known else None,
            dir=run.folder,
            config=run.config.to_dict(),
            settings=settings,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        run.note("wandb", {"id": self._run.id, "url": self._run.url})

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({**figures, "step": step})

    def samples(self, step: int, samples: Sequence[SampleAnswer]) -> None:
        import wandb

        parts = (
            f"<p>{sample.which}, reward {html.escape(sample.reward)}</p>"
            + "".join(f"<pre>{html.escape(text)}</pre>" for text in (sample.asked, sample.answer))
            for sample in samples
        )
        shown: dict[str, Any] = {"sample": wandb.Html("".join(parts), inject=False), "step": step}
        for kind, (make, suffixes) in _players().items():
            made = [
                make(str(item.path), caption=f"{sample.which}: {sample.answer}")
                for sample, item in uploads(step, samples)
                if item.ref.kind == kind and item.path.suffix in suffixes
            ]
            if made:
                shown[f"samples/{kind}"] = made
        self._run.log(shown)

    def warning(self, step: int, text: str) -> None:
        self._run.alert(title="Relax Gym", text=f"step {step}: {text}", level="WARN", wait_duration=0)

    def close(self, end: End) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if end == "done" else 1)

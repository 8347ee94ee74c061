"""One live line per run: in a terminal, in a notebook, or as plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from relax_sdk.config import RunConfig

PLAIN_EVERY = 5.0
"""Seconds between plain lines."""


class Progress:
    """Keeps the latest figures of a run; subclasses show them."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.text = "starting"
        self.latest: dict[str, Any] = {}
        self.held_out: float | None = None
        self.rewards: deque[float] = deque(maxlen=10)
        self.started = time.monotonic()

    def stage(self, text: str) -> None:
        self.text = text
        self.show()

    def step(self, metrics: dict[str, Any]) -> None:
        self.text = ""
        self.latest = metrics
        self.rewards.append(metrics.get("reward", 0.0))
        self.held_out = metrics.get("eval_reward", self.held_out)
        self.show()

    def warn(self, text: str) -> None:
        self.print(f"warning: {text}")

    def line(self) -> str:
        """The figures in one line."""
        seconds = time.monotonic() - self.started
        if not self.latest:
            return f"{self.config.env}: {self.text} · {seconds:.0f} s"
        m = self.latest
        parts = [
            f"{self.config.env} step {m['step']}/{self.config.steps}",
            f"reward {sum(self.rewards) / len(self.rewards):.3f}",
            f"held-out {'–' if self.held_out is None else f'{self.held_out:.3f}'}",
            f"{m.get('tokens_per_second', 0):,.0f} tok/s",
            f"staleness {m.get('staleness_mean', 0):.2f}",
            f"queue {m.get('queue', 0):.0f}",
            time_split(m),
            f"{seconds:.0f} s",
        ]
        return " · ".join([*parts, self.text] if self.text else parts)

    def show(self) -> None:
        """Bring the display up to date."""

    def print(self, text: str) -> None:
        """A line that stays."""
        print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self.close()
        if kind is None:
            self.print(f"{self.line()}\ndone: {self.folder}")
        else:
            self.print(f"{self.line()}\nended early ({kind.__name__}): {self.folder}")

    def close(self) -> None:
        """Take the live display down."""


def time_split(metrics: dict[str, Any]) -> str:
    """Where the trainer's step went, in per cent: waiting for groups, training, publishing weights."""
    total = max(metrics.get("seconds_step", 0.0), 1e-9)
    names = (("wait", "seconds_wait"), ("train", "seconds_train"), ("publish", "seconds_publish"))
    return " ".join(f"{name} {100 * metrics.get(key, 0.0) / total:.0f}%" for name, key in names) + f" of {total:.2f} s"


class PlainProgress(Progress):
    """For logs: a line every few seconds."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self._shown = 0.0

    def show(self) -> None:
        now = time.monotonic()
        if self.text or now - self._shown >= PLAIN_EVERY:
            self._shown = now
            self.print(self.line())


class TerminalProgress(Progress):
    """For terminals: one line that is rewritten."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        super().__init__(config, folder)
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True)
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4)
        self._live.start()

    def _render(self) -> Any:
        from rich.text import Text

        return Text(self.line(), no_wrap=True, overflow="ellipsis")

    def print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()


class NotebookProgress(Progress):
    """For notebooks: one output that is rewritten."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        super().__init__(config, folder)
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        self._handle = display({"text/plain": self.line()}, raw=True, display_id=True)
        self._shown = 0.0

    def show(self) -> None:
        now = time.monotonic()
        if self.text or now - self._shown >= 0.5:
            self._shown = now
            self._update()

    def _update(self) -> None:
        if self._handle is not None:
            self._handle.update({"text/plain": self.line()}, raw=True)

    def close(self) -> None:
        self._update()


class SilentProgress(Progress):
    """Shows warnings only."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self.close()


def make_progress(config: RunConfig, folder: Path, show: bool = True) -> Progress:
    """The display that suits where the program runs."""
    if not show:
        return SilentProgress(config, folder)
    if "ipykernel" in sys.modules:
        return NotebookProgress(config, folder)
    if sys.stderr.isatty():
        return TerminalProgress(config, folder)
    return PlainProgress(config, folder)

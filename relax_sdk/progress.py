"""One live line per run or evaluation: in a terminal, in a notebook, or as plain lines in a log."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_sdk.config import RunConfig
from relax_sdk.showing import MEDIA, sample_line, samples_html

PLAIN_EVERY = 5.0
"""Seconds between plain lines."""
TICK = 1.0
"""Seconds between two looks at a line on which only the time has changed."""
SAMPLE_STEPS = 50
"""Steps between two that have their sample answers shown; the first step's is shown too."""
CLOSE_SECONDS = 5.0
"""Seconds for a line that is just being shown; whoever reads it may have stopped."""


class Display:
    """A place where a changing line is shown; this one shows only lines that stay.

    Args:
        line: makes the line.
    """

    stays = False
    """Whether the last line is still to be seen after `close`."""

    def __init__(self, line: Callable[[], str]) -> None:
        self.line = line

    def show(self, urgent: bool = False) -> None:
        """The line has changed; `urgent`: in a way that is to be seen at once."""

    def print(self, text: str) -> None:
        """A line that stays."""
        print(text, file=sys.stderr, flush=True)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]], media: Path) -> None:
        """Show sample answers of a step, a line for each.

        Args:
            step: whose they are.
            samples: as in its metrics.
            media: folder of the run's media store.
        """
        for sample in samples:
            self.print(f"step {step}, {sample_line(sample)}")

    def close(self) -> None:
        """Take the live line down."""


class PlainDisplay(Display):
    """A display for logs: a line every few seconds."""

    def __init__(self, line: Callable[[], str]) -> None:
        super().__init__(line)
        self._shown = 0.0

    def show(self, urgent: bool = False) -> None:
        now = time.monotonic()
        if urgent or now - self._shown >= PLAIN_EVERY:
            self._shown = now
            self.print(self.line())


class TerminalDisplay(Display):
    """A display for terminals: one line that is rewritten."""

    stays = True

    def __init__(self, line: Callable[[], str]) -> None:
        super().__init__(line)
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


class NotebookDisplay(Display):
    """A display for notebooks: the line, and below it the last sample answers with their media, both rewritten."""

    stays = True

    def __init__(self, line: Callable[[], str]) -> None:
        super().__init__(line)
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        self._display: Any = display
        self._handle = display({"text/plain": self.line()}, raw=True, display_id=True)
        self._samples: Any = None
        self._shown = 0.0

    def show(self, urgent: bool = False) -> None:
        now = time.monotonic()
        if urgent or now - self._shown >= 0.5:
            self._shown = now
            self.close()

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]], media: Path) -> None:
        if not samples:
            return
        text = "\n".join(f"step {step}, {sample_line(sample)}" for sample in samples)
        shown = {"text/plain": text, "text/html": f"<div>step {step}</div>{samples_html(samples, media)}"}
        if self._samples is None:
            self._samples = self._display(shown, raw=True, display_id=True)
        else:
            self._samples.update(shown, raw=True)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.update({"text/plain": self.line()}, raw=True)


def make_display(line: Callable[[], str], show: bool = True) -> Display:
    """The display that suits where the program runs."""
    if not show:
        return Display(line)
    if "ipykernel" in sys.modules:
        return NotebookDisplay(line)
    if sys.stderr.isatty():
        return TerminalDisplay(line)
    return PlainDisplay(line)


class Progress:
    """The latest figures of a run, in one line; an `Observer`.

    Args:
        config: of the run.
        folder: of the run.
        show: warnings only, if not.
    """

    def __init__(self, config: RunConfig, folder: Path, show: bool = True) -> None:
        self.config = config
        self.folder = folder
        self.text = "starting"
        self.latest: dict[str, Any] = {}
        self.held_out: float | None = None
        self.rewards: deque[float] = deque(maxlen=10)
        self.last_words: list[str] = []
        """Lines that are shown after the end of a run that is done."""
        self.started = time.monotonic()
        self._says_end = show
        self._display = make_display(self.line, show)

    def stage(self, text: str) -> None:
        """Show what is being done when it is not a step."""
        begins = text.partition(":")[0] != self.text.partition(":")[0]  # else only its counts have changed
        self.text = text
        with _seen_or_not():
            self._display.show(urgent=begins)

    def step(self, metrics: dict[str, Any]) -> None:
        """Show a step, and now and then sample answers.

        Args:
            metrics: of the step; the newest step's come again when an evaluation has ended.
        """
        self.text = ""
        again = self.latest.get("step") == metrics["step"]
        self.latest = metrics
        if not again:
            self.rewards.append(metrics.get("reward", 0.0))
        self.held_out = metrics.get("eval_reward", self.held_out)
        with _seen_or_not():
            self._display.show()
            if not again and self._says_end and (metrics["step"] == 1 or metrics["step"] % SAMPLE_STEPS == 0):
                self._display.samples(metrics["step"], metrics.get("samples", ()), self.folder / MEDIA)

    def warn(self, text: str) -> None:
        """Show a line that stays."""
        with _seen_or_not():
            self._display.print(f"warning: {text}")

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

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        with _seen_or_not():
            self._display.close()
            if self._says_end:
                end = "done" if kind is None else f"ended early ({kind.__name__})"
                line = "" if self._display.stays else f"{self.line()}\n"
                self._display.print(f"{line}{end}: {_from_here(self.folder)}")
                for words in self.last_words if kind is None else ():
                    self._display.print(words)


def _from_here(folder: Path) -> Path:
    """A folder as it is named in the current one, where it lies in that."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def _seen_or_not() -> contextlib.suppress:
    """Let what is shown fail: a terminal that is closed is no reason for a run to end; SIGHUP says what the run is to do."""
    return contextlib.suppress(OSError)


class Waiting:
    """A live line for what is not a run: what is done, how far it is, and since when.

    Args:
        label: what is done.
        show: nothing, if not.
    """

    def __init__(self, label: str, show: bool = True) -> None:
        self.label, self.text = label, ""
        self.started = time.monotonic()
        self._display = make_display(self.line, show)
        self._showing = threading.Lock()
        self._ended = threading.Event()
        self._clock = threading.Thread(target=self._tick, name="waiting", daemon=True)

    def tell(self, text: str) -> None:
        """Show how far it is; may be called from any thread."""
        self.text = text
        with self._showing:
            self._display.show()

    def line(self) -> str:
        """All that is known."""
        seconds = f"{time.monotonic() - self.started:.0f} s"
        return " · ".join(part for part in (self.label, self.text, seconds) if part)

    def _tick(self) -> None:
        """The seconds go on also where nothing is told."""
        while not self._ended.wait(TICK):
            with self._showing:
                self._display.show()

    def __enter__(self) -> Waiting:
        self._clock.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._clock.join(CLOSE_SECONDS)
        self._display.close()


def time_split(metrics: dict[str, Any]) -> str:
    """Shares of the time of a trainer's step in per cent: waiting for groups, training, publishing weights."""
    total = max(metrics.get("seconds_step", 0.0), 1e-9)
    names = (("wait", "seconds_wait"), ("train", "seconds_train"), ("publish", "seconds_publish"))
    return " ".join(f"{name} {100 * metrics.get(key, 0.0) / total:.0f}%" for name, key in names) + f" of {total:.2f} s"

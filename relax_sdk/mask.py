"""A recorded episode token by token: what the policy was given, what it wrote, and what was trained on, and why."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from relax_sdk.config import RunConfig
from relax_sdk.printable import printable
from relax_sdk.run import read_config
from relax_sdk.runtime import find_runtime

RUN = 4
"""Equal tokens in a row that were given are told in one line, if there are so many."""


@dataclass(frozen=True)
class ExplainedToken:
    """One token of a training sequence."""

    position: int
    id: int
    text: str
    mask: int
    """1: the policy wrote it, so that it counts in the loss when the episode is trained on; 0: it was given."""
    why: str
    logprob: float | None = None
    """The engine's, natural log; None where the mask is 0."""
    version: int | None = None
    """The version of the weights that wrote it; None where the mask is 0."""


@dataclass(frozen=True)
class TokenLine:
    """Tokens that are told in one line: one, or a run of equal ones such as the placeholders of a sound."""

    first: ExplainedToken
    count: int
    why: str | None
    """None where it is that of the line before."""

    def __str__(self) -> str:
        token = self.first
        at = str(token.position) if self.count == 1 else f"{token.position}–{token.position + self.count - 1}"
        text = printable(repr(token.text)) + (f" ×{self.count}" if self.count > 1 else "")
        facts = "" if token.logprob is None else f"logprob {token.logprob:.3f}, version {token.version}"
        line = f"{at:>11} {token.mask} {token.id:>7} {text:<24} {facts}".rstrip()
        return line if self.why is None else f"{line:<72} ← {self.why}"


@dataclass(frozen=True)
class MaskExplanation:
    """An episode token by token; each training sequence that its turns make is one list."""

    id: str
    samples: tuple[tuple[ExplainedToken, ...], ...]

    def lines(self, sample: int) -> Iterator[TokenLine]:
        """The tokens of a sequence as lines; each reason is told once, where it begins."""
        before = None
        for _, run in itertools.groupby(self.samples[sample], key=lambda token: (token.id, token.mask, token.why)):
            tokens = list(run)
            together = tokens[0].mask == 0 and len(tokens) >= RUN
            for token in tokens[:1] if together else tokens:
                yield TokenLine(token, len(tokens) if together else 1, None if token.why == before else token.why)
                before = token.why

    def __str__(self) -> str:
        out = [self.headline]
        for number in range(len(self.samples)):
            out += [f"sample {number}:"] if len(self.samples) > 1 else []
            out += map(str, self.lines(number))
        return "\n".join(out)

    @property
    def headline(self) -> str:
        """How many tokens there are, and how many of them the policy wrote."""
        tokens = [token for sample in self.samples for token in sample]
        n = len(self.samples)
        return (
            f"{self.id}: {n} training {'sequence' if n == 1 else 'sequences'}, {len(tokens)} tokens, "
            f"{sum(token.mask for token in tokens)} of them written by the policy (mask 1)"
        )


class MaskExplainer(Protocol):
    """Explains the tokens of recorded episodes; the `local` runtime does."""

    def explain_mask(self, folder: Path, config: RunConfig, episode: str) -> MaskExplanation:
        """See the function of this name."""
        ...


def explain_mask(folder: str | Path, episode: str) -> MaskExplanation:
    """Take a recorded episode apart: each token with its loss mask and the reason for it.

    Args:
        folder: of the run.
        episode: id of the trajectory, with or without the run's name in front, or a beginning that fits only one.

    Raises:
        ConfigError: not a run folder, or no such episode.
    """
    home = Path(folder).resolve()
    return cast(MaskExplainer, find_runtime("local")).explain_mask(home, read_config(home), episode)

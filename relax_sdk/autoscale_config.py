"""Configuration of when a run adds engines and removes them."""

from __future__ import annotations

from dataclasses import dataclass

from relax_sdk.field_checks import check_types, require


@dataclass(frozen=True)
class AutoscaleConfig:
    """Engines added where the trainer waits for groups, and removed where groups wait for the trainer. Off by default."""

    max_engines: int = 0
    """0: off."""
    min_engines: int = 1
    wait_above: float = 0.3
    """One more where the trainer has waited for this share of the window, and less than a batch was ready."""
    wait_below: float = 0.05
    """One less where it has waited for at most this share, and a batch or more was ready."""
    window: float = 30.0
    """Seconds that are looked at."""
    cooldown: float = 60.0
    """Seconds after a change before the next one."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.min_engines >= 1, self, "min_engines", "1 or more")
        off_or_more = self.max_engines == 0 or self.max_engines >= self.min_engines
        require(off_or_more, self, "max_engines", f"0 (off), or min_engines ({self.min_engines}) and more")
        require(0 < self.wait_above <= 1, self, "wait_above", "above 0, at most 1")
        require(0 <= self.wait_below < self.wait_above, self, "wait_below", f"0 to less than wait_above ({self.wait_above})")
        require(self.window > 0, self, "window", "above 0 seconds")
        require(self.cooldown >= self.window, self, "cooldown", f"window ({self.window}) or more seconds")

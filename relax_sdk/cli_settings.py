"""What the commands have in common: `--set section.field=value`, and examples at the end of a help."""

from __future__ import annotations

import ast
from typing import Any

from relax_sdk.errors import ConfigError

SETTING_HELP = "A setting by its name in RunConfig, e.g. --set rollout.group_size=8; may be repeated."
WORDS = {"true": True, "false": False, "none": None, "null": None}
"""Values as YAML and JSON write them; Python's own forms are read too."""


def examples(*commands: str) -> str:
    """The end of a command's help."""
    return "\n\n".join(("Examples:", *commands))


def parse_settings(settings: list[str]) -> dict[str, dict[str, Any]]:
    """`["rollout.group_size=8"]` as `{"rollout": {"group_size": 8}}`.

    Raises:
        ConfigError: not of the form `section.field=value`, or there is no such section.
    """
    from relax_sdk.trainer import SECTIONS

    out: dict[str, dict[str, Any]] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        section, dot, name = path.partition(".")
        if not (equals and dot and name):
            raise ConfigError(f"--set {setting!r}: write it as section.field=value, e.g. rollout.group_size=8")
        if section not in SECTIONS:
            raise ConfigError(f"--set {setting!r}: no section {section!r}; there are {', '.join(SECTIONS)}")
        try:
            value = WORDS[text] if text in WORDS else ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        out.setdefault(section, {})[name] = value
    return out

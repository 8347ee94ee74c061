"""What the commands have in common: `--set section.field=value`, commands that need no name, examples at the end of a help."""

from __future__ import annotations

import ast
from typing import Any, ClassVar

from typer.core import TyperGroup

from relax_sdk.errors import ConfigError

SETTING_HELP = "A setting by its name in RunConfig, e.g. --set rollout.group_size=8; may be repeated."
WORDS = {"true": True, "false": False, "none": None, "null": None}
"""Values as YAML and JSON write them; Python's own forms are read too."""


class DefaultGroup(TyperGroup):
    """A group of commands, one of which needs no name."""

    default: ClassVar[str]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = bool(args) and args[0] in self.commands
        return super().parse_args(ctx, args if named or not args else [self.default, *args])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return "" if name == self.default else name, command, rest


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

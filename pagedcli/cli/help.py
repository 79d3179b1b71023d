"""Help that fits on a screen: options in groups, a line each, without boxes. Imports typer only.

Typer's own help is replaced because it shows every alias, wraps each option over several lines and needs rich.
"""

from __future__ import annotations

from typing import Any

import typer.core

_OTHER = "Other"
_WIDTH = 100


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    """The options, group by group in the order of declaration."""
    formatter.width = max(formatter.width, min(_WIDTH, formatter.width + 20))
    groups: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        if parameter.param_type_name == "option" and not getattr(parameter, "hidden", False):
            panel = getattr(parameter, "rich_help_panel", None) or _OTHER
            groups.setdefault(panel, []).append(option_line(parameter))
    groups[_OTHER] = groups.pop(_OTHER, [])
    width = max(len(names) for lines in groups.values() for names, _ in lines)
    for panel, lines in groups.items():
        with formatter.section(panel):
            formatter.write_dl([(names.ljust(width), text) for names, text in lines], col_max=width)


class GroupedCommand(typer.core.TyperCommand):
    """A command whose options are listed under their panels' headings; hidden ones are only in docs/cli.md."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options."""
        _write_options(self, ctx, formatter)


class GroupedGroup(typer.core.TyperGroup):
    """The same for a command that has subcommands, which are listed last."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, then the subcommands."""
        _write_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)


def option_line(parameter: Any) -> tuple[str, str]:
    """Names with their value, and the help."""
    names = parameter.secondary_opts or _shown_names(parameter.opts)
    value = "" if parameter.is_flag else f" {parameter.metavar or parameter.type.name.upper()}"
    return ", ".join(names) + value, parameter.help or ""


def _shown_names(names: list[str]) -> list[str]:
    """The short name, if there is one, and the first long one; other engines' names work and are not shown."""
    short = [name for name in names if not name.startswith("--")]
    long = [name for name in names if name.startswith("--")]
    return [*short[:1], *long[:1]]

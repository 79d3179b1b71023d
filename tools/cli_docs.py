"""Writes docs/cli.md from cli.md.template and the program's own declarations.

With --check, fails if the page is not up to date.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any, get_type_hints

import typer.main

from pagedcli.cli.main import app
from pagedcli.config import EngineConfig, ServeConfig
from pagedcli.core.sampling import SamplingParams

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
TEMPLATE = Path(__file__).with_name("cli.md.template")


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|")


def _default(value: object) -> str:
    if value is None or value == ():
        return "none"
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _setting_rows() -> list[str]:
    rows = ["| setting | default | unit | meaning |", "|---|---|---|---|"]
    hints = get_type_hints(EngineConfig)
    for part in dataclasses.fields(EngineConfig):
        if dataclasses.is_dataclass(hints[part.name]):
            rows += _section_rows(part.name, hints[part.name])
        else:
            rows.append(_setting_row(part.name, part))
    return rows + _section_rows("serve", ServeConfig)


def _section_rows(name: str, section: Any) -> list[str]:
    return [_setting_row(f"{name}.{item.name}", item) for item in dataclasses.fields(section)]


def _setting_row(name: str, item: Any) -> str:
    meta = item.metadata
    return f"| `{name}` | {_default(item.default)} | {meta['unit']} | {_cell(meta['doc'])} |"


def _sampling_docs() -> dict[str, str]:
    """Meanings from the class's own documentation."""
    docs: dict[str, str] = {}
    for line in (SamplingParams.__doc__ or "").splitlines():
        name, colon, text = line.strip().partition(": ")
        if colon and name.isidentifier():
            docs[name] = text
    return docs


def _sampling_rows() -> list[str]:
    docs = _sampling_docs()
    rows = ["| row field, `[sampling]` setting | default | meaning |", "|---|---|---|"]
    for item in dataclasses.fields(SamplingParams):
        default = "" if item.default in ((), "") else _default(item.default)
        rows.append(f"| `{item.name}` | {default} | {_cell(docs[item.name])} |")
    return rows


def _option_rows(command: Any) -> list[str]:
    rows = ["| flag | meaning |", "|---|---|"]
    for parameter in command.params:
        if parameter.param_type_name != "option":
            continue
        names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        value = "" if parameter.is_flag else f" {parameter.metavar or parameter.type.name.upper()}"
        rows.append(f"| {names}{_cell(value)} | {_cell(parameter.help or '')} |")
    return rows


def _command_section(name: str, command: Any) -> list[str]:
    paragraphs = [" ".join(part.split()) for part in (command.help or "").split("\n\n")]
    arguments = [
        item.metavar if item.required else f"[{item.metavar}]"
        for item in command.params
        if item.param_type_name == "argument"
    ]
    usage = " ".join([f"paged {name} [OPTIONS]", *arguments])
    body: list[str] = []
    for paragraph in paragraphs:
        body += [paragraph, ""]
    level = "#" * (2 + name.count(" "))
    section = [f"{level} `paged {name}`", "", "```", usage, "```", "", *body, *_option_rows(command), ""]
    for below, subcommand in getattr(command, "commands", {}).items():
        section += _command_section(f"{name} {below}", subcommand)
    return section


def page() -> str:
    """The whole page."""
    group: Any = typer.main.get_command(app)
    parts = {"settings": _setting_rows(), "sampling": _sampling_rows()}
    parts |= {name: _command_section(name, command) for name, command in group.commands.items()}
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, lines in parts.items():
        mark = f"@@{name}@@"
        if mark not in text:
            raise SystemExit(f"{TEMPLATE.name} has no {mark}: say where {name} goes")
        text = text.replace(mark, "\n".join(lines).rstrip())
    return text


def main() -> int:
    """Write or check the page; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page is not up to date")
    text = page()
    if parser.parse_args().check:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            print(f"{PAGE.name} is not up to date: run make docs", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What `paged generate` does: settings, then one of its three jobs. May import everything below `cli`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedcli.cli.config_note import say_config
from pagedcli.cli.console import make_messages
from pagedcli.cli.row_fields import make_params
from pagedcli.config import ServeConfig
from pagedcli.config_file import Settings, Value, load_settings
from pagedcli.core.sampling import SamplingParams
from pagedcli.errors import ConfigError, RequestError


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """Flags of `paged generate` that are no settings; see `generate.generate`."""

    file: str | None
    prompt: str | None
    chat: bool
    output: str | None
    unordered: bool
    return_token_ids: bool
    retry_errors: bool
    overwrite: bool
    verbose: bool
    quiet: bool
    no_config: bool = False


def run_generate(
    options: GenerateOptions,
    flags: Mapping[str, Value],
    *,
    assignments: Sequence[str],
    config_file: str | None,
) -> int:
    """Run the command; its exit code."""
    _check(options)
    settings = load_settings(
        config_file=Path(config_file) if config_file is not None else None,
        assignments=assignments,
        flags=flags,
        # One paged.toml serves all commands: what is not for this one is known and left alone.
        extra_sections={"sampling": SamplingParams, "serve": ServeConfig},
        read_folder_file=not options.no_config,
    )
    sampling = settings.extra["sampling"]
    _check_sampling(sampling, settings)
    messages = make_messages(verbose=options.verbose, quiet=options.quiet)
    say_config(settings, messages)
    if options.chat or (options.prompt is not None and options.output is None):
        from pagedcli.cli.chat import answer_prompt, converse

        interactive = options.chat and options.prompt is None
        if interactive:
            return converse(settings.engine, sampling, messages)
        return answer_prompt(options.prompt or "", settings.engine, sampling, messages, chat=options.chat)
    from pagedcli.cli.rows_run import run_rows

    return run_rows(options, settings.engine, sampling, messages)


def _check(options: GenerateOptions) -> None:
    if options.chat and (options.file or options.output):
        raise ConfigError("--chat answers in the terminal: it takes neither FILE nor -o")
    if options.file and options.prompt is not None:
        raise ConfigError("-p and FILE both give prompts: give one of them")
    if not (options.file or options.chat or options.prompt is not None):
        hint = "" if sys.stdin is None or sys.stdin.isatty() else " (- reads the rows that are piped in)"
        raise ConfigError(f"nothing to answer: give FILE, -, -p TEXT or --chat{hint}")
    if options.output == "":
        raise ConfigError("-o is empty: give a file, or leave it out for stdout")
    if sys.stdout is None and options.output in (None, "-"):
        raise ConfigError("stdout is closed: give -o OUT")
    if sys.stdin is None and options.chat and options.prompt is None:
        raise ConfigError("stdin is closed: --chat reads what you say there; -p TEXT gives one message")
    if options.output in (None, "-") and (options.retry_errors or options.overwrite):
        name = "--retry-errors" if options.retry_errors else "--overwrite"
        raise ConfigError(f"{name} is about an output file: give -o OUT")
    if options.retry_errors and options.overwrite:
        raise ConfigError("--overwrite forgets the rows that --retry-errors would keep: give one of them")


def _check_sampling(sampling: Mapping[str, Any], settings: Settings) -> None:
    """A default that no row could use is the user's mistake, not an error of every row."""
    try:
        make_params(sampling, {})
    except RequestError as error:
        given = settings.given.get(f"sampling.{error.field}")
        source = f"{given.source}: " if given is not None else ""
        raise ConfigError(f"{source}{error}") from None

"""`paged generate`: declaration of the command. Light: what it does is in `generate_run`, imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from pagedcli.cli.options import (
    MODEL_FLAGS,
    POOL_FLAGS,
    SAMPLING_FLAGS,
    Assignments,
    ConfigFile,
    NoConfig,
    Quiet,
    Verbose,
    refuse_unavailable,
    with_flags,
)
from pagedcli.config_file import Value

INPUT = "Input and output"


def _option(*names: str, text: str, metavar: str | None = None) -> object:
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel=INPUT, show_default=False)


@with_flags((*MODEL_FLAGS, *POOL_FLAGS, *SAMPLING_FLAGS))
def generate(
    *,
    file: Annotated[str | None, typer.Argument(metavar="FILE|-", show_default=False)] = None,
    prompt: Annotated[
        str | None,
        _option("-p", "--prompt", text="Continue one text as it is; with --chat, answer it", metavar="TEXT"),
    ] = None,
    chat: Annotated[
        bool, _option("--chat", text="A conversation in the terminal (with -p: one answer)")
    ] = False,
    output: Annotated[
        str | None,
        _option("-o", "--output", text="File for the answers; run again, it goes on [stdout]", metavar="OUT"),
    ] = None,
    unordered: Annotated[
        bool, _option("--unordered", text="Write rows as they finish, not in input order")
    ] = False,
    return_token_ids: Annotated[
        bool, _option("--return-token-ids", text="Add the token ids of the answers")
    ] = False,
    retry_errors: Annotated[
        bool, _option("--retry-errors", text="Answer again the rows of OUT that failed")
    ] = False,
    overwrite: Annotated[bool, _option("--overwrite", text="Forget what OUT has and start anew")] = False,
    set_: Assignments = None,
    config: ConfigFile = None,
    no_config: NoConfig = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    flags: dict[str, Value],
) -> None:
    """Answer a file of prompts, one prompt, or a conversation.

    FILE is JSONL, or .txt with a prompt a line; - is JSONL on stdin. A row has an "id", one of "prompt", "messages"
    and "prompt_token_ids", and any sampling field; OpenAI batch lines work too. Every row gives one row, errors
    included. With -o, the same command again goes on where it stopped.
    """
    from pagedcli.cli.generate_run import GenerateOptions, run_generate

    options = GenerateOptions(
        file=file,
        prompt=prompt,
        chat=chat,
        output=output,
        unordered=unordered,
        return_token_ids=return_token_ids,
        retry_errors=retry_errors,
        overwrite=overwrite,
        no_config=no_config,
        verbose=verbose,
        quiet=quiet,
    )
    code = run_generate(options, refuse_unavailable(flags), assignments=set_ or [], config_file=config)
    raise typer.Exit(code)

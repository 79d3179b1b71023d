"""`paged doctor`: declaration of the command. Light: what it does is in `doctor_run`, imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from pagedcli.cli.options import Verbose


def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder, GGUF file or hub id", show_default=False)
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Describe this machine and the flags that suit it, or a MODEL.

    Without MODEL: versions, instruction sets, cores, memory, what each op runs on. With MODEL: what is in the folder
    or file, and whether it will run here; exit code 2 if it cannot be used. A quantized folder without settings gets
    the quantize_config.json that other packages need; a file that is there is never changed.
    """
    from pagedcli.cli.doctor_run import run_doctor

    raise typer.Exit(run_doctor(model, verbose=verbose))

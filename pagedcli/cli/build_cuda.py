"""`paged build-cuda`: compiles our CUDA kernels into the cache. Light; what it does is short enough to stand here."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from pagedcli.cli.options import Quiet, Verbose


def build_cuda(
    *,
    arch: Annotated[
        list[int] | None,
        typer.Option(
            "--arch",
            metavar="N",
            help="Compute capability without the dot, such as 90; may be repeated [80 86 89 90]",
            show_default=False,
        ),
    ] = None,
    nvcc: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Compiler [CUDA_HOME's, PATH's]", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Build again what is there")] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compile our CUDA kernels with nvcc, for `--device cuda`.

    Once on a machine, and again after an upgrade; needs the CUDA toolkit 12 or newer, no GPU. The library goes into the
    cache folder (PAGED_CACHE). Without it `--device cuda` takes torch's ops, and says so.
    """
    from pagedcli.checkpoint.sources import cache_folder
    from pagedcli.cli.console import make_messages
    from pagedcli.ops.cuda_library import ARCHITECTURES, build_library, library_in

    messages = make_messages(quiet=quiet, verbose=verbose)
    library = library_in(cache_folder())
    if library.is_file() and not force:
        messages.say(f"{library} is there already (--force builds it again)")
        return
    architectures = arch or ARCHITECTURES
    messages.say(f"compiling for {', '.join(map(str, architectures))}: about a minute")
    started = time.monotonic()
    build_library(library, architectures, nvcc)
    messages.say(f"{library} is built ({time.monotonic() - started:.0f} s)")

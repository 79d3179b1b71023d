"""`paged build-cuda`: compiles our CUDA kernels into the cache. Light; what it does is short enough to stand here."""

from __future__ import annotations

import time
from collections.abc import Sequence
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
    from pagedcli.ops.cuda_library import architectures_in, build_library, choose_architectures, library_in

    messages = make_messages(quiet=quiet, verbose=verbose)
    architectures = choose_architectures(arch or ())
    library = library_in(cache_folder())
    there = architectures_in(library)
    if library.is_file() and not force and (not arch or set(architectures) <= set(there)):
        built = f", for {_listed(there)}" if there else ""
        messages.say(f"{library} is there already{built} (--force builds it again)")
        return
    messages.say(f"compiling for {_listed(architectures)}: a minute or two")
    started = time.monotonic()
    build_library(library, architectures, nvcc)
    messages.say(f"{library} is built ({time.monotonic() - started:.0f} s)")


def _listed(architectures: Sequence[int]) -> str:
    return ", ".join(map(str, architectures))

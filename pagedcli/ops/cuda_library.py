"""The library of our CUDA kernels: where it lies, how it gets there. Imports `paged_kernels`, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paged_kernels import cuda_build

from pagedcli.errors import ConfigError, MissingDependencyError

ARCHITECTURES = cuda_build.ARCHITECTURES


def library_in(cache: Path) -> Path:
    """Where the library of these sources is: in the package if it was built with it, else in the cache, or will be."""
    return cuda_build.packaged_library() or cuda_build.library_path(cache)


def architectures_in(library: Path) -> tuple[int, ...]:
    """What a library was compiled for; empty: there is none, or it is not known."""
    return cuda_build.built_for(library)


def choose_architectures(wanted: Sequence[int]) -> tuple[int, ...]:
    """Those wanted, ascending; all that are usual if there are none.

    Args:
        wanted: Compute capabilities without the dot.

    Raises:
        ConfigError: A GPU as old as that has no kernels.
    """
    chosen = tuple(sorted(set(wanted or ARCHITECTURES)))
    if chosen[0] < ARCHITECTURES[0]:
        raise ConfigError(
            f"--arch {chosen[0]}: the kernels need compute capability 8.0 or newer: --arch {ARCHITECTURES[0]}"
        )
    return chosen


def build_library(library: Path, architectures: Sequence[int], nvcc: Path | None) -> None:
    """Compile the kernels.

    Args:
        library: As `library_in` names it.
        architectures: As `choose_architectures` gives them.
        nvcc: The compiler; None: as CUDA_HOME, PATH or the usual place have it.

    Raises:
        MissingDependencyError: There is no nvcc, it failed, or the folder cannot be written.
    """
    try:
        cuda_build.build(library, architectures, nvcc=nvcc)
    except cuda_build.CudaBuildError as error:
        raise MissingDependencyError(str(error)) from error

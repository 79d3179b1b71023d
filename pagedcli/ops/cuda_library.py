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


def build_library(library: Path, architectures: Sequence[int], nvcc: Path | None) -> None:
    """Compile the kernels.

    Args:
        library: As `library_in` names it.
        architectures: Compute capabilities without the dot; empty: all that are usual.
        nvcc: The compiler; None: as CUDA_HOME, PATH or the usual place have it.

    Raises:
        ConfigError: A GPU as old as that has no kernels, or the library's folder cannot be written.
        MissingDependencyError: There is no nvcc, or it failed.
    """
    chosen = sorted(set(architectures or ARCHITECTURES))
    if chosen[0] < ARCHITECTURES[0]:
        raise ConfigError(
            f"--arch {chosen[0]}: the kernels need compute capability 8.0 or newer: --arch {ARCHITECTURES[0]}"
        )
    try:
        cuda_build.build(library, chosen, nvcc=nvcc)
    except cuda_build.CudaBuildError as error:
        raise MissingDependencyError(str(error)) from error
    except OSError as error:
        raise ConfigError(
            f"{library.parent} cannot be written ({error.strerror}): set PAGED_CACHE to a folder that can"
        ) from error

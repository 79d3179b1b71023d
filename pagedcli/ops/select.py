"""Picks the backend for a device, and finds out whether there is a CUDA device. Imports a backend only when it is made.

Nothing here imports torch unless a CUDA driver tells of a device: `--device auto` on a machine without one must not
cost the seconds that importing torch takes.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pagedcli.errors import ConfigError, MissingDependencyError, how_to_install
from pagedcli.ops.protocol import Ops

if TYPE_CHECKING:
    from pagedcli.ops.native_ops import NativeOps

BACKENDS = ("native", "torch")
_INT8_VARIANTS = ("amx", "avx512bf16", "neondot")
# CPUs that multiply int8 in one instruction and have no bfloat16 run other variants, where int8 inputs still win.
_INT8_FLAGS = {"avx512": {"avx512_vnni"}, "avx2": {"avx512_vnni", "avx_vnni"}}
_DRIVERS = ("libcuda.so.1", "nvcuda.dll")


def make_ops(
    device: str,
    dtype: str,
    backend: str = "torch",
    *,
    kernels: Path | None = None,
    strict: bool = False,
    head_dim: int = 128,
    vocab_size: int = 0,
) -> Ops:
    """The ops of a device.

    Args:
        device: "cpu", "cuda" or "cuda:1" and the like.
        dtype: "float32", "bfloat16", "float16"; float16 runs as bfloat16 on a CPU ("float64" for reference runs).
        backend: "torch", the reference, or "native", on a CPU with one thread (`make_native_ops` takes more).
        kernels: Library of our CUDA kernels, where it is or would be; None: torch's ops alone.
        strict: On CUDA: fail rather than take torch's op in the place of a kernel.
        head_dim: Of the model to come, with which CUDA kernels are tried.
        vocab_size: As `head_dim`.

    Raises:
        ConfigError: There is no such device here, the backend cannot use it, or `strict` finds a kernel missing.
        MissingDependencyError: The backend is not installed.
    """
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device.device is {device!r}: choose cpu or cuda")
    if kind == "cpu" and dtype == "float16":
        dtype = "bfloat16"
    if backend == "native" and kind == "cpu":
        return make_native_ops(dtype, threads=1)
    if backend != "torch":
        raise ConfigError(f"device.backend is {backend!r}: choose native (on a CPU only) or torch")
    require_torch(
        f"device.device is {device} and device.backend is torch" if kind == "cpu" else f"--device {kind}"
    )
    from pagedcli.ops import torch_ops

    if kind == "cuda" and not torch_ops.cuda_is_available():
        raise ConfigError("device.device is cuda, but torch finds no CUDA device here: use --device cpu")
    if kind == "cpu" or (kernels is None and not strict):
        return torch_ops.TorchOps(device, dtype)
    from pagedcli.ops.cuda_start import TriedSizes, open_cuda_ops

    return open_cuda_ops(device, dtype, kernels, strict=strict, sizes=TriedSizes(head_dim, vocab_size))


def make_native_ops(dtype: str, *, threads: int, cpus: Sequence[int] = (), activation: str = "") -> NativeOps:
    """The native kernels on this CPU.

    Args:
        dtype: "float32" or "bfloat16".
        threads: Compute threads.
        cpus: Logical CPUs for them.
        activation: Inputs of quantized linears: "int8", "bf16", "float32"; empty: the dtype's own.

    Raises:
        MissingDependencyError: They were not built.
        ConfigError: PAGED_CPU_ISA names a variant that is not there.
    """
    require_native()
    from pagedcli.ops.native_ops import NativeOps

    try:
        return NativeOps(dtype, threads=threads, cpus=cpus, activation=activation)
    except ValueError as error:
        raise ConfigError(f"the native CPU engine cannot start: {error}") from error


def has_int8_dot() -> bool:
    """Whether this CPU multiplies int8 in one instruction, with a variant of the native kernels where int8 pays."""
    require_native()
    from paged_kernels.native import Runtime

    return int8_pays(Runtime(1).isa, Path("/proc/cpuinfo"))


def int8_pays(isa: str, cpuinfo: Path) -> bool:
    """As `has_int8_dot`, of a variant, and of a CPU as Linux describes it; without that, of what the variant needs."""
    if isa in _INT8_VARIANTS:
        return True
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    lines = (line for line in text.splitlines() if line.partition(":")[0].strip() == "flags")
    return not _INT8_FLAGS.get(isa, set()).isdisjoint(next(lines, "").split())


def require_native() -> None:
    """Say in one line that the kernels were not built.

    Raises:
        MissingDependencyError: They cannot be imported.
    """
    try:
        import paged_kernels.native  # noqa: F401 - only whether it can be
    except ImportError as error:
        raise MissingDependencyError(
            f"{error}; or take the slower torch: --set device.backend=torch"
        ) from error


def torch_is_installed() -> bool:
    """Whether torch could be imported; it is not."""
    return importlib.util.find_spec("torch") is not None


def require_torch(wanted_by: str) -> None:
    """Say in one line that torch is needed and not there.

    Args:
        wanted_by: The setting that needs it, to begin the sentence with.

    Raises:
        MissingDependencyError: It is not installed.
    """
    if not torch_is_installed():
        extra = "cuda" if "cuda" in wanted_by else "all"
        raise MissingDependencyError(
            f"{wanted_by}, which needs torch, and torch is not installed: {how_to_install(extra)}"
        )


def has_cuda() -> bool:
    """Whether torch can compute on a CUDA device. Imports torch only if the driver tells of one."""
    return why_no_cuda() is None


def why_no_cuda() -> str | None:
    """What is missing first for torch to compute on a CUDA device; None: nothing is. Imports torch as `has_cuda`."""
    devices = _count_devices()
    if devices is None:
        return "NVIDIA's driver is not here (libcuda.so.1)"
    if devices == 0:
        return "NVIDIA's driver finds no GPU"
    if not torch_is_installed():
        return f"there is a GPU, and torch is not installed: {how_to_install('cuda')}"
    from pagedcli.ops.torch_ops import cuda_is_available, cuda_version

    version, cuda = cuda_version()
    if cuda is None:
        return f"there is a GPU, and torch {version} is a build without CUDA"
    if not cuda_is_available():
        return f"there is a GPU, and torch {version} for CUDA {cuda} cannot use it: the driver may be too old for that"
    return None


def require_cuda(wanted_by: str) -> None:
    """Say in one line what is missing for a CUDA device.

    Args:
        wanted_by: The setting that needs it, to begin the sentence with.

    Raises:
        MissingDependencyError: There is none, or torch cannot use it.
    """
    reason = why_no_cuda()
    if reason is not None:
        raise MissingDependencyError(f"{wanted_by} cannot be used here: {reason}; or use --device cpu")


def _count_devices() -> int | None:
    """As NVIDIA's driver counts them; None: there is no driver."""
    for name in _DRIVERS:
        try:
            driver = ctypes.CDLL(name)
        except OSError:
            continue
        count = ctypes.c_int(0)
        works = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
        return count.value if works else 0
    return None

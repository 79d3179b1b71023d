"""Picks the backend for a device. Imports the backend only when it is made."""

from __future__ import annotations

from pagedcli.errors import ConfigError, MissingDependencyError
from pagedcli.ops.protocol import Ops


def make_ops(device: str, dtype: str) -> Ops:
    """The ops of a device.

    Args:
        device: "cpu", "cuda" or "cuda:1" and the like.
        dtype: "float32", "bfloat16", "float16"; float16 runs as bfloat16 on a CPU ("float64" for reference runs).

    Raises:
        ConfigError: There is no such device here.
    """
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device.device is {device!r}: choose cpu or cuda")
    try:
        from pagedcli.ops import torch_ops
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{error.name} is not installed, and the ops run on it: pip install {error.name}"
        ) from error
    if kind == "cuda" and not torch_ops.cuda_is_available():
        raise ConfigError("device.device is cuda, but torch finds no CUDA device here: use --device cpu")
    if kind == "cpu" and dtype == "float16":
        dtype = "bfloat16"
    return torch_ops.TorchOps(device, dtype)

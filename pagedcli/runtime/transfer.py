"""Between host and device without waiting. May import torch and numpy.

On CUDA a copy from ordinary memory waits for all work issued before it, which would undo what depth 2 is for: copies
go through pinned memory. On a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """The array as a tensor on the device; the array must not be changed afterwards."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def integers(values: Sequence[int], device: torch.device) -> Tensor:
    """[len(values)] int64."""
    return to_device(np.array(values, dtype=np.int64), device)


def reals(values: Sequence[float], device: torch.device) -> Tensor:
    """[len(values)] float64."""
    return to_device(np.array(values, dtype=np.float64), device)


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host that is complete once the device has done all that was issued until now."""
    return tensor.to("cpu", non_blocking=True)

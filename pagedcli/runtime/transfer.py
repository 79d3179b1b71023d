"""Between host and device without waiting. May import torch and numpy.

On CUDA a copy from ordinary memory waits for all work issued before it, which would undo what depth 2 is for: copies
go through pinned memory. Results go to the host on a stream of their own (`StreamCopies`), so that the next step need
not wait for them:

    compute |== step N ==|== step N + 1 ==|
    copies               |ids|             |ids|     each copy waits for what was issued before it, nothing waits for it

On a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

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


def fill(buffer: Tensor, array: npt.NDArray[np.generic]) -> None:
    """Write the array into a contiguous buffer of its size, after all that was issued before."""
    tensor = torch.from_numpy(array)
    buffer.copy_(tensor.pin_memory() if buffer.is_cuda else tensor, non_blocking=True)


def integers(values: Sequence[int], device: torch.device) -> Tensor:
    """[len(values)] int64."""
    return to_device(np.array(values, dtype=np.int64), device)


def reals(values: Sequence[float], device: torch.device) -> Tensor:
    """[len(values)] float64."""
    return to_device(np.array(values, dtype=np.float64), device)


class Mark(Protocol):
    """All copies begun before it was set."""

    def done(self) -> bool:
        """Whether they are complete."""

    def wait(self) -> None:
        """Until they are."""


class HostCopies(Protocol):
    """Brings results to the host."""

    def begin(self, tensor: Tensor) -> Tensor:
        """A copy on the host, complete once a later mark is done; `tensor` must not be written again."""

    def mark(self) -> Mark:
        """After all copies begun until now."""


class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class NoCopies:
    """Implements `HostCopies` where the device is the host: what was computed is there already."""

    def begin(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def mark(self) -> Mark:
        """Done."""
        return _Done()


class _Event:
    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class StreamCopies:
    """Implements `HostCopies` on CUDA, on a stream of its own.

    Args:
        device: With a current stream on which the results are computed.
        cuda: `torch.cuda`, or what stands in for it in a test.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._stream = cuda.Stream(device)

    def begin(self, tensor: Tensor) -> Tensor:
        """Into pinned memory."""
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            # Whoever frees the tensor frees it on the stream that computed it, which does not wait for this one.
            tensor.record_stream(self._stream)
            return tensor.to("cpu", non_blocking=True)

    def mark(self) -> Mark:
        """An event on the stream."""
        event = self._cuda.Event()
        event.record(self._stream)
        return _Event(event)


def host_copies(device: torch.device) -> HostCopies:
    """For a device."""
    return NoCopies() if device.type == "cpu" else StreamCopies(device)

"""What stands in for CUDA's graphs and copies where there is no GPU. Needs torch.

`DoneAgain` does the Python again, for models that read values on the host. `Tape` is stricter: it notes every op of
torch and every kernel of ours with the tensors and addresses that it worked on, and refuses what a graph could not
hold; played, it works on those same tensors and addresses, whatever Python's variables say by then. `LateCopies` copies
as late as it may, as a GPU would: a buffer that the next step writes too early shows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class DoneAgain:
    """Implements `Captures`."""

    def capture(self, computes: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        for compute in computes:
            compute()
        return list(computes)


@dataclass
class _Copies:
    """Implements `Mark`."""

    items: list[tuple[Tensor, Tensor]]

    def done(self) -> bool:
        return not self.items

    def wait(self) -> None:
        with torch.inference_mode():
            for source, copy in self.items:
                copy.copy_(source)
        self.items = []


@dataclass
class LateCopies:
    """Implements `HostCopies`."""

    items: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def begin(self, tensor: Tensor) -> Tensor:
        copy = torch.full_like(tensor, -77)
        self.items.append((tensor, copy))
        return copy

    def mark(self) -> _Copies:
        items, self.items = self.items, []
        return _Copies(items)


WORK = """
    add.Tensor arange.default arange.start argmax.default bitwise_not.default cat.default constant_pad_nd.default
    contiguous.default copy_.default div.Tensor exp.default floor_divide.default gather.default index.Tensor
    index_copy_.default index_put_.default index_select.default isfinite.default linear.default masked_fill.Scalar
    masked_fill_.Scalar mean.dim mul.Tensor neg.default new_zeros.default remainder.Scalar rsqrt.default
    square.default sub.Tensor to.dtype zeros_like.default _to_copy.default
"""
VIEWS = """
    alias.default chunk.default detach.default flatten.using_ints reshape.default select.int slice.Tensor
    split.Tensor split_with_sizes.default unbind.int unsqueeze.default view.default _unsafe_view.default
"""
ROOM = "empty.memory_format new_empty.default"
"""What gives memory: it keeps its place, and what is in it may not matter."""
ALLOWED = frozenset(f"aten.{name}" for name in f"{WORK} {VIEWS} {ROOM}".split())
"""Ops of torch that CUDA can record: none reads a value back, waits, or sends something from the host."""


@dataclass
class _Step:
    run: Callable[[], Any]
    results: list[Tensor]


class Tape(TorchDispatchMode):
    """One piece of work, noted while it is done."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert name in ALLOWED, f"{name} cannot be part of a CUDA graph, or nobody has said yet that it can"
        self.names.append(name)
        result = func(*args, **(kwargs or {}))
        if name.removeprefix("aten.") in ROOM.split():
            self.steps.append(_Step(partial(_spoil, result), []))
            return result
        memory = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        made = result if isinstance(result, tuple | list) else [result]
        fresh = [item for item in made if item.untyped_storage().data_ptr() not in memory]
        # A view needs no work; what wrote to an argument, or made something of its own, is done again.
        if fresh or any(item is args[0] for item in made):
            self.steps.append(_Step(partial(func, *args, **(kwargs or {})), fresh))
        return result

    def kernel(self, name: str, function: Any, arguments: tuple[Any, ...]) -> None:
        """Note a kernel of ours; addresses are values of `arguments`."""
        self.names.append(name)
        kept = tuple(_copy(item) for item in arguments)
        self.steps.append(_Step(partial(function, *kept), []))

    def play(self) -> None:
        """Do it all again, in the same memory."""
        with torch.inference_mode():
            for step in self.steps:
                again = step.run()
                again = list(again) if isinstance(again, tuple | list) else [again]
                for result, value in zip(step.results, again, strict=False):
                    result.copy_(value)


def _refuse(name: str, *_: object) -> None:
    raise AssertionError(f"{name} cannot be part of a CUDA graph")


def _spoil(tensor: Tensor) -> None:
    tensor.fill_(torch.nan if tensor.is_floating_point() else 0)


def _copy(argument: Any) -> Any:
    """A struct is passed by reference: what it holds now counts."""
    if isinstance(argument, ctypes.Structure):
        return type(argument).from_buffer_copy(argument)
    return argument


class TapedLibrary:
    """A library of kernels whose calls are noted on the tape that records."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.tape: Tape | None = None

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)

        def call(*arguments: Any) -> Any:
            if self.tape is not None and name not in ANSWERS:
                self.tape.kernel(name, function, arguments)
            return function(*arguments)

        return call


ANSWERS = frozenset(
    {
        "paged_cuda_attention_tile_rows",
        "paged_cuda_w4a16_scratch",
        "paged_cuda_w4a16_max_rows",
        "paged_cuda_sample_room",
        "paged_cuda_sample_max_vocabulary",
    }
)
"""Functions of the library that start nothing."""


class Tapes:
    """Implements `Captures`: on a GPU the recording would be CUDA's.

    Attributes:
        tapes: In the order of the recordings.
    """

    def __init__(self, library: TapedLibrary) -> None:
        self._library = library
        self.tapes: list[Tape] = []

    def capture(self, computes: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        return [self._record(compute) for compute in computes]

    def _record(self, compute: Callable[[], None]) -> Callable[[], None]:
        compute()
        tape = self._library.tape = Tape()
        with ExitStack() as stack:
            # These do not go by torch's dispatcher.
            for place, name in ((torch.Tensor, "tolist"), (torch.Tensor, "numpy"), (torch, "from_numpy")):
                stack.enter_context(patch.object(place, name, partial(_refuse, name)))
            stack.enter_context(tape)
            compute()
        self._library.tape = None
        self.tapes.append(tape)
        return tape.play

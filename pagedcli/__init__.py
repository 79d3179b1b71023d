"""`paged`: run, serve, quantize and measure language models on one machine, over one paged KV engine.

`from pagedcli import LLM, AsyncLLM, SamplingParams` is the public Python API. The names are looked up when they are
used: importing the package takes milliseconds and loads nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedcli.api.async_llm import AsyncLLM
    from pagedcli.api.llm import LLM
    from pagedcli.core.request import FinishReason
    from pagedcli.core.sampling import SamplingParams
    from pagedcli.engine.outputs import Delta, RequestOutput, SampleOutput
    from pagedcli.errors import (
        CheckpointError,
        ConfigError,
        EngineDead,
        MissingDependencyError,
        PagedError,
        RequestError,
    )

_MODULES = {
    "AsyncLLM": "pagedcli.api.async_llm",
    "LLM": "pagedcli.api.llm",
    "FinishReason": "pagedcli.core.request",
    "SamplingParams": "pagedcli.core.sampling",
    "Delta": "pagedcli.engine.outputs",
    "RequestOutput": "pagedcli.engine.outputs",
    "SampleOutput": "pagedcli.engine.outputs",
    "CheckpointError": "pagedcli.errors",
    "ConfigError": "pagedcli.errors",
    "EngineDead": "pagedcli.errors",
    "MissingDependencyError": "pagedcli.errors",
    "PagedError": "pagedcli.errors",
    "RequestError": "pagedcli.errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CheckpointError",
    "ConfigError",
    "Delta",
    "EngineDead",
    "FinishReason",
    "MissingDependencyError",
    "PagedError",
    "RequestError",
    "RequestOutput",
    "SampleOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("pagedcli")
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

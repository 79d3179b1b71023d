"""Quantizing from Python, and the engine that quantizers get from above. May import `api` and `quant`; torch lazily.

`quantize` is the whole of `paged quantize`: calibration text, quantizer, files, checks and quality report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pagedcli.api.build import Engine, build_engine
from pagedcli.api.convert import load_tokenizer
from pagedcli.api.llm import LLM
from pagedcli.checkpoint.base import Checkpoint
from pagedcli.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from pagedcli.core.sampling import SamplingParams
from pagedcli.errors import MissingDependencyError, how_to_install
from pagedcli.quant.request import QuantizeRequest, Watcher
from pagedcli.quant.result import QuantizeResult
from pagedcli.text.tokenizer import Tokenizer

WARM_UP_TOKENS, SPEED_TOKENS = 16, 64
_SEEDS = 1 << 31


class EngineSession:
    """Implements `quant.request.Session`."""

    def __init__(self, engine: Engine) -> None:
        self._llm = LLM.from_engine(engine)

    def write(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        """New token ids of each prompt; prompt i is sampled with seed + i. Greedy runs go on past the end token."""
        base = SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=temperature == 0)
        each = [dataclasses.replace(base, seed=(seed + index) % _SEEDS) for index in range(len(prompts))]
        outputs = self._llm.generate([list(prompt) for prompt in prompts], each)
        return [list(output.samples[0].token_ids) for output in outputs]

    def tokens_per_second(self) -> float:
        """One stream, decoding; a shorter run before it warms up."""
        prompt = self._llm.encode("Once upon a time")
        for tokens in (WARM_UP_TOKENS, SPEED_TOKENS):
            output = self._llm.generate([prompt], SamplingParams(max_tokens=tokens, ignore_eos=True))[0]
        assert output.seconds.first_token is not None
        count = len(output.samples[0].token_ids) - 1
        return count / max(1e-9, output.seconds.total - output.seconds.first_token)


class CpuEngines:
    """Implements `quant.request.Engines`: engines on the CPU with so many threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    @contextmanager
    def open(self, model: Path) -> Iterator[EngineSession]:
        """As `paged generate` would run the model."""
        config = EngineConfig(
            model=ModelConfig(model=str(model)),
            device=DeviceConfig(device="cpu", threads=self._threads),
            cache=CacheConfig(prefix_caching=False),
            seed=0,
        )
        with build_engine(config) as engine:
            yield EngineSession(engine)

    def load_tokenizer(self, checkpoint: Checkpoint) -> Tokenizer:
        """The checkpoint's."""
        return load_tokenizer(checkpoint)


def quantize(request: QuantizeRequest, watcher: Watcher) -> QuantizeResult:
    """Quantize a model, write it, and report its quality.

    Args:
        request: What to do.
        watcher: Told how it goes.

    Raises:
        ConfigError: A setting cannot be met, or the output folder is in the way.
        CheckpointError: The model cannot be used.
        MissingDependencyError: torch is not installed.
    """
    require_torch_for_quantizing()
    from pagedcli.quant.job import run_job

    return run_job(request, CpuEngines(request.threads), watcher)


def require_torch_for_quantizing() -> None:
    """MissingDependencyError unless torch is installed."""
    try:
        import torch  # noqa: F401 - only whether it is there
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"paged quantize needs PyTorch, {error.name} is not installed: {how_to_install('quantize')}"
        ) from error

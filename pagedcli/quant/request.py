"""What a whole `paged quantize` run is asked for, and who watches it. Plain values: nothing heavy.

A request is checked here as far as that is possible without the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, get_args

from pagedcli.checkpoint.base import Checkpoint
from pagedcli.errors import ConfigError
from pagedcli.quant.options import QuantizeEvent, QuantizeOptions
from pagedcli.quant.quality import Contract
from pagedcli.text.tokenizer import Tokenizer

FormatName = Literal["autoawq", "gptq", "gptq_v2", "compressed-tensors"]
BackendName = Literal["native", "autoawq", "auto-gptq"]

MAX_SAMPLES, MAX_SEQ_LEN = 1 << 16, 1 << 17
_FORMATS: dict[str, tuple[FormatName, ...]] = {
    "awq": ("autoawq", "compressed-tensors"),
    "gptq": ("gptq", "gptq_v2", "compressed-tensors"),
    "rtn": ("gptq", "gptq_v2", "autoawq", "compressed-tensors"),
}
_BACKEND_METHOD = {"autoawq": "awq", "auto-gptq": "gptq"}


@dataclass(frozen=True, slots=True)
class QuantizeRequest:
    """A run.

    Attributes:
        options: How to quantize.
        model: Folder, GGUF file or hub id; None: SmolLM2-135M-Instruct.
        output: Folder to write; None: named after the model and the method.
        calibration: File or hub data set; None: text that the model writes itself.
        samples: Of calibration, at most.
        seq_len: Tokens of a sample.
        seed: Of calibration text and samples.
        format: Of the files; None: the method's usual one.
        backend: What quantizes.
        evaluation: File with held-out text; None: the text that comes with the package.
        contract: Quality that is demanded.
        overwrite: Replace a finished or other output folder.
        threads: That compute.
    """

    options: QuantizeOptions
    model: str | None = None
    output: str | None = None
    calibration: str | None = None
    samples: int = 128
    seq_len: int = 512
    seed: int = 0
    format: FormatName | None = None
    backend: BackendName = "native"
    evaluation: str | None = None
    contract: Contract = field(default_factory=Contract)
    overwrite: bool = False
    threads: int = 1

    def __post_init__(self) -> None:
        _check_range("--samples", self.samples, 1, MAX_SAMPLES)
        _check_range("--seq-len", self.seq_len, 16, MAX_SEQ_LEN)
        _check_choice("--format", self.format, get_args(FormatName))
        _check_choice("--backend", self.backend, get_args(BackendName))
        if self.format is not None and self.format not in _FORMATS[self.options.method]:
            known = ", ".join(_FORMATS[self.options.method])
            raise ConfigError(f"--format {self.format} does not go with --{self.options.method}: use {known}")
        if self.options.method == "rtn" and self.calibration is not None:
            raise ConfigError("--rtn uses no calibration text: leave --calibration out")
        self._check_format()
        self._check_backend()
        for name, limit in (
            ("--max-kl", self.contract.max_kl),
            ("--max-perplexity-increase", self.contract.max_perplexity_increase),
        ):
            if limit is not None and not limit >= 0:
                raise ConfigError(f"{name} is {limit:g}: it must not be negative")

    def _check_format(self) -> None:
        options, name = self.options, self.target_format
        if name == "gptq" and not options.symmetric:
            raise ConfigError(
                "--format gptq stores symmetric zero points only: use --format gptq_v2, or --sym"
            )
        if name == "autoawq" and options.bits != 4:
            raise ConfigError(f"--format autoawq holds 4 bits, not {options.bits}: use --format gptq")
        if options.desc_act and not name.startswith("gptq"):
            raise ConfigError(f"--desc-act needs g_idx, which --format {name} has not: use --format gptq")

    def _check_backend(self) -> None:
        method = _BACKEND_METHOD.get(self.backend)
        if method is None:
            return
        if self.options.method != method:
            raise ConfigError(
                f"--backend {self.backend} is for --{method}: leave it out with --{self.options.method}"
            )
        wrong = {"autoawq": self.options.symmetric, "auto-gptq": not self.options.symmetric}[self.backend]
        if wrong:
            raise ConfigError(
                f"--backend {self.backend} makes {'asymmetric' if self.options.symmetric else 'symmetric'} codes only: "
                f"leave --{'sym' if self.options.symmetric else 'asym'} out, or use the native backend"
            )
        if self.target_format not in ("autoawq", "gptq"):
            raise ConfigError(f"--backend {self.backend} writes no {self.target_format}: leave --format out")
        if self.options.keep:
            raise ConfigError(f"--keep is for the native backend: leave it out with --backend {self.backend}")

    @property
    def target_format(self) -> FormatName:
        """`format` with its default filled in."""
        if self.format is not None:
            return self.format
        if self.options.method == "awq":
            return "autoawq"
        return "gptq" if self.options.symmetric else "gptq_v2"


class Watcher(Protocol):
    """Is told how a run goes; the command line shows it."""

    def say(self, text: str) -> None:
        """Something that the user should know."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A part of the run, while it lasts."""

    def progress(self, done: float, total: float, what: str = "") -> None:
        """How far the phase is."""

    def quantizing(self, event: QuantizeEvent) -> None:
        """How far the quantizer is."""

    def fetched(self, name: str, done: int, total: int) -> None:
        """Progress of a download in bytes."""


class Session(Protocol):
    """A model running in the engine."""

    def write(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        """New token ids of each prompt, at most `max_tokens`; temperature 0 is greedy and ignores the end token."""

    def tokens_per_second(self) -> float:
        """Of one stream that decodes."""


class Engines(Protocol):
    """What a job needs of running models; given to it from above (`api`)."""

    def open(self, model: Path) -> AbstractContextManager[Session]:
        """Start an engine; it runs while the context lasts."""

    def load_tokenizer(self, checkpoint: Checkpoint) -> Tokenizer:
        """The tokenizer of a checkpoint, converted where that is needed."""


def _check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name} is {value}: choose {least} to {most}")


def _check_choice(name: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise ConfigError(f"{name} is {value!r}: choose one of {', '.join(known)}")

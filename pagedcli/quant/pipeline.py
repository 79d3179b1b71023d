"""Quantizing a model layer by layer: the layers run, each linear is quantized as its input is known.

Imports torch and everything below. One fused linear is in memory at a time, beside the activations of all samples; a
finished layer is on disk before the next begins (`work.py`). The output of a quantized layer is what the next layer
reads. Bytes depend on model, options and samples, never on threads.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import torch
from torch import Tensor

from pagedcli.checkpoint.base import Checkpoint
from pagedcli.errors import ConfigError
from pagedcli.models.layers import Decoder
from pagedcli.models.load import TensorNotes, expected_tensors
from pagedcli.models.registry import family_of
from pagedcli.models.rope import rope_tables
from pagedcli.models.spec import ModelSpec
from pagedcli.ops.protocol import Ops
from pagedcli.ops.weights import RopeTable
from pagedcli.quant.linears import LayerQuantizer
from pagedcli.quant.options import LayerResult, Progress, QuantizeEvent, QuantizePlan
from pagedcli.quant.source import Source, check_finite
from pagedcli.quant.stream import CalibrationOps, Stream, embedded, product_dtype
from pagedcli.quant.work import WorkFolder, open_work
from pagedcli.quant.workers import Workers, workers

FORMAT = 4
"""Of the work folder and of everything that decides bytes; raised when either changes."""

Samples = Sequence[Sequence[int]] | np.ndarray[Any, np.dtype[np.int64]]


def quantize_layers(
    checkpoint: Checkpoint,
    plan: QuantizePlan,
    samples: Samples,
    work_folder: Path,
    *,
    threads: int,
    progress: Progress | None = None,
) -> Iterator[LayerResult]:
    """Quantize all decoder layers, in order; layers of an earlier run in the same folder are read back.

    Args:
        checkpoint: Open.
        plan: Of `plan_quantization` for this checkpoint and these samples.
        samples: Token ids of the calibration samples; none for rtn.
        work_folder: Kept when the run ends or dies; whoever has stored the results deletes it.
        threads: Compute; they do not change the result.
        progress: Told what happens.

    Raises:
        CheckpointError: A weight or an activation is infinite or NaN; names the tensor.
        ConfigError: A token id is outside the vocabulary, or the folder belongs to another run.
    """
    run = _Run(checkpoint, plan, _as_tensors(samples), threads, _Reporter(plan.num_layers, progress))
    with open_work(work_folder, run.manifest()) as work:
        yield from run.layers(work)


class _Reporter:
    """Fills in what every event has."""

    def __init__(self, num_layers: int, progress: Progress | None) -> None:
        self._num_layers, self._progress = num_layers, progress
        self._start, self._process = time.perf_counter(), psutil.Process()

    def __call__(self, phase: Any, layer: int, linear: str = "", error: float | None = None) -> None:
        if self._progress is None:
            return
        seconds, memory = time.perf_counter() - self._start, int(self._process.memory_info().rss)
        self._progress(QuantizeEvent(phase, layer, self._num_layers, linear, error, seconds, memory))


@dataclass(frozen=True, slots=True)
class _Run:
    """One call of `quantize_layers`."""

    checkpoint: Checkpoint
    plan: QuantizePlan
    samples: list[Tensor]
    threads: int
    report: _Reporter

    def manifest(self) -> dict[str, Any]:
        """What decides the bytes."""
        spec = self._spec()
        _check_tokens(self.samples, spec.vocab_size)
        names = list(expected_tensors(spec))
        model = check_finite(self.checkpoint, names, lambda done: self._checked(done, len(names)))
        calibration = hashlib.sha256()
        for sample in self.samples:
            calibration.update(len(sample).to_bytes(8, "little") + sample.numpy().astype("<i8").tobytes())
        options = {**asdict(self.plan.options), "group_size": self.plan.group_size}
        return {"format": FORMAT, "model": model, "calibration": calibration.hexdigest(), **options}

    def layers(self, work: WorkFolder) -> Iterator[LayerResult]:
        """Read back, then make."""
        done = work.finished()
        for index in range(done):
            self.report("resume", index)
            yield work.read(index)
        if done == self.plan.num_layers:
            return
        make = self._round if self.plan.options.method == "rtn" else self._calibrated(work, done)
        for index in range(done, self.plan.num_layers):
            result, hidden = make(index)
            work.save(result, [sample.numpy() for sample in hidden])
            self.report("layer", index)
            yield result

    def _spec(self) -> ModelSpec:
        return ModelSpec.from_config(self.checkpoint.config, f"{self.checkpoint.path}: config")

    def _checked(self, done: int, total: int) -> None:
        self.report("check", done * self.plan.num_layers // total)

    def _round(self, index: int) -> tuple[LayerResult, list[Tensor]]:
        """A layer without calibration."""
        with workers(self.threads) as pool:
            quantizer = self._quantizer(index, pool)
            for linear in self.plan.linears:
                if linear.layer == index:
                    quantizer.round_to_nearest(linear)
        return _result(index, quantizer), []

    def _calibrated(self, work: WorkFolder, done: int) -> Callable[[int], tuple[LayerResult, list[Tensor]]]:
        """A function that makes the layers one after the other, from `done` on."""
        spec, source = self._spec(), Source(self.checkpoint)
        decoder = family_of(spec.architecture).wire(TensorNotes(), spec)
        lengths = [len(sample) for sample in self.samples]
        rope = _rope(spec, max(lengths))
        if done:
            state = [torch.from_numpy(sample) for sample in work.hidden(done, lengths)]
        else:
            table = decoder.embedding.name
            state = embedded(self.samples, lambda ids: source.rows(table, ids))
        running = [state]  # the last activations, and nobody else's

        def make(index: int) -> tuple[LayerResult, list[Tensor]]:
            with workers(self.threads) as pool:
                products = product_dtype(spec.dtype)
                quantizer = self._quantizer(index, pool, products)
                ops = CalibrationOps(source.tensor, quantizer.linear, pool, products)
                hidden = _run_layer(decoder, index, ops, Stream(running.pop(), len(lengths)), rope).all(pool)
            running.append(hidden)
            return _result(index, quantizer), hidden

        return make

    def _quantizer(self, index: int, pool: Workers, products: torch.dtype = torch.float32) -> LayerQuantizer:
        planned = {linear.names[0]: linear for linear in self.plan.linears}

        def finished(names: str, error: float | None) -> None:
            self.report("linear", index, names, error)

        options = self.plan.options
        return LayerQuantizer(Source(self.checkpoint), options, planned, pool, finished, products)


def _run_layer(decoder: Decoder, index: int, ops: CalibrationOps, x: Stream, rope: RopeTable) -> Stream:
    """One decoder layer; its output with the residual added, so that the next layer starts like the first."""
    # A layer calls no other ops than these, and streams need neither batch nor cache.
    nothing = cast(Any, None)
    branch, residual = decoder.layers[index](cast(Ops, ops), x, None, rope, nothing, nothing, index)
    return ops.add(branch, residual)


def _result(index: int, quantizer: LayerQuantizer) -> LayerResult:
    dense = dict(sorted(quantizer.dense.items()))
    return LayerResult(
        index, tuple(quantizer.tensors.values()), dense, tuple(quantizer.records), resumed=False
    )


def _rope(spec: ModelSpec, length: int) -> RopeTable:
    cos, sin = rope_tables(spec.rope, spec.head_dim, length)
    return RopeTable(length, spec.head_dim, torch.from_numpy(cos), torch.from_numpy(sin))


def _as_tensors(samples: Samples) -> list[Tensor]:
    return [torch.tensor(np.asarray(sample, dtype=np.int64)) for sample in samples]


def _check_tokens(samples: list[Tensor], vocab_size: int) -> None:
    for index, sample in enumerate(samples):
        if len(sample) == 0 or int(sample.min()) < 0 or int(sample.max()) >= vocab_size:
            worst = (
                "no tokens" if len(sample) == 0 else f"token ids {int(sample.min())} to {int(sample.max())}"
            )
            raise ConfigError(
                f"calibration sample {index} has {worst}, the model has {vocab_size} tokens: was the text "
                "tokenized with this model's tokenizer?"
            )

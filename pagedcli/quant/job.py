"""The whole of `paged quantize`: calibration text, quantizer, files, self-check, measurements, contract, report.

May import everything below and torch; what runs a model in the engine comes from above. Killed anywhere, the same run
goes on: what is finished lies in the work folder, and the output counts as finished when that is gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pagedcli.checkpoint.base import Checkpoint
from pagedcli.checkpoint.sources import open_checkpoint, resolve_model
from pagedcli.models.spec import ModelSpec
from pagedcli.quant.calibration import Calibration
from pagedcli.quant.calibration_step import get_calibration
from pagedcli.quant.contract import next_to_keep
from pagedcli.quant.description import describe
from pagedcli.quant.measure import Behaviour, HeldOut, Pair, behave, held_out, measure
from pagedcli.quant.options import LayerResult, QuantizeOptions, QuantizePlan
from pagedcli.quant.output_folder import (
    check_room,
    default_output,
    finish_output,
    model_name,
    prepare_output,
)
from pagedcli.quant.pipeline import quantize_layers
from pagedcli.quant.plan import plan_quantization
from pagedcli.quant.quality import Quality, write_card, write_quality
from pagedcli.quant.request import Engines, QuantizeRequest, Watcher
from pagedcli.quant.result import QuantizeResult
from pagedcli.quant.self_check import check_written
from pagedcli.quant.work import WorkFolder
from pagedcli.quant.writing import write_checkpoint
from pagedcli.text.tokenizer import Tokenizer

MAX_ROUNDS = 8


def run_job(request: QuantizeRequest, engines: Engines, watcher: Watcher) -> QuantizeResult:
    """Do all of it; see `api.quantize.quantize`."""
    torch.set_num_threads(request.threads)
    with watcher.phase("open the model"):
        path = resolve_model(request.model, progress=watcher.fetched)
        original = open_checkpoint(path)
        tokenizer = engines.load_tokenizer(original)
    if (warning := already_quantized(original)) is not None:
        watcher.say(warning)
    text = held_out(request.evaluation, tokenizer, _max_position(original))
    job = _Job(request, engines, watcher, original, tokenizer, text)
    return job.run()


def already_quantized(checkpoint: Checkpoint) -> str | None:
    """A warning if the source has lost precision before."""
    found = checkpoint.quantization
    if found is None:
        return None
    return (
        f"{checkpoint.path.name} is quantized already ({found.detail}): what it has lost stays lost; "
        "the unquantized model gives a better result"
    )


def _max_position(checkpoint: Checkpoint) -> int:
    return ModelSpec.from_config(checkpoint.config, f"{checkpoint.path}: config").max_position


@dataclass(slots=True)
class _Job:
    """A run of the native backend."""

    request: QuantizeRequest
    engines: Engines
    watcher: Watcher
    original: Checkpoint
    tokenizer: Tokenizer
    text: HeldOut
    before: Behaviour | None = None

    def run(self) -> QuantizeResult:
        folder, work = self._prepare()
        calibration = get_calibration(
            self.request, self.original.path, self.tokenizer, work, self.engines.open, self.watcher
        )
        self._say(calibration.notes)
        self._say(self.text.notes)
        options = self.request.options
        for attempt in range(MAX_ROUNDS):
            plan = self._plan(options, calibration)
            if attempt == 0:
                self._say(plan.notes)
            quality = self._round(plan, calibration, folder, work / f"round-{attempt}")
            missed = quality.misses(self.request.contract)
            more = next_to_keep(plan, quality, self.request.contract) if missed else ()
            if not more:
                break
            self._say((f"{'; '.join(missed)}: leaving {len(more)} more unquantized: {', '.join(more)}",))
            options = replace(options, keep=(*options.keep, *more))
        return self._finish(plan, quality, missed, folder)

    def _prepare(self) -> tuple[Path, Path]:
        """Output and work folder, after everything that can be refused was."""
        request = self.request
        lengths = [] if request.options.method == "rtn" else [request.seq_len] * request.samples
        plan = plan_quantization(self.original, request.options, lengths, request.threads)
        folder = Path(request.output) if request.output else default_output(request, plan.group_size)
        room = check_room(plan, folder, self.original.stored_bytes())
        work = prepare_output(folder, self.original.path, overwrite=request.overwrite)
        self.watcher.say(f"{folder}: {plan.num_layers} layers; {room}")
        return folder, work

    def _plan(self, options: QuantizeOptions, calibration: Calibration) -> QuantizePlan:
        lengths = [len(sample) for sample in calibration.samples]
        return plan_quantization(self.original, options, lengths, self.request.threads)

    def _say(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.watcher.say(line)

    def _round(self, plan: QuantizePlan, calibration: Calibration, folder: Path, work: Path) -> Quality:
        """Quantize, write, check and measure once."""
        with self.watcher.phase(f"quantize {plan.num_layers} layers"):
            results = quantize_layers(
                self.original,
                plan,
                calibration.samples,
                work,
                threads=self.request.threads,
                progress=self.watcher.quantizing,
            )
            write_checkpoint(folder, self.original, plan, self.request.target_format, results)
        with self.watcher.phase("read it back"):
            written = open_checkpoint(folder)
            methods = check_written(written, plan, _kept_results(work, plan.num_layers))
        after = self._behaviour(written.path)
        return measure(
            Pair(self.original, written),
            methods=methods,
            folded=plan.options.method == "awq",
            text=self.text,
            calibration=calibration,
            before=self._original_behaviour(),
            after=after,
            watcher=self.watcher,
        )

    def _behaviour(self, model: Path) -> Behaviour:
        with self.watcher.phase(f"run {model.name}"), self.engines.open(model) as session:
            return behave(session, self.tokenizer)

    def _original_behaviour(self) -> Behaviour:
        if self.before is None:
            self.before = self._behaviour(self.original.path)
        return self.before

    def _finish(
        self, plan: QuantizePlan, quality: Quality, missed: tuple[str, ...], folder: Path
    ) -> QuantizeResult:
        name = model_name(self.request.model)
        write_card(folder, folder.resolve().name, describe(plan, self.request, name), quality, missed)
        write_quality(folder, quality, missed)
        finish_output(folder)
        return QuantizeResult(folder, quality, missed, quality.notes)


def _kept_results(work: Path, num_layers: int) -> Iterator[LayerResult]:
    """The quantizer's results as they lie in the work folder."""
    kept = WorkFolder(work)
    return (kept.read(index) for index in range(num_layers))

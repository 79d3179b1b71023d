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
from pagedcli.quant.backend_job import backend_of, linear_names, quantize_by_package
from pagedcli.quant.backends.environment import check_python
from pagedcli.quant.calibration import Calibration
from pagedcli.quant.calibration_step import read_calibration, write_calibration
from pagedcli.quant.contract import next_to_keep
from pagedcli.quant.description import describe, notes_of
from pagedcli.quant.evaluation import Evaluation
from pagedcli.quant.measure import HeldOut, Pair, behave_in_turns, compare, held_out, make_report
from pagedcli.quant.memory import evaluation_bytes, running_bytes
from pagedcli.quant.options import LayerResult, LinearRecord, QuantizeOptions, QuantizePlan
from pagedcli.quant.output_folder import (
    check_room,
    default_output,
    finish_output,
    model_name,
    prepare_output,
    refuse_output,
)
from pagedcli.quant.pipeline import quantize_layers
from pagedcli.quant.plan import plan_quantization
from pagedcli.quant.quality import Contract, Quality, write_card, write_quality
from pagedcli.quant.request import Engines, QuantizeRequest, Watcher
from pagedcli.quant.result import QuantizeResult
from pagedcli.quant.self_check import check_codes_there, check_written
from pagedcli.quant.self_written import TOKENS_AT_ONCE
from pagedcli.quant.work import WorkFolder, locked
from pagedcli.quant.writing import output_bytes, write_checkpoint
from pagedcli.text.tokenizer import Tokenizer

MAX_ROUNDS = 8


def run_job(request: QuantizeRequest, engines: Engines, watcher: Watcher) -> QuantizeResult:
    """Do all of it; see `api.quantize.quantize`."""
    if (backend := backend_of(request)) is not None:
        check_python(backend)  # before anything is fetched
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
    made_by: str = "paged"
    notes: tuple[str, ...] = ()

    def run(self) -> QuantizeResult:
        """From the output folder to the report."""
        folder = self._choose_folder()
        calibration = read_calibration(self.request, self.tokenizer, self.watcher)
        work = prepare_output(folder, self.original.path, overwrite=self.request.overwrite)
        with locked(work):
            return self._run_in(folder, work, calibration)

    def _run_in(self, folder: Path, work: Path, calibration: Calibration | None) -> QuantizeResult:
        """In a folder that is this run's alone; the calibration text is written if there is none."""
        if calibration is None:
            calibration = write_calibration(
                self.request, self.original.path, self.tokenizer, work, self.engines, self.watcher
            )
        self._say((*calibration.notes, *self.text.notes))
        if self.request.calibration is not None and self.request.calibration == self.request.evaluation:
            self.watcher.say("--eval and --calibration are the same text: the report flatters")
        plan = self._plan(self.request.options, calibration)
        self._say(plan.notes)
        for attempt in range(MAX_ROUNDS):
            methods = self._quantize(plan, calibration, folder, work / f"round-{attempt}")
            pair = Pair(self.original, open_checkpoint(folder))
            found = compare(pair, self.text, folded=plan.options.method == "awq", watcher=self.watcher)
            more = self._more_to_keep(plan, found)
            if not more:
                break
            options = replace(plan.options, keep=(*plan.options.keep, *more))
            plan = self._plan(options, calibration)
        before, after = behave_in_turns(
            self.engines, (self.original.path, folder), self.tokenizer, self.watcher
        )
        quality = make_report(
            pair,
            found,
            methods=methods,
            text=self.text,
            calibration=calibration,
            before=before,
            after=after,
            notes=self.notes,
        )
        return self._finish(plan, quality, folder)

    def _more_to_keep(self, plan: QuantizePlan, found: Evaluation) -> tuple[str, ...]:
        """Linears to leave unquantized in the next round; none: the contract is met, or out of reach."""
        contract, figures = self.request.contract, (found.kl_mean, found.perplexity_increase)
        missed = contract.misses(*figures)
        if backend_of(self.request) is not None:
            return ()  # a package cannot leave layers out
        more = next_to_keep(plan, found.errors, contract.excess(*figures)) if missed else ()
        if more:
            self.watcher.say(f"{'; '.join(missed)}: leaving {len(more)} more unquantized: {', '.join(more)}")
        return more

    def _choose_folder(self) -> Path:
        """The output folder, after everything that can be refused without reading text was; nothing is made yet."""
        request = self.request
        lengths = [] if request.options.method == "rtn" else [request.seq_len] * request.samples
        plan = plan_quantization(self.original, request.options, lengths, request.threads)
        folder = Path(request.output) if request.output else default_output(request, plan.group_size)
        refuse_output(folder, self.original.path, overwrite=request.overwrite)
        size = output_bytes(self.original, plan, request.target_format)
        room = check_room(
            plan, folder, size, running=self._running_bytes(plan), may_repeat=request.contract != Contract()
        )
        self.watcher.say(f"{folder}: {plan.num_layers} layers; {room}")
        return folder

    def _running_bytes(self, plan: QuantizePlan) -> int:
        """Memory of the comparison, or of the engine with the original, which may write the calibration text."""
        writes = self.request.calibration is None and self.request.options.method != "rtn"
        config = self.original.config
        spec = ModelSpec.from_config(config, f"{self.original.path}: config")
        weights, dtype = self.original.stored_bytes(), str(config.get("torch_dtype", "float32"))
        engine = running_bytes(spec, weights, dtype, TOKENS_AT_ONCE if writes else 0)
        return max(engine, evaluation_bytes(plan, spec))

    def _plan(self, options: QuantizeOptions, calibration: Calibration) -> QuantizePlan:
        lengths = [len(sample) for sample in calibration.samples]
        return plan_quantization(self.original, options, lengths, self.request.threads)

    def _say(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.watcher.say(line)

    def _quantize(
        self, plan: QuantizePlan, calibration: Calibration, folder: Path, work: Path
    ) -> dict[str, str]:
        """Quantize, write and check once; how each linear was quantized, by name."""
        backend = backend_of(self.request)
        if backend is not None:
            work.mkdir(exist_ok=True)
            self.made_by = quantize_by_package(
                backend, self.request, self.original, plan, calibration, folder, work, self.watcher
            )
            names = linear_names(self.original)
            return check_codes_there(open_checkpoint(folder), names, plan.options.method)
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
            records: list[LinearRecord] = []
            methods = check_written(written, plan, _kept_results(work, plan.num_layers, records))
        self.notes = notes_of(records)
        self._say(self.notes)
        return methods

    def _finish(self, plan: QuantizePlan, quality: Quality, folder: Path) -> QuantizeResult:
        missed = quality.misses(self.request.contract)
        how = describe(plan, self.request, model_name(self.request.model), self.made_by)
        write_card(folder, folder.resolve().name, how, quality, missed)
        write_quality(folder, quality, missed)
        finish_output(folder)
        return QuantizeResult(folder, quality, missed)


def _kept_results(work: Path, num_layers: int, records: list[LinearRecord]) -> Iterator[LayerResult]:
    """The quantizer's results as they lie in the work folder; their records are noted as they come."""
    kept = WorkFolder(work)
    for index in range(num_layers):
        result = kept.read(index)
        records += result.records
        yield result

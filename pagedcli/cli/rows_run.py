"""`paged generate FILE`: prepares the output, runs the job, and says how it went. May import everything below `cli`.

Order of events for an output that can be gone on with: lock, input hashed, manifest compared, earlier rows recovered,
engine built, rows run, output brought to the disk, manifest marked complete, journal removed. A kill between any two
leaves a state from which the same command goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

from pagedcli.cli import engine_access
from pagedcli.cli.console import Messages, discard_stdout
from pagedcli.cli.files import OutputError, OutputLock, StreamFile, is_stream, open_spool, refusing_os_errors
from pagedcli.cli.generate_run import GenerateOptions
from pagedcli.cli.job import Job
from pagedcli.cli.journal import Journal, OrderedSink, RowSink, UnorderedSink
from pagedcli.cli.lines import read_lines
from pagedcli.cli.manifest import Manifest, fingerprint, save_manifest
from pagedcli.cli.monitor import Monitor
from pagedcli.cli.output_rows import RowStyle
from pagedcli.cli.progress import Progress
from pagedcli.cli.recovery import Done, journal_path, recover_ordered, recover_unordered
from pagedcli.cli.resume import prepare_output
from pagedcli.cli.rows import RowReader
from pagedcli.cli.source import Source, open_source
from pagedcli.cli.summary import KVEstimate, summary_lines
from pagedcli.config import EngineConfig
from pagedcli.errors import ConfigError, PagedError

STDOUT = "-"
DONE, ROWS_FAILED, INTERRUPTED = 0, 3, 130
# Rows in flight for each sequence that may run: the scheduler has something to choose from, memory stays bounded.
_WINDOW_PER_SEQUENCE = 2


@dataclasses.dataclass(frozen=True, slots=True)
class RowsRun:
    """Everything about a run that does not change while it goes on."""

    options: GenerateOptions
    config: EngineConfig
    sampling: dict[str, Any]
    messages: Messages
    seed: int
    created: int


def run_rows(
    options: GenerateOptions, config: EngineConfig, sampling: dict[str, Any], messages: Messages
) -> int:
    """Answer all rows; the exit code."""
    seed = config.seed if config.seed is not None else secrets.randbits(63)
    run = RowsRun(options, config, sampling, messages, seed, int(time.time()))
    with open_source(options.file, options.prompt) as source:
        if options.output in (None, STDOUT) or is_stream(Path(str(options.output))):
            return _run_stream(run, source)
        output = Path(os.path.realpath(options.output))
        _check_output(output, source)
        with OutputLock(output):
            return _run_file(run, source, output)


def _check_output(output: Path, source: Source) -> None:
    if output.is_dir():
        raise ConfigError(f"{output}: is a folder: give -o a file")
    with contextlib.suppress(FileNotFoundError):
        if source.name not in ("stdin", "-p") and output.samefile(source.name):
            raise ConfigError(f"{output}: is the input: give -o another file")


def _run_stream(run: RowsRun, source: Source) -> int:
    """Rows to stdout, a pipe or a device: nothing to go on with."""
    source.count()
    with contextlib.ExitStack() as stack:
        if run.options.output in (None, STDOUT):
            file = StreamFile(sys.stdout.buffer, "stdout")
        else:
            path = Path(str(run.options.output))
            with refusing_os_errors():
                file = StreamFile(stack.enter_context(path.open("wb", buffering=0)), str(path))
        sink: RowSink
        sink = UnorderedSink(file) if run.options.unordered else OrderedSink(file, Journal(open_spool()))
        try:
            _run_job(run, source, sink, None)
        except BrokenPipeError:
            discard_stdout()
            return DONE
        except KeyboardInterrupt:
            run.messages.say(f"interrupted: {sink.num_rows:,} rows were answered")
            return INTERRUPTED
    if run.config.seed is None:
        run.messages.say(f"seed {run.seed} (drawn; --seed {run.seed} repeats this run)")
    return ROWS_FAILED if sink.num_errors else DONE


def _run_file(run: RowsRun, source: Source, output: Path) -> int:
    """Rows to a file, going on with what an earlier run left."""
    model = engine_access.find_model(run.config, run.messages)
    with refusing_os_errors():
        wanted = _manifest(run, source.pin(), model)
        manifest = prepare_output(
            output, wanted, overwrite=run.options.overwrite, retry_errors=run.options.retry_errors
        )
        if manifest.complete is not None:
            journal_path(output).unlink(missing_ok=True)
            return _say_complete(run, output, manifest.complete)
        run = dataclasses.replace(run, seed=manifest.seed, created=manifest.created)
        recover = recover_unordered if run.options.unordered else recover_ordered
        done, sink = recover(output)
    if done.num_rows:
        run.messages.say(f"{output}: going on, {done.num_rows:,} rows are done")
    try:
        _run_job(run, source, sink, done)
    except KeyboardInterrupt:
        run.messages.say(
            f"interrupted: {sink.num_rows:,} of {source.num_rows:,} rows are done; the same command goes on"
        )
        return INTERRUPTED
    source.check_unchanged()
    if sink.num_rows != source.num_rows:
        raise ConfigError(
            f"{output}: has {sink.num_rows:,} rows for {source.num_rows:,} of the input: "
            "the output was changed; --overwrite starts anew"
        )
    complete = {"rows": sink.num_rows, "errors": sink.num_errors, "bytes": output.stat().st_size}
    save_manifest(output, dataclasses.replace(manifest, complete=complete))
    journal_path(output).unlink(missing_ok=True)
    return ROWS_FAILED if sink.num_errors else DONE


def _say_complete(run: RowsRun, output: Path, complete: dict[str, int]) -> int:
    errors = complete["errors"]
    failed = f", {errors:,} failed (--retry-errors runs them again)" if errors else ""
    run.messages.say(f"{output}: complete, {complete['rows']:,} rows{failed}")
    return ROWS_FAILED if errors else DONE


def _manifest(run: RowsRun, source: dict[str, Any], model: Path) -> Manifest:
    config, options = run.config, run.options
    template = config.model.chat_template
    try:
        template_hash = fingerprint(Path(template)) if template else None
    except OSError as error:
        raise ConfigError(f"--chat-template {template}: {error.strerror}") from error
    parameters = {
        "sampling": run.sampling,
        "dtype": config.model.dtype,
        "device": config.device.device,
        "max_model_len": config.model.max_model_len,
        "chat_template": template_hash,
        "order": "unordered" if options.unordered else "input",
        "return_token_ids": options.return_token_ids,
    }
    return Manifest(
        version=version("pagedcli"),
        input=source,
        model={"sha256": fingerprint(model)},
        parameters=parameters,
        seed=run.seed,
        seed_drawn=config.seed is None,
        created=run.created,
    )


@contextlib.contextmanager
def _interrupts_go_to(job: Job) -> Iterator[None]:
    """While the job runs, the first Ctrl-C or SIGTERM ends it between two rows; a second one ends the process."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        job.interrupt()
        signal.signal(number, signal.SIG_DFL)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    # Not in a `finally`: after an interrupt, the next one still ends the process.
    for number, handler in before.items():
        signal.signal(number, handler)


def _run_job(run: RowsRun, source: Source, sink: RowSink, done: Done | None) -> None:
    """Build the engine, run the rows, sum up; the sink is closed in any case."""
    try:
        with engine_access.open_engine(run.config, run.messages) as engine:
            resolved = engine.resolved
            progress = Progress(total=source.num_rows, before=done.num_rows if done else 0)
            estimate = KVEstimate(resolved.max_model_len)
            reader = RowReader(run.sampling, text=source.is_text, run_seed=run.seed)
            job = Job(
                rows=reader.rows(read_lines(source.file)),
                client=engine.client,
                sink=sink,
                style=RowStyle(run.options.return_token_ids, resolved.model, run.created),
                window=_WINDOW_PER_SEQUENCE * resolved.max_num_seqs,
                done=done,
                progress=progress,
                estimate=estimate,
            )
            title = engine_access.engine_title(engine)
            with Monitor(engine.client, progress, title, run.messages) as monitor, _interrupts_go_to(job):
                _run_keeping(job)
            for line in summary_lines(
                progress,
                monitor.elapsed_s,
                engine.client.stats(),
                monitor.kv_use(),
                estimate,
                resolved.page_size,
            ):
                run.messages.say(line)
    finally:
        sink.close()


def _run_keeping(job: Job) -> None:
    """Run the job; whatever ends it early but a broken output, what was answered by then is written."""
    try:
        job.run()
    except (OutputError, BrokenPipeError):
        raise
    except (KeyboardInterrupt, PagedError, OSError):
        job.keep_finished()
        raise

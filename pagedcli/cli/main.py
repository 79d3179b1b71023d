"""`paged`: the commands, and what every one of them does about errors, interrupts and exit codes.

Must stay light (`paged --help` under 0.3 s): imports typer and the commands' declarations, which import the rest when
they run. Exit codes are those of docs/cli.md: 0, 1 our fault, 2 the user's mistake, 3 rows failed, 4 quality missed,
130 interrupted.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pagedcli.cli.bench import bench_app
from pagedcli.cli.build_cuda import build_cuda
from pagedcli.cli.doctor import doctor
from pagedcli.cli.generate import generate
from pagedcli.cli.help import GroupedCommand
from pagedcli.cli.quantize import quantize
from pagedcli.cli.serve import serve
from pagedcli.cli.vllm_flags import ServeCommand
from pagedcli.errors import PagedError

OUR_FAULT = 1
USER_MISTAKE = 2
INTERRUPTED = 130


class Interrupted(Exception):
    """A `KeyboardInterrupt` on its way out of a command: Typer would turn that into an exit code and say nothing."""


class Commands(TyperGroup):
    """All commands; what interrupts one of them gets as far as `run`."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Interrupted from error


app = typer.Typer(
    name="paged",
    cls=Commands,
    help="Run language models on this machine, over one paged KV engine.",
    epilog="Documentation: docs/cli.md. `paged COMMAND --help` lists the options of a command.",
    rich_markup_mode=None,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command(cls=GroupedCommand)(generate)
app.command(cls=ServeCommand)(serve)
app.command(cls=GroupedCommand)(quantize)
app.add_typer(bench_app)
app.command(cls=GroupedCommand)(doctor)
app.command(name="build-cuda", cls=GroupedCommand)(build_cuda)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"paged {version('pagedcli')}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run language models on this machine, over one paged KV engine."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(USER_MISTAKE)


def _fail(message: str) -> None:
    """One line on stderr."""
    print("paged:", " ".join(message.split()), file=sys.stderr)  # noqa: T201


def _end_interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _end_by_signals() -> None:
    """What is left is ending threads: an exception there would be shown whole, and leave some of them running."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _give_up_stdout() -> None:
    """What waits to be written there would fail once more at exit."""
    from pagedcli.cli.console import discard_stdout

    discard_stdout()


def run(arguments: list[str] | None = None) -> int:
    """Run a command; its exit code. Nothing that it raises gets past."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(args=arguments, prog_name="paged", standalone_mode=False)
    except PagedError as error:
        _fail(str(error))
        return error.exit_code
    except typer.TyperException as error:
        _fail(error.format_message())
        return USER_MISTAKE
    except (Interrupted, KeyboardInterrupt, typer.Abort):
        _fail("interrupted")
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - a defect: one line, and the whole story with -v.
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            _give_up_stdout()
            _fail(f"cannot write: {error.strerror}")
            return OUR_FAULT
        if {"-v", "--verbose"} & set(arguments):
            traceback.print_exc()
        _fail(f"unexpected {type(error).__name__}: {error} (run again with -v for the traceback)")
        return OUR_FAULT
    return code if isinstance(code, int) else 0


def _fill_standard_streams() -> None:
    """Put the null device where a standard stream is closed: no socket may get its number and what is said."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free


def main() -> None:
    """Entry point of the console script."""
    _fill_standard_streams()
    signal.signal(signal.SIGTERM, _end_interrupted)
    try:
        code = run()
        _end_by_signals()
    except KeyboardInterrupt:  # a second one, while the first was being told
        _end_by_signals()
        code = INTERRUPTED
    sys.exit(code)

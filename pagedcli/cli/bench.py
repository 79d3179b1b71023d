"""`paged bench`: declaration of the command and its subcommands. Light: what each does is imported when it runs.

Without a subcommand it measures offline. Settings that take a list (`--page-size 8,16`) are swept.
"""

from __future__ import annotations

import dataclasses

import typer

from pagedcli.cli.bench_compare import compare
from pagedcli.cli.bench_kernels import kernels
from pagedcli.cli.bench_options import (
    HtmlFile,
    JsonFile,
    MarkdownFile,
    Repeats,
    Requests,
    Seconds,
    Seed,
    Workload,
)
from pagedcli.cli.bench_report import report
from pagedcli.cli.bench_serve import serve_load
from pagedcli.cli.bench_tune import tune
from pagedcli.cli.help import GroupedCommand, GroupedGroup
from pagedcli.cli.options import (
    MODEL_FLAGS,
    POOL_FLAGS,
    Assignments,
    ConfigFile,
    Flag,
    NoConfig,
    Quiet,
    Verbose,
    refuse_unavailable,
    with_flags,
)
from pagedcli.config_file import Value
from pagedcli.errors import ConfigError

SWEPT = (
    "cache.page_size",
    "cache.num_pages",
    "cache.kv_memory_bytes",
    "scheduler.max_num_seqs",
    "scheduler.max_num_batched_tokens",
    "scheduler.policy",
    "device.threads",
)
"""Settings whose flags take a list here."""
ENGINE_FLAGS = (*MODEL_FLAGS, *POOL_FLAGS)
"""Of every command that measures an engine in this process."""

bench_app = typer.Typer(
    name="bench",
    cls=GroupedGroup,
    rich_markup_mode=None,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _with_list(flag: Flag) -> Flag:
    """The flag as text, where a list may be given."""
    return dataclasses.replace(flag, kind=str) if flag.key in SWEPT else flag


@bench_app.callback()
@with_flags(tuple(_with_list(flag) for flag in ENGINE_FLAGS))
def bench(
    *,
    context: typer.Context,
    workload: Workload = None,
    requests: Requests = None,
    repeats: Repeats = None,
    seconds: Seconds = None,
    seed: Seed = None,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
    html_file: HtmlFile = None,
    set_: Assignments = None,
    config: ConfigFile = None,
    no_config: NoConfig = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    flags: dict[str, Value],
) -> None:
    """Measure the engine on this machine: rates, latencies, KV use, and what limits them.

    Runs a seeded workload in this process, several times, beside the machine's own limits. A list of values
    (--page-size 8,16,32 --threads 1,2) runs every combination, in turns. The subcommands measure something else.
    """
    from pagedcli.cli.bench_run import BenchOptions, run_bench

    options = BenchOptions(
        workload=workload,
        requests=requests,
        repeats=repeats,
        seconds=seconds,
        seed=seed,
        json_file=json_file,
        markdown_file=markdown_file,
        html_file=html_file,
        verbose=verbose,
        quiet=quiet,
        no_config=no_config,
    )
    given = refuse_unavailable(flags)
    if context.invoked_subcommand is not None:
        _refuse_before(options, given, context.invoked_subcommand)
        return
    code = run_bench(options, given, assignments=set_ or [], config_file=config)
    raise typer.Exit(code)


def _refuse_before(options: object, given: dict[str, Value], subcommand: str) -> None:
    """Flags before a subcommand would be taken and ignored."""
    if given or options != type(options)():
        raise ConfigError(f"give the flags after the subcommand: paged bench {subcommand} ...")


bench_app.command(cls=GroupedCommand)(compare)
bench_app.command("serve", cls=GroupedCommand)(serve_load)
bench_app.command(cls=GroupedCommand)(kernels)
bench_app.command(cls=GroupedCommand)(tune)
bench_app.command(cls=GroupedCommand)(report)

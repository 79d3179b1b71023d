"""What `paged doctor` reports: this machine, or a model. May import everything below `cli`.

The report is a result and goes to stdout. Nothing is measured: what is advised follows from what is found.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pagedcli.checkpoint.inspect import Finding, judge
from pagedcli.cli.console import make_messages
from pagedcli.cli.display import two_columns
from pagedcli.config_file import show_bytes
from pagedcli.errors import CheckpointError, MissingDependencyError, how_to_install
from pagedcli.models.load import expected_tensors
from pagedcli.models.spec import ModelSpec
from pagedcli.ops.protocol import OpReport, Ops
from pagedcli.runtime.cgroups import ControlGroups
from pagedcli.runtime.memory import cpu_kv_budget, free_memory
from pagedcli.runtime.threads import allowed_cpus, compute_threads, physical_cores

USABLE, REFUSED = 0, 2
_PACKAGES = (
    "pagedcli",
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "gguf",
    "huggingface_hub",
    "transformers",
)
# What CPU kernels can make use of, as /proc/cpuinfo spells it (x86 flags, Arm features).
_INSTRUCTION_SETS = (
    *(
        "sse4_2",
        "avx",
        "avx2",
        "fma",
        "f16c",
        "avx_vnni",
        "avx512f",
        "avx512bw",
        "avx512_vnni",
        "avx512_bf16",
    ),
    *("avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
_MARKS = {
    "ok": ("ok", "green"),
    "note": ("note", "cyan"),
    "warning": ("warn", "yellow"),
    "refused": ("no", "red"),
}


@dataclass(frozen=True, slots=True)
class Processor:
    """The CPU's name and the instruction sets that it has."""

    name: str
    instruction_sets: tuple[str, ...]


def read_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Processor:
    """From /proc/cpuinfo; without it, what Python knows."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return Processor(platform.processor() or platform.machine(), ())
    facts = dict(line.split(":", 1) for line in reversed(text.splitlines()) if ":" in line)
    stripped = {key.strip(): value.strip() for key, value in facts.items()}
    has = set((stripped.get("flags") or stripped.get("Features") or "").split())
    name = stripped.get("model name") or platform.processor() or platform.machine()
    return Processor(name, tuple(item for item in _INSTRUCTION_SETS if item in has))


def run_doctor(model: str | None, *, verbose: bool) -> int:
    """Print the report; the exit code."""
    messages = make_messages(verbose=verbose, quiet=False)
    console = Console(highlight=False, emoji=False, markup=False)
    if model is None:
        _report_machine(console)
        return USABLE
    from pagedcli.checkpoint.sources import resolve_model

    path = resolve_model(model, progress=messages.transfer)
    findings = judge(path, expected_shapes=_expected_shapes)
    if not any(finding.level == "refused" for finding in findings):
        findings += _missing_settings(path)
    _print_findings(console, path, findings)
    refused = any(finding.level == "refused" for finding in findings)
    console.print(
        Text("cannot be used" if refused else "can be used", "bold red" if refused else "bold green")
    )
    return REFUSED if refused else USABLE


def _missing_settings(path: Path) -> list[Finding]:
    """Writes what a quantized folder should have, and says so."""
    from pagedcli.checkpoint.missing_settings import write_missing_settings

    try:
        message = write_missing_settings(path)
    except CheckpointError as error:
        return [Finding("warning", str(error))]
    return [] if message is None else [Finding("note", message)]


def _expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return expected_tensors(ModelSpec.from_config(config))


def _print_findings(console: Console, path: Path, findings: list[Finding]) -> None:
    console.print(Text(str(path), "bold cyan"), soft_wrap=True)
    for finding in findings:
        mark, style = _MARKS[finding.level]
        console.print(Text.assemble((mark.ljust(5), style), finding.message), soft_wrap=True)


def _report_machine(console: Console) -> None:
    from pagedcli.ops.select import has_cuda

    device = "cuda" if has_cuda() else "cpu"
    sections: list[tuple[str, list[tuple[str, str]]]] = [
        ("Versions", _versions()),
        ("Processor", _processor_rows()),
        ("Memory", _memory_rows()),
        ("Device", _device_rows(device)),
        ("Ops", _op_rows(device)),
        ("Advice", _advice(device)),
    ]
    for title, rows in sections:
        console.print(Text(title, "bold cyan"))
        console.print(two_columns([("  " + name, value) for name, value in rows]))


def _versions() -> list[tuple[str, str]]:
    rows = [("python", f"{platform.python_version()} ({sys.platform}, {platform.machine()})")]
    for package in _PACKAGES:
        try:
            rows.append((package, version(package)))
        except PackageNotFoundError:
            rows.append((package, _not_installed(package)))
    return rows


def _not_installed(package: str) -> str:
    """Of what a user may lack without a loss, why it may be wanted."""
    if package != "transformers":
        return "not installed"
    return f"not installed (only models without tokenizer.json need it: {how_to_install('convert')})"


def _processor_rows() -> list[tuple[str, str]]:
    processor = read_processor()
    cpus = allowed_cpus()
    quota = ControlGroups().cpu_quota()
    return [
        ("name", processor.name),
        ("instruction sets", ", ".join(processor.instruction_sets) or "not known"),
        (
            "cores",
            f"{physical_cores(cpus)} physical, {len(cpus)} logical usable, {os.cpu_count()} logical in the machine",
        ),
        ("CPU quota", "none" if quota is None else f"{quota:g} CPUs"),
    ]


def _memory_rows() -> list[tuple[str, str]]:
    import psutil

    room = ControlGroups().free_memory()
    return [
        ("in the machine", show_bytes(psutil.virtual_memory().total)),
        ("free for us", show_bytes(free_memory())),
        ("container limit", "none" if room is None else f"{show_bytes(room)} left"),
        ("for pages, unless you say", show_bytes(cpu_kv_budget())),
    ]


def _device_rows(device: str) -> list[tuple[str, str]]:
    if device == "cpu":
        return [("cuda", _why_no_cuda()), *_kernel_rows(wanted=False)]
    import torch

    free, total = torch.cuda.mem_get_info()
    name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    memory = f"{show_bytes(free)} free of {show_bytes(total)}"
    return [("cuda", f"{name}, compute capability {major}.{minor}, {memory}"), *_kernel_rows(wanted=True)]


def _why_no_cuda() -> str:
    from pagedcli.ops.select import why_no_cuda

    return why_no_cuda() or ""


def _kernel_rows(*, wanted: bool) -> list[tuple[str, str]]:
    """Of the library of our CUDA kernels; without a GPU only where there is one."""
    from pagedcli.checkpoint.sources import cache_folder
    from pagedcli.ops.cuda_library import architectures_in, library_in

    library = library_in(cache_folder())
    if not library.is_file():
        return [("CUDA kernels", "not built: paged build-cuda")] if wanted else []
    built = architectures_in(library)
    listed = f" for {', '.join(map(str, built))} and newer" if built else ""
    return [("CUDA kernels", f"built{listed}, in {library}")]


def _op_rows(device: str) -> list[tuple[str, str]]:
    from pagedcli.checkpoint.sources import cache_folder
    from pagedcli.ops.cuda_library import library_in
    from pagedcli.ops.select import make_native_ops, make_ops

    try:
        ops = (
            make_ops(device, "bfloat16", kernels=library_in(cache_folder()))
            if device == "cuda"
            else make_native_ops("bfloat16", threads=compute_threads())
        )
        report: dict[str, OpReport] = ops.report()
    except MissingDependencyError as error:
        return [("native", str(error))]
    rows = [(name, f"{entry.implementation}: {entry.detail}") for name, entry in report.items()]
    return rows if device == "cpu" else [*rows, ("decode steps", graph_row(ops))]


def graph_row(ops: Ops) -> str:
    """Whether decode steps are CUDA graphs with these ops, and what is none in any case."""
    from pagedcli.ops.torch_ops import TorchOps

    assert isinstance(ops, TorchOps), "the ops of a GPU"
    reason = ops.why_eager()
    if reason is not None:
        return f"op by op: {reason}"
    return "CUDA graphs; prompts, mixed steps and sampling other than the likeliest token run op by op"


def _advice(device: str) -> list[tuple[str, str]]:
    rows = [("--device", f"{device} (what auto takes here)")]
    if device == "cpu":
        threads = compute_threads()
        rows.append(("--threads", f"{threads} (what auto takes here: physical cores within the quota)"))
        budget = cpu_kv_budget() >> 20
        rows.append(("--kv-memory", f"{budget}MiB (what auto takes now: 40% of free memory)"))
    else:
        rows.append(("--gpu-memory-utilization", "0.9, less if something else uses the GPU"))
    return rows

"""What figures were measured on, when, by what, and what else kept the machine busy meanwhile.

May import psutil. Everything is told from what the system counts; nothing is asked of the network.
"""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from pagedcli.runtime.threads import allowed_cpus, physical_cores

NOTICEABLE = 0.05
"""Part of the machine's processors from which other load is said to be there."""
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def describe_machine() -> dict[str, Any]:
    """Processor, cores, caches, memory and system, for the head of a report."""
    return {
        "cpu": _cpu_name(),
        "cores": physical_cores(allowed_cpus()),
        "logical_cpus": len(allowed_cpus()),
        "cache_bytes": last_cache_bytes(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def last_cache_bytes(folder: Path = _CACHES) -> int | None:
    """Size of the largest cache of the first processor; None where the system does not say."""
    sizes = []
    for file in folder.glob("index*/size"):
        text = file.read_text(encoding="utf-8").strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG")) * unit)
    return max(sizes, default=None)


def paged_version() -> str:
    """Of this package, as it is installed."""
    try:
        return version("pagedcli")
    except PackageNotFoundError:
        return "not installed"


def provenance() -> dict[str, str]:
    """Version, date and command line of this run."""
    arguments = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {
        "version": paged_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(arguments),
    }


@dataclass(frozen=True, slots=True)
class OtherLoad:
    """What others did while something was measured.

    Attributes:
        cpus: Logical processors of the machine.
        others: Of them, kept busy by other processes.
        stolen: Of them, not given to this machine by its host.
        waiting: Load average of the last minute.
    """

    cpus: int
    others: float
    stolen: float
    waiting: float

    @property
    def is_noticeable(self) -> bool:
        """Whether figures may have suffered."""
        return max(self.others, self.stolen) > NOTICEABLE * self.cpus

    def __str__(self) -> str:
        seen = f"other processes used {self.others:.2f} of {self.cpus} processors"
        if self.stolen >= 0.005 * self.cpus:
            seen += f", the host withheld {self.stolen:.2f}"
        if not self.is_noticeable:
            return f"none to speak of: {seen}"
        return f"noticed: {seen} (load average {self.waiting:.1f}): rates are too low, latencies too high"


@dataclass(frozen=True, slots=True)
class Counters:
    """Processor seconds at one moment: of all processes, of this one and its children, withheld by the host."""

    now: float
    busy: float
    own: float
    stolen: float


class LoadMeter:
    """Counts processor time of this process, of all others, and what the host withheld, over one or more spans.

    A span begins here, unless `begin` is false, and wherever `begin` is called; only spans count, so that what was not
    measured (loading, writing) may be disturbed.

    Args:
        begin: Whether the first span begins at once.
        read: Takes the counters; for tests.
        cpus: Logical processors; None: of this machine.
    """

    def __init__(
        self, *, begin: bool = True, read: Callable[[], Counters] | None = None, cpus: int | None = None
    ) -> None:
        self._read = read or _read_counters
        self._cpus = cpus or psutil.cpu_count() or 1
        self._begun: Counters | None = None
        self._seconds = self._others = self._stolen = 0.0
        if begin:
            self.begin()

    def begin(self) -> None:
        """A span begins."""
        self._begun = self._read()

    def end(self) -> None:
        """It ends."""
        if self._begun is None:
            return
        before, after = self._begun, self._read()
        self._begun = None
        self._seconds += after.now - before.now
        self._others += max(0.0, (after.busy - before.busy) - (after.own - before.own))
        self._stolen += max(0.0, after.stolen - before.stolen)

    def seen(self) -> OtherLoad | None:
        """Over all spans; None if they were too short for what the system counts, hundredths of a second."""
        self.end()
        if self._seconds < 0.1:
            return None
        waiting = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        return OtherLoad(self._cpus, self._others / self._seconds, self._stolen / self._seconds, waiting)

    def told(self) -> str:
        """The same in words; "" if it was too short."""
        seen = self.seen()
        return "" if seen is None else str(seen)


def _read_counters() -> Counters:
    times, own = psutil.cpu_times(), os.times()
    busy = times.user + times.system + sum(getattr(times, name, 0.0) for name in ("nice", "irq", "softirq"))
    used = own.user + own.system + own.children_user + own.children_system
    return Counters(time.perf_counter(), busy, used, getattr(times, "steal", 0.0))

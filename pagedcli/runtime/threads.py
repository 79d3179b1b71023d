"""How many compute threads this process should run. Standard library only.

One thread for each physical core that it may use: a second one on the same core's other hardware thread would share
the arithmetic units that the first one fills. A quota of CPU time, which containers have, counts like fewer cores.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from pagedcli.runtime.cgroups import ControlGroups

_TOPOLOGY = Path("/sys/devices/system/cpu")


def compute_threads(
    cpus: Collection[int] | None = None,
    groups: ControlGroups | None = None,
    topology: Path = _TOPOLOGY,
) -> int:
    """Physical cores within affinity and quota, at least 1.

    Args:
        cpus: Logical CPUs that may be used; None: this process's affinity.
        groups: Where the quota is read.
        topology: Folder of cpu0, cpu1, ...
    """
    cores = physical_cores(allowed_cpus() if cpus is None else cpus, topology)
    quota = (groups or ControlGroups()).cpu_quota()
    return max(1, cores if quota is None else min(cores, int(quota)))


def allowed_cpus() -> set[int]:
    """Logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def core_cpus(cpus: Collection[int] | None = None, topology: Path = _TOPOLOGY) -> tuple[int, ...]:
    """One logical CPU of each physical core that may be used, in ascending order: where threads are pinned."""
    first: dict[tuple[str, ...], int] = {}
    for cpu in sorted(allowed_cpus() if cpus is None else cpus):
        first.setdefault(_core_of(cpu, topology), cpu)
    return tuple(first.values())


def physical_cores(cpus: Collection[int], topology: Path = _TOPOLOGY) -> int:
    """Different physical cores among logical CPUs; a CPU that tells nothing of its core counts as one."""
    return len({_core_of(cpu, topology) for cpu in cpus})


def _core_of(cpu: int, topology: Path) -> tuple[str, ...]:
    folder = topology / f"cpu{cpu}" / "topology"
    try:
        return tuple((folder / name).read_text().strip() for name in ("physical_package_id", "core_id"))
    except OSError:
        return (f"cpu{cpu}",)

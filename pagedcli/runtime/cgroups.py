"""What control groups (Linux containers, v1 and v2) leave to this process. Standard library only.

A group's limit holds for all groups below it, so that the tightest on the way to the root counts. Inside a container
the path that /proc names may not be mounted: then the root of the mount is the container's own group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# v1 writes "no limit" as the greatest multiple of a page.
_V1_UNLIMITED = 2**60


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """Reads the limits.

    Attributes:
        proc: The file that names this process's groups.
        mount: Where the hierarchies are mounted.
    """

    proc: Path = Path("/proc/self/cgroup")
    mount: Path = Path("/sys/fs/cgroup")

    def free_memory(self) -> int | None:
        """Bytes until the tightest memory limit, reclaimable file pages not counted as used; None: no limit."""
        rooms = [_room(group, "memory.max", "memory.current", "inactive_file") for group in self._groups("")]
        for group in self._groups("memory"):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            rooms.append(_room(group, *names))
        known = [room for room in rooms if room is not None]
        return min(known) if known else None

    def cpu_quota(self) -> float | None:
        """CPUs' worth of time that the tightest quota allows; None: no quota."""
        quotas = [_quota_v2(group) for group in self._groups("")]
        quotas += [_quota_v1(group) for group in self._groups("cpu")]
        known = [quota for quota in quotas if quota is not None]
        return min(known) if known else None

    def _groups(self, controller: str) -> Iterator[Path]:
        """Folders of this process's group and its parents; `controller` is "" for v2."""
        for line in _lines(self.proc):
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                root = self.mount / controllers if controllers else self.mount
                if not root.is_dir() and controller:
                    root = self.mount / controller
                group = root / path.lstrip("/")
                for folder in (group, *group.parents):
                    if folder.is_dir():
                        yield folder
                    if folder == root:
                        break


def _lines(path: Path) -> list[str]:
    """Lines of a file; none where it is missing or may not be read (no Linux, no such controller)."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """A file's number; None if there is none, or it says "max"."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _room(group: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> int | None:
    limit, usage = _number(group / limit_name), _number(group / usage_name)
    if limit is None or usage is None or limit >= _V1_UNLIMITED:
        return None
    statistics = dict(line.split() for line in _lines(group / "memory.stat") if len(line.split()) == 2)
    return max(0, limit - usage + int(statistics.get(reclaimable_name, 0)))


def _quota_v2(group: Path) -> float | None:
    words = " ".join(_lines(group / "cpu.max")).split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None


def _quota_v1(group: Path) -> float | None:
    # -1 is "no quota", which _number takes for no number.
    quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return quota / period if quota and period else None

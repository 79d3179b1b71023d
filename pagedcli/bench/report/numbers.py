"""How numbers are written: as many digits as mean something, with a unit. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence

MISSING = "-"


def number(value: float | None, digits: int = 3) -> str:
    """With at least `digits` significant digits and thousands separated: 1,234; 12.3; 0.123; "-" for what is none."""
    if value is None or not math.isfinite(value):
        return MISSING
    if isinstance(value, int) or value == 0:
        return f"{value:,.0f}"
    # A number that rounds up to the next power of ten has a digit more.
    decimals = max(0, digits - 1 - math.floor(math.log10(float(f"{abs(value):.{digits - 1}e}"))))
    return f"{value:,.{decimals}f}"


def count(value: float | None) -> str:
    """A number of things, whole also where it was stored as 12.0."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:,.0f}"


def share(value: float | None) -> str:
    """A part of a whole in percent, with one decimal."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:.1%}"


def ratio(value: float | None) -> str:
    """So many times: 3.28x."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:,.2f}x"


def seconds(value: float | None) -> str:
    """A time in the unit that reads best: 1.20 s, 12.0 ms, 3.40 µs."""
    if value is None or not math.isfinite(value):
        return MISSING
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1.0 or value == 0:
            return f"{number(value * factor)} {unit}"
    return f"{number(value * 1e6)} µs"


def time_unit(seconds: Sequence[float | None]) -> tuple[str, float]:
    """The unit in which all of `seconds` read best, and how many of it a second has."""
    known = [abs(value) for value in seconds if value is not None and math.isfinite(value)]
    if known and max(known) >= 10.0:
        return "s", 1.0
    return "ms", 1e3


def size(num_bytes: float | None) -> str:
    """Bytes as KiB, MiB or GiB."""
    if num_bytes is None:
        return MISSING
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{number(value)} {unit}"
        value /= 1024
    return f"{number(value)} GiB"

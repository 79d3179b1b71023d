"""JSON without its loopholes, for bodies of requests and rows of files. Standard library only.

What RFC 8259 leaves to the reader is refused: numbers that are none (NaN, Infinity), a name given twice, numbers of
thousands of digits, nesting that the parser cannot follow.
"""

from __future__ import annotations

import json
from typing import Any


class JSONTextError(ValueError):
    """Text that is not JSON, or not such that it can be read; the message says why and where."""


def parse(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        JSONTextError: It is none.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_pairs)
    except json.JSONDecodeError as error:
        raise JSONTextError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise JSONTextError("not JSON that can be read: nested too deeply") from None
    except ValueError as error:
        # The hooks' own words, or Python's about a number of more digits than it reads.
        words = "a number has too many digits" if "integer string conversion" in str(error) else error
        raise JSONTextError(f"not JSON that can be read: {words}") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{name[:40]!r} is given twice")
            seen.add(name)
    return result

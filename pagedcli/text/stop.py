"""Stop strings over a stream of text. Standard library only.

The stop that is complete first wins, of several complete at the same character the longest. This depends on the text
alone, never on where it was cut into pieces. Text is held back only while it can still be the beginning of a stop.
"""

from __future__ import annotations


class StopMatcher:
    """Finds the first stop string in text that comes piece by piece.

    Attributes:
        matched: The stop that was found, or None.

    Args:
        stops: The stop strings; none may be empty.
        include: Whether the stop itself belongs to the text.
    """

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        assert all(stops), "an empty stop is refused with the request (SamplingParams)"
        self._stops = stops
        self._include = include
        self._held = ""
        self._num_passed = 0
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Take more text; return what may be shown now and whether a stop has ended the text."""
        if not self._stops:
            return text, False
        if self.matched is not None:
            return "", True
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := self._find(text, stop)) >= 0]
        if found:
            return self._end_at(text, *min(found)), True
        self._num_passed = 0
        return self._hold(text), False

    def skip(self, text: str) -> str:
        """Take more text in which no stop counts that is complete by its end (`min_tokens`); one may begin in it."""
        shown = self._hold(self._held + text)
        self._num_passed = len(self._held)
        return shown

    def finish(self) -> str:
        """Return what is still held back: the text has ended without completing a stop."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, stop: str) -> int:
        """Where a stop begins that ends behind what was skipped; -1: nowhere."""
        return text.find(stop, max(0, self._num_passed - len(stop) + 1))

    def _hold(self, text: str) -> str:
        """Keep back the end of `text` that may be the beginning of a stop; return the rest."""
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _end_at(self, text: str, end: int, start: int) -> str:
        self.matched = text[start:end]
        self._held = ""
        return text[: end if self._include else start]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, and not the whole of it."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0

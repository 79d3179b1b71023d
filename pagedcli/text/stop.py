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
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Take more text; return what may be shown now and whether a stop has ended the text."""
        if self.matched is not None:
            return "", True
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            return self._end_at(text, *min(found)), True
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """Return what is still held back: the text has ended without completing a stop."""
        held, self._held = self._held, ""
        return held

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

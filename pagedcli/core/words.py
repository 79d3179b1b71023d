"""Numbers in sentences. Standard library only."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """A number and what it counts: "1 token", "2 tokens"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

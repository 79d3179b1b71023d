"""Stop strings against a reference that looks at every prefix of the text."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagedcli.text.stop import StopMatcher


def reference(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """The shortest prefix that ends with a stop counts; of several stops that it ends with, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: tuple[str, ...], include: bool) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include)
    shown = []
    for piece in pieces:
        text, matched = matcher.push(piece)
        shown.append(text)
        assert matched == (matcher.matched is not None)
        if matched:
            break
    return [*shown, matcher.finish()], matcher.matched


SMALL = st.text("ab<é", max_size=6)
STOPS = st.lists(st.text("ab<é", min_size=1, max_size=5), max_size=4).map(tuple)


@settings(max_examples=800, deadline=None)
@given(pieces=st.lists(SMALL, max_size=10), stops=STOPS, include=st.booleans())
@example(pieces=["abcab", "d"], stops=("abcabd", "cab"), include=False)
@example(pieces=["aa", "ab"], stops=("aab",), include=False)
def test_same_as_the_reference_wherever_the_text_is_cut(
    pieces: list[str], stops: tuple[str, ...], include: bool
) -> None:
    shown, matched = run(pieces, stops, include)
    assert ("".join(shown), matched) == reference("".join(pieces), stops, include)


@settings(max_examples=400, deadline=None)
@given(pieces=st.lists(SMALL, max_size=8), stops=STOPS)
def test_text_is_held_back_only_while_it_can_still_become_a_stop(
    pieces: list[str], stops: tuple[str, ...]
) -> None:
    matcher = StopMatcher(stops, include=False)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        text, matched = matcher.push(piece)
        shown += text
        if matched:
            break
        held = seen[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
        # exactly the longest one: no character that a later stop begins with has been shown
        ends = [seen[-n:] for n in range(1, len(seen) + 1)]
        assert len(held) == max(
            (len(e) for e in ends for s in stops if s != e and s.startswith(e)), default=0
        )


def test_after_a_match_nothing_more_is_shown() -> None:
    matcher = StopMatcher(("b",), include=True)
    assert matcher.push("abc") == ("ab", True)
    assert matcher.push("more") == ("", True)
    assert matcher.finish() == ""


def test_without_stops_nothing_is_held_back() -> None:
    assert StopMatcher((), include=False).push("abc") == ("abc", False)


@pytest.mark.parametrize("include", [False, True])
def test_long_stops_and_long_texts_take_no_long_time(include: bool) -> None:
    stop = "a" * 2000 + "b"
    matcher = StopMatcher((stop,), include)
    shown = "".join(matcher.push("a")[0] for _ in range(3000))
    text, matched = matcher.push("b")
    assert matched
    assert shown + text == "a" * 1000 + (stop if include else "")

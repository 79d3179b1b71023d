"""Times between tokens: whatever the order in which samples come, go and pause, none is lost and none made up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from pagedcli.core.plan import TokenEvent
from pagedcli.engine.latency import MAX_NOTES, LatencyBoard, TokenGaps


@dataclass
class Bed:
    """`TokenGaps` as the engine's loop calls it, beside one number per sample: when its last token came."""

    living: set[int] = field(default_factory=set)
    told: Counter[float] = field(default_factory=Counter)
    expected: Counter[float] = field(default_factory=Counter)
    times: dict[int, float] = field(default_factory=dict)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.gaps = TokenGaps(self.count)

    def count(self, gap: float, times: int) -> None:
        assert times > 0
        self.told[gap] += times

    def step(self, events: dict[int, tuple[bool, bool]], wait: int) -> None:
        """Some samples have an event each: whether it brings a token, and whether it is the last."""
        self.now += wait
        self.living |= events.keys()
        for sample, (has_token, _) in events.items():
            if has_token:
                if sample in self.times:
                    self.expected[self.now - self.times[sample]] += 1
                self.times[sample] = self.now
        self.gaps.note([sample for sample, (has_token, _) in events.items() if has_token], self.now)
        for sample, (_, ends) in events.items():
            if ends:
                self.end(sample)

    def end(self, sample: int) -> None:
        self.living.discard(sample)
        self.gaps.forget(sample)
        self.times.pop(sample, None)


def tokens(*samples: int) -> dict[int, tuple[bool, bool]]:
    return dict.fromkeys(samples, (True, False))


# Six names in use at once; each name that ended is a new sample when it comes back, as ids are in the engine.
EVENTS = st.dictionaries(st.integers(0, 5), st.tuples(st.booleans(), st.integers(0, 5).map(lambda n: n == 0)))
STEPS = st.lists(st.tuples(EVENTS, st.integers(1, 9), st.none() | st.integers(0, 5)), max_size=30)


@given(steps=STEPS)
def test_every_gap_is_counted_once(steps: list[tuple[dict[int, tuple[bool, bool]], int, int | None]]) -> None:
    bed = Bed()
    generation = Counter[int]()
    for events, wait, aborted in steps:
        if aborted is not None:
            bed.end(aborted + 6 * generation[aborted])
            generation[aborted] += 1
        bed.step({name + 6 * generation[name]: event for name, event in events.items()}, wait)
        generation.update(name for name, (_, ends) in events.items() if ends)
        assert bed.told == bed.expected


def test_samples_that_go_on_together_are_told_at_once() -> None:
    bed = Bed()
    calls: list[tuple[float, int]] = []
    bed.gaps = TokenGaps(lambda gap, times: calls.append((gap, times)))
    for wait in (1, 2, 3):
        bed.step(tokens(0, 1, 2), wait)
    assert calls == [(2.0, 3), (3.0, 3)]


def test_a_pause_counts_whole_and_an_end_is_forgotten() -> None:
    bed = Bed()
    bed.step(tokens(0, 1), 1)
    bed.step(tokens(0), 1)
    bed.step(tokens(0), 1)
    bed.step({0: (True, True), 1: (True, False)}, 1)  # 1 was held back for three steps
    assert bed.told == {1.0: 3, 3.0: 1}
    bed.step(tokens(2), 1)
    bed.end(2)
    bed.step(tokens(1), 5)
    assert bed.told == {1.0: 3, 3.0: 1, 6.0: 1}
    assert not bed.gaps._earlier.keys() - bed.living, "what has ended takes no memory"


def test_a_step_without_tokens_changes_nothing() -> None:
    bed = Bed()
    bed.step(tokens(0), 1)
    bed.step({1: (False, True)}, 1)
    bed.step(tokens(0), 1)
    assert bed.told == {2.0: 1}


def test_the_board_counts_what_was_noted_when_it_is_asked_and_when_enough_was_noted() -> None:
    board = LatencyBoard(max_model_len=100)
    for now in range(1, 4):
        board.tokens_came([TokenEvent(1, 7, 0), TokenEvent(2, 7 if now > 1 else None, 0)], float(now))
    board.sample_ended(1)
    board.tokens_came([TokenEvent(2, 7, 0), TokenEvent(3, 7, 0)], 5.0)
    gaps = board.values()["between_tokens"]
    assert (sum(gaps.counts), gaps.total) == (4, 1.0 + 1.0 + 1.0 + 2.0)
    for now in range(6, 1000):
        board.tokens_came([TokenEvent(2, 7, 0)], float(now))
        board.settle_many()
    assert len(board._tokens) <= MAX_NOTES
    assert sum(board.values()["between_tokens"].counts) == 4 + 994

"""Sweeps: which combinations, in which order, and when they end; other load."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from pagedcli.bench.environment import Counters, LoadMeter, describe_machine, provenance
from pagedcli.bench.run import Interrupted, Run
from pagedcli.bench.sweep import Limits, Results, Setting, Sweep
from pagedcli.cli.bench_run import add_comparisons, combinations
from pagedcli.config import EngineConfig
from pagedcli.config_file import Value
from pagedcli.errors import ConfigError
from tests.bench.scripted import request, run_scripted


def test_lists_are_combined_and_other_flags_stay() -> None:
    flags = {
        "cache.page_size": Value("8,16", "--page-size"),
        "device.threads": Value("1, 2", "--threads"),
        "cache.num_pages": Value("64", "--num-pages"),
        "model.dtype": Value("float32", "--dtype"),
        "cache.kv_memory_bytes": Value("1MiB,2MiB", "--kv-memory"),
    }
    found = list(combinations(flags))
    assert len(found) == 8
    swept, given = found[-1]
    assert swept == {"cache.page_size": 16, "cache.kv_memory_bytes": "2MiB", "device.threads": 2}
    assert given["cache.num_pages"] == Value(64, "--num-pages")
    assert given["model.dtype"] == Value("float32", "--dtype")
    assert len({tuple(values.items()) for values, _ in found}) == 8


@pytest.mark.parametrize(
    ("text", "told"),
    [("8,x", "'x'"), ("8,,16", "missing"), ("8,16,8", "8 is there twice"), ("-4", "'-4'"), ("1.5", "'1.5'")],
)
def test_a_bad_item_is_refused_with_its_flag(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"--page-size {text}.*{told}"):
        list(combinations({"cache.page_size": Value(text, "--page-size")}))


@dataclasses.dataclass
class _Session:
    """Gives runs whose durations are written down."""

    run_of: Run
    seconds: dict[int, list[float]]
    clock: list[float]
    order: list[int] = dataclasses.field(default_factory=list)
    interrupt_at: int | None = None
    failing: tuple[int, ...] = ()

    def resolve(self, config: EngineConfig) -> Any:
        raise NotImplementedError

    def run(self, config: EngineConfig, workload: Sequence[object], *, watch: object = None) -> Run:
        size = config.cache.page_size
        times = self.seconds[size]
        seconds = times[self.order.count(size) % len(times)]
        self.order.append(size)
        self.clock[0] += seconds
        run = dataclasses.replace(self.run_of, seconds=seconds)
        if size in self.failing:
            refused = dataclasses.replace(run.requests[0], error="needs 4 pages", token_times=())
            run = dataclasses.replace(run, requests=(refused,))
        if len(self.order) == self.interrupt_at:
            raise Interrupted(dataclasses.replace(run, is_interrupted=True))
        return run


def _sweep(seconds: dict[int, list[float]], limits: Limits, **session: Any) -> tuple[_Session, Results]:
    clock = [0.0]
    run = run_scripted([request("a", 10, 3)])
    runs = _Session(run, seconds, clock, **session)
    settings = [
        Setting(
            {"cache.page_size": size},
            dataclasses.replace(
                EngineConfig(), cache=dataclasses.replace(EngineConfig().cache, page_size=size)
            ),
        )
        for size in seconds
    ]
    load = LoadMeter(begin=False)
    sweep = Sweep(runs, settings, [request("a", 10, 3)], limits, load, clock=lambda: clock[0])
    return runs, sweep.run()


def test_settings_take_turns_forwards_and_backwards() -> None:
    session, results = _sweep({8: [1.0], 16: [2.0], 32: [3.0]}, Limits(rounds=3))
    assert session.order == [8, 16, 32, 32, 16, 8, 8, 16, 32]
    assert [len(runs) for runs in results.runs] == [3, 3, 3]
    assert results.why == "3 rounds, as asked for"


def test_it_ends_when_all_settings_are_tight_and_not_before() -> None:
    steady, shaky = [1.0, 1.0, 1.001], [1.0, 1.5, 0.8, 1.2, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    session, results = _sweep({8: steady, 16: [1.0, 1.0, 1.0]}, Limits(seconds=100.0))
    assert len(session.order) == 6
    assert results.why == "tight after 3 rounds"
    session, results = _sweep({8: steady, 16: shaky}, Limits(seconds=100.0))
    assert len(session.order) > 6


def test_where_nothing_is_served_one_round_is_enough() -> None:
    session, results = _sweep({8: [0.001], 16: [0.001]}, Limits(seconds=100.0), failing=(8, 16))
    assert session.order == [8, 16]
    assert results.why == "no request was served in the first round"
    session, _ = _sweep({8: [0.001]}, Limits(rounds=5), failing=(8,))
    assert session.order == [8]


def test_a_setting_that_serves_nothing_does_not_keep_the_others_from_being_tight() -> None:
    session, results = _sweep({8: [0.001], 16: [1.0]}, Limits(seconds=100.0), failing=(8,))
    assert len(session.order) == 6
    assert results.why == "tight after 3 rounds"


def test_no_round_begins_after_the_time_is_over() -> None:
    _, results = _sweep({8: [5.0, 9.0], 16: [5.0, 2.0]}, Limits(seconds=12.0))
    assert [len(runs) for runs in results.runs] == [2, 2]
    assert results.why == "12 s were over after 2 rounds"


def test_a_minute_for_each_setting_unless_something_else_is_said() -> None:
    assert Limits.of(None, None, 4) == Limits(None, 240.0)
    assert Limits.of(5, None, 4) == Limits(5, None)
    assert Limits.of(None, 7.0, 4) == Limits(None, 7.0)


def test_settings_are_compared_with_the_first_in_pairs() -> None:
    drift = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]  # the machine becomes slower all the time
    seconds = {8: drift, 16: [value / 1.05 for value in drift], 32: [0.9, 1.3, 1.1, 1.4, 1.35, 1.6]}
    _, results = _sweep(seconds, Limits(rounds=6))
    runs: list[dict[str, Any]] = [{}, {}, {}]
    add_comparisons(runs, results)
    assert runs[0] == {}
    assert runs[1]["against_first"]["verdict"] == "1.05 times faster"
    assert runs[1]["against_first"]["low"] == pytest.approx(1.05)
    assert runs[2]["against_first"]["verdict"] == "no difference shown"


def test_an_interrupted_sweep_keeps_whole_runs_and_part_of_one_only_where_there_is_no_other() -> None:
    _, results = _sweep({8: [1.0], 16: [2.0]}, Limits(rounds=3), interrupt_at=3)
    assert results.is_interrupted
    assert [len(runs) for runs in results.runs] == [1, 1]
    assert not any(run.is_interrupted for runs in results.runs for run in runs)
    _, results = _sweep({8: [1.0], 16: [2.0]}, Limits(rounds=3), interrupt_at=1)
    assert [[run.is_interrupted for run in runs] for runs in results.runs] == [[True], []]


def test_other_load_is_what_others_use_while_something_is_measured() -> None:
    readings = iter(
        [
            Counters(0.0, 100.0, 10.0, 5.0),
            Counters(10.0, 116.0, 22.0, 5.5),  # 16 busy, 12 of them ours, half a second withheld
            Counters(50.0, 900.0, 22.0, 80.0),
            Counters(60.0, 908.0, 30.0, 80.0),  # 8 busy, all ours; what lay between does not count
        ]
    )
    meter = LoadMeter(begin=False, read=lambda: next(readings), cpus=4)
    for _ in range(2):
        meter.begin()
        meter.end()
    seen = meter.seen()
    assert seen is not None
    assert (seen.others, seen.stolen) == pytest.approx((4 / 20, 0.5 / 20))
    assert not seen.is_noticeable
    assert "none to speak of" in str(seen)
    noisy = dataclasses.replace(seen, others=1.0)
    assert str(noisy).startswith("noticed: other processes used 1.00 of 4 processors")


def test_a_busy_neighbour_is_noticed() -> None:
    """A process of its own that computes all the time, beside one that sleeps."""
    import subprocess
    import sys
    import time

    meter = LoadMeter()
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(1.0)
        seen = meter.seen()
    finally:
        busy.kill()
        busy.wait()
    assert seen is not None
    assert seen.others > 0.2


def test_the_machine_and_the_command_are_told() -> None:
    machine = describe_machine()
    assert machine["memory_bytes"] > 1 << 28
    assert machine["cores"] >= 1
    assert {"version", "date", "command"} == set(provenance())

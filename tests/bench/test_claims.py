"""Every claim is judged on made-up measurements on both sides of its threshold, and says why where it cannot be."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pytest

from pagedcli.bench.claims import Measurements, Verdict, as_dict, factor_verdict
from pagedcli.bench.claims_list import CLAIMS
from pagedcli.bench.statistics import Interval

YES, NO, SAME = Verdict.CONFIRMED, Verdict.REFUTED, Verdict.NO_DIFFERENCE
C, F, P, S = (f"modes/{name}" for name in (
    "contiguous, continuous", "first-fit, continuous", "paged, continuous", "paged, static"
))  # fmt: skip
Arms = Mapping[str, Mapping[str, float]]
BY_ID = {claim.id: claim for claim in CLAIMS}


def measured(
    arms: Arms, facts: Mapping[str, float] | None = None, jitter: Sequence[float] = (1, 1.001, 0.999)
) -> Measurements:
    """Each arm in three rounds that hardly differ: the same drift in all arms of a round."""
    rounds = {
        name: [{key: value * factor for key, value in figures.items()} for factor in jitter]
        for name, figures in arms.items()
    }
    return Measurements(rounds, facts or {}, {})


def rates(**values: float) -> Arms:
    return {name.replace("__", "/"): {"output_tokens_per_s": value} for name, value in values.items()}


def uses(contiguous: float, paged: float) -> Arms:
    return {C: {"kv_use": contiguous}, F: {"kv_use": 0.6}, P: {"kv_use": paged}}


def at_once(contiguous: float, paged: float) -> Arms:
    return {C: {"peak_running": contiguous}, F: {"peak_running": 10}, P: {"peak_running": paged}}


def contexts(contiguous: float, paged: float) -> Arms:
    lengths = {"contiguous": contiguous, "first-fit": 900, "paged": paged}
    return {
        f"context/{name}": {"longest_tokens": length, "peak_running": 8} for name, length in lengths.items()
    }


def pages(figure: str, **values: float) -> Arms:
    return {f"pages/{size[1:]}": {figure: value} for size, value in values.items()}


def batches(rate_8: float, page_16: float) -> Arms:
    arms: dict[str, dict[str, float]] = {
        f"batch/{size}": {"output_tokens_per_s": rate, "tpot_s": 0.02}
        for size, rate in ((1, 50), (4, 150), (8, rate_8), (16, 300))
    }
    return {**arms, **pages("output_tokens_per_s", p8=190, p16=page_16, p32=200)}


def tpots(static: float, continuous: float) -> Arms:
    return {S: {"tpot_s": static, "e2e_s": 2}, P: {"tpot_s": continuous, "e2e_s": 1}}


def modes(contiguous: float, paged: float) -> Arms:
    values = {C: contiguous, F: 90, P: paged}
    return {name: {"output_tokens_per_s": value} for name, value in values.items()}


def fairness(alone: float, fcfs: float, shortest: float) -> Arms:
    figures = {"short only": alone, "fcfs": fcfs, "shortest": shortest}
    return {f"fairness/{arm}": {"short_e2e_s": value, "long_e2e_s": 9} for arm, value in figures.items()}


def int4(original: float, awq: float, gptq: float) -> Arms:
    single = {"original": original, "awq": awq, "gptq": gptq}
    arms = {f"int4/{name}": {"output_tokens_per_s": rate} for name, rate in single.items()}
    main = {"modes/+ prefix sharing": 100, "modes/+ AWQ": 130, "modes/+ GPTQ": 120}
    return {**arms, **{name: {"output_tokens_per_s": rate} for name, rate in main.items()}}


CASES: list[tuple[str, Measurements, Verdict]] = [
    ("kv-use", measured(uses(0.25, 0.96)), YES),
    ("kv-use", measured(uses(0.25, 0.94)), NO),
    ("kv-use", measured(uses(0.35, 0.96)), NO),
    ("reserved", measured({"reserved/contiguous": {"kv_use": 0.085}}), YES),
    ("reserved", measured({"reserved/contiguous": {"kv_use": 0.11}}), NO),
    ("concurrency", measured(at_once(4, 16), jitter=(1,)), YES),
    ("concurrency", measured(at_once(4, 15), jitter=(1,)), NO),
    ("context", measured(contexts(256, 400), jitter=(1,)), YES),
    ("context", measured(contexts(256, 380), jitter=(1,)), NO),
    ("overhead", measured(pages("output_tokens_per_s", p16=100, p256=105)), YES),
    ("overhead", measured(pages("output_tokens_per_s", p16=100, p256=95)), NO),
    ("overhead", measured(pages("output_tokens_per_s", p16=100, p256=100)), SAME),
    ("swing", measured(pages("swing", p8=0.2, p32=0.1)), YES),
    ("swing", measured(pages("swing", p8=0.1, p32=0.2)), NO),
    ("swing", measured(pages("swing", p8=0.105, p32=0.1)), SAME),
    ("page-gain", measured(pages("output_tokens_per_s", p8=100, p32=103)), YES),
    ("page-gain", measured(pages("output_tokens_per_s", p8=100, p32=101)), NO),
    ("page-gain", measured(pages("output_tokens_per_s", p8=100, p32=100)), SAME),
    ("large-pages-scheduler", measured(pages("scheduler_s_per_step", p16=1e-4, p256=1.2e-4)), YES),
    ("large-pages-scheduler", measured(pages("scheduler_s_per_step", p16=1e-4, p256=0.8e-4)), NO),
    ("large-pages-waste", measured(pages("kv_use", p16=0.95, p256=0.5)), YES),
    ("large-pages-waste", measured(pages("kv_use", p16=0.95, p256=0.9)), NO),
    ("balance", measured(batches(290, 199)), YES),
    ("balance", measured(batches(250, 199)), NO),
    ("balance", measured(batches(290, 190)), NO),
    ("small-batches", measured(rates(batch__1=50, batch__2=60, batch__4=80)), YES),
    ("small-batches", measured(rates(batch__1=50, batch__2=65, batch__4=130)), NO),
    ("tpot", measured(tpots(0.03, 0.02)), YES),
    ("tpot", measured(tpots(0.02, 0.03)), NO),
    ("needs-paging", measured(modes(50, 100)), YES),
    ("needs-paging", measured(modes(90, 100)), NO),
    ("long-slow-short", measured(fairness(1, 2, 1)), YES),
    ("long-slow-short", measured(fairness(1, 1.4, 1)), NO),
    ("policy", measured(fairness(1, 3, 1)), YES),
    ("policy", measured(fairness(1, 3, 2.7)), NO),
    ("int4-speed", measured(int4(50, 110, 80)), YES),
    ("int4-speed", measured(int4(50, 90, 80)), NO),
    ("int4-loss", measured({}, {"awq.perplexity_increase": 0.009}), YES),
    ("int4-loss", measured({}, {"awq.perplexity_increase": 0.1, "gptq.perplexity_increase": 0.02}), NO),
    ("making", measured({}, {"awq.making_s": 600, "gptq.making_s": 7200}), YES),
    ("making", measured({}, {"awq.making_s": 60, "gptq.making_s": 90}), NO),
    ("awq-speed", measured(int4(50, 84, 80)), YES),
    ("awq-speed", measured(int4(50, 78, 80)), NO),
    ("awq-speed", measured(int4(50, 80, 80)), SAME),
]  # fmt: skip


@pytest.mark.parametrize(("claim", "measurements", "verdict"), CASES)
def test_a_claim_is_judged_by_its_threshold(claim: str, measurements: Measurements, verdict: Verdict) -> None:
    finding = BY_ID[claim].check(measurements)
    assert finding.verdict is verdict, finding.measured
    assert finding.figures
    assert any(character.isdigit() for character in finding.measured)


def test_each_claim_can_be_confirmed_and_refuted() -> None:
    for wanted in (YES, NO):
        assert {claim for claim, _, verdict in CASES if verdict is wanted} == set(BY_ID)
    assert len(BY_ID) == len(CLAIMS)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_what_was_not_run_is_not_measured_and_says_so(claim: object) -> None:
    finding = BY_ID[claim.id].check(Measurements({}, {}, {"": "because it was left out"}))  # type: ignore[attr-defined]
    assert finding.verdict is Verdict.NOT_MEASURED
    assert finding.measured in ("because it was left out", "batch 8 was not run")


def test_a_checkpoint_that_is_not_there_names_its_flag() -> None:
    missing = {
        "int4/awq": "no AWQ checkpoint: give --awq DIR",
        "int4/gptq": "no GPTQ checkpoint: give --gptq DIR",
    }
    arms = {"int4/original": [{"output_tokens_per_s": 5.0}] * 3}
    finding = BY_ID["int4-speed"].check(Measurements(arms, {}, missing))
    assert (finding.verdict, finding.measured) == (Verdict.NOT_MEASURED, "no AWQ checkpoint: give --awq DIR")


def test_one_round_shows_no_difference_in_time() -> None:
    finding = BY_ID["page-gain"].check(measured(pages("output_tokens_per_s", p8=100, p32=200), jitter=(1,)))
    assert finding.verdict is Verdict.NOT_MEASURED
    assert "--repeats 2" in finding.measured


def test_rounds_are_paired_so_that_a_drift_does_not_hide_a_difference() -> None:
    drift = (1.0, 0.7, 0.5, 0.9)
    finding = BY_ID["page-gain"].check(measured(pages("output_tokens_per_s", p8=100, p32=105), jitter=drift))
    assert finding.verdict is YES
    assert finding.figures["factor"] == pytest.approx(1.05)


@pytest.mark.parametrize(
    ("interval", "least", "verdict"),
    [
        ((0.9, 1.0, 1.1), 1.02, SAME),
        ((0.9, 1.1, 1.3), 1.02, SAME),
        ((1.01, 1.03, 1.05), 1.02, YES),
        ((1.005, 1.01, 1.015), 1.02, NO),
        ((0.8, 0.9, 0.95), 1.02, NO),
        ((0.9, 1.1, 1.3), 2.0, NO),
        ((1.5, 2.1, 2.6), 2.0, YES),
        ((0.2, 3.0, 45.0), 2.0, SAME),
    ],
)
def test_an_interval_around_one_shows_a_difference_only_where_much_was_claimed(
    interval: tuple[float, float, float], least: float, verdict: Verdict
) -> None:
    assert factor_verdict(Interval(*interval), least) is verdict


def test_thresholds_are_told_in_the_test_and_all_of_it_is_json() -> None:
    for claim, measurements, _ in CASES:
        row = as_dict(BY_ID[claim], BY_ID[claim].check(measurements))
        assert json.loads(json.dumps(row)) == row
        assert "onfirmed" in row["test"]
        assert row["text"].endswith(".")

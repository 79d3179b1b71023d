"""Limits of the machine: which rate a run is held against, and what is measured without a compiler."""

from __future__ import annotations

import pytest

from pagedcli.bench import machine
from pagedcli.bench.machine import MachineRates, can_compile, measure_limits, measure_machine

RATES = MachineRates(2, 36e9, 1e11, 2e11, 4e11, 2e12, 8e11, 4e12)


@pytest.mark.parametrize(
    ("products", "isa", "rate"),
    [
        ("int8", "amx", 4e12),
        ("int8", "avx512", 8e11),
        ("bfloat16", "amx", 2e12),
        ("bfloat16", "avx512bf16", 4e11),
        ("bfloat16", "avx2", 1e11),
        ("float32", "amx", 2e11),
    ],
)
def test_the_rate_is_that_of_the_instructions_in_use(
    products: str, isa: str, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "can_compile", lambda: True)
    monkeypatch.setattr(machine, "measure_machine", lambda threads: RATES)
    limits = measure_limits("cpu", products, isa, 2)
    assert (limits.flops_per_s, limits.read_bytes_per_s, limits.products) == (rate, 36e9, products)


def test_what_this_machine_lacks_is_not_known_rather_than_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "can_compile", lambda: True)
    monkeypatch.setattr(machine, "measure_machine", lambda threads: MachineRates(1, 1e9, 1e9, 0.0, 0.0, 0.0))
    assert measure_limits("cpu", "int8", "avx2", 1).flops_per_s is None


@pytest.mark.parametrize(("products", "is_known"), [("float32", True), ("bfloat16", False), ("int8", False)])
def test_without_a_compiler_numpy_measures_what_it_can(
    products: str, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "can_compile", lambda: False)
    monkeypatch.setattr(machine, "NUMPY_MEGABYTES", 16)
    monkeypatch.setattr(machine, "NUMPY_PRODUCT", (64, 128, 256))
    limits = measure_limits("cpu", products, "avx2", 1)
    assert 1e8 < limits.read_bytes_per_s < 1e13
    assert (limits.flops_per_s is not None) is is_known
    assert "numpy" in limits.measured_by


@pytest.mark.skipif(not can_compile(), reason="no C compiler, or no checkout")
def test_reading_alone_gives_the_rate_of_every_pass() -> None:
    with machine.reading(1) as read:
        first, second = read(16), read(32)
    assert len(first) == len(second) == machine.READING_PASSES
    assert all(1e8 < rate < 1e13 for rate in first + second)
    assert first != second


@pytest.mark.nightly
@pytest.mark.skipif(not can_compile(), reason="no C compiler, or no checkout")
def test_the_measurement_compiles_and_gives_rates_that_can_be() -> None:
    rates = measure_machine(1, megabytes=64)
    assert 1e8 < rates.read_bytes_per_s < 1e13
    assert rates.f32_flops_per_s > 1e8
    assert rates.f32_wide_flops_per_s == 0 or rates.f32_wide_flops_per_s > rates.f32_flops_per_s / 2


def test_where_the_program_fails_numpy_measures_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    monkeypatch.setattr(machine, "NUMPY_MEGABYTES", 8)
    monkeypatch.setattr(machine, "NUMPY_PRODUCT", (8, 8, 8))
    limits = measure_limits("cpu", "float32", "", 1)
    assert limits.read_bytes_per_s > 0
    assert limits.measured_by == "numpy: machine.c failed: CalledProcessError"


def test_more_threads_than_it_can_have_are_measured_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(machine, "measure_machine", lambda threads: (asked.append(threads), RATES)[1])
    monkeypatch.setattr(machine, "can_compile", lambda: True)
    assert measure_limits("cpu", "float32", "", 1000).threads == 1000
    assert asked == [256]

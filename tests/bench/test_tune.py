"""`paged bench tune`: a made-up machine with a known optimum and noise, the budget, the file, and who reads it."""

from __future__ import annotations

import dataclasses
import json
import random
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pagedcli.bench import tune
from pagedcli.bench.report.build import build_document
from pagedcli.bench.report.markdown import as_markdown
from pagedcli.bench.tune import Aim, Candidate, Figures, Trial, Tuned, Tuner, default_space
from pagedcli.bench.tuned_file import render, verdict_text
from pagedcli.cli import bench_tune_run
from pagedcli.cli.bench_tune_run import TuneOptions, aim_of, check_output, space_of
from pagedcli.cli.config_note import machine_facts, misfits
from pagedcli.config import EngineConfig
from pagedcli.config_file import Value, load_settings
from pagedcli.errors import ConfigError
from tests.bench.scripted import request, run_scripted

DEFAULT = Candidate(threads=2, max_num_seqs=256, max_num_batched_tokens=2048, page_size=16)
SPACE = default_space(DEFAULT, cores=4, requests=64)


class Machine:
    """Makes up runs: each takes a second of its own clock."""

    def __init__(self, gains: dict[str, dict[int, float]], noise: float = 0.02, seed: int = 0) -> None:
        self.now, self.runs = 0.0, 0
        self._gains, self._noise, self._random = gains, noise, random.Random(seed)
        self.interrupt_at: int | None = None

    def clock(self) -> float:
        return self.now

    def __call__(self, candidate: Candidate) -> Figures:
        self.runs += 1
        if self.runs == self.interrupt_at:
            raise KeyboardInterrupt
        self.now += 1.0
        rate = 100.0 * self._random.lognormvariate(0, self._noise)
        for name, gains in self._gains.items():
            rate *= gains.get(getattr(candidate, name), 1.0)
        return Figures(rate, 0.1 * candidate.max_num_batched_tokens / 2048, 0.02, 100 / rate)

    def tune(self, aim: Aim | None = None, seconds: float = 1000.0) -> Tuned:
        tuner = Tuner(self, aim or Aim(), SPACE, DEFAULT, seconds=seconds, clock=self.clock)
        return tuner.run()


@pytest.mark.parametrize("seed", range(5))
def test_the_optimum_is_found_and_shown(seed: int) -> None:
    machine = Machine({"threads": {4: 1.5, 1: 0.6}, "page_size": {32: 1.2, 64: 1.1}}, seed=seed)
    tuned = machine.tune()
    assert tuned.best == dataclasses.replace(DEFAULT, threads=4, page_size=32)
    assert tuned.is_better
    assert tuned.final is not None
    assert tuned.final.middle == pytest.approx(1.8, rel=0.03)
    assert len(tuned.comparison[0]) == len(tuned.comparison[1]) >= 6


def test_noise_is_not_taken_for_a_gain() -> None:
    kept = [Machine({}, noise=0.05, seed=seed).tune().best == DEFAULT for seed in range(40)]
    assert sum(kept) >= 39  # search (99%) and comparison (95%) must both be wrong


def test_settings_that_depend_on_each_other_are_found_in_a_second_pass() -> None:
    class Coupled(Machine):
        def __call__(self, candidate: Candidate) -> Figures:
            found = super().__call__(candidate)
            helps = candidate.page_size == 64 and candidate.threads == 4
            good = (
                2.0 if helps else 1.2 if candidate.page_size == 64 else 0.9 if candidate.threads == 4 else 1.0
            )
            return dataclasses.replace(found, tokens_per_s=found.tokens_per_s * good)

    tuned = Coupled({}).tune()
    assert (tuned.best.threads, tuned.best.page_size) == (4, 64)


@pytest.mark.parametrize("seconds", [3.0, 20.0, 60.0, 150.0])
def test_the_budget_is_kept(seconds: float) -> None:
    machine = Machine({"threads": {4: 1.5}})
    machine.tune(seconds=seconds)
    # the comparison with the defaults has two rounds at least, of two runs each
    assert machine.now <= max(seconds, 0.65 * seconds + 4)


def test_what_there_was_no_time_for_is_said() -> None:
    cut = Machine({}).tune(seconds=60)
    assert (cut.is_cut, cut.untried) == (True, ("page_size",))
    assert "over before all of page_size was tried: give more --minutes" in verdict_text(cut, Aim())
    whole = Machine({}).tune(seconds=1000)
    assert (whole.is_cut, whole.untried) == (False, ())
    assert "time was over" not in verdict_text(whole, Aim())


def test_time_for_a_comparison_is_searched_in_while_there_is_none_to_make() -> None:
    machine = Machine({})
    tuned = machine.tune(seconds=60)
    assert tuned.final is None
    assert 60 - 12 - 1 <= machine.now <= 60 - 12  # six rounds of two runs could still be compared


def test_a_late_find_is_compared_with_the_defaults() -> None:
    """Found after 85 runs, when a search that has something already would be over."""
    machine = Machine({"page_size": {32: 1.5}})
    tuned = machine.tune(seconds=110)
    assert tuned.best.page_size == 32
    assert len(tuned.comparison[0]) >= 6
    assert machine.now <= 110


def test_a_limit_counts_more_than_throughput() -> None:
    gains = {"max_num_batched_tokens": {4096: 1.4, 512: 0.9, 1024: 0.95, 256: 0.7, 128: 0.5}}
    assert Machine(gains).tune().best.max_num_batched_tokens == 4096
    limited = Machine(gains).tune(Aim(max_ttft_s=0.055))
    assert limited.best.max_num_batched_tokens == 1024  # TTFT is 50 ms; 100 ms with the default
    assert Aim(max_ttft_s=0.055).meets(Figures(1, 0.05, 1, 1))
    assert not Aim(max_ttft_s=0.055).meets(Figures(1, 0.06, 1, 1))


def test_limits_that_are_missed_are_said() -> None:
    slow, fast = Figures(90.0, 0.2, 0.02, 10.0), Figures(10.0, 0.05, 0.02, 10.0)
    other = dataclasses.replace(DEFAULT, page_size=32)
    aim = Aim(max_ttft_s=0.1)
    tuned = Tuned(DEFAULT, DEFAULT, DEFAULT, [Trial(DEFAULT, [slow]), Trial(other, [slow])])
    assert verdict_text(tuned, aim).endswith("they are kept; nothing keeps the limits")
    tuned.trials[1].figures = [fast]
    assert "the limits are missed, though not by all" in verdict_text(tuned, aim)
    tuned.trials[0].figures = [fast]
    assert "limits" not in verdict_text(tuned, aim)


def test_worth_by_hand() -> None:
    figures = Figures(tokens_per_s=90.0, ttft_s=0.2, itl_s=0.02, e2e_s=10.0)
    assert Aim("throughput").worth(figures) == 90
    assert Aim("latency").worth(figures) == pytest.approx(0.1)
    assert Aim("balanced").worth(figures) == pytest.approx(3)
    assert Aim(max_ttft_s=0.1).worth(figures) == pytest.approx(90 / 16)
    assert Aim(max_itl_s=0.01, max_ttft_s=0.1).worth(figures) == pytest.approx(90 / 256)


def test_an_interrupt_keeps_what_was_shown() -> None:
    machine = Machine({"threads": {4: 1.5, 1: 0.5}})
    machine.interrupt_at = 40
    tuned = machine.tune()
    assert tuned.is_interrupted
    assert tuned.best.threads == 4
    assert tuned.final is None
    assert sum(len(trial.figures) for trial in tuned.trials) == 39
    assert "interrupted" in verdict_text(tuned, Aim())


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_an_interrupt_in_the_comparison_is_no_comparison(rounds: int) -> None:
    """Of one round the interval is a point, and would show anything."""
    gains = {"threads": {4: 1.5, 1: 0.5}}
    whole = Machine(gains, noise=0.0).tune()
    machine = Machine(gains, noise=0.0)
    searching = sum(len(trial.figures) for trial in whole.trials) - 2 * len(whole.comparison[0])
    machine.interrupt_at = searching + 2 * rounds + 1
    tuned = machine.tune()
    assert len(tuned.comparison[0]) == rounds
    assert tuned.best.threads == 4
    assert tuned.final is None
    assert "interrupted before the comparison" in verdict_text(tuned, Aim())


def test_what_cannot_run_is_left_out() -> None:
    class Small(Machine):
        def __call__(self, candidate: Candidate) -> Figures:
            if candidate.page_size == 128:
                raise ConfigError("the pool is too small")
            return super().__call__(candidate)

    tuned = Small({"page_size": {64: 1.3}}).tune()
    assert tuned.best.page_size == 64
    assert [trial.problem for trial in tuned.trials if trial.candidate.page_size == 128] == [
        "the pool is too small"
    ]


def test_the_space() -> None:
    space = default_space(DEFAULT, cores=6, requests=32)
    assert space["threads"] == [1, 2, 4, 6]
    assert space["max_num_seqs"] == [4, 8, 16, 256]
    assert 16 in space["page_size"]
    given = {"cache.page_size": Value(32, "--page-size")}
    settings = dataclasses.replace(load_settings(read_folder_file=False), given=given)
    assert "page_size" not in space_of(settings, DEFAULT, requests=32)
    assert "threads" not in space_of(settings, DEFAULT, requests=32, device="cuda")
    everything = {f"{section}.{name}": Value(1, "--set") for name, section in tune.SETTINGS.items()}
    with pytest.raises(ConfigError, match="nothing to search"):
        space_of(dataclasses.replace(settings, given=everything), DEFAULT, requests=32)


def test_a_run_with_failed_requests_takes_its_setting_out_of_the_search() -> None:
    """As where large pages leave too few of them; a ConfigError is what the search takes for that."""
    served = run_scripted([request("a", 10, 3)])
    assert bench_tune_run.figures_of(served).tokens_per_s > 0
    refused = dataclasses.replace(served.requests[0], error="needs 4 pages, the pool has 2", token_times=())
    with pytest.raises(ConfigError, match="1 of 1 requests failed, such as a: needs 4 pages"):
        bench_tune_run.figures_of(dataclasses.replace(served, requests=(refused,)))


# ---- the file


ABOUT = {"model": "m", "cores": 2, "aim": 'a "quoted" one', "requests": None}


def test_the_file_has_what_differs_and_is_read_back(tmp_path: Path) -> None:
    tuned = Machine({"threads": {4: 1.5}, "page_size": {32: 1.3}}).tune()
    text = render(tuned, Aim(), ABOUT)
    (tmp_path / "paged.toml").write_text(text)
    settings = load_settings(folder=tmp_path)
    assert (settings.engine.device.threads, settings.engine.cache.page_size) == (4, 32)
    assert settings.engine.scheduler == EngineConfig().scheduler
    assert settings.folder_file == tmp_path / "paged.toml"
    assert settings.tuned == {"model": "m", "cores": 2, "aim": 'a "quoted" one'}
    assert "# Measured: " in text
    assert text.count("tokens/s") >= 5
    flagged = load_settings(folder=tmp_path, flags={"cache.page_size": Value(8, "--page-size")})
    assert flagged.engine.cache.page_size == 8
    refused = load_settings(folder=tmp_path, read_folder_file=False)
    assert refused.engine == EngineConfig()
    assert refused.folder_file is None


def test_no_difference_writes_no_settings() -> None:
    tuned = Tuned(DEFAULT, DEFAULT, DEFAULT, [Trial(DEFAULT, [Figures(1, 1, 1, 1)])])
    text = render(tuned, Aim(), ABOUT)
    assert set(tomllib.loads(text)) == {"tuned"}
    assert "no difference shown" in text


def test_a_file_that_does_not_fit_is_told_of() -> None:
    here = machine_facts(EngineConfig())
    assert list(misfits(here, here)) == []
    assert list(misfits({}, here)) == []
    (warning,) = misfits({**here, "cores": 999}, here)
    assert "tuned for cores 999, and this is" in warning
    (warning,) = misfits({**here, "model": "other"}, here)
    assert "tuned for model other, and this is SmolLM2-135M-Instruct" in warning


def test_somebodys_own_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "paged.toml"
    check_output(path, overwrite=False)
    path.write_text("seed = 1\n")
    with pytest.raises(ConfigError, match="did not write it"):
        check_output(path, overwrite=False)
    check_output(path, overwrite=True)
    path.write_text("[tuned]\ncores = 2\n")
    check_output(path, overwrite=False)
    with pytest.raises(ConfigError, match="there is no folder"):
        check_output(tmp_path / "none" / "paged.toml", overwrite=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (TuneOptions(aim="fast"), "choose throughput, latency, balanced"),
        (TuneOptions(max_ttft_ms=0), "--max-ttft-ms is 0: it must be positive"),
        (TuneOptions(minutes=-1), "--minutes is -1"),
        (TuneOptions(max_itl_ms=float("inf")), "--max-itl-ms is inf, which limits nothing"),
    ],
)
def test_mistakes(options: TuneOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        aim_of(options)


def test_generate_serve_and_bench_read_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to the moment in which the engine would be opened."""
    from pagedcli.cli import engine_access
    from pagedcli.cli.main import run

    seen: list[Any] = []

    def refuse(config: EngineConfig, *arguments: Any) -> Any:
        seen.append(config)
        raise ConfigError("enough seen")

    monkeypatch.setattr(engine_access, "open_engine", refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "paged.toml").write_text("[cache]\npage_size = 32\n\n[tuned]\ncores = 999\n")
    assert run(["generate", "-p", "x"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "settings from paged.toml in this folder (--no-config leaves it unread)" in told
    assert "warning: the settings were tuned for cores 999" in told
    assert run(["generate", "-p", "x", "--no-config"]) == 2
    assert "paged.toml" not in capsys.readouterr().err
    run(["serve", "--port", "0"])
    told = " ".join(capsys.readouterr().err.split())
    assert "settings from paged.toml in this folder" in told
    assert [config.cache.page_size for config in seen] == [32, 16, 32]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """What the session of the command makes its runs up with, in an empty folder; page 32 is half as fast again."""
    machine = Machine({"page_size": {32: 1.5}})

    class Run:
        failed = ()

        def __init__(self, figures: Figures) -> None:
            self.figures = figures

    class Session:
        spec = type("Spec", (), {"vocab_size": 100})
        choice = type("Choice", (), {"device": "cpu", "dtype": "float32"})

        def encode(self, text: str) -> tuple[int, ...]:
            raise NotImplementedError

        def __init__(self, *arguments: Any, **named: Any) -> None:
            pass

        def resolve(self, config: EngineConfig) -> Any:
            return type("Resolved", (), {"threads": 2})

        def run(self, config: EngineConfig, workload: Any) -> Any:
            candidate = Candidate(
                config.device.threads or 0,
                config.scheduler.max_num_seqs,
                config.scheduler.max_num_batched_tokens,
                config.cache.page_size,
            )
            return Run(machine(candidate))

    monkeypatch.setattr(bench_tune_run, "Session", Session)
    monkeypatch.setattr(bench_tune_run, "figures_of", lambda run: run.figures)
    monkeypatch.setattr(bench_tune_run.time, "perf_counter", machine.clock)
    monkeypatch.chdir(tmp_path)
    return machine


def command(*arguments: str) -> int:
    from pagedcli.cli.main import run

    given = ["--requests", "8", "--minutes", "10", "--json", "out.json", "--threads", "2", "-m", "some/model"]
    return run(["bench", "tune", *given, *arguments])


@pytest.mark.usefixtures("machine")
def test_the_whole_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert command() == 0
    written = tomllib.loads(Path("paged.toml").read_text())
    assert (written["cache"], written["tuned"]["model"]) == ({"page_size": 32}, "model")
    data = json.loads(Path("out.json").read_text())
    assert data["best"]["page_size"] == 32
    assert "times the defaults" in as_markdown(build_document(data))
    data["trials"][0]["problem"] = "too few pages"
    told = as_markdown(build_document(data)).replace("\\", "")
    assert "Cannot run: threads 2, batch 256, tokens a step 2048, page 16: too few pages" in told
    assert "paged.toml: 1.5" in " ".join(capsys.readouterr().err.split())
    assert command() == 0  # its own file is replaced


@pytest.mark.usefixtures("machine")
def test_what_the_command_does_not_write(capsys: pytest.CaptureFixture[str]) -> None:
    Path("paged.toml").write_text("seed = 3\n")
    assert command() == 2
    capsys.readouterr()
    for output in ("/dev/null", "."):  # neither is read to see whose it is, nor replaced
        assert command("-o", output, "--overwrite") == 2
        assert "is no file: give the name of one" in capsys.readouterr().err
    assert command("-o", "other.toml", "--minutes", "inf") == 2
    assert "--minutes is inf: give at most 10080, a week" in capsys.readouterr().err
    assert command("-o", "") == 2
    assert "the name of the file is empty" in capsys.readouterr().err


def test_an_interrupt_before_anything_is_shown_writes_nothing(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("kept.toml").write_text("[tuned]\n")
    for output, left in (("kept.toml", "is left as it was"), ("none.toml", "is not written")):
        machine.interrupt_at = machine.runs + 3
        assert command("-o", output) == 130
        assert f"{output} {left}: interrupted before anything" in capsys.readouterr().err
    assert Path("kept.toml").read_text() == "[tuned]\n"
    assert not Path("none.toml").exists()


def test_a_search_that_was_interrupted_says_so() -> None:
    tuned = Tuned(DEFAULT, DEFAULT, DEFAULT, [], is_interrupted=True)
    assert verdict_text(tuned, Aim()).endswith("by anything until it was interrupted: they are kept")

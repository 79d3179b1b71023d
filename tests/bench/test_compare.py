"""`paged bench compare` on a tiny model: what is run, that answers are compared, and what is written and refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from pagedcli.bench import session as session_module
from pagedcli.bench.claims_list import CLAIMS
from pagedcli.bench.compare import Model, quality_facts, run_all
from pagedcli.bench.compare_figures import figures_of, swing
from pagedcli.bench.experiments import ORIGINAL, Plan
from pagedcli.bench.machine import MachineLimits
from pagedcli.bench.run import RequestRun, Run, Sample
from pagedcli.bench.scales import FULL, ONE_PAGE, SHORT, Scale
from pagedcli.bench.session import Session
from pagedcli.cli import bench_compare_run
from pagedcli.cli.main import run
from pagedcli.config import DeviceConfig, EngineConfig, ModelConfig
from pagedcli.errors import ConfigError
from pagedcli.quant.quality import QUALITY_FILE
from tests.conftest import MakeModel

TINY = Scale(
    rounds=2,
    many_rounds=2,
    workload="shared-prefix:32:8-24:4-16",
    requests=10,
    pool_tokens=768,
    longest=256,
    context_pool=512,
    context_short=(8, 8),
    batches=(1, 2, 4, 8),
    batch_requests=8,
    batch_lengths=(8, 4),
    pages=(8, 16, 32, ONE_PAGE),
    page_prompt=(16, 48),
    page_output=(8, 16),
    num_short=6,
    short=(8, 4),
    num_long=4,
    long=(64, 24),
    single_requests=1,
    single=(8, 4),
)
LIMITS = MachineLimits("cpu", 1, 1e9, 1e9, "float32", "nobody")
CONFIG_256 = {"max_position_embeddings": 256}


@pytest.fixture(scope="module")
def model(tiny_checkpoint: MakeModel) -> str:
    return str(tiny_checkpoint("llama", **CONFIG_256))


@pytest.fixture(scope="module")
def compared(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The command's JSON at the tiny scale."""
    folder = tmp_path_factory.mktemp("compare")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_compare_run, "SHORT", TINY)
        patch.setattr(session_module, "measure_limits", lambda *settings: LIMITS)
        file, page = folder / "all.json", folder / "all.html"
        arguments = [
            "bench",
            "compare",
            "-m",
            model,
            "--short",
            "--threads",
            "1",
            "--set",
            "model.dtype=float32",
        ]
        assert (
            run([*arguments, "--json", str(file), "--html", str(page), "--markdown", str(folder / "all.md")])
            == 0
        )
        assert page.read_text().startswith("<!doctype html>")
        assert "# What paging" in (folder / "all.md").read_text()
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def rows(compared: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in compared["rows"]}


def test_six_ways_and_prefix_sharing_answer_the_same_requests_alike(compared: dict[str, Any]) -> None:
    assert list(rows(compared)) == [
        *(f"{kind}, {way}" for kind in ("contiguous", "first-fit", "paged") for way in ("static", "continuous")),
        "+ prefix sharing",
    ]  # fmt: skip
    assert compared["same_ids"] is True
    assert compared["failed"] == []
    assert all(row["requests"] == 10 and row["failed"] == 0 for row in compared["rows"])


def test_each_mechanism_shows_where_it_must(compared: dict[str, Any]) -> None:
    contiguous, first_fit, paged = (
        rows(compared)[f"{kind}, continuous"] for kind in ("contiguous", "first-fit", "paged")
    )
    assert contiguous["peak_running"] == 768 // 256
    assert contiguous["peak_running"] < first_fit["peak_running"] <= paged["peak_running"]
    assert contiguous["kv_use"] < first_fit["kv_use"] < paged["kv_use"]
    assert paged["internal_fragmentation"] == pytest.approx(1 - paged["kv_use"])
    assert paged["external_fragmentation"] == 0 < first_fit["external_fragmentation"]
    assert contiguous["context_tokens"] < first_fit["context_tokens"] <= paged["context_tokens"]
    shared = rows(compared)["+ prefix sharing"]
    assert paged["prefix_hit_rate"] == 0 < shared["prefix_hit_rate"]
    assert rows(compared)["contiguous, static"]["speedup"] == 1


def test_every_claim_is_judged_or_says_why_not(compared: dict[str, Any]) -> None:
    verdicts = {claim["id"]: claim for claim in compared["claims"]}
    assert list(verdicts) == [claim.id for claim in CLAIMS]
    unmeasured = {
        name: claim["measured"] for name, claim in verdicts.items() if claim["verdict"] == "not measured"
    }
    assert set(unmeasured) == {"reserved", "int4-speed", "int4-loss", "making", "awq-speed"}
    assert "256 tokens" in unmeasured["reserved"]
    assert all("--awq DIR" in unmeasured[name] for name in ("int4-speed", "int4-loss", "awq-speed"))
    assert "--quantize DIR" in unmeasured["making"]
    assert verdicts["large-pages-waste"]["verdict"] == "confirmed"


def test_the_file_has_its_head(compared: dict[str, Any]) -> None:
    assert compared["kind"] == "compare"
    assert compared["settings"]["dtype"] == "float32"
    assert compared["settings"]["threads"] == 1
    assert "--dtype float32 --threads 1 --short" in compared["command"]
    assert {"machine", "date", "version", "command", "limits", "seconds", "other_load"} <= set(compared)
    names = [experiment["name"] for experiment in compared["experiments"]]
    assert names == ["context", "batch", "pages", "fairness"]
    assert [arm["name"] for arm in compared["experiments"][1]["arms"]] == ["1", "2", "4", "8"]


def test_the_longest_context_really_ran_beside_all_others(compared: dict[str, Any]) -> None:
    arms = {arm["name"]: arm for arm in compared["experiments"][0]["arms"]}
    assert {name: arm["peak_running"] for name, arm in arms.items()} == dict.fromkeys(arms, 8)
    assert all(arm["preemptions"] == 0 for arm in arms.values())
    assert arms["contiguous"]["longest_tokens"] == 512 // 8


class _Wrong:
    """A session that gives another last token to one request of one arm."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def run(self, config: EngineConfig, workload: Any, *, watch: Any = None) -> Run:
        made = self.session.run(config, workload, watch=watch)
        if config.cache.allocation != "first-fit":
            return made
        first = made.requests[0]
        changed = dataclasses.replace(first, token_ids=(*first.token_ids[:-1], first.token_ids[-1] ^ 1))
        return dataclasses.replace(made, requests=(changed, *made.requests[1:]))


@pytest.mark.parametrize(
    ("last", "rows", "others"),
    [
        (("modes/paged, static", 1), 4, []),  # in the first round
        (("modes/paged, static", 2), 7, []),  # in the second one, which goes backwards
        (("batch/2", 1), 7, ["context", "batch"]),
        (("fairness/short only", 1), 7, ["context", "batch", "pages"]),
    ],
)
def test_ctrl_c_keeps_the_whole_runs(
    last: tuple[str, int],
    rows: int,
    others: list[str],
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the middle of a run of an arm: what ended before it is written, shown and said."""
    monkeypatch.setattr(bench_compare_run, "SHORT", TINY)
    monkeypatch.setattr(session_module, "measure_limits", lambda *settings: LIMITS)
    seen: dict[str, int] = {}
    true_call = bench_compare_run._Turns.__call__

    def interrupt(self: Any, experiment: Any, arm: Any, *numbers: int) -> None:
        name = f"{experiment.name}/{arm.name}"
        seen[name] = seen.get(name, 0) + 1
        true_call(self, experiment, arm, *numbers)
        if (name, seen[name]) == last:
            raise KeyboardInterrupt

    monkeypatch.setattr(bench_compare_run._Turns, "__call__", interrupt)
    file, page, text = tmp_path / "all.json", tmp_path / "all.html", tmp_path / "all.md"
    flags = ["--short", "--threads", "1", "--json", str(file), "--html", str(page), "--markdown", str(text)]
    assert run(["bench", "compare", "-m", model, *flags]) == 130
    found = json.loads(file.read_text())
    assert found["interrupted"] is True
    assert len(found["rows"]) == rows
    assert [experiment["name"] for experiment in found["experiments"]] == others
    told = {claim["verdict"]: claim["measured"] for claim in found["claims"]}
    assert told["not measured"]
    assert any("interrupted" in claim["measured"] for claim in found["claims"])
    assert "Interrupted after" in text.read_text()
    assert page.read_text().startswith("<!doctype html>")
    shown = capsys.readouterr()
    assert "interrupted: these are the figures of" in shown.err.replace("\n", " ")
    assert "Interrupted after" in shown.out


def test_ctrl_c_before_the_first_run_writes_nothing(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*about: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "run", interrupt)
    file = tmp_path / "all.json"
    flags = ["--short", "--threads", "1", "--json", str(file), "-q"]
    assert run(["bench", "compare", "-m", model, *flags]) == 130
    assert not file.exists()
    assert capsys.readouterr().err == "paged: interrupted\n"


TOML = "[serve]\nport = 8001\n[sampling]\ntemperature = 0.5\n[scheduler]\nmax_num_batched_tokens = 64\n"


def test_a_file_of_this_folder_is_read_and_said_and_can_be_refused(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = dataclasses.replace(TINY, rounds=1, many_rounds=1)
    monkeypatch.setattr(bench_compare_run, "SHORT", tiny)
    monkeypatch.chdir(tmp_path)
    Path("paged.toml").write_text(TOML + "policy = 'shortest'\n[cache]\npage_size = 32\n")
    flags = ["bench", "compare", "-m", model, "--short", "--threads", "1", "--json", "all.json"]
    assert run(flags) == 0
    told = capsys.readouterr().err.replace("\n", " ")
    assert "settings from paged.toml" in told
    assert "the comparison sets cache.page_size, scheduler.policy itself: these are not used" in told
    assert json.loads(Path("all.json").read_text())["settings"]["max_num_batched_tokens"] == 64
    assert run([*flags, "--no-config", "-q"]) == 0
    assert capsys.readouterr().err == ""
    assert json.loads(Path("all.json").read_text())["settings"]["max_num_batched_tokens"] > 64


def test_texts_of_a_file_are_compared(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages through the template, all there from the start whatever the file says of arrivals."""
    monkeypatch.setattr(bench_compare_run, "SHORT", dataclasses.replace(TINY, rounds=1, many_rounds=1))
    rows = [
        {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 3, "arrival_s": 1000},
        {"prompt": "a b", "max_tokens": 3},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [
        "--threads",
        "1",
        "--workload",
        str(tmp_path / "rows.jsonl"),
        "--json",
        str(tmp_path / "all.json"),
    ]
    assert run(["bench", "compare", "-m", model, "--short", "-q", *flags]) == 0
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["rows"][0]["requests"] == 2
    assert "The same 2 requests" in found["about"]


def test_what_is_compared_cannot_be_set(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "compare", "-m", model, "--short", "--set", "cache.page_size=8"]) == 2
    assert "the comparison sets cache.page_size itself: leave it out" in capsys.readouterr().err


def test_another_answer_to_the_same_request_is_found(model: str) -> None:
    config = EngineConfig(
        model=ModelConfig(model=model, dtype="float32"), device=DeviceConfig(device="cpu", threads=1)
    )
    session = Session(config)
    plan = Plan(TINY, 0, session.spec.vocab_size, 256, (ORIGINAL,))
    modes = dataclasses.replace(plan.modes(), rounds=1)
    results = run_all({ORIGINAL: Model(_Wrong(session), config)}, [modes])
    assert results.differing == [
        "modes/first-fit, static: modes-0", "modes/first-fit, continuous: modes-0"
    ]  # fmt: skip


def test_answers_that_differ_are_an_error_after_the_report(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_compare_run, "SHORT", dataclasses.replace(TINY, rounds=1, many_rounds=1))
    monkeypatch.setattr(session_module, "measure_limits", lambda *settings: LIMITS)
    true_run = Session.run

    def run_wrongly(self: Session, config: EngineConfig, workload: Any, **more: Any) -> Run:
        wrapped = _Wrong(self)
        wrapped.session = type(
            "Plain", (), {"run": lambda _, *given, **named: true_run(self, *given, **named)}
        )()  # type: ignore[assignment]
        return wrapped.run(config, workload, **more)

    monkeypatch.setattr(Session, "run", run_wrongly)
    file = tmp_path / "all.json"
    assert run(["bench", "compare", "-m", model, "--short", "--threads", "1", "--json", str(file), "-q"]) == 1
    assert json.loads(file.read_text())["same_ids"] is False
    assert "the schedule has changed an answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--requests", "0"], "--requests is 0"),
        (["--kv-tokens", "64"], "has 64: give --kv-tokens 256"),
        (["--kv-tokens", "64", "--max-model-len", "70"], "give --max-model-len 127 and --kv-tokens 127"),
        (["--workload", "fixed:400:200"], "give shorter requests"),
        (["--quantize", "/dev/null/x"], "--quantize /dev/null/x: cannot be a folder"),
        (["--workload", "/dev/zero"], "is a device"),
        (["--workload", "nonsense"], "nonsense"),
        (["--quantize", "x", "--awq", "y"], "leave --awq and --gptq out"),
        (["--awq", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--html", "/nowhere/at/all.html"], "no folder"),
    ],
)
def test_mistakes_are_one_line_before_anything_runs(
    model: str,
    flags: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Session, "run", None)
    assert run(["bench", "compare", "-m", model, "--short", "--threads", "1", *flags]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert words in lines[0]


def test_less_can_be_reserved_than_other_experiments_need(
    tiny_checkpoint: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is loaded for its own longest sequence, not for what one experiment reserves."""
    monkeypatch.setattr(
        bench_compare_run, "SHORT", dataclasses.replace(TINY, rounds=1, many_rounds=1, context_pool=1024)
    )
    file = tmp_path / "all.json"
    flags = ["--short", "--threads", "1", "--max-model-len", "128", "--json", str(file), "-q"]
    assert run(["bench", "compare", "-m", str(tiny_checkpoint("llama")), *flags]) == 0
    found = json.loads(file.read_text())
    assert "reserves 128 tokens" in found["about"]
    assert max(arm["longest_tokens"] for arm in found["experiments"][0]["arms"]) > 256


def test_a_dense_folder_is_no_awq_checkpoint(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "compare", "-m", model, "--short", "--threads", "1", "--awq", model]) == 2
    assert f"--awq {model} is no AWQ checkpoint: its weights are not quantized: leave it out" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize("scale", [FULL, SHORT])
def test_the_scales_fit_what_they_promise(scale: Scale) -> None:
    plan = Plan(scale, 0, 1000, 8192, (ORIGINAL, "awq", "gptq"))
    experiments = plan.experiments()
    assert [item.name for item in experiments] == [
        "modes", "reserved", "context", "batch", "pages", "fairness", "int4"
    ]  # fmt: skip
    ids: dict[str, object] = {}
    for experiment in experiments:
        for arm in experiment.arms:
            for request in arm.workload:
                assert len(request.prompt_token_ids) + request.output_tokens <= arm.max_model_len
                assert ids.setdefault(request.id, request.prompt_token_ids) == request.prompt_token_ids
    pages = next(item for item in experiments if item.name == "pages")
    for arm in pages.arms:  # at every page size all eight fit, so that batches are equal
        assert all(len(r.prompt_token_ids) + r.max_tokens <= ONE_PAGE for r in arm.workload)
        assert arm.pool_tokens // arm.page_size >= sum(
            -(-(len(r.prompt_token_ids) + r.output_tokens) // arm.page_size) for r in arm.workload
        )
    first = experiments[0].arms
    assert all(arm.workload == first[0].workload and arm.pool_tokens == first[0].pool_tokens for arm in first)


def test_the_same_seed_gives_the_same_requests() -> None:
    first, same, other = (Plan(SHORT, seed, 1000, 8192, (ORIGINAL,)).experiments() for seed in (0, 0, 1))
    assert first == same
    assert first != other


def test_figures_of_a_run_by_hand(model: str) -> None:
    def request(name: str, arrival: float, times: tuple[float, ...]) -> RequestRun:
        return RequestRun(name, arrival, 10, 0, times, tuple(range(len(times))), times[-1])

    samples = tuple(
        Sample(t, running, 0, stored, allocated, 100, 0, 0, 50, 0)
        for t, running, stored, allocated in ((0, 2, 10, 20), (1, 2, 20, 40), (3, 0, 0, 0))
    )
    config = EngineConfig(
        model=ModelConfig(model=model, dtype="float32"), device=DeviceConfig(device="cpu", threads=1)
    )
    real = Session(config).run(config, Plan(TINY, 0, 64, 256, (ORIGINAL,)).int4().arms[0].workload)
    made = dataclasses.replace(
        real,
        seconds=4.0,
        samples=samples,
        requests=(request("fair-short-0", 0.0, (1.0, 2.0, 3.0)), request("fair-long-0", 1.0, (2.0, 4.0))),
    )
    figures = figures_of(made)
    assert figures["ttft_s"] == 1.0
    assert figures["tpot_s"] == 1.5
    assert (figures["short_e2e_s"], figures["long_e2e_s"]) == (3.0, 3.0)
    assert figures["output_tokens_per_s"] == 5 / 4
    assert figures["kv_use"] == (10 + 2 * 20) / (20 + 2 * 40)
    assert figures["longest_tokens"] == 13
    mean, square = (20 + 2 * 40) / 3, (20**2 + 2 * 40**2) / 3
    assert swing(made) == pytest.approx((square - mean**2) ** 0.5 / mean)
    assert figures_of(dataclasses.replace(made, requests=(), samples=(), steps=()))["peak_running"] == 0


def test_what_a_quality_report_says_is_taken(tmp_path: Path) -> None:
    assert quality_facts("awq", {"perplexity": {"original": 20.0, "quantized": 20.1}})[
        "awq.perplexity_increase"
    ] == pytest.approx(0.005)
    assert quality_facts("awq", {"perplexity": {"original": 20.0, "quantized": None}}) == {}
    assert quality_facts("gptq", {"seconds": 61}) == {"gptq.making_s": 61.0}
    from pagedcli.cli.bench_compare_models import Given, find_quantized
    from pagedcli.cli.console import make_messages

    (tmp_path / QUALITY_FILE).write_text("[1]")
    with pytest.raises(ConfigError, match=r"quality\.json"):
        find_quantized(
            Given(str(tmp_path), None, None, False), EngineConfig(), make_messages(verbose=False, quiet=True)
        )


@pytest.mark.nightly
def test_both_quantized_copies_are_made_timed_and_run(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(bench_compare_run, "SHORT", dataclasses.replace(TINY, rounds=2, many_rounds=2))
    file, made = tmp_path / "all.json", tmp_path / "made"
    flags = ["--short", "--threads", "1", "--quantize", str(made), "--json", str(file), "-q"]
    assert run(["bench", "compare", "-m", model, *flags]) == 0
    found = json.loads(file.read_text())
    assert [row["name"] for row in found["rows"]][-2:] == ["+ AWQ", "+ GPTQ"]
    verdicts = {claim["id"]: claim["verdict"] for claim in found["claims"]}
    assert verdicts["making"] == "refuted"  # a tiny model takes GPTQ seconds
    assert "not measured" not in {verdicts[name] for name in ("int4-speed", "int4-loss", "awq-speed")}
    assert run(["bench", "compare", "-m", model, *flags]) == 0  # what is there is used
    again = {claim["id"]: claim for claim in json.loads(file.read_text())["claims"]}
    assert again["making"]["verdict"] == "not measured"


@pytest.mark.nightly
@pytest.mark.model
def test_the_short_form_on_the_real_model_confirms_what_is_certain(tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    assert run(["bench", "compare", "--dtype", "bfloat16", "--short", "--json", str(file), "-q"]) == 0
    found = json.loads(file.read_text())
    assert found["same_ids"] is True
    verdicts = {claim["id"]: claim["verdict"] for claim in found["claims"]}
    for name in (
        "reserved",
        "concurrency",
        "context",
        "large-pages-waste",
        "needs-paging",
        "long-slow-short",
    ):
        assert verdicts[name] == "confirmed", name
    assert verdicts["small-batches"] == "refuted"

"""Reports are views of a benchmark's JSON: tables, Markdown and one page that needs nothing else."""

from __future__ import annotations

import io
import itertools
import json
import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pagedcli.bench.report.build import build_document
from pagedcli.bench.report.console import print_document
from pagedcli.bench.report.document import (
    Column,
    Document,
    Line,
    LinePlot,
    Point,
    Section,
    Table,
    pareto_front,
)
from pagedcli.bench.report.files import check_outputs, read_results, write_reports
from pagedcli.bench.report.html import as_html
from pagedcli.bench.report.markdown import as_markdown
from pagedcli.bench.report.numbers import count, number, ratio, seconds, share, size, time_unit
from pagedcli.cli.main import run
from pagedcli.errors import ConfigError, MissingDependencyError

EVIL = '<script>alert("x")</script> & | `$x^2$` [a](http://b) *c*'


def latency(mean: float) -> dict[str, float]:
    return {"mean": mean, "p50": mean * 0.9, "p90": mean * 1.5, "p99": mean * 2}


def run_dict(rate: float = 761.2, use: float = 0.966, **settings: Any) -> dict[str, Any]:
    """A run as `--json` writes it."""
    return {
        "settings": {"model": "/home/somebody/models/tiny", "dtype": "bfloat16", "page_size": 16, **settings},
        "machine": {"cpu": "A processor", "cores": 2, "memory_bytes": 16 << 30},
        "date": "2026-11-30T07:00:00+00:00",
        "version": "0.1.0",
        "requests": 32,
        "failed": 0,
        "throughput": {
            "requests_per_s": 1.5,
            "total_tokens_per_s": rate * 2,
            "output_tokens_per_s": rate,
            "intervals": {"output_tokens_per_s": {"low": 740.0, "high": 780.0, "confidence": 0.95}},
        },
        "ttft_s": latency(0.4),
        "tpot_s": latency(0.03),
        "itl_s": latency(0.03),
        "e2e_s": latency(12.0),
        "peak_running": 8,
        "kv_use": use,
        "prefix_hit_rate": 0.25,
        "preemptions": 3,
        "recomputed_tokens": 12345,
        "executor_busy": 0.97,
        "step_s": {"scheduler_s": 0.0001, "kernels_s": 0.02},
        "limits": {"read_bytes_per_s": 17.3e9, "flops_per_s": 8.38e11, "limit_share": 0.62},
        "series": {
            "time_s": [0.0, 1.0, 2.0],
            "running": [1, 8, 2],
            "waiting": [7, 0, 0],
            "stored_tokens": [16, 200, 50],
            "allocated_tokens": [16, 208, 64],
            "cached_tokens": [0, 0, 8],
            "ttft_s": [0.1, 0.4, 0.9],
            "e2e_s": [1.0, 12.0, 14.0],
        },
    }


def compare_dict() -> dict[str, Any]:
    names = ("contiguous, continuous", "paged, continuous", "+ prefix sharing")
    rows = [
        {**run_dict(100.0 * (1 + index)), "name": name, "speedup": 1.0 + index, "context_tokens": 256.0}
        for index, name in enumerate(names)
    ]
    claim = {
        "id": "x",
        "text": "Paging helps.",
        "test": "Confirmed if so.",
        "measured": "a: 1; b: 2",
        "figures": {},
    }
    verdicts = ("confirmed", "refuted", "no difference shown", "not measured")
    arms = [
        {"name": str(n), "output_tokens_per_s": 50.0 * n, "tpot_s": 0.02 * n, "peak_running": n}
        for n in (1, 2)
    ]
    batch = {"name": "batch", "title": "Batch size", "about": "So many at once.", "of": "Batch", "arms": arms}
    return {
        **{key: value for key, value in run_dict().items() if key not in ("throughput", "series")},
        "kind": "compare",
        "about": "The same requests.",
        "note": "Medians.",
        "rows": rows,
        "left_out": ["+ AWQ was not run: give --awq DIR."],
        "experiments": [batch],
        "claims": [{**claim, "verdict": verdict} for verdict in verdicts],
        "other_load": "noticed: others were busy",
    }


def sweep_dict() -> list[dict[str, Any]]:
    return [
        run_dict(100.0 * page / 8 * seqs, 0.9, page_size=page, max_num_seqs=seqs)
        for page in (8, 16)
        for seqs in (1, 4)
    ]


def shown(document: Document, width: int = 80) -> str:
    file = io.StringIO()
    print_document(document, Console(file=file, width=width))
    return file.getvalue()


class Page(HTMLParser):
    """What a page holds: all attributes, all text outside style sheets, and whether every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str | None]] = []
        self.tags: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.text += data


@pytest.mark.parametrize("data", [run_dict(), sweep_dict(), compare_dict()], ids=("run", "sweep", "compare"))
def test_a_page_needs_nothing_else_and_is_well_formed(data: Any) -> None:
    text = as_html(build_document(data))
    page = Page(text)
    assert "svg" in page.tags
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(page.tags)
    targets = [value for name, value in page.attributes if name in ("href", "src", "xlink:href", "data")]
    assert all(value is not None and value.startswith("#") for value in targets)
    assert "default-src 'none'" in text
    assert "url(http" not in text
    assert "@import" not in text
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {value.removeprefix("#") for value in targets if value} <= set(ids)


def test_every_plot_is_xml_with_a_name() -> None:
    text = as_html(build_document(compare_dict()))
    plots = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(plots) >= 5
    for plot in plots:
        root = ET.fromstring(plot)
        assert root.get("aria-label")
        assert root.get("role") == "img"
        assert root.get("width") is None


def test_the_same_data_give_the_same_page() -> None:
    pytest.importorskip("matplotlib")
    from pagedcli.bench.report.plots import svg

    for section in build_document(compare_dict()).sections:
        for block in section.blocks:
            if isinstance(block, LinePlot):
                assert svg(block, "p") == svg(block, "p")
                return
    pytest.fail("there is no plot of lines")


def test_names_are_text_wherever_they_stand() -> None:
    data = compare_dict()
    data["settings"]["model"] = EVIL
    data["rows"][1]["name"] = EVIL
    page = Page(as_html(build_document(data)))
    assert "script" not in page.tags
    assert page.text.count(EVIL) >= 3  # head, table, plots: markup would have swallowed a part of it
    markdown = as_markdown(build_document(data))
    assert "<script>" not in markdown.replace("\\<", "")
    rows = [line for line in markdown.splitlines() if "alert" in line and line.startswith("|")]
    assert len(rows) == 1
    cells = re.findall(r"(?<!\\)\|", rows[0])
    header = next(line for line in markdown.splitlines() if line.startswith("|"))
    assert len(cells) == header.count("|")
    assert "[bold]" in shown(build_document({**data, "about": "[bold]not markup[/bold]"}))


def test_a_folder_is_told_by_its_own_name() -> None:
    for text in (as_html(build_document(run_dict())), as_markdown(build_document(run_dict()))):
        assert "somebody" not in text
        assert "tiny" in text
    assert "org/model" in as_markdown(build_document({**run_dict(), "settings": {"model": "org/model"}}))


def test_a_run_shows_its_figures_with_units() -> None:
    text = shown(build_document(run_dict()))
    for figure in ("761 tokens/s", "96.6%", "12,345 tokens", "25.0%"):
        assert figure in re.sub(r" +", " ", text)
    row = next(line for line in text.splitlines() if line.startswith("Time per output token"))
    assert row.split()[-4:] == ["30.0", "27.0", "45.0", "60.0"]
    assert "read 17.3 GB/s; arithmetic 838 GFLOP/s" in " ".join(text.split())
    assert "scheduler 100 µs; kernels 20.0 ms" in " ".join(text.split())
    assert re.search(r"Output +761 +tokens/s +740 to 780", text)
    assert re.search(r"Of the machine's limit +62.0%", text)


def test_a_sweep_shows_what_differs_and_marks_the_best() -> None:
    document = build_document(sweep_dict())
    table = next(block for block in document.sections[0].blocks if isinstance(block, Table))
    assert [column.title for column in table.columns[:2]] == [
        "Page size, tokens",
        "Requests at once, at most",
    ]
    assert [row[:3] for row in table.rows][-1] == ("16", "4", "800")
    assert table.strong == {3}
    assert ("Settings", "dtype bfloat16") in document.head
    markdown = as_markdown(document)
    assert "| **16** | **4** | **800** |" in markdown
    assert "---:|" in markdown


def test_a_sweep_in_which_requests_failed_says_where() -> None:
    runs = sweep_dict()
    assert "Failed" not in shown(build_document(runs))
    runs[1]["failed"] = 7
    text = shown(build_document(runs))
    assert re.search(r"Failed +0 +7 +0 +0", text), text


def test_a_sweep_of_one_is_a_run() -> None:
    assert build_document([run_dict()]).title == build_document(run_dict()).title


def test_the_comparison_shows_mechanisms_claims_and_what_was_left_out() -> None:
    text = shown(build_document(compare_dict()), 100)
    assert "+ AWQ was not run" in text
    assert "Other load noticed" in text
    assert "Of 4 claims" in text
    assert "1 confirmed, 1 refuted, 1 no difference shown, 1 not measured" in " ".join(text.split())
    page = as_html(build_document(compare_dict()))
    for sign, verdict in (
        ("✓", "confirmed"),
        ("✗", "refuted"),
        ("≈", "no difference shown"),
        ("–", "not measured"),
    ):
        assert f"{sign} {verdict}</span>" in page


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("data", [run_dict(), sweep_dict(), compare_dict()], ids=("run", "sweep", "compare"))
def test_no_figure_is_cut_off_on_a_narrow_console(data: Any, width: int) -> None:
    document = build_document(data)
    text = shown(document, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    words = set(text.split())
    for section in document.sections:
        for block in section.blocks:
            if isinstance(block, Table):
                numbers = [
                    cell for row in block.rows for cell in row if cell[:1].isdigit() and " " not in cell
                ]
                assert set(numbers) <= words


def test_of_the_front_no_point_is_beaten() -> None:
    points = [Point("a", 1, 10), Point("b", 2, 20), Point("c", 2, 15), Point("d", 3, 18), Point("e", 4, 30)]
    assert [point.name for point in pareto_front(points)] == ["a", "b", "e"]
    assert [point.name for point in pareto_front([Point("a", 1, 10), Point("b", 1, 12)])] == ["b"]


def test_names_at_the_ends_of_lines_do_not_lie_on_each_other() -> None:
    pytest.importorskip("matplotlib")
    from pagedcli.bench.report.plots import spread

    for heights in ([0.5, 0.5, 0.51], [0.0, 0.97, 0.98, 1.0], [1.0, 1.0]):
        placed = spread(heights, 0.08)
        assert all(b - a >= 0.0799 for a, b in itertools.pairwise(placed))
        assert max(placed) <= 1.0
    assert spread([0.1, 0.9], 0.08) == [0.1, 0.9]


def test_a_plot_without_a_point_or_with_one_is_drawn() -> None:
    pytest.importorskip("matplotlib")
    from pagedcli.bench.report.plots import svg

    for lines in ([], [Line("a", [], [])], [Line("a", [1.0], [2.0]), Line("b", [1.0], [2.0])]):
        ET.fromstring(svg(LinePlot("few", lines, "x", "y"), "p"))


def test_numbers_have_the_digits_that_mean_something() -> None:
    assert [number(value) for value in (0.0012345, 0.12, 9.996, 12.34, 999.7, 1234.5, 7, 0, None, float("nan"))] == [
        "0.00123", "0.120", "10.0", "12.3", "1,000", "1,234", "7", "0", "-", "-",
    ]  # fmt: skip
    assert (share(0.1234), share(None), ratio(3.283), count(12.0)) == ("12.3%", "-", "3.28x", "12")
    assert (size(512), size(3 << 30), size(None)) == ("512 B", "3.00 GiB", "-")
    assert time_unit([0.1, None, 9.0]) == ("ms", 1e3)
    assert [seconds(value) for value in (12.34, 0.0123, 3.4e-6, 0, None)] == [
        "12.3 s",
        "12.3 ms",
        "3.40 µs",
        "0 s",
        "-",
    ]
    assert time_unit([0.1, 10.0]) == ("s", 1.0)


def test_files_are_written_from_the_json_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    write_reports(compare_dict(), json_file=str(file))
    page, markdown = tmp_path / "page.html", tmp_path / "page.md"
    assert run(["bench", "report", str(file), "--html", str(page), "--markdown", str(markdown)]) == 0
    assert read_results(file) == compare_dict()
    assert Page(page.read_text()).tags.count("svg") == 6
    assert markdown.read_text() == as_markdown(build_document(compare_dict()))
    assert "The claims" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "[1]", '"text"', '{"kind": "other"}'])
def test_a_file_of_something_else_is_refused(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    assert run(["bench", "report", str(file)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_cannot_be_written_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        check_outputs(str(tmp_path / "none" / "a.json"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[bench\]'"):
        check_outputs(html=str(tmp_path / "a.html"))


def test_without_matplotlib_a_page_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.startswith(("matplotlib", "pagedcli.bench.report.plots"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[bench\]'"):
        as_html(build_document(run_dict()))


def test_figures_that_do_not_exist_leave_no_holes() -> None:
    data = json.loads(json.dumps(run_dict()))
    for name in ("series", "prefix_hit_rate", "limits", "step_s", "machine"):
        del data[name]
    data["itl_s"] = dict.fromkeys(("mean", "p50", "p90", "p99"))
    text = shown(build_document(data))
    assert "None" not in text
    assert "nan" not in text
    Page(as_html(build_document(data)))


def test_a_row_of_another_length_is_a_defect() -> None:
    with pytest.raises(AssertionError):
        Section("x", [Table([Column("a"), Column("b")], [("1",)])])

"""Going on with an output: what is done stays, every row once, and nothing that changed is mixed in."""

from __future__ import annotations

import fcntl
import json
import os

import pytest

from pagedcli.cli import journal, rows_run
from pagedcli.cli.files import Appender, OutputError, OutputLock, open_appender
from pagedcli.errors import ConfigError

RUN = ("generate", "in.jsonl", "-o", "out.jsonl")


def write_rows(paged, count=12):
    rows = [{"id": f"r{i}", "prompt": f"p{i}", "max_tokens": 1 + (i * 7) % 11} for i in range(count)]
    rows[4] = "{bad"
    paged.write("in.jsonl", rows)
    return [row["id"] if isinstance(row, dict) else "5" for row in rows]


def answers(paged):
    return [(row["id"], row.get("text")) for row in paged.read()]


@pytest.fixture
def finished(paged):
    """A finished run: its ids, its answers."""
    ids = write_rows(paged)
    assert paged(*RUN).code == 3
    return ids, answers(paged)


def cut(paged, num_rows, torn=b""):
    """As if the run had been killed after some rows."""
    path = paged.folder / "out.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:num_rows]) + torn)
    return lines


def entry(ordinal, line):
    return b'{"n": %d, "row": ' % ordinal + line.removesuffix(b"\n") + b"}\n"


def test_finished_run_leaves_output_and_manifest_only(paged, finished):
    ids, _ = finished
    assert [row["id"] for row in paged.read()] == ids
    assert sorted(path.name for path in paged.folder.iterdir()) == [
        "in.jsonl",
        "out.jsonl",
        "out.jsonl.manifest.json",
    ]
    manifest = json.loads((paged.folder / "out.jsonl.manifest.json").read_text())
    assert manifest["complete"] == {
        "rows": 12,
        "errors": 1,
        "bytes": (paged.folder / "out.jsonl").stat().st_size,
    }
    assert manifest["seed_drawn"] is True


def test_the_same_command_again_says_complete_and_loads_nothing(paged, finished):
    paged.use_engine()
    result = paged(*RUN)
    assert result.code == 3
    assert "complete, 12 rows, 1 failed" in result.err
    assert paged.engines == []


@pytest.mark.parametrize("num_rows", [0, 1, 5, 11])
@pytest.mark.parametrize("torn", [b"", b'{"id": "r', b"\x00" * 100])
@pytest.mark.parametrize("order", [(), ("--unordered",)])
def test_a_run_that_was_cut_goes_on(paged, num_rows, torn, order):
    ids = write_rows(paged)
    assert paged(*RUN, *order).code == 3
    before = answers(paged)
    lines = cut(paged, num_rows, torn)
    result = paged(*RUN, *order)
    assert result.code == 3
    assert (f"going on, {num_rows} rows are done" in result.err) == (num_rows > 0)
    assert sorted(answers(paged)) == sorted(before)
    assert (paged.folder / "out.jsonl").read_bytes().splitlines(keepends=True)[:num_rows] == lines[:num_rows]
    if not order:
        assert [row["id"] for row in paged.read()] == ids


def test_rows_in_the_journal_are_not_run_again(paged, finished):
    lines = cut(paged, 3)
    # Row 2 was moved to the output already; row 7 is written twice; the last entry is torn.
    entries = entry(2, lines[2]) + entry(7, lines[7]) + entry(5, lines[5]) + entry(7, lines[7])
    (paged.folder / "out.jsonl.journal").write_bytes(entries + entry(9, lines[9])[:-5])
    result = paged(*RUN)
    assert "going on, 5 rows are done" in result.err
    assert "6 answered, 1 failed, 5 done before" in result.err
    assert answers(paged) == finished[1]
    after = (paged.folder / "out.jsonl").read_bytes().splitlines(keepends=True)
    assert (after[5], after[7]) == (lines[5], lines[7])  # timings included
    assert not (paged.folder / "out.jsonl.journal").exists()


def test_journal_that_holds_all_the_rest_needs_no_more_answers(paged, finished):
    lines = cut(paged, 2)
    rest = [entry(i, lines[i]) for i in range(2, 12)]
    (paged.folder / "out.jsonl.journal").write_bytes(b"".join(reversed(rest)))
    assert "0 answered, 0 failed, 12 done before" in paged(*RUN).err
    assert answers(paged) == finished[1]


def test_sampled_rows_get_the_same_seed_after_a_cut(paged):
    paged.write("in.jsonl", [{"prompt": f"p{i}", "temperature": 1.0, "max_tokens": 9} for i in range(6)])
    paged(*RUN)
    before = answers(paged)
    cut(paged, 3)
    paged(*RUN)
    assert answers(paged) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--temperature", 0.5), "parameters.sampling.temperature was null, now 0.5"),
        (("--dtype", "float32"), 'parameters.dtype was "auto", now "float32"'),
        (("--seed", 3), "seed was null, now 3"),
        (("--return-token-ids",), "parameters.return_token_ids was false, now true"),
        (("--unordered",), 'parameters.order was "input", now "unordered"'),
        (("--max-model-len", 100), "parameters.max_model_len was null, now 100"),
        (("-m", "other.gguf"), "model.sha256 was"),
    ],
)
@pytest.mark.parametrize("num_rows", [3, 12])
def test_changed_parameters_are_refused_by_name(paged, finished, arguments, words, num_rows):
    paged.write("other.gguf", b"another model")
    cut(paged, num_rows)
    result = paged(*RUN, *arguments)
    assert result.code == 2
    assert words in result.err
    assert "--overwrite starts anew" in result.err
    assert len(paged.read()) == num_rows


def test_changed_input_is_refused(paged, finished):
    with (paged.folder / "in.jsonl").open("a") as file:
        file.write('{"prompt": "one more"}\n')
    result = paged(*RUN)
    assert result.code == 2
    assert "input.sha256 was" in result.err


def test_input_that_changes_while_it_is_read_is_noticed(paged, monkeypatch):
    write_rows(paged)
    real = rows_run.Job.run

    def run(job):
        count = real(job)
        os.utime(paged.folder / "in.jsonl", (1, 1))
        return count

    monkeypatch.setattr(rows_run.Job, "run", run)
    result = paged(*RUN)
    assert result.code == 2
    assert "was changed while it was read" in result.err
    assert '"complete": null' in (paged.folder / "out.jsonl.manifest.json").read_text()


def test_journal_left_by_a_kill_at_the_very_end_is_removed(paged, finished):
    (paged.folder / "out.jsonl.journal").write_bytes(b"left")
    assert "complete" in paged(*RUN).err
    assert not (paged.folder / "out.jsonl.journal").exists()


def test_changed_version_is_refused(paged, finished):
    path = paged.folder / "out.jsonl.manifest.json"
    path.write_text(path.read_text().replace('"version": "', '"version": "9.'))
    result = paged(*RUN)
    assert result.code == 2
    assert "version was" in result.err


def test_settings_that_change_no_answer_may_differ(paged, finished):
    cut(paged, 3)
    result = paged(*RUN, "--page-size", 8, "--num-pages", 200, "--max-num-seqs", 2, "--policy", "shortest")
    assert result.code == 3
    assert answers(paged) == finished[1]


def test_overwrite_starts_anew(paged, finished):
    result = paged(*RUN, "--max-tokens", 2, "--overwrite")
    assert result.code == 3
    assert "going on" not in result.err
    assert len(paged.read()) == 12


@pytest.mark.parametrize("content", [b"precious\n", b'{"id": "x"}\n'])
def test_a_file_of_someone_else_is_not_touched(paged, content):
    write_rows(paged)
    paged.write("out.jsonl", content)
    result = paged(*RUN)
    assert result.code == 2
    assert "out.jsonl.manifest.json is missing" in result.err
    assert (paged.folder / "out.jsonl").read_bytes() == content
    assert paged(*RUN, "--overwrite").code == 3


def test_an_empty_file_is_no_ones(paged):
    write_rows(paged)
    paged.write("out.jsonl", b"")
    assert paged(*RUN).code == 3


def test_a_mistake_found_when_the_engine_starts_pins_nothing(paged, monkeypatch):
    write_rows(paged)

    def refuse(*arguments):
        raise ConfigError("too few pages")

    with monkeypatch.context() as patch:
        patch.setattr("pagedcli.cli.engine_access.open_engine", refuse)
        assert paged(*RUN, "--dtype", "float32").code == 2
    assert paged(*RUN, "--dtype", "bfloat16").code == 3


@pytest.mark.parametrize("num_rows", [12, 8])
@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [lines[1], lines[0], *lines[2:]],
        lambda lines: [b"not a row\n", *lines],
        lambda lines: [*lines[:2], *lines[3:]],
    ],
)
def test_a_changed_output_is_refused_and_not_touched(paged, finished, damage, num_rows):
    path = paged.folder / "out.jsonl"
    path.write_bytes(b"".join(damage(cut(paged, num_rows)[:num_rows])))
    content = path.read_bytes()
    if num_rows == 12 and len(content.splitlines()) == 12:
        pytest.skip("the same size: taken for the finished output")
    result = paged(*RUN)
    assert result.code == 2
    assert "--overwrite starts anew" in result.err
    assert path.read_bytes().startswith(content)


def test_rows_of_another_input_in_an_unordered_output_are_noticed(paged):
    write_rows(paged)
    paged(*RUN, "--unordered")
    cut(paged, 3, b'{"id": "stranger", "text": ""}\n')
    result = paged(*RUN, "--unordered")
    assert result.code == 2
    assert "has 13 rows for 12 of the input" in result.err


@pytest.mark.parametrize("order", [(), ("--unordered",)])
@pytest.mark.parametrize("num_rows", [12, 8])
def test_retry_errors_runs_failed_rows_again_with_more_pages(paged, order, num_rows):
    rows = [{"id": f"r{i}", "prompt": "x" * (400 if i in (2, 7) else 20), "max_tokens": 3} for i in range(12)]
    paged.write("in.jsonl", [*rows, "{bad"])
    small = ("--num-pages", 20, "--max-model-len", 320, *order)
    assert paged(*RUN, *small).code == 3
    assert sum("error" in row for row in paged.read()) == 3
    cut(paged, num_rows)
    # The same pool: the same errors.
    assert paged(*RUN, *small, "--retry-errors").code == 3
    assert sum("error" in row for row in paged.read()) == 3
    before = {row["id"]: row["seconds"] for row in paged.read() if "error" not in row}
    large = ("--num-pages", 60, "--max-model-len", 600, *order)
    result = paged(*RUN, *large, "--retry-errors")
    assert result.code == 3
    assert "2 answered, 1 failed" in result.err
    after = paged.read()
    assert [row["error"]["code"] for row in after if "error" in row] == ["invalid_json"]
    assert {row["id"]: row["seconds"] for row in after if row["id"] in before} == before
    if not order:
        assert [row["id"] for row in after] == [*(f"r{i}" for i in range(12)), "13"]
    assert len(after) == 13
    # What is pinned now is what was retried with.
    assert "complete" in paged(*RUN, *large).err


def test_retry_errors_without_errors_is_complete(paged):
    paged.write("in.jsonl", [{"prompt": "a", "max_tokens": 1}])
    paged(*RUN)
    assert "complete, 1 rows" in paged(*RUN, "--retry-errors").err


def test_a_kill_between_the_two_steps_of_retry_errors_loses_nothing(paged, finished, monkeypatch):
    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pagedcli.cli.recovery.open_appender", killed)
        assert paged(*RUN, "--retry-errors").code == 130
    assert answers(paged) == finished[1]
    assert paged(*RUN).code == 3
    assert answers(paged) == finished[1]


def test_two_names_of_one_output_are_one_output(paged, finished):
    (paged.folder / "link.jsonl").symlink_to("out.jsonl")
    assert "complete" in paged("generate", "in.jsonl", "-o", "link.jsonl").err


def test_a_second_writer_is_refused(paged):
    write_rows(paged)
    with OutputLock(paged.folder / "out.jsonl"):
        result = paged(*RUN)
    assert result.code == 2
    assert "another `paged generate` is writing it" in result.err
    assert paged(*RUN).code == 3
    assert not (paged.folder / "out.jsonl.lock").exists()


def test_the_lock_of_a_removed_file_is_not_enough(tmp_path):
    output = tmp_path / "out"
    path = tmp_path / "out.lock"
    with path.open("w") as stale:
        fcntl.flock(stale, fcntl.LOCK_EX)
        path.unlink()
        with OutputLock(output), pytest.raises(ConfigError, match="is writing it"), OutputLock(output):
            pass


def test_a_failed_write_leaves_whole_rows(tmp_path, monkeypatch):
    appender = open_appender(tmp_path / "out", 0)
    appender.append(b"whole\n")

    def half(fd, data):
        os.write(fd, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pagedcli.cli.files.write_all", half)
        with pytest.raises(OutputError, match="No space left on device; the rows written so far are kept"):
            appender.append(b"another\n")
    assert (tmp_path / "out").read_bytes() == b"whole\n"
    appender.append(b"third\n")
    appender.close()
    assert (tmp_path / "out").read_bytes() == b"whole\nthird\n"


def test_a_full_disk_is_one_line_and_the_rest_is_done_later(paged, monkeypatch):
    ids = write_rows(paged)
    real = Appender.append

    def full(self, data):
        if self.size > 600:
            raise OutputError("out.jsonl: No space left on device")
        real(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(Appender, "append", full)
        result = paged(*RUN)
    assert result.code == 1
    assert result.err.count("paged:") == 1
    assert "No space left" in result.err
    assert paged(*RUN).code == 3
    assert [row["id"] for row in paged.read()] == ids


def test_dev_full_is_one_line(paged):
    write_rows(paged)
    result = paged("generate", "in.jsonl", "-o", "/dev/full")
    assert result.code == 1
    assert "/dev/full: No space left on device" in result.err
    assert not list(paged.folder.glob("*manifest*"))


def test_dev_null_is_a_stream(paged):
    write_rows(paged)
    assert paged("generate", "in.jsonl", "-o", "/dev/null").code == 3


def test_the_journal_is_emptied_when_nothing_waits_in_it(paged, monkeypatch):
    monkeypatch.setattr(journal, "_COMPACT_BYTES", 1)
    monkeypatch.setattr(journal, "SYNC_SECONDS", 0.0)
    cleared = []
    real = Appender.clear
    monkeypatch.setattr(Appender, "clear", lambda self: (cleared.append(self.size), real(self)))
    ids = write_rows(paged, 40)
    assert paged(*RUN).code == 3
    assert cleared
    assert [row["id"] for row in paged.read()] == ids


def test_interrupt_keeps_what_is_done(paged, monkeypatch):
    rows = [{"id": i, "prompt": "x", "max_tokens": 2 if i < 3 else 200} for i in range(6)]
    paged.write("in.jsonl", rows)
    paged.use_engine(step_seconds=0.01)

    real = rows_run.Job._next_event

    def next_event(job):
        ended = real(job)
        if job._progress.done == 3:
            job.interrupt()
        return ended

    monkeypatch.setattr(rows_run.Job, "_next_event", next_event)
    result = paged(*RUN)
    assert result.code == 130
    assert "interrupted: 3 of 6 rows are done; the same command goes on" in result.err
    assert [row["id"] for row in paged.read()] == [0, 1, 2]
    monkeypatch.setattr(rows_run.Job, "_next_event", real)
    paged.use_engine()
    assert paged(*RUN).code == 0
    assert [row["id"] for row in paged.read()] == list(range(6))


DEEP = "[" * 5000


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"a": 1}', DEEP])
def test_a_manifest_that_is_none_is_refused(paged, finished, text):
    (paged.folder / "out.jsonl.manifest.json").write_text(text)
    result = paged(*RUN)
    assert result.code == 2
    assert "not a manifest of this version: --overwrite starts anew" in result.err
    assert paged(*RUN, "--overwrite").code == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("complete", 5),
        ("complete", {}),
        ("complete", {"rows": "x", "errors": "y", "bytes": "z"}),
        ("parameters", []),
        ("input", None),
        ("model", "tiny"),
        ("seed", "x"),
        ("seed", None),
        ("created", "x"),
        ("seed_drawn", 1),
    ],
)
def test_a_manifest_with_a_field_of_another_type_is_refused(paged, finished, key, value):
    path = paged.folder / "out.jsonl.manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    for flags in ((), ("--retry-errors",)):
        result = paged(*RUN, *flags)
        assert result.code == 2
        assert "not a manifest of this version" in result.err


@pytest.mark.parametrize("suffix", [".journal", ".manifest.json", ".lock"])
@pytest.mark.parametrize("flags", [(), ("--overwrite",)])
def test_a_folder_in_the_place_of_a_file_beside_the_output_is_named(paged, suffix, flags):
    write_rows(paged)
    (paged.folder / f"out.jsonl{suffix}").mkdir()
    result = paged(*RUN, *flags)
    assert result.code == 2
    assert "Is a directory" in result.err
    assert "unexpected" not in result.err


def test_a_dash_is_stdout(paged, finished):
    _, expected = finished
    result = paged("generate", "in.jsonl", "-o", "-")
    assert [(row["id"], row.get("text")) for row in result.rows] == expected
    assert not (paged.folder / "-").exists()
    assert "give -o OUT" in paged("generate", "in.jsonl", "-o", "-", "--overwrite").err


def test_an_empty_output_name_is_refused(paged, finished):
    result = paged("generate", "in.jsonl", "-o", "")
    assert result.code == 2
    assert "-o is empty" in result.err

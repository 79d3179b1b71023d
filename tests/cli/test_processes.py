"""`paged` as a process: killed at any moment, interrupted, piped into something that goes away, two at once."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, str(ROOT / "tests" / "cli" / "fake_cli.py")]
RUN = ("generate", "in.jsonl", "-o", "out.jsonl", "-q")


def start(folder, *arguments, **environment):
    return subprocess.Popen(
        [*PROGRAM, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process, timeout=60):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err.decode()


def write_rows(folder, count=60):
    generator = random.Random(7)
    lines = []
    for index in range(count):
        row = {"id": f"r{index}", "prompt": f"p{index}", "max_tokens": generator.choice([1, 2, 5, 40])}
        lines.append("{bad" if index % 13 == 5 else json.dumps(row))
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    return [f"r{i}" if i % 13 != 5 else str(i + 1) for i in range(count)]


def rows_so_far(folder):
    path = folder / "out.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.002)


@pytest.mark.parametrize("order", ["input", "unordered"])
def test_every_row_exactly_once_over_kills_at_random_moments(tmp_path, order):
    ids = write_rows(tmp_path)
    arguments = (*RUN, *(["--unordered"] if order == "unordered" else []))
    generator = random.Random(order)
    kills, goals = 0, sorted(generator.sample(range(1, len(ids)), 10))
    for goal in goals:
        process = start(tmp_path, *arguments, FAKE_STEP_SECONDS="0.002")
        wait_for(
            lambda goal=goal, process=process: rows_so_far(tmp_path) >= goal or process.poll() is not None
        )
        time.sleep(generator.random() * 0.01)
        process.send_signal(signal.SIGKILL)
        kills += finish(process)[0] == -signal.SIGKILL
    assert kills >= 5
    code, _, err = finish(start(tmp_path, *arguments))
    assert (code, err) == (3, "")
    got = [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert sorted(got) == sorted(ids)
    if order == "input":
        assert got == ids
    assert not (tmp_path / "out.jsonl.journal").exists()
    assert not (tmp_path / "out.jsonl.lock").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_every_row_exactly_once_over_kills_after_random_times(tmp_path, seed):
    ids = write_rows(tmp_path, 200)
    generator = random.Random(seed)
    for _ in range(25):
        process = start(tmp_path, *RUN, FAKE_STEP_SECONDS="0.001")
        time.sleep(generator.random() * 1.5)
        process.send_signal(signal.SIGKILL)
        finish(process)
    assert finish(start(tmp_path, *RUN))[0] == 3
    assert [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_bytes().splitlines()] == ids


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_keeps_what_is_done_and_says_so(tmp_path, number):
    ids = write_rows(tmp_path)
    process = start(tmp_path, *RUN[:-1], FAKE_STEP_SECONDS="0.01")
    wait_for(lambda: rows_so_far(tmp_path) >= 3)
    process.send_signal(number)
    code, out, err = finish(process)
    assert (code, out) == (130, b"")
    assert "rows are done; the same command goes on" in err
    assert "Traceback" not in err
    assert 3 <= rows_so_far(tmp_path) < len(ids)
    assert finish(start(tmp_path, *RUN))[0] == 3
    assert rows_so_far(tmp_path) == len(ids)


def test_interrupted_prompt_ends_with_what_it_has(tmp_path):
    process = start(tmp_path, "generate", "-p", "x", "-q", FAKE_STEP_SECONDS="0.05")
    assert process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130
    assert out.endswith(b"\n")
    assert "Traceback" not in err


def test_interrupt_while_stdin_gives_nothing(tmp_path):
    process = subprocess.Popen(
        [*PROGRAM, "generate", "-"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdin.write(b'{"prompt": "a", "max_tokens": 1}\n')
    process.stdin.flush()
    # Rows are answered as they come, not when the input ends.
    assert json.loads(process.stdout.readline())["id"] == "1"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    err = process.stderr.read().decode()
    assert "interrupted: 1 rows were answered" in err
    assert "Fatal" not in err
    for pipe in (process.stdin, process.stdout, process.stderr):
        pipe.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whatever_command_is_interrupted_says_so(number):
    """Also one that knows nothing of interrupts: Typer alone would end it with 130 and say nothing."""
    code = (
        "import os, pagedcli.cli.doctor_run as doctor; from pagedcli.cli.main import main\n"
        f"doctor.run_doctor = lambda *args, **kwargs: os.kill(os.getpid(), {int(number)})\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "paged: interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_interrupt_while_threads_end_is_no_traceback(number):
    """Python waits for its threads after the command; an exception there would be shown whole."""
    code = (
        "import os, threading, pagedcli.cli.doctor_run as doctor; from pagedcli.cli.main import main\n"
        "def again():\n"
        "    threading.main_thread().join()\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    threading.Event().wait(20)\n"
        "def run_doctor(*args, **kwargs):\n"
        "    threading.Thread(target=again).start()\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "doctor.run_doctor = run_doctor\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-number, "", "paged: interrupted\n")


def test_python_m_is_the_same_program():
    arguments = [sys.executable, "-m", "pagedcli"]
    done = subprocess.run(
        [*arguments, "--help"], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True
    )
    assert done.stdout.startswith("Usage: paged")
    wrong = subprocess.run(
        [*arguments, "nothing"], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("paged: No such command")


def test_two_writers_of_one_output(tmp_path):
    ids = write_rows(tmp_path)
    first = start(tmp_path, *RUN, FAKE_STEP_SECONDS="0.01")
    wait_for(lambda: rows_so_far(tmp_path) >= 1)
    first.send_signal(signal.SIGSTOP)  # on a busy machine it would be done before the second has started
    code, _, err = finish(start(tmp_path, *RUN))
    first.send_signal(signal.SIGCONT)
    assert code == 2
    assert "another `paged generate` is writing it" in err
    assert finish(first)[0] == 3
    assert rows_so_far(tmp_path) == len(ids)


@pytest.mark.parametrize("arguments", [("generate", "in.jsonl"), ("generate", "-p", "x" * 20)])
def test_a_reader_that_goes_away_ends_the_run_quietly(tmp_path, arguments):
    write_rows(tmp_path)
    process = start(tmp_path, *arguments, "-q", FAKE_STEP_SECONDS="0.005")
    process.stdout.read(3)
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_file_size_limit_leaves_whole_rows_and_goes_on_later(tmp_path):
    """As a disk that fills up in the middle of a row."""
    ids = write_rows(tmp_path)
    command = " ".join([*PROGRAM, *RUN])
    limited = subprocess.run(
        ["bash", "-c", f"ulimit -f 4; exec {command}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert limited.returncode == 1
    assert b"out.jsonl" in limited.stderr
    assert limited.stderr.count(b"\n") == 1
    assert finish(start(tmp_path, *RUN))[0] == 3
    assert [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_bytes().splitlines()] == ids


def test_help_is_quick_and_loads_nothing_heavy():
    heavy = ("torch", "numpy", "transformers", "tokenizers", "rich", "huggingface_hub", "psutil", "jinja2")
    code = (
        "import sys; from pagedcli.cli.main import run; run(sys.argv[1:]);"
        f"print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    for arguments in (["--help"], ["generate", "--help"], ["doctor", "--help"]):
        result = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, cwd=ROOT
        )
        assert result.stderr.strip() == "[]"
        assert result.stdout.startswith("Usage: paged")


def test_help_answers_in_under_0_3_seconds():
    """Processor time, which is the wall time of a quiet machine and does not count what others do on a busy one."""
    code = "import sys; from pagedcli.cli.main import main; main()"
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, check=True, cwd=ROOT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.3


def run_in_shell(folder, line, **environment):
    """Exit code, stdout and stderr of a shell line in which $PAGED is the program."""
    done = subprocess.run(
        ["sh", "-c", line],
        cwd=folder,
        env={
            **os.environ,
            "PAGED": " ".join(PROGRAM),
            "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
            **environment,
        },
        capture_output=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr.decode()


def test_an_answer_that_the_terminal_cannot_show_is_no_failure(tmp_path):
    line = "$PAGED generate -p a --stop q --max-tokens 2 --set sampling.echo=true"
    plain = run_in_shell(
        tmp_path, line.replace("-p a", "-p \u00e9a"), PYTHONIOENCODING="ascii", PYTHONUTF8="1"
    )
    assert plain[0] == 0, plain[2]
    assert plain[1].startswith(b"?a")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout_is_one_line(tmp_path):
    code, _, err = run_in_shell(tmp_path, "$PAGED generate -p a --max-tokens 2 > /dev/full")
    assert (code, err) == (1, "paged: stdout: No space left on device\n")


def test_closed_standard_streams_are_named(tmp_path):
    write_rows(tmp_path, 3)
    for line, words in (
        ("$PAGED generate -p a >&-", "stdout is closed: give -o OUT"),
        ("$PAGED generate in.jsonl >&-", "stdout is closed: give -o OUT"),
        ("$PAGED generate - <&-", "stdin is closed: give a file"),
        ("$PAGED generate --chat <&-", "stdin is closed: --chat reads"),
    ):
        code, _, err = run_in_shell(tmp_path, line)
        assert code == 2
        assert words in err
    assert run_in_shell(tmp_path, "$PAGED generate in.jsonl -q 2>&-")[0] == 0
    (tmp_path / "a.json").write_text('{"throughput": {}}')
    code, _, err = run_in_shell(tmp_path, "$PAGED bench report a.json --markdown a.md >&-")
    assert (code, err) == (1, "paged: stdout is closed: nothing can be shown there\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stderr_costs_no_row(tmp_path):
    ids = write_rows(tmp_path, 3)
    code, _, _ = run_in_shell(tmp_path, "$PAGED generate in.jsonl -o out.jsonl 2> /dev/full")
    assert code == 0
    assert rows_so_far(tmp_path) == len(ids)
    assert json.loads((tmp_path / "out.jsonl.manifest.json").read_text())["complete"]["rows"] == len(ids)

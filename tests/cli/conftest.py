"""`paged` in this process, over the scripted engine."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagedcli.cli.main import run
from tests.cli.fake_cli import install


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


class Paged:
    """Runs commands in a folder of its own; `engines` are those that it made."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch
        self._capfd = capfd
        self.use_engine()

    def use_engine(self, **options: Any) -> None:
        self.engines = install(self._monkeypatch, **options)

    def __call__(self, *arguments: object, stdin: bytes | None = None) -> Result:
        if stdin is not None:
            self._monkeypatch.setattr(
                "sys.stdin", SimpleNamespace(fileno=_no_fileno, buffer=io.BytesIO(stdin))
            )
        self._capfd.readouterr()
        code = run([str(item) for item in arguments])
        out, err = self._capfd.readouterr()
        return Result(code, out, err)

    def write(self, name: str, rows: list[Any] | bytes) -> Path:
        """A JSONL file; items that are text are lines as they are."""
        path = self.folder / name
        if isinstance(rows, bytes):
            path.write_bytes(rows)
        else:
            path.write_text(
                "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
            )
        return path

    def read(self, name: str = "out.jsonl") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


def _no_fileno() -> int:
    raise io.UnsupportedOperation


@pytest.fixture
def paged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Paged:
    monkeypatch.chdir(tmp_path)
    return Paged(tmp_path, monkeypatch, capfd)

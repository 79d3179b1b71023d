"""The command that installs an extra fits the copy that runs: installed, an old install, or a source tree alone."""

from __future__ import annotations

from email.message import Message
from importlib import metadata
from pathlib import Path

import pytest

from pagedcli import errors
from pagedcli.errors import how_to_install

ROOT = Path(__file__).parents[2]


def _installed(monkeypatch: pytest.MonkeyPatch, extras: list[str] | None) -> None:
    def found(name: str) -> Message:
        if extras is None:
            raise metadata.PackageNotFoundError(name)
        message = Message()
        for extra in extras:
            message["Provides-Extra"] = extra
        return message

    monkeypatch.setattr(metadata, "metadata", found)


def test_an_installed_copy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, ["cuda", "quantize"])
    assert how_to_install("quantize") == "pip install 'pagedcli[quantize]'"


def test_a_wheel_without_its_source_is_named_whatever_it_offers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _installed(monkeypatch, [])
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "site-packages" / "pagedcli" / "errors.py"))
    assert how_to_install("quantize") == "pip install 'pagedcli[quantize]'"


@pytest.mark.parametrize("extras", [None, [], ["cuda"]])
def test_a_tree_that_is_not_installed_or_was_before_the_extra_came_is_named_by_its_path(
    extras: list[str] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By name pip would find nothing, or only warn that there is no such extra."""
    _installed(monkeypatch, extras)
    monkeypatch.chdir(tmp_path)
    assert how_to_install("quantize") == f"pip install -e '{ROOT}[quantize]'"
    monkeypatch.chdir(ROOT)
    assert how_to_install("quantize") == "pip install -e '.[quantize]'"


def test_every_hint_uses_it_and_names_an_extra_that_there_is() -> None:
    declared = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1]
    for file in (ROOT / "pagedcli").rglob("*.py"):
        text = file.read_text()
        assert "pip install 'pagedcli[" not in text or file.name == "errors.py", file
        for quote in "\"'":
            for part in text.split(f"how_to_install({quote}")[1:]:
                assert f"\n{part.split(quote)[0]} = [" in declared, file

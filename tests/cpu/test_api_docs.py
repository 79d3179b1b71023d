"""The Python examples of docs and README run as printed, with a tiny model in place of the default one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import MakeModel

PAGE = Path(__file__).parents[2] / "docs" / "python-api.md"
README = PAGE.parents[1] / "README.md"
EXAMPLES = [
    found
    for page in (PAGE, README)
    for found in re.findall(
        r"^## (.+?)$|^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
]


def examples() -> list[tuple[str, str]]:
    found, title = [], ""
    for heading, code in EXAMPLES:
        title = heading or title
        if code:
            found.append((title, code))
    return found


@pytest.mark.parametrize(("title", "code"), examples(), ids=[title for title, _ in examples()])
def test_example(
    title: str,
    code: str,
    tiny_checkpoint: MakeModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tiny_checkpoint("llama")
    monkeypatch.setattr("pagedcli.api.build.resolve_model", lambda model, progress=None: model or path)
    exec(compile(code, f"{PAGE.name}: {title}", "exec"), {"__name__": "example"})  # noqa: S102
    out = capsys.readouterr().out
    assert ("prompt_too_long" in out) == (title == "Errors")


def test_there_are_examples_of_everything() -> None:
    assert "Answer a file of prompts" in [title for title, _ in examples()], "that of the README"
    code = "".join(code for _, code in examples())
    for name in (
        "generate",
        "chat",
        "stream",
        "AsyncLLM",
        "SamplingParams",
        "RequestError",
        "stats",
        "snapshot",
    ):
        assert name in code


def test_the_family_of_the_guide_is_the_file_itself() -> None:
    root = PAGE.parents[1]
    guide = (root / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
    (code,) = re.findall(
        r"`pagedcli/models/qwen2.py`, whole:\n\n```python\n(.*?)^```", guide, re.MULTILINE | re.DOTALL
    )
    assert code == (root / "pagedcli" / "models" / "qwen2.py").read_text(encoding="utf-8")

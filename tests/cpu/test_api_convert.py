"""A folder without `tokenizer.json` has its tokenizer converted once, into the cache; or is told what to install."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from pagedcli.api.convert import load_tokenizer
from pagedcli.checkpoint.sources import open_checkpoint
from pagedcli.errors import CheckpointError, MissingDependencyError
from tests.conftest import MakeModel


@pytest.fixture
def slow_folder(tiny_checkpoint: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with GPT-2's vocab.json and merges.txt in place of tokenizer.json, and an empty cache."""
    folder = tmp_path / "slow"
    shutil.copytree(tiny_checkpoint("llama"), folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [item if isinstance(item, str) else " ".join(item) for item in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "GPT2Tokenizer"}))
    monkeypatch.setenv("PAGED_CACHE", str(tmp_path / "cache"))
    return folder


def test_converted_once_and_equal(
    slow_folder: Path, tiny_checkpoint: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    expected = open_checkpoint(tiny_checkpoint("llama")).load_tokenizer()
    tokenizer = load_tokenizer(open_checkpoint(slow_folder))
    for text in ("Hello the other one", "  zwei Wörter 😀\n"):
        assert tokenizer.encode(text) == expected.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_ids == expected.eos_token_ids
    monkeypatch.setitem(sys.modules, "transformers", None)  # the second time nobody needs it
    again = load_tokenizer(open_checkpoint(slow_folder))
    assert again.encode("Hello") == tokenizer.encode("Hello")
    assert [path.name for path in (slow_folder.parent / "cache" / "tokenizers").glob("new-*")] == []


def test_without_transformers_one_line_says_what_to_install(
    slow_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[convert\]'") as caught:
        load_tokenizer(open_checkpoint(slow_folder))
    assert "\n" not in str(caught.value)


def test_a_folder_without_any_tokenizer_says_so(slow_folder: Path) -> None:
    for name in ("vocab.json", "merges.txt"):
        (slow_folder / name).unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(open_checkpoint(slow_folder))


def test_broken_files_give_one_line(slow_folder: Path) -> None:
    pytest.importorskip("transformers")
    (slow_folder / "vocab.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be converted") as caught:
        load_tokenizer(open_checkpoint(slow_folder))
    assert "\n" not in str(caught.value)

"""Calibration text: what may be in a file, how it is cut, what the model writes itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain, permutations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pagedcli.errors import ConfigError
from pagedcli.quant.calibration import calibration_by_model, calibration_from_file
from pagedcli.quant.calibration_text import find_texts, read_texts
from pagedcli.quant.self_written import SELF_WRITTEN, start_tokens
from pagedcli.text.tokenizer import Tokenizer
from tests.conftest import MakeModel


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: MakeModel) -> Tokenizer:
    return Tokenizer.from_folder(tiny_checkpoint("llama"))


def _write(folder: Path, name: str, data: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def _rows(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_C23_bom_crlf_blank_lines_and_no_final_newline(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "two"}\r\n   \r\n{"text": "three"}'
    texts = read_texts(_write(tmp_path, "a.jsonl", data))
    assert [text.value for text in texts] == ["one", "two", "three"]
    assert [text.where.rsplit(" ", 1)[1] for text in texts] == ["1", "3", "5"]


def test_messages_go_through_the_chat_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    (text,) = read_texts(_write(tmp_path, "a.jsonl", _rows({"messages": messages})))
    assert text.encode(tokenizer) == tokenizer.encode_chat(messages, add_generation_prompt=False)


def test_plain_text_is_read_whole_in_pieces_of_lines(tmp_path: Path) -> None:
    text = "".join(f"line {number} " + "x" * 90 + "\n" for number in range(200))
    pieces = read_texts(_write(tmp_path, "a.txt", text))
    assert len(pieces) > 2
    assert "".join(str(piece.value) for piece in pieces) == text


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{not json", "line 2: not JSON"),
        (
            '{"answer": "x"}',
            "line 2: a row needs one of text, messages and prompt; this one has none of them",
        ),
        ('{"text": "a", "prompt": "b"}', "this one has text and prompt"),
        ('{"text": 5}', "line 2: text must be text"),
        ('{"messages": "hello"}', "line 2: messages must be a list"),
        ("[1, 2]", "line 2: a row needs"),
    ],
)
def test_a_bad_row_names_its_line(tmp_path: Path, line: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        read_texts(_write(tmp_path, "a.jsonl", '{"text": "fine"}\n' + line + "\n"))


def test_bytes_that_are_no_utf8_name_the_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 2 is not UTF-8"):
        read_texts(_write(tmp_path, "a.txt", b"fine\nno \xff\xfe\n"))


def test_long_texts_are_split_and_short_ones_packed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = ["a b c d e f g h " * 40, "short one", "another"]
    path = _write(tmp_path, "a.jsonl", _rows(*({"text": text} for text in texts)))
    found = calibration_from_file(str(path), tokenizer, samples=1000, seq_len=16, seed=3)
    encoded = [tokenizer.encode(text) for text in texts]
    total = sum(map(len, encoded))
    assert found.samples.shape == (total // 16, 16)
    joined = found.samples.flatten().tolist()
    # In some order all texts one after the other, but for what fills no sample at the end.
    orders = [list(chain(*order)) for order in permutations(encoded)]
    assert any(joined == order[: len(joined)] for order in orders)
    assert found.notes
    assert str(total // 16) in found.notes[0]
    assert found.report() == {"source": "a.jsonl", "tokens": found.samples.size, "seed": 3}


def test_the_seed_chooses(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = _write(tmp_path, "a.jsonl", _rows(*({"text": f"text number {n} " * 5} for n in range(100))))

    def chosen(seed: int) -> np.ndarray:
        return calibration_from_file(str(path), tokenizer, samples=8, seq_len=32, seed=seed).samples

    assert np.array_equal(chosen(1), chosen(1))
    assert not np.array_equal(chosen(1), chosen(2))


def test_too_little_text_is_an_error_with_the_count(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = _write(tmp_path, "a.txt", "one two three four five six")
    count = len(tokenizer.encode("one two three four five six"))
    for size, made in (
        (count // 2, "2 full samples"),
        (count, "1 full sample"),
        (count + 1, "0 full samples"),
    ):
        with pytest.raises(ConfigError, match=rf"{count} tokens make {made} of {size}, at least 8"):
            calibration_from_file(str(path), tokenizer, samples=128, seq_len=size, seed=0)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        find_texts("nowhere.jsonl", flag="--calibration")


class Hub:
    """Stands for the hub's data sets: `files` by name, or an error for whoever asks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, files: dict[str, Path] | Exception) -> None:
        import huggingface_hub

        self.files = files
        self.kept: dict[str, Path] = {}
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        monkeypatch.setattr(
            huggingface_hub, "hf_hub_download", lambda repo, file, repo_type: str(self.listed()[file])
        )
        monkeypatch.setattr(
            huggingface_hub,
            "try_to_load_from_cache",
            lambda repo, file, repo_type: str(self.kept[file]) if file in self.kept else None,
        )

    def listed(self) -> dict[str, Path]:
        if isinstance(self.files, Exception):
            raise self.files
        return self.files

    def dataset_info(self, repo: str, *, timeout: float) -> SimpleNamespace:
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.listed()])


def test_a_hub_data_set_is_read_from_what_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path, "train.jsonl", _rows({"text": "fetched"}))
    hub = Hub(monkeypatch, {"README.md": path, "train.jsonl": path, "data.parquet": path})
    for name in ("owner/data:train.jsonl", "owner/data"):
        (text,) = find_texts(name, flag="--calibration")
        assert text.value == "fetched"
    hub.listed()["test.jsonl"] = path
    with pytest.raises(ConfigError, match=r"2 files of JSONL or text \(test.jsonl, train.jsonl\): name one"):
        find_texts("owner/data", flag="--calibration")
    with pytest.raises(ConfigError, match=r"owner/data: has no other\.txt"):
        find_texts("owner/data:other.txt", flag="--calibration")


def test_without_the_network_what_was_fetched_before_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(monkeypatch, OSError("no route to host"))
    with pytest.raises(
        ConfigError, match=r"the hub cannot be reached \(no route to host\): give a file, or leave --cal"
    ):
        find_texts("owner/data:train.jsonl", flag="--calibration")
    hub.kept["train.jsonl"] = _write(tmp_path, "train.jsonl", _rows({"text": "kept"}))
    (text,) = find_texts("owner/data:train.jsonl", flag="--calibration")
    assert text.value == "kept"


class Writer:
    """Writes `length` tokens after every prompt, which tell prompt and seed; remembers what it was asked."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.prompts: list[list[int]] = []

    def __call__(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        self.prompts += [list(prompt) for prompt in prompts]
        count = min(self.length, max_tokens)
        return [[(seed + 7 * row + i) % 200 + 10 for i in range(count)] for row in range(len(prompts))]


def test_the_model_writes_documents_and_answers(tokenizer: Tokenizer) -> None:
    writer = Writer(100)
    found = calibration_by_model(writer, tokenizer, samples=16, seq_len=64, seed=5)
    assert found.samples.shape == (16, 64)
    assert found.source == SELF_WRITTEN
    start = start_tokens(tokenizer)
    question = tokenizer.encode_chat([{"role": "user", "content": "x"}])[:2]
    documents = [prompt for prompt in writer.prompts if prompt[: len(start)] == start]
    assert documents
    assert any(prompt[:2] == question and len(prompt) > 20 for prompt in writer.prompts)
    again = calibration_by_model(Writer(100), tokenizer, samples=16, seq_len=64, seed=5)
    assert np.array_equal(found.samples, again.samples)
    other = calibration_by_model(Writer(100), tokenizer, samples=16, seq_len=64, seed=6)
    assert not np.array_equal(found.samples, other.samples)


def test_a_model_that_writes_nothing_is_said(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="writes no text to calibrate with: give --calibration FILE"):
        calibration_by_model(Writer(0), tokenizer, samples=1000, seq_len=512, seed=0)

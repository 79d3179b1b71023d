"""Input rows: one line of a JSONL or text file -> `Row`, ready for the engine or with the error that it has.

May import `core`, `serve.strict_json`, `config_file` and `errors`. A bad row never raises: it becomes a row with
`error` set, so that one output row comes of every line. Ids are unique in a file: a later row with the id of an
earlier one is an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagedcli.cli.batch_rows import batch_fields, batch_kind
from pagedcli.cli.lines import Line
from pagedcli.cli.row_fields import (
    SAMPLING_FIELDS,
    RowKind,
    check_messages,
    check_names,
    check_prompt,
    check_template_args,
    check_token_ids,
    invalid,
    is_text,
    make_params,
)
from pagedcli.core.sampling import SamplingParams
from pagedcli.errors import RequestError
from pagedcli.serve import strict_json

_INPUTS = ("prompt", "messages", "prompt_token_ids")
_ROW_FIELDS = ("id", *_INPUTS, "chat_template_kwargs", *SAMPLING_FIELDS)
_PLAIN_TEXT = ': write {"prompt": "..."}, or name the file .txt to have a prompt a line'
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class Row:
    """One input row.

    Attributes:
        line: Physical line in the file, from 1.
        ordinal: Its place among the lines that are not blank, from 0.
        id: As given, text or a whole number; the line's number as text where there is none.
        kind: Shape of the row.
        prompt: Raw text or token ids, or None.
        messages: Of a conversation, or None.
        template_args: Further variables of the chat template.
        params: Sampling parameters, the defaults filled in.
        error: What is wrong with it; then only `line`, `ordinal`, `id` and `kind` count.
    """

    line: int
    ordinal: int
    id: str | int
    kind: RowKind = RowKind.PLAIN
    prompt: str | tuple[int, ...] | None = None
    messages: list[dict[str, Any]] | None = None
    template_args: dict[str, Any] = field(default_factory=dict)
    params: SamplingParams = field(default_factory=SamplingParams)
    error: RequestError | None = None


def _decode(line: Line) -> str:
    if line.too_long:
        raise invalid(f"the line is longer than {len(line.data) - 1} bytes: split it", code="line_too_long")
    try:
        return line.data.decode("utf-8")
    except UnicodeDecodeError as error:
        hint = "save the file as UTF-8"
        if line.number == 1 and line.data.startswith(_UTF16_MARKS):
            hint = "the file is UTF-16: convert it with iconv -f UTF-16 -t UTF-8"
        raise invalid(f"not UTF-8 at byte {error.start + 1}: {hint}", code="invalid_utf8") from None


def _parse_json(text: str) -> dict[str, Any]:
    try:
        value = strict_json.parse(text)
    except strict_json.JSONTextError as error:
        plain = "" if text.lstrip().startswith(("{", "[")) else _PLAIN_TEXT
        raise invalid(f"{error}{plain}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid('not a JSON object: write {"prompt": "..."}', code="invalid_json")
    return value


def _is_id(value: object) -> bool:
    return is_text(value) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63)


def _plain_fields(body: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    check_names(body, _ROW_FIELDS)
    inputs = [name for name in _INPUTS if body.get(name) is not None]
    if len(inputs) != 1:
        given = f"it has {' and '.join(inputs)}" if inputs else "it has none"
        raise invalid(f"give one of prompt, messages and prompt_token_ids: {given}")
    result: dict[str, Any] = {"template_args": check_template_args(body.get("chat_template_kwargs"))}
    if result["template_args"] and "messages" not in inputs:
        raise invalid("chat_template_kwargs needs messages: leave it out", "chat_template_kwargs")
    if "messages" in inputs:
        result["messages"] = check_messages(body["messages"])
    elif "prompt" in inputs:
        result["prompt"] = check_prompt(body["prompt"])
    else:
        result["prompt"] = check_token_ids(body["prompt_token_ids"])
    sampling = {name: value for name, value in body.items() if name in SAMPLING_FIELDS}
    return result | {"params": make_params(defaults, sampling)}


class RowReader:
    """Makes rows of lines, in order; knows the ids that were used.

    Args:
        defaults: Sampling fields for rows that do not have their own.
        text: Every line is a prompt (a `.txt` file), not JSON.
        run_seed: Rows without a seed draw theirs from it and their line, so that a rerun draws the same.
    """

    def __init__(self, defaults: Mapping[str, Any], *, text: bool, run_seed: int) -> None:
        self._defaults = dict(defaults)
        self._text = text
        self._run_seed = run_seed
        self._ids: set[bytes] = set()
        self._kind = RowKind.PLAIN

    def rows(self, lines: Iterable[Line]) -> Iterator[Row]:
        """One row for every line."""
        for line in lines:
            yield self.row(line)

    def row(self, line: Line) -> Row:
        """The row of a line; never raises for what is wrong with it."""
        row = Row(line.number, line.ordinal, str(line.number), self._kind)
        try:
            row = self._read(line, row)
        except _BadRowError as bad:
            row = dataclasses.replace(bad.row, error=bad.error)
        return self._claim_id(row)

    def _claim_id(self, row: Row) -> Row:
        """Ids are kept as 16-byte digests: a file of any size has any number of them."""
        digest = hashlib.blake2b(str(row.id).encode(), digest_size=16).digest()
        if digest not in self._ids:
            self._ids.add(digest)
            return row
        error = invalid(f"an earlier row has the id {row.id!r}: give every row its own", "id", "duplicate_id")
        return dataclasses.replace(row, error=error)

    def _read(self, line: Line, row: Row) -> Row:
        try:
            text = _decode(line)
            body = {"prompt": text} if self._text else _parse_json(text)
        except RequestError as error:
            raise _BadRowError(row, error) from None
        row = self._identify(body, row)
        self._kind = row.kind
        try:
            return dataclasses.replace(row, **self._fields(row.kind, body, line.number))
        except RequestError as error:
            raise _BadRowError(row, error) from None

    def _identify(self, body: dict[str, Any], row: Row) -> Row:
        """The row with its kind and id, as far as they can be read."""
        is_batch = "custom_id" in body
        row = dataclasses.replace(row, kind=batch_kind(body) if is_batch else RowKind.PLAIN)
        name = "custom_id" if is_batch else "id"
        if name not in body:
            return row
        if not _is_id(body[name]):
            error = invalid(f"{name}: give text or a whole number", name)
            raise _BadRowError(row, error)
        return dataclasses.replace(row, id=body[name])

    def _fields(self, kind: RowKind, body: dict[str, Any], line: int) -> dict[str, Any]:
        read = _plain_fields if kind is RowKind.PLAIN else batch_fields
        fields = read(body, self._defaults)
        params: SamplingParams = fields["params"]
        if params.seed is None:
            fields["params"] = params.replace(seed=row_seed(self._run_seed, line))
        return fields


def row_seed(run_seed: int, line: int) -> int:
    """Seed of a row that has none: from the run's seed and its line, never from the order in which rows run."""
    digest = hashlib.blake2b(f"{run_seed}:{line}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class _BadRowError(Exception):
    """Carries a row as far as it could be read, and what is wrong with it."""

    def __init__(self, row: Row, error: RequestError) -> None:
        super().__init__(str(error))
        self.row = row
        self.error = error

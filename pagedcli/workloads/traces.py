"""Traces of real services: lengths and moments, without the texts. Standard library only and `errors`.

Azure's LLM traces are CSV files with a moment, the prompt's and the answer's length. Mooncake's are JSONL; a request
has `hash_ids` besides, one for each block of 512 prompt tokens, and equal ids stand for equal blocks after equal
prefixes. Token ids are drawn: from the seed and the row, or from the seed and the block's id, so that equal blocks
become equal tokens.
"""

from __future__ import annotations

import csv
import functools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from pagedcli.workloads.fields import MAX_TOKENS, Record, WorkloadError, read_object, shown
from pagedcli.workloads.requests import WorkloadRequest

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Where token ids come from.

    Attributes:
        seed: Another one gives other ids.
        first: Smallest id.
        end: Largest id and one.
    """

    seed: int
    first: int
    end: int

    def draw(self, key: str, num: int) -> tuple[int, ...]:
        """Ids that depend on the seed and the key alone; a longer draw begins with the shorter one."""
        return tuple(random.Random(f"{self.seed}/{key}").choices(range(self.first, self.end), k=num))


def scaled_length(length: int, scale: float) -> int:
    """At least one token."""
    return max(1, round(length * scale))


def from_zero(requests: Iterable[WorkloadRequest]) -> Iterator[WorkloadRequest]:
    """With arrivals counted from the first one's; none is before it, whatever a trace says."""
    start: float | None = None
    for request in requests:
        start = request.arrival_s if start is None else start
        yield replace(request, arrival_s=max(0.0, request.arrival_s - start))


def azure_requests(
    name: str, lines: Sequence[str], tokens: TokenSource, *, length_scale: float
) -> Iterator[WorkloadRequest]:
    """Of a CSV file with the columns `AZURE_COLUMNS`, in any order; times as they stand there, in seconds."""
    rows = csv.reader(lines, strict=True)
    try:
        header = next(rows)
        missing = [column for column in AZURE_COLUMNS if column not in header]
        if missing:
            raise WorkloadError(f"{name}, line 1: {missing[0]} is missing: the columns are {shown(header)}")
        for row in rows:
            if not row:
                continue
            place = f"{name}, line {rows.line_num}"
            if len(row) != len(header):
                raise WorkloadError(f"{place}: {len(row)} fields: the header has {len(header)}")
            yield _azure_request(Record(place, dict(zip(header, row, strict=True))), tokens, length_scale)
    except csv.Error as error:
        raise WorkloadError(f"{name}, line {rows.line_num}: {error}") from error


def _azure_request(record: Record, tokens: TokenSource, length_scale: float) -> WorkloadRequest:
    number = record.place.rpartition(" ")[2]
    length = scaled_length(_count(record, "ContextTokens"), length_scale)
    output = scaled_length(_count(record, "GeneratedTokens"), length_scale)
    prompt = tokens.draw(f"row {number}", length)
    return WorkloadRequest(f"azure-{number}", prompt, output, output, _moment(record))


def _count(record: Record, name: str) -> int:
    text = record.values[name]
    if not text.isascii() or not text.isdigit() or len(text) > len(str(MAX_TOKENS)):
        record.fail(f"{name} is {shown(text)}: give a whole number from 1 to {MAX_TOKENS}")
    return Record(record.place, {name: int(text)}).integer(name, least=1)


def _moment(record: Record) -> float:
    """Seconds; Python reads six digits of a fraction, the trace has seven."""
    text = record.values["TIMESTAMP"]
    whole, _, fraction = text.partition(".")
    if (fraction and not (fraction.isascii() and fraction.isdigit())) or len(fraction) > 9:
        record.fail(f"TIMESTAMP is {shown(text)}: give a time such as 2023-11-16 18:15:46.6805900")
    try:
        moment = datetime.fromisoformat(whole)
    except ValueError:
        record.fail(f"TIMESTAMP is {shown(text)}: give a time such as 2023-11-16 18:15:46.6805900")
    since = moment.replace(tzinfo=None) - datetime(1970, 1, 1)
    return since.total_seconds() + (int(fraction) / 10 ** len(fraction) if fraction else 0.0)


def mooncake_requests(
    name: str, lines: Sequence[str], tokens: TokenSource, *, length_scale: float
) -> Iterator[WorkloadRequest]:
    """Of a JSONL file with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`.

    A scale shortens the blocks, so that what was shared stays shared.
    """
    size = scaled_length(MOONCAKE_BLOCK, length_scale)
    block = functools.lru_cache(maxsize=4096)(lambda number: tokens.draw(f"block {number}", size))
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = read_object(f"{name}, line {number}", line)
        length, ids = record.integer("input_length", least=1), _hash_ids(record)
        num_blocks = -(-length // MOONCAKE_BLOCK)
        if len(ids) != num_blocks:
            record.fail(
                f"hash_ids has {len(ids)} blocks: {length} tokens are {num_blocks} of {MOONCAKE_BLOCK}"
            )
        rest = scaled_length(length - (num_blocks - 1) * MOONCAKE_BLOCK, length_scale)
        prompt = [token for item in ids[:-1] for token in block(item)]
        prompt += block(ids[-1])[:rest]
        output = scaled_length(record.integer("output_length", least=1), length_scale)
        arrival = record.seconds("timestamp") / 1e3
        yield WorkloadRequest(f"mooncake-{number}", tuple(prompt), output, output, arrival)


def _hash_ids(record: Record) -> list[int]:
    ids = record.get("hash_ids")
    if not isinstance(ids, list):
        record.fail(f"hash_ids is {shown(ids)}: give a list of numbers")
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int):
            record.fail(f"hash_ids holds {shown(item)}: give whole numbers")
    return ids

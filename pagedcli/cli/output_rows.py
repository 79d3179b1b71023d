"""Output rows: what the engine returned, or an error -> one JSON object, in the shape in which the row came.

May import `serve.bodies`, `engine.outputs`, `errors` and `rows`. Rows are compact JSON in UTF-8 with a line feed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagedcli.cli.row_fields import RowKind
from pagedcli.cli.rows import Row
from pagedcli.engine.outputs import RequestOutput, SampleOutput, TokenLogprobs
from pagedcli.errors import PagedError, RequestError
from pagedcli.serve.bodies import Shape, answer_body, completion_logprobs


@dataclass(frozen=True, slots=True)
class RowStyle:
    """What goes into output rows.

    Attributes:
        token_ids: Add the output's token ids.
        model: Name in OpenAI bodies.
        created: Unix time in OpenAI bodies; the start of the run, so that a rerun writes the same.
    """

    token_ids: bool
    model: str
    created: int


def encode_row(value: dict[str, Any]) -> bytes:
    """The line as it is written."""
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": ")).encode() + b"\n"


def error_row(row: Row, error: PagedError) -> dict[str, Any]:
    """Output of a row that was refused."""
    code = error.code if isinstance(error, RequestError) else "engine_error"
    shown = {"code": code, "message": str(error), "line": row.line}
    if row.kind is RowKind.PLAIN:
        return {"id": row.id, "error": shown}
    status = error.status if isinstance(error, RequestError) else 500
    field = error.field if isinstance(error, RequestError) else None
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": str(error), "type": kind, "param": field, "code": code}}
    return _batch_row(row, status, body) | {"error": shown}


def output_row(row: Row, output: RequestOutput, style: RowStyle) -> dict[str, Any]:
    """Output of a row that was served."""
    if row.kind is RowKind.PLAIN:
        return _plain_row(row, output, style)
    return _batch_row(row, 200, _openai_body(row, output, style))


def is_error_row(value: dict[str, Any]) -> bool:
    """Whether an output row, read back, is that of a row that failed."""
    return value.get("error") is not None


def error_line(value: dict[str, Any]) -> int | None:
    """Line of the input that an error row belongs to."""
    error = value.get("error")
    line = error.get("line") if isinstance(error, dict) else None
    return line if isinstance(line, int) else None


def row_id(value: dict[str, Any]) -> Any:
    """Id of the input row that an output row, read back, belongs to."""
    return value["custom_id"] if "custom_id" in value else value.get("id")


def _plain_row(row: Row, output: RequestOutput, style: RowStyle) -> dict[str, Any]:
    result: dict[str, Any] = {"id": row.id}
    samples = [_plain_sample(sample, output, row, style) for sample in output.samples]
    if row.params.n > 1:
        result["choices"] = samples
    else:
        del samples[0]["index"]
        result |= samples[0]
    if row.params.prompt_logprobs is not None and not row.params.echo:
        result["prompt_logprobs"] = completion_logprobs(output.prompt_logprobs or (), output.prompt)
    usage, seconds = output.usage, output.seconds
    result["usage"] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }
    first = None if seconds.first_token is None else round(seconds.first_token, 4)
    total = round(seconds.total, 4)
    result["seconds"] = {"queued": round(seconds.queued, 4), "first_token": first, "total": total}
    return result


def _plain_sample(sample: SampleOutput, output: RequestOutput, row: Row, style: RowStyle) -> dict[str, Any]:
    result: dict[str, Any] = {
        "index": sample.index,
        "text": sample.text,
        "finish_reason": sample.finish_reason.value if sample.finish_reason else None,
    }
    if style.token_ids:
        result["token_ids"] = list(sample.token_ids)
    if row.params.logprobs is not None:
        result["logprobs"] = completion_logprobs(_echoed(sample, output, row), output.prompt)
    return result


def _echoed(sample: SampleOutput, output: RequestOutput, row: Row) -> Sequence[TokenLogprobs | None]:
    """The sample's log-probabilities, after the prompt's if the prompt is echoed."""
    own = sample.logprobs or ()
    return [*(output.prompt_logprobs or ()), *own] if row.params.echo else own


def _batch_row(row: Row, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """Ids follow from the line, so that a rerun writes the same ones."""
    response = {"status_code": status, "request_id": f"req_{row.line}", "body": body}
    return {"id": f"batch_req_{row.line}", "custom_id": row.id, "response": response, "error": None}


def _openai_body(row: Row, output: RequestOutput, style: RowStyle) -> dict[str, Any]:
    """What `paged serve` would have answered."""
    is_chat = row.kind is RowKind.CHAT
    params = row.params
    shape = Shape(
        id=f"{'chatcmpl' if is_chat else 'cmpl'}-{row.line}",
        model=style.model,
        created=style.created,
        is_chat=is_chat,
        echo=params.echo,
        logprobs=params.logprobs is not None,
        # An echo brings them with the others.
        prompt_logprobs=params.prompt_logprobs is not None and not params.echo,
        token_ids=style.token_ids,
        n=params.n,
        token_bytes=_unknown_bytes,
    )
    return answer_body(shape, [output])


def _unknown_bytes(token_id: int) -> None:
    """Rows are written without the tokenizer at hand: the bytes of a token are those of its text."""

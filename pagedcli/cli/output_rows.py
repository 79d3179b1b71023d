"""Output rows: what the engine returned, or an error -> one JSON object, in the shape in which the row came.

May import `core`, `engine.outputs`, `errors` and `rows`. Rows are compact JSON in UTF-8 with a line feed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagedcli.cli.row_fields import RowKind
from pagedcli.cli.rows import Row
from pagedcli.core.request import FinishReason
from pagedcli.engine.outputs import RequestOutput, SampleOutput, TokenLogprobs
from pagedcli.errors import PagedError, RequestError

# OpenAI's clients know only its own reasons: an end that the user set is a length.
_OPENAI_REASONS = {FinishReason.DEADLINE: "length", FinishReason.PAGE_CAP: "length"}


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


def completion_logprobs(items: Sequence[TokenLogprobs | None], prompt: str | None) -> dict[str, Any]:
    """As OpenAI's completions write them; the first token of a prompt has none."""
    after = items[1] if len(items) > 1 else None
    first = (prompt or "")[: after.offset if after else None]
    return {
        "tokens": [item.text if item else first for item in items],
        "token_logprobs": [item.logprob if item else None for item in items],
        "top_logprobs": [_top_dict(item) if item else None for item in items],
        "text_offset": [item.offset if item else 0 for item in items],
    }


def _top_dict(item: TokenLogprobs) -> dict[str, float]:
    """Alternatives by text, and the token itself; of tokens with one text the most probable counts."""
    result: dict[str, float] = {}
    for top in item.top:
        result.setdefault(top.text, top.logprob)
    result.setdefault(item.text, item.logprob)
    return result


def _chat_logprobs(items: Sequence[TokenLogprobs]) -> dict[str, Any]:
    content = []
    for item in items:
        tops = [_chat_token(top.text, top.logprob) for top in item.top]
        content.append(_chat_token(item.text, item.logprob) | {"top_logprobs": tops})
    return {"content": content, "refusal": None}


def _chat_token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _batch_row(row: Row, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """Ids follow from the line, so that a rerun writes the same ones."""
    response = {"status_code": status, "request_id": f"req_{row.line}", "body": body}
    return {"id": f"batch_req_{row.line}", "custom_id": row.id, "response": response, "error": None}


def _openai_body(row: Row, output: RequestOutput, style: RowStyle) -> dict[str, Any]:
    is_chat = row.kind is RowKind.CHAT
    make_choice = _chat_choice if is_chat else _completion_choice
    usage = output.usage
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{row.line}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": style.created,
        "model": style.model,
        "choices": [make_choice(sample, output, row, style) for sample in output.samples],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        },
    }


def _openai_reason(sample: SampleOutput) -> str | None:
    reason = sample.finish_reason
    return None if reason is None else _OPENAI_REASONS.get(reason, reason.value)


def _chat_choice(sample: SampleOutput, output: RequestOutput, row: Row, style: RowStyle) -> dict[str, Any]:
    logprobs = _chat_logprobs(sample.logprobs or ()) if row.params.logprobs is not None else None
    choice = {
        "index": sample.index,
        "message": {"role": "assistant", "content": sample.text},
        "logprobs": logprobs,
        "finish_reason": _openai_reason(sample),
    }
    return choice | ({"token_ids": list(sample.token_ids)} if style.token_ids else {})


def _completion_choice(
    sample: SampleOutput, output: RequestOutput, row: Row, style: RowStyle
) -> dict[str, Any]:
    wanted = row.params.logprobs is not None
    choice = {
        "index": sample.index,
        "text": sample.text,
        "logprobs": completion_logprobs(_echoed(sample, output, row), output.prompt) if wanted else None,
        "finish_reason": _openai_reason(sample),
    }
    return choice | ({"token_ids": list(sample.token_ids)} if style.token_ids else {})

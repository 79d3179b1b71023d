"""What is wrong with a request, as OpenAI's clients read it: one shape, the right status, no traceback.

May import starlette's responses and `errors`. Every error that leaves the server is made here. A message is shown as
it was written for the command line, so the names of the core's fields that the API spells otherwise are replaced.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from pagedcli.errors import EngineDead, PagedError, RequestError

RETRY_AFTER_S = {429: 1.0, 503: 5.0}
"""Seconds after which a client may try again, where nothing better is known."""
_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# Names of the core's that the API spells differently, by what a caller has written.
_API_NAMES = {
    "deadline_s": "deadline_ms",
    "prompt_token_ids": "prompt",
    "template_args": "chat_template_kwargs",
}


class ApiResponse(Response):
    """JSON bytes; half a surrogate pair that came from a client goes back escaped, as it came."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body of any JSON value."""
        return encode_json(content)


def encode_json(value: Any) -> bytes:
    """Compact JSON in UTF-8; what UTF-8 cannot write stays an escape."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def as_request_error(error: PagedError) -> RequestError:
    """Any error that a caller may meet as one with status and code."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineDead):
        return RequestError(str(error), code="engine_dead", status=503)
    return RequestError(str(error), code="server_error", status=500)


def error_body(error: PagedError) -> dict[str, Any]:
    """OpenAI's error object."""
    known = as_request_error(error)
    kind = _KINDS.get(known.status, "invalid_request_error" if known.status < 500 else "server_error")
    field, message = known.field, str(known)
    if field in _API_NAMES:
        message, field = message.replace(field, _API_NAMES[field]), _API_NAMES[field]
    return {"error": {"message": message, "type": kind, "param": field, "code": known.code}}


def error_headers(error: RequestError) -> dict[str, str]:
    """`Retry-After` where trying again may help, in whole seconds; the end of a connection whose body was not read."""
    seconds = error.retry_after_s if error.retry_after_s is not None else RETRY_AFTER_S.get(error.status)
    retry = {} if seconds is None else {"Retry-After": str(max(1, math.ceil(seconds)))}
    return {**retry, **({"Connection": "close"} if error.status in (408, 413) else {})}


def error_response(error: PagedError, headers: Mapping[str, str] | None = None) -> ApiResponse:
    """The answer to a request that is refused or lost."""
    known = as_request_error(error)
    return ApiResponse(error_body(known), known.status, {**error_headers(known), **(headers or {})})


def not_found(what: str, *, code: str = "not_found", field: str | None = None) -> RequestError:
    """404: a route, a model or a request that is not there."""
    return RequestError(what, code=code, status=404, field=field)

"""The OpenAPI document of the routes: written from the bodies' models, so that it says what is checked.

May import pydantic's models of this package. Standard shapes of answers are written here; the tests hold them
against what the server answers.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from pagedcli.serve import schemas
from pagedcli.serve.schemas import Body

Json = dict[str, Any]


def _object(*required: str, **properties: Any) -> Json:
    return {"type": "object", "required": list(required), "properties": properties}


_TEXT: Json = {"type": "string"}
_MAYBE_TEXT: Json = {"type": ["string", "null"]}
_COUNT: Json = {"type": "integer", "minimum": 0}
_STATUS = _object("status", status=_TEXT)
_ERROR = _object(
    "error",
    error=_object(
        "message", "type", "param", "code", message=_TEXT, type=_TEXT, param=_MAYBE_TEXT, code=_MAYBE_TEXT
    ),
)
_USAGE = _object(
    "prompt_tokens",
    "completion_tokens",
    "total_tokens",
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_object("cached_tokens", cached_tokens=_COUNT),
)
_CARD = _object(
    "id", "object", "created", "owned_by", id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT
)
_PROMPT = _object("prompt", prompt=_TEXT)


def _answer(kind: str, **choice: Json) -> Json:
    return _object(
        "id",
        "object",
        "created",
        "model",
        "choices",
        "usage",
        id=_TEXT,
        object={"const": kind},
        created=_COUNT,
        model=_TEXT,
        choices={
            "type": "array",
            "items": _object(
                "index", "finish_reason", *choice, index=_COUNT, finish_reason=_MAYBE_TEXT, **choice
            ),
        },
        usage=_USAGE,
    )


_MESSAGE = _object("role", "content", role={"const": "assistant"}, content=_TEXT)
_POSTS: dict[str, tuple[type[Body], Json]] = {
    "/v1/completions": (schemas.CompletionBody, _answer("text_completion", text=_TEXT)),
    "/v1/chat/completions": (schemas.ChatBody, _answer("chat.completion", message=_MESSAGE)),
    "/tokenize": (
        schemas.TokenizeBody,
        _object("count", "max_model_len", "tokens", count=_COUNT, tokens={"type": "array", "items": _COUNT}),
    ),
    "/detokenize": (schemas.DetokenizeBody, _PROMPT),
    "/apply-template": (schemas.ApplyTemplateBody, _PROMPT),
}
_GETS: dict[str, Json] = {
    "/v1/models": _object("object", "data", object={"const": "list"}, data={"type": "array", "items": _CARD}),
    "/v1/models/{model_id}": _CARD,
    "/health": _STATUS,
    "/ready": _STATUS,
    "/version": _object("version", version=_TEXT),
    "/metrics": _TEXT,
    "/openapi.json": {"type": "object"},
}
_ABORT = "/v1/requests/{request_id}/abort"
_STREAMING = ("/v1/completions", "/v1/chat/completions")
_OPEN = ("/health", "/ready")
_ERRORS = {
    "400": "The request is wrong: param names the field",
    "401": "A key is needed",
    "403": "A web page asks that may not",
    "404": "The model or the request is not there",
    "408": "The body did not come",
    "413": "The body is too large",
    "429": "Too many requests wait: Retry-After says when to come again",
    "503": "The model is being loaded, the server stops, or the engine has failed",
}


def document() -> Json:
    """The OpenAPI 3.1 document."""
    paths: Json = {path: {"post": _post(path, *described)} for path, described in _POSTS.items()}
    paths[_ABORT] = {"post": _operation(_ABORT, _object("id", "aborted", id=_TEXT, aborted={"const": True}))}
    paths |= {path: {"get": _operation(path, result)} for path, result in _GETS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "paged", "version": version("pagedcli")},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _post(path: str, body: type[Body], result: Json) -> Json:
    content = {"application/json": {"schema": body.model_json_schema()}}
    return _operation(path, result) | {"requestBody": {"required": True, "content": content}}


def _operation(path: str, result: Json) -> Json:
    kind = "text/plain" if path == "/metrics" else "application/json"
    content = {kind: {"schema": result}}
    if path in _STREAMING:
        content["text/event-stream"] = {}
    responses: Json = {"200": {"description": "Done", "content": content}}
    for status, text in _ERRORS.items():
        schema = _STATUS if path in _OPEN else {"$ref": "#/components/schemas/Error"}
        responses[status] = {"description": text, "content": {"application/json": {"schema": schema}}}
    names = [part.strip("{}") for part in path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names]
    # An empty requirement: without keys, a server asks for none.
    security: list[Json] = [] if path in _OPEN else [{"key": []}, {}]
    return {"responses": responses, "parameters": parameters, "security": security}

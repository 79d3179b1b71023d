"""The routes that are not completions: models, tokens, templates, health, and the end of a request.

May import starlette, `api` and this package.
"""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pagedcli.errors import RequestError
from pagedcli.serve.answering import Answer, read_checked
from pagedcli.serve.errors import ApiResponse, error_headers, not_found
from pagedcli.serve.openapi import document
from pagedcli.serve.params import checked_messages, template_args
from pagedcli.serve.schemas import ApplyTemplateBody, DetokenizeBody, TemplateBody, TokenizeBody
from pagedcli.serve.state import ServerState
from pagedcli.serve.validation import printable


class Routes:
    """Handlers of all routes, over one server's state."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def completions(self, request: Request) -> Response:
        """Continue one prompt or several."""
        return Answer(self._state, is_chat=False)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return Answer(self._state, is_chat=True)

    async def models(self, request: Request) -> Response:
        """The served names."""
        self._state.llm()
        return ApiResponse({"object": "list", "data": [self._card(name) for name in self._state.names]})

    async def model(self, request: Request) -> Response:
        """One served name."""
        return ApiResponse(self._card(self._state.check_model(request.path_params["model_id"])))

    def _card(self, name: str) -> dict[str, Any]:
        state = self._state
        return {
            "id": name,
            "object": "model",
            "created": state.created,
            "owned_by": "paged",
            "root": state.names[0],
            "parent": None,
            "max_model_len": state.llm().engine.resolved.max_model_len,
        }

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text, or of a conversation as the model gets it."""
        state = self._state
        body = await read_checked(request.scope, request.receive, TokenizeBody, state)
        state.check_model(body.model)
        engine = state.llm().engine
        tokens = await asyncio.to_thread(self._tokens, body)
        texts = [engine.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
        return ApiResponse(
            {
                "count": len(tokens),
                "max_model_len": engine.resolved.max_model_len,
                "tokens": tokens,
                "token_strs": texts,
            }
        )

    def _tokens(self, body: TokenizeBody) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give a prompt or messages, one of the two", field="prompt")
        engine = self._state.llm().engine
        with engine.client.timing.tokenizing():
            if body.prompt is not None:
                return engine.tokenizer.encode(
                    body.prompt, add_special_tokens=body.add_special_tokens is not False
                )
            text = self._render(body, body.messages)
            return engine.tokenizer.encode(text, add_special_tokens=body.add_special_tokens is True)

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids, special tokens included."""
        body = await read_checked(request.scope, request.receive, DetokenizeBody, self._state)
        self._state.check_model(body.model)
        engine = self._state.llm().engine
        for token in body.tokens:
            if not 0 <= token < engine.resolved.vocab_size:
                raise RequestError(
                    f"tokens has {token}: the vocabulary has ids 0 to {engine.resolved.vocab_size - 1}",
                    code="invalid_value",
                    field="tokens",
                )
        text = await asyncio.to_thread(engine.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return ApiResponse({"prompt": text})

    async def apply_template(self, request: Request) -> Response:
        """The prompt that a conversation becomes."""
        body = await read_checked(request.scope, request.receive, ApplyTemplateBody, self._state)
        self._state.check_model(body.model)
        return ApiResponse({"prompt": await asyncio.to_thread(self._render, body, body.messages)})

    def _render(self, body: TemplateBody, messages: Any) -> str:
        client = self._state.llm().engine.client
        return client.codec.apply_chat_template(
            checked_messages(messages, self._state.config),
            template=client.settings.chat_template,
            **template_args(body),
        )

    async def abort(self, request: Request) -> Response:
        """End a request with what it has; named by the id that its answer carries."""
        request_id = request.path_params["request_id"]
        streams = self._state.open.get(request_id)
        if streams is None:
            raise not_found(
                f"there is no unfinished request {printable(request_id)!r}", code="request_not_found"
            )
        for stream in streams:
            stream.abort()
        return ApiResponse({"id": request_id, "aborted": True})

    async def health(self, request: Request) -> Response:
        """Alive."""
        return self._status(*self._state.lifecycle.health())

    async def ready(self, request: Request) -> Response:
        """Ready for a request: the model is loaded and the queue has room."""
        return self._status(*self._state.lifecycle.ready())

    def _status(self, status: int, body: dict[str, str]) -> Response:
        headers = error_headers(RequestError("", status=status)) if status == 503 else {}
        return ApiResponse(body, status, headers)

    async def version(self, request: Request) -> Response:
        """This program's version."""
        return ApiResponse({"version": version("pagedcli")})

    async def metrics(self, request: Request) -> Response:
        """Prometheus metrics."""
        if self._state.metrics is None:
            self._state.llm()
            raise not_found("metrics are not served")
        body, content_type = self._state.metrics()
        return Response(body, media_type=content_type)

    async def openapi(self, request: Request) -> Response:
        """The OpenAPI document of these routes."""
        return ApiResponse(document())

"""`create_app`: the routes, what is round them, and their errors. May import starlette and this package.

Bodies are read and checked by our own code (`answering.read_checked`), so that nothing answers with 422 and none of
JSON's loopholes gets through.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pagedcli.errors import PagedError, RequestError
from pagedcli.serve.body import ClientGoneError
from pagedcli.serve.errors import as_request_error, error_response
from pagedcli.serve.routes import Routes
from pagedcli.serve.security import KeyGate, OriginGate
from pagedcli.serve.state import ServerState
from pagedcli.serve.validation import printable


def create_app(state: ServerState) -> ASGIApp:
    """The server's ASGI application."""
    app: ASGIApp = make_routes(state)
    if state.keys:
        app = KeyGate(app, state.keys)
    app = OriginGate(app, state.config.cors_origins)
    if state.config.cors_origins:
        # Outermost: a browser asks before it sends a key.
        app = CORSMiddleware(
            app,
            allow_origins=list(state.config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


def make_routes(state: ServerState) -> Starlette:
    """The routes and their error handlers, open to everybody."""
    routes = Routes(state)
    posts = {
        "/v1/completions": routes.completions,
        "/v1/chat/completions": routes.chat,
        "/v1/requests/{request_id}/abort": routes.abort,
        "/tokenize": routes.tokenize,
        "/detokenize": routes.detokenize,
        "/apply-template": routes.apply_template,
    }
    gets = {
        "/v1/models": routes.models,
        "/v1/models/{model_id:path}": routes.model,
        "/health": routes.health,
        "/ready": routes.ready,
        "/version": routes.version,
        "/metrics": routes.metrics,
        "/openapi.json": routes.openapi,
    }
    app = Starlette(
        routes=[
            *(Route(path, handler, methods=["POST"]) for path, handler in posts.items()),
            *(Route(path, handler, methods=["GET"]) for path, handler in gets.items()),
        ]
    )
    app.router.redirect_slashes = False
    _add_error_handlers(app, state)
    return app


def _add_error_handlers(app: Starlette, state: ServerState) -> None:
    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, PagedError)
        state.on_error(as_request_error(error).code)
        return error_response(error)

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(
            _of_status(error, printable(request.url.path, 80), request.method), error.headers
        )

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=400)  # nobody is there to receive it

    async def defect(request: Request, error: Exception) -> Response:
        state.on_error("internal_error")
        return error_response(
            RequestError(
                "the server failed at this request: its log says why", code="internal_error", status=500
            )
        )

    app.add_exception_handler(PagedError, refused)
    app.add_exception_handler(HTTPException, no_route)
    app.add_exception_handler(ClientGoneError, gone)
    app.add_exception_handler(Exception, defect)


def _of_status(error: HTTPException, path: str, method: str) -> RequestError:
    """What the router refuses, in our words."""
    if error.status_code == 404:
        return RequestError(f"there is no route {path}", code="not_found", status=404)
    if error.status_code == 405:
        return RequestError(f"{path} does not take {method}", code="method_not_allowed", status=405)
    return RequestError(str(error.detail), status=error.status_code)

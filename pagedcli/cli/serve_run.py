"""What `paged serve` does: settings, keys, a socket, then the server until a signal.

May import everything below `cli`.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedcli.api.async_llm import AsyncLLM
from pagedcli.api.build import Engine
from pagedcli.api.defaults import model_defaults
from pagedcli.cli import engine_access
from pagedcli.cli.config_note import say_config
from pagedcli.cli.console import Messages, make_messages, set_up_access_log
from pagedcli.cli.serve_live import ServeMonitor
from pagedcli.config import EngineConfig, ServeConfig
from pagedcli.config_file import Settings, Value, build_section, load_settings
from pagedcli.core.sampling import SamplingParams
from pagedcli.engine.admission import QueueLimits
from pagedcli.errors import ConfigError, RequestError
from pagedcli.serve.access_log import log_request
from pagedcli.serve.app import create_app
from pagedcli.serve.lifecycle import Lifecycle, bind, serve
from pagedcli.serve.metrics import CONTENT_TYPE, Metrics
from pagedcli.serve.params import Defaults, check_defaults, served_names
from pagedcli.serve.security import is_local, is_readable_by_others, read_keys
from pagedcli.serve.state import RequestRecord, ServerState


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Flags of `paged serve` that are no settings; see `serve.serve`."""

    model: str | None
    live: bool
    api_keys: tuple[str, ...]
    verbose: bool
    quiet: bool
    no_config: bool = False


def run_serve(
    options: ServeOptions,
    flags: Mapping[str, Value],
    *,
    assignments: Sequence[str],
    config_file: str | None,
) -> None:
    """Serve until a signal."""
    settings = load_settings(
        config_file=Path(config_file) if config_file is not None else None,
        assignments=assignments,
        flags=_with_model(options.model, flags),
        extra_sections={"sampling": SamplingParams, "serve": ServeConfig},
        read_folder_file=not options.no_config,
    )
    config = build_section("serve", ServeConfig, settings.given)
    sampling = settings.extra["sampling"]
    _check_sampling(Defaults({}, sampling), settings)
    tls = _tls(config)
    messages = make_messages(verbose=options.verbose, quiet=options.quiet)
    say_config(settings, messages)
    set_up_access_log(messages.console, is_live=options.live, quiet=options.quiet)
    keys = read_keys(config.api_key_file, options.api_keys, os.environ)
    _warn(config, options, keys, messages)
    listener = bind(config.host, config.port)
    server = _Server(settings.engine, config, sampling, keys, messages, listener.getsockname()[1])
    with server.shown:
        server.is_live = options.live
        serve(server.app, server.lifecycle, listener, tls)


def _with_model(model: str | None, flags: Mapping[str, Value]) -> dict[str, Value]:
    """The flags, with the model that was given as the argument."""
    if model is None:
        return dict(flags)
    if "model.model" in flags and flags["model.model"].value != model:
        raise ConfigError(f"MODEL is {model} and --model {flags['model.model'].value}: give one of them")
    return {**flags, "model.model": Value(model, "MODEL")}


def _check_sampling(defaults: Defaults, settings: Settings) -> None:
    """A default that no request could use is the user's mistake, not an error of every request."""
    try:
        check_defaults(defaults)
    except RequestError as error:
        given = settings.given.get(f"sampling.{error.field}")
        raise ConfigError(f"{given.source}: {error}" if given is not None else str(error)) from None


def _warn(config: ServeConfig, options: ServeOptions, keys: tuple[bytes, ...], messages: Messages) -> None:
    if not keys and not is_local(config.host):
        messages.say(
            f"warning: everybody who reaches {config.host}:{config.port} may use this server: give --api-key-file"
        )
    if options.api_keys:
        messages.say(
            "warning: other users of this machine see a key on the command line: --api-key-file hides it"
        )
    if config.api_key_file is not None and is_readable_by_others(config.api_key_file):
        messages.say(
            f"warning: other users of this machine may read {config.api_key_file}: chmod 600 hides it"
        )


def _tls(config: ServeConfig) -> dict[str, Any]:
    """Uvicorn's options for TLS, tried out before the model is loaded."""
    if config.ssl_certfile is None:
        return {}
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            config.ssl_certfile, config.ssl_keyfile
        )
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = " and ".join(file for file in (config.ssl_certfile, config.ssl_keyfile) if file is not None)
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(f"{files}: {reason}: give a certificate and its key as PEM files") from error
    return {"ssl_certfile": config.ssl_certfile, "ssl_keyfile": config.ssl_keyfile}


class _Server:
    """State, lifecycle and application of one server, put together.

    Args:
        engine_config: What the engine is built from.
        config: The server's own settings.
        sampling: Defaults for requests.
        keys: API keys.
        messages: What is said on stderr.
        port: Where it listens.

    Attributes:
        shown: Holds the live display, if there is one.
        is_live: Whether there will be one.
    """

    def __init__(
        self,
        engine_config: EngineConfig,
        config: ServeConfig,
        sampling: Mapping[str, Any],
        keys: tuple[bytes, ...],
        messages: Messages,
        port: int,
    ) -> None:
        self._config, self._sampling, self._messages, self._port = config, sampling, messages, port
        self.shown = contextlib.ExitStack()
        self.is_live = False
        limits = QueueLimits(config.max_queue, config.max_queued_tokens)
        self.lifecycle = Lifecycle(
            lambda: engine_access.open_engine(engine_config, messages, limits),
            drain_s=config.drain_s,
            on_ready=self._ready,
        )
        self.state = ServerState(
            config, self.lifecycle, keys=keys, names=config.served_model_name, on_end=_log
        )
        self.app = create_app(self.state)

    def _ready(self, llm: AsyncLLM) -> None:
        engine = llm.engine
        attach(self.state, engine, self._sampling)
        scheme = "https" if self._config.ssl_certfile else "http"
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        title = engine_access.engine_title(engine)
        address = f"{scheme}://{host}:{self._port}/v1 as {', '.join(self.state.names)}"
        if not self.is_live or not self._messages.console.is_terminal:
            self._messages.say(f"serving {title}\nat {address}")
        if self.is_live:
            self.shown.enter_context(ServeMonitor(engine.client, title, address, self._messages))


def attach(state: ServerState, engine: Engine, sampling: Mapping[str, Any]) -> None:
    """What a server knows only when its model is loaded."""
    state.names = served_names(
        state.config.served_model_name, engine.resolved.model, Path(engine.resolved.path).name
    )
    state.defaults = Defaults(model_defaults(engine.generation_config), sampling)
    metrics = Metrics(engine, state.names[0])
    state.metrics = lambda: (metrics.render(), CONTENT_TYPE)
    state.on_error = metrics.rejected


def _log(record: RequestRecord) -> None:
    log_request(
        record.endpoint,
        record.request_id,
        record.status,
        outputs=record.outputs,
        error_code=record.error_code,
        client=record.client,
        seconds=record.seconds,
        is_stream=record.stream,
        is_client_gone=record.client_gone,
    )

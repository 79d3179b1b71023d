"""What a server says of itself before and after a run: its models, and its counters where it has any.

Standard library only and `errors`. Only a server that cannot be reached, or cannot be asked, is an error here; counters
that are missing are unknown, never zero.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pagedcli.bench.http_target import Target
from pagedcli.errors import PagedError

_TIMEOUT_S = 20.0
_MAX_BODY = 1 << 24
_KEY = "give its key with --api-key-file FILE or PAGED_API_KEY"


class UnreachableError(PagedError):
    """There is no server to be measured."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Who is measured.

    Attributes:
        url: Of its API.
        model: Name in requests.
        software: As it calls itself; None: it does not.
        address: That its name stands for.
    """

    url: str
    model: str
    software: str | None = None
    address: str | None = None


def discover(api: Target, model: str | None) -> ServerInfo:
    """Ask a server for its models; `model` is the one to take, None the first.

    Raises:
        UnreachableError: There is none, or it names no model and none is given.
    """
    try:
        found = _get(replace(api, path=f"{api.path}/models"))
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UnreachableError(
            f"cannot reach {api.url}: {reason}: start the server first, or check host, port and https"
        ) from error
    status = found.status
    if status in (401, 403):
        raise UnreachableError(f"{api.url} answers {status}: {_KEY}")
    if 300 <= status < 400:
        raise UnreachableError(f"{api.url} answers {status}, a redirection: give the URL that it points to")
    entries = _models(found.body) if status == 200 else []
    chosen = next((entry for entry in entries if model in (None, entry["id"])), None)
    if chosen is None and model is None:
        raise UnreachableError(
            f"{api.url}/models answers {status} and names no model: check the path of the URL, or give --model NAME"
        )
    return ServerInfo(api.url, model or str((chosen or {})["id"]), found.software, found.address)


class _Found(NamedTuple):
    status: int
    software: str | None
    body: bytes
    address: str | None


def _get(target: Target) -> _Found:
    connection: http.client.HTTPConnection
    if target.tls is not None:
        connection = http.client.HTTPSConnection(
            target.host, target.port, timeout=_TIMEOUT_S, context=target.tls
        )
    else:
        connection = http.client.HTTPConnection(target.host, target.port, timeout=_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    with contextlib.closing(connection):
        connection.request("GET", target.path, headers=headers)
        address = str(connection.sock.getpeername()[0])
        response = connection.getresponse()
        return _Found(response.status, response.getheader("Server"), response.read(_MAX_BODY), address)


def _models(body: bytes) -> list[dict[str, Any]]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return []
    data = value.get("data") if isinstance(value, dict) else None
    entries = data if isinstance(data, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]


def counters(api: Target) -> Mapping[str, float]:
    """Metrics of the server, summed over labels, by name; none if it has none."""
    root = api.path.removesuffix("/v1")
    try:
        found = _get(replace(api, path=f"{root}/metrics"))
    except (OSError, http.client.HTTPException, ValueError):
        return {}
    return parse_metrics(found.body.decode(errors="replace")) if found.status == 200 else {}


def parse_metrics(text: str) -> Mapping[str, float]:
    """The lines "name{labels} value" of Prometheus."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        value = line.rpartition("}")[2].split() if "}" in line else line.split()[1:]
        if not name or name.startswith("#") or not value:
            continue
        with contextlib.suppress(ValueError):
            number = float(value[0])
            if math.isfinite(number):
                sums[name] = sums.get(name, 0.0) + number
    return sums


def engine_figures(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float | None]:
    """What the server's engine did in a run, under the names of a benchmark's file; None: it does not say."""

    def risen(name: str) -> float | None:
        if name not in before or name not in after or after[name] < before[name]:
            return None
        return after[name] - before[name]

    hits, queries = risen("vllm:prefix_cache_hits_total"), risen("vllm:prefix_cache_queries_total")
    return {
        "prefix_hit_rate": min(1.0, hits / queries) if hits is not None and queries else None,
        "preemptions": risen("vllm:num_preemptions_total"),
        "recomputed_tokens": risen("paged:tokens_recomputed_total"),
        "executor_busy": None,
        "kv_use": None,
    }

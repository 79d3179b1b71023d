"""One line per request in the log: what was asked for, how it ended, how long it took; never what it said.

May import `engine.outputs` only. Handlers belong to the command line; without one, nothing is printed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pagedcli.engine.outputs import RequestOutput

logger = logging.getLogger("pagedcli.access")


def log_request(
    endpoint: str,
    request_id: str,
    status: int,
    *,
    outputs: Sequence[RequestOutput] = (),
    error_code: str | None = None,
    client: str = "-",
    seconds: float = 0.0,
    is_stream: bool = False,
    is_client_gone: bool = False,
) -> None:
    """Log a request that is over.

    Args:
        endpoint: Its path.
        request_id: As in the answer.
        status: HTTP status that was sent.
        outputs: What the engine made of its prompts.
        error_code: Of the error that it ended with.
        client: Address of the other end.
        seconds: From the first byte of the request to the last of the answer.
        is_stream: Whether the answer was a stream.
        is_client_gone: Whether the client went away before the end.
    """
    if not logger.isEnabledFor(logging.INFO):
        return
    parts = [" ".join(filter(None, (str(status), endpoint, request_id, client)))]
    parts += ["stream"] if is_stream else []
    if outputs:
        parts.append(_tokens(outputs))
        parts.append(_times(outputs))
    parts.append(f"total {seconds:.3f} s")
    parts += [f"error {error_code}"] if error_code is not None else []
    parts += ["client gone"] if is_client_gone else []
    logger.info("%s", " · ".join(parts))


def _tokens(outputs: Sequence[RequestOutput]) -> str:
    prompt = sum(output.usage.prompt_tokens for output in outputs)
    cached = sum(output.usage.cached_tokens for output in outputs)
    generated = sum(output.usage.completion_tokens for output in outputs)
    ends = sorted({str(s.finish_reason) for o in outputs for s in o.samples if s.finish_reason is not None})
    return f"{prompt} prompt ({cached} cached) + {generated} tokens, {'/'.join(ends) or 'unfinished'}"


def _times(outputs: Sequence[RequestOutput]) -> str:
    queued = max(output.seconds.queued for output in outputs)
    first = [output.seconds.first_token for output in outputs if output.seconds.first_token is not None]
    return f"queued {queued:.3f} s" + (f", first token {min(first):.3f} s" if first else "")

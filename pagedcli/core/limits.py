"""How long a request may get, and the refusal of what can never fit (I12). Standard library, `errors` and `core` only.

Messages say "page" and name flags, because a user reads them; see `docs/cli.md`.
"""

from __future__ import annotations

from pagedcli.core.kv_manager import KVManager, blocks_for
from pagedcli.core.request import FinishReason, Request
from pagedcli.core.words import counted
from pagedcli.errors import RequestError


def set_limits(request: Request, kv: KVManager, max_model_len: int, model_limit: int | None = None) -> None:
    """Set `max_len`, `max_computed` and `limit_reason`, or refuse the request.

    Raises:
        RequestError: Its prompt can never be served; names the numbers and the smallest change that mends it.
    """
    refuse_if_too_long(request, kv, max_model_len, model_limit)
    # The last token sampled is never computed, so it needs no KV: the pool's limit lies one above its capacity.
    fits = min(max_model_len, kv.capacity_tokens + 1)
    wanted = fits
    if request.params.max_tokens is not None:
        wanted = min(fits, request.num_prompt + request.params.max_tokens)
    request.max_len, request.limit_reason = wanted, FinishReason.LENGTH
    if request.params.max_pages is not None:
        cap = request.params.max_pages * kv.block_size + 1
        if cap < wanted:
            request.max_len, request.limit_reason = cap, FinishReason.PAGE_CAP
    request.max_computed = max(request.num_prompt, request.max_len - 1)


def refuse_if_too_long(
    request: Request, kv: KVManager, max_model_len: int, model_limit: int | None = None
) -> None:
    """Raise RequestError for an empty prompt and for one that no state of the pool could serve (I12)."""
    if request.num_prompt == 0:
        raise RequestError(
            "the prompt is empty: give at least one token", code="empty_prompt", field="prompt"
        )
    pages = blocks_for(request.num_prompt, kv.block_size)
    room_for_output = 0 if request.params.max_tokens == 0 else 1
    if pages > kv.num_blocks and kv.capacity_tokens <= max_model_len:
        surplus = counted(request.num_prompt - kv.capacity_tokens, "token")
        raise _too_long(
            f"needs {counted(pages, 'page')}, the pool has {kv.num_blocks}: shorten by {surplus} or --num-pages {pages}"
        )
    if request.num_prompt > max_model_len - room_for_output:
        needed = request.num_prompt + room_for_output
        can_grow = model_limit is None or needed <= model_limit
        remedy = f" or --max-model-len {needed}" if can_grow else ""
        output = ", one of them for output," if room_for_output else ""
        raise _too_long(
            f"needs {counted(needed, 'token')}{output} and the longest sequence "
            f"has {max_model_len}: shorten by {counted(needed - max_model_len, 'token')}{remedy}"
        )
    if request.params.max_pages is not None and pages > request.params.max_pages:
        surplus = counted(request.num_prompt - request.params.max_pages * kv.block_size, "token")
        raise _too_long(
            f"the prompt needs {counted(pages, 'page')}, max_pages is {request.params.max_pages}: shorten by {surplus} "
            f"or max_pages {pages}",
            field="max_pages",
        )


def _too_long(message: str, field: str = "prompt") -> RequestError:
    return RequestError(message, code="prompt_too_long", field=field)

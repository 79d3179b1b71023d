"""The KV manager that the configuration asks for. Standard library, `config` and `core` only."""

from __future__ import annotations

from pagedcli.config import CacheConfig
from pagedcli.core.kv_contiguous import ContiguousKV, FirstFitKV
from pagedcli.core.kv_manager import KVManager, PagedKV


def make_kv(cache: CacheConfig, num_blocks: int, max_model_len: int) -> KVManager:
    """Paged, or one of the baselines; `num_blocks` is the resolved size of the pool."""
    if cache.allocation == "contiguous":
        return ContiguousKV(num_blocks, cache.page_size, max_model_len)
    if cache.allocation == "first-fit":
        return FirstFitKV(num_blocks, cache.page_size)
    return PagedKV(num_blocks, cache.page_size, caching=cache.prefix_caching)

"""Sizes of the models whose shapes are measured. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """Sizes of one model of a family.

    Attributes:
        name: As `--shapes` takes it.
        hidden: Features between layers.
        num_heads: Query heads.
        num_kv_heads: Key-value heads.
        head_dim: Features of a head.
        inner: Features inside the gated unit.
        vocab_size: Rows of embedding and head.
        is_large: Only one layer's matrices are measured: neither embedding nor head.
    """

    name: str
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner: int
    vocab_size: int
    is_large: bool = False

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key-value heads, head_dim."""
        return (self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def q_size(self) -> int:
        """Features of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Features of queries, keys and values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def matrices(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of one layer's linears, fused as they run."""
        return {
            "qkv": (self.qkv_size, self.hidden),
            "o": (self.hidden, self.q_size),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }


FAMILIES = {
    family.name: family
    for family in (
        Family("smollm2-135m", 576, 9, 3, 64, 1536, 49152),
        Family("qwen2.5-0.5b", 896, 14, 2, 64, 4864, 151936),
        Family("llama-3-8b", 4096, 32, 8, 128, 14336, 128256, is_large=True),
        Family("mistral-7b", 4096, 32, 8, 128, 14336, 32768, is_large=True),
    )
}

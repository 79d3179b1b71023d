"""Sampling values that a model brings along. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# generation_config.json names -> ours.
_GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def model_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling fields that a model's generation_config sets."""
    found = {
        ours: generation_config[theirs]
        for theirs, ours in _GENERATION_FIELDS.items()
        if generation_config.get(theirs) is not None
    }
    if generation_config.get("do_sample") is False:
        found["temperature"] = 0.0
    return found

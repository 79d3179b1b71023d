"""The families that are known, and the refusal of everything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedcli.errors import CheckpointError
from pagedcli.models import llama, mistral, qwen2, qwen3
from pagedcli.models.family import Family
from pagedcli.models.rope import shown

FAMILIES: tuple[Family, ...] = (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY)


def known_architectures() -> tuple[str, ...]:
    """Names as in `architectures` of config.json."""
    return tuple(family.architecture for family in FAMILIES)


def find_family(config: Mapping[str, Any], source: str) -> Family:
    """The family of a config, by `architectures`, else by `model_type`.

    Raises:
        CheckpointError: None.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise CheckpointError(f"{source}: architectures is {shown(names)}: it must be a list of names")
    wanted = str(names[0]) if names else f"model_type {shown(config.get('model_type'))}"
    for family in FAMILIES:
        if family.architecture == wanted or (not names and family.model_type == config.get("model_type")):
            return family
    raise CheckpointError(
        f"{source}: architecture {wanted} is not known; known: {', '.join(known_architectures())}"
    )


def family_of(architecture: str) -> Family:
    """The family of a `ModelSpec.architecture`."""
    return next(family for family in FAMILIES if family.architecture == architecture)

"""What a family of models is: how its config is read and how its layers are wired."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagedcli.models.layers import Decoder, Weights
from pagedcli.models.spec import ConfigReader, ModelSpec


@dataclass(frozen=True, slots=True)
class Family:
    """One file of this folder.

    Attributes:
        architecture: In `architectures` of config.json.
        model_type: In `model_type`, for configs without `architectures`.
        read_spec: Reads the config over transformers' defaults for the family.
        wire: Builds the model from a source of weights; also run to list the tensors that it reads.
    """

    architecture: str
    model_type: str
    read_spec: Callable[[ConfigReader], ModelSpec]
    wire: Callable[[Weights, ModelSpec], Decoder]

"""4-bit codes in the order in which the CUDA kernels read them (kernels/src/cuda/codes.cuh). Imports numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK_INPUTS = 64
BLOCK_OUTPUTS = 16
ZERO_BIAS = {"float16": 1024, "bfloat16": 128}
"""What a kernel's numbers made of codes begin at; zeros are stored with it added."""

NIBBLES = ((0, 0), (0, 2), (8, 0), (8, 2), (0, 1), (0, 3), (8, 1), (8, 3))
"""(output within 16, input within 4) of the nibbles of a word, nibble after nibble."""


def fits(out_features: int, in_features: int, group_size: int) -> bool:
    """Whether the kernels take a weight of these sizes."""
    return (
        out_features % BLOCK_OUTPUTS == 0
        and in_features % BLOCK_INPUTS == 0
        and group_size % 16 == 0
        and in_features % group_size == 0
    )


def pack_codes(codes: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Pack a weight's codes.

    Args:
        codes: uint8 [out_features, in_features], 0 to 15; sizes as `fits` wants them.

    Returns:
        uint32 [in_features / 64, out_features / 16, 32 lanes, 4 words].
    """
    outputs, inputs = codes.shape
    tiles, steps = outputs // BLOCK_OUTPUTS, inputs // BLOCK_INPUTS
    # [tile, output in 16, step, t, word, input in 4]: lane 4 g + t holds inputs 16 t + 4 word + 0 to 3.
    parts = codes.reshape(tiles, BLOCK_OUTPUTS, steps, 4, 4, 4).astype(np.uint32)
    packed = np.zeros((steps, tiles, 8, 4, 4), dtype=np.uint32)  # [step, tile, g, t, word]
    for nibble, (output, at) in enumerate(NIBBLES):
        half = parts[:, output : output + 8, :, :, :, at]
        packed |= half.transpose(2, 0, 1, 3, 4) << np.uint32(4 * nibble)
    return packed.reshape(steps, tiles, 32, 4)

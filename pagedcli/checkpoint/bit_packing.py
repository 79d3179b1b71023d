"""Codes of 2, 3, 4 or 8 bits in 32-bit words, as checkpoints store them: a stream of bits, lowest first.

Imports numpy alone. 32 codes fill `bits` words exactly, whatever the width, so that a code of 3 bits may lie across
two words:

    word 0: c0 c1 ... c9 | 2 bits of c10        word 1: 1 bit of c10 | c11 ... c20 | 1 bit of c21 ...
"""

from __future__ import annotations

import numpy as np

WORD_BITS = 32
CODES = 32
"""Codes that fill a whole number of words, whatever their width."""


def unpack_last(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Codes along the last axis.

    Args:
        words: [..., words] int32.
        bits: Width of a code.
        count: Codes wanted; those that pad the last words are left out.

    Returns:
        [..., count] uint8.
    """
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    if WORD_BITS % bits == 0:
        return _whole(unsigned, bits)[..., :count]
    return _across(unsigned, bits)[..., :count]


def _whole(words: np.ndarray, bits: int) -> np.ndarray:
    """Widths that divide a byte or fill it: the bytes of a word lie in order already."""
    data = words.astype("<u4", copy=False).view(np.uint8)
    if bits == 8:
        return data
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (data[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return np.asarray(codes.reshape(*data.shape[:-1], -1))


def _across(words: np.ndarray, bits: int) -> np.ndarray:
    """Any width; the words come in whole rounds of `bits`."""
    rounds = words.reshape(*words.shape[:-1], -1, bits)
    out = np.empty((*rounds.shape[:-1], CODES), np.uint8)
    mask = np.uint32((1 << bits) - 1)
    for i in range(CODES):
        word, shift = divmod(i * bits, WORD_BITS)
        value = rounds[..., word] >> np.uint32(shift)
        if shift + bits > WORD_BITS:
            value = value | (rounds[..., word + 1] << np.uint32(WORD_BITS - shift))
        out[..., i] = value & mask
    return out.reshape(*words.shape[:-1], -1)


def pack_last(codes: np.ndarray, bits: int) -> np.ndarray:
    """The reverse of `unpack_last`: [..., count] to [..., words] int32; the last words are filled up with zeros."""
    count = codes.shape[-1]
    per_round = WORD_BITS // bits if WORD_BITS % bits == 0 else CODES
    padded = np.zeros((*codes.shape[:-1], -(-count // per_round) * per_round), np.uint8)
    padded[..., :count] = codes
    if WORD_BITS % bits:
        return _pack_across(padded, bits)
    lanes = padded.reshape(*codes.shape[:-1], -1, per_round)
    words = np.zeros(lanes.shape[:-1], np.uint32)
    for i in range(per_round):
        words |= lanes[..., i].astype(np.uint32) << np.uint32(i * bits)
    return words.view(np.int32)


def _pack_across(padded: np.ndarray, bits: int) -> np.ndarray:
    rounds = padded.reshape(*padded.shape[:-1], -1, CODES).astype(np.uint32)
    words = np.zeros((*rounds.shape[:-1], bits), np.uint32)
    for i in range(CODES):
        word, shift = divmod(i * bits, WORD_BITS)
        words[..., word] |= rounds[..., i] << np.uint32(shift)
        if shift + bits > WORD_BITS:
            words[..., word + 1] |= rounds[..., i] >> np.uint32(WORD_BITS - shift)
    return words.reshape(*padded.shape[:-1], -1).view(np.int32)


def unpack_first(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Codes along the first axis of [words, columns]: [count, columns], transposed in memory."""
    return unpack_last(np.ascontiguousarray(words.T), bits, count).T


def pack_first(codes: np.ndarray, bits: int) -> np.ndarray:
    """The reverse of `unpack_first`: [count, columns] to [words, columns]."""
    return np.ascontiguousarray(pack_last(np.ascontiguousarray(codes.T), bits).T)


def words_for(count: int, bits: int) -> int:
    """Words along an axis of `count` codes."""
    if WORD_BITS % bits == 0:
        return -(-count // (WORD_BITS // bits))
    return -(-count // CODES) * bits

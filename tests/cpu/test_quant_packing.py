"""Packing and unpacking of codes: any codes survive, against words made bit by bit; GGUF codes against `gguf`."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcli.checkpoint import awq, compressed_tensors, gptq
from pagedcli.checkpoint.bit_packing import pack_first, pack_last, unpack_first, unpack_last, words_for
from pagedcli.checkpoint.gguf_checkpoint import GGUFCheckpoint
from pagedcli.checkpoint.gguf_codes import read_codes, runs_as_codes, width_of
from pagedcli.checkpoint.quant_tensor import QuantTensor
from tests.conftest import MakeModel
from tests.quant_support import rows_of_words

SEEDS = st.integers(0, 2**32 - 1)


@given(st.sampled_from([2, 3, 4, 8]), st.integers(1, 5), st.integers(1, 140), SEEDS)
@settings(max_examples=150, deadline=None)
def test_words_are_a_stream_of_bits(bits: int, rows: int, count: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, count)).astype(np.uint8)
    words = pack_last(codes, bits)
    assert words.dtype == np.int32
    assert words.shape == (rows, words_for(count, bits))
    want = rows_of_words(codes, bits)
    np.testing.assert_array_equal(words[:, : want.shape[1]], want)
    assert not words[:, want.shape[1] :].any()
    np.testing.assert_array_equal(unpack_last(words, bits, count), codes)
    np.testing.assert_array_equal(pack_first(codes.T, bits), words.T)
    np.testing.assert_array_equal(unpack_first(words.T, bits, count), codes.T)


def random_tensor(
    bits: int, out: int, groups: int, size: int, seed: int, *, order: bool = False, least: int = 0
) -> QuantTensor:
    random = np.random.default_rng(seed)
    inputs, most = groups * size, (1 << bits) - 1
    g_idx = np.repeat(np.arange(groups), size).astype(np.int32)
    return QuantTensor(
        "x",
        bits,
        size,
        random.integers(0, most + 1, (out, inputs)).astype(np.uint8),
        random.uniform(0.001, 1, (out, groups)).astype(np.float16).astype(np.float32),
        random.integers(least, most + 1, (out, groups)).astype(np.uint8),
        None,
        random.permutation(g_idx) if order else None,
        "rtn",
    )


def assert_equal(found: QuantTensor, tensor: QuantTensor) -> None:
    np.testing.assert_array_equal(found.codes, tensor.codes)
    np.testing.assert_array_equal(found.scales, tensor.scales)
    np.testing.assert_array_equal(found.zeros, tensor.zeros)
    np.testing.assert_array_equal(found.groups(), tensor.groups())
    np.testing.assert_array_equal(found.dequantize(), tensor.dequantize())


@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from([8, 16, 32]), SEEDS)
@settings(max_examples=60, deadline=None)
def test_awq_round_trip(eights: int, groups: int, size: int, seed: int) -> None:
    tensor = random_tensor(4, 8 * eights, groups, size, seed)
    leaves = awq.pack(tensor)
    assert_equal(awq.unpack("x", leaves["qweight"], leaves["qzeros"], leaves["scales"], size), tensor)


@given(
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([1, 2]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    SEEDS,
)
@settings(max_examples=80, deadline=None)
def test_gptq_round_trip(bits: int, version: int, outs: int, groups: int, order: bool, seed: int) -> None:
    tensor = random_tensor(bits, 32 * outs, groups, 32, seed, order=order, least=2 - version)
    leaves = gptq.pack(tensor, version=version)
    found = gptq.unpack(
        "x", leaves, bits=bits, group_size=32, in_features=tensor.in_features, version=version
    )
    assert_equal(found, tensor)


@given(
    st.sampled_from([4, 8]), st.integers(1, 40), st.integers(1, 3), st.integers(1, 37), st.booleans(), SEEDS
)
@settings(max_examples=80, deadline=None)
def test_compressed_tensors_round_trip(
    bits: int, out: int, groups: int, size: int, order: bool, seed: int
) -> None:
    """Any shape: rows that end within a word too."""
    tensor = random_tensor(bits, out, groups, size, seed, order=order)
    leaves = compressed_tensors.pack(tensor)
    found = compressed_tensors.unpack("x", leaves, bits=bits, group_size=size, shape=tensor.shape)
    assert_equal(found, tensor)


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 20), st.booleans(), SEEDS)
@settings(max_examples=30, deadline=None)
def test_rows_are_those_rows(out: int, groups: int, size: int, order: bool, seed: int) -> None:
    tensor = random_tensor(4, out, groups, size, seed, order=order)
    for first, last in ((0, out), (out // 2, out), (0, 1)):
        np.testing.assert_array_equal(tensor.rows(first, last).dequantize(), tensor.dequantize()[first:last])


GGUF_KINDS = [kind for kind in Kind if runs_as_codes(kind)]


@pytest.mark.parametrize("kind", GGUF_KINDS, ids=lambda kind: kind.name)
def test_gguf_codes_are_the_numbers_that_gguf_reads(kind: Kind) -> None:
    """Any bytes, with sane float16 scales."""
    assert {kind.name for kind in GGUF_KINDS} == {"Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"}
    block, size = GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(1).integers(0, 256, (7, 3, size)).astype(np.uint8)
    places = {Kind.Q4_1: (0, 2), Kind.Q4_K: (0, 2), Kind.Q6_K: (208,)}.get(kind, (0,))
    for place in places:
        numbers = np.random.default_rng(place).uniform(-0.1, 0.1, (7, 3, 1)).astype(np.float16)
        rows[:, :, place : place + 2] = numbers.view(np.uint8).reshape(7, 3, 2)
    flat = rows.reshape(7, -1)
    found = read_codes("x", kind, flat)
    assert found.bits == width_of(kind)
    assert int(found.codes.max()) < 1 << found.bits
    assert found.shape == (7, 3 * block)
    np.testing.assert_array_equal(found.dequantize(), gguf.dequantize(flat, kind))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_a_gguf_files_linears_come_as_codes_in_hugging_face_order(
    family: str, kind: str, tiny_gguf: MakeModel
) -> None:
    path = tiny_gguf(family, tensor_type=kind, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    checkpoint = GGUFCheckpoint(path)
    assert checkpoint.quantization is not None
    assert checkpoint.quantization.method == "gguf"
    linears = [name for name in checkpoint.names() if name.endswith(("_proj.weight", "embed_tokens.weight"))]
    assert checkpoint.quantization.num_linears >= len(linears)
    for name in linears:
        found, dense = checkpoint.quantized(name.removesuffix(".weight")), checkpoint.tensor(name)
        assert found is not None
        values = dense.data.view(np.float32).reshape(dense.shape)
        np.testing.assert_array_equal(found.dequantize(), values)
    assert checkpoint.quantized("model.norm") is None

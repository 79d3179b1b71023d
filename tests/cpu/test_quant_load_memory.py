"""Loading a quantized linear takes a few pieces of memory beside its packed weight, never all codes at once."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from paged_kernels.native import Runtime

from pagedcli.checkpoint import awq, compressed_tensors, gguf_codes, gptq
from pagedcli.checkpoint.code_rows import CodeRows
from pagedcli.checkpoint.gguf_codes import read_codes
from pagedcli.checkpoint.quant_tensor import QuantTensor

OUT, IN, GROUP = 4096, 2048, 128
Unpack = Callable[[dict[str, Any]], QuantTensor]
FORMATS: dict[str, tuple[Callable[[QuantTensor], dict[str, Any]], Unpack]] = {
    "awq": (awq.pack, lambda a: awq.unpack("x", a["qweight"], a["qzeros"], a["scales"], GROUP)),
    "gptq": (
        lambda tensor: gptq.pack(tensor, version=2),
        lambda a: gptq.unpack("x", a, bits=4, group_size=GROUP, in_features=IN, version=2),
    ),
    "compressed-tensors": (
        compressed_tensors.pack,
        lambda a: compressed_tensors.unpack("x", a, bits=4, group_size=GROUP, shape=(OUT, IN)),
    ),
}


def _tensor(seed: int) -> QuantTensor:
    random = np.random.default_rng(seed)
    codes = random.integers(0, 16, (OUT, IN), dtype=np.uint8)
    scales = random.random((OUT, IN // GROUP)).astype(np.float16).astype(np.float32)
    zeros = random.integers(1, 16, (OUT, IN // GROUP), dtype=np.uint8)
    return QuantTensor("x", 4, GROUP, codes, scales, zeros, None, None, "rtn")


def _peak(work: Callable[[], Any]) -> int:
    """Bytes that Python and numpy hold at most while it runs, beyond those before; packed weights lie elsewhere."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_packed_a_range_of_rows_at_a_time(name: str) -> None:
    runtime = Runtime(1)
    pack, unpack = FORMATS[name]
    made = _tensor(0)
    stored = pack(made)
    assert _peak(lambda: runtime.pack_quantized([unpack(stored), unpack(stored)])) < OUT * IN
    assert _peak(lambda: runtime.pack_quantized([made, made])) < OUT * IN


@pytest.mark.parametrize("name", FORMATS)
def test_ranges_are_those_of_the_whole(name: str) -> None:
    pack, unpack = FORMATS[name]
    made = _tensor(1)
    found = unpack(pack(made))
    assert isinstance(found.codes, CodeRows)
    codes = made.all_codes()
    np.testing.assert_array_equal(found.all_codes(), codes)
    for first, last in ((0, 1), (3, 21), (OUT - 5, OUT), (7, 7), (OUT - 1, OUT + 9)):
        np.testing.assert_array_equal(found.codes[first:last], codes[first:last])
    np.testing.assert_array_equal(found.codes[-3:, 5:9], codes[-3:, 5:9])
    np.testing.assert_array_equal(found.rows(9, 30).dequantize(), made.dequantize()[9:30])


@pytest.mark.parametrize(("kind", "row"), [(Kind.Q4_0, 18), (Kind.Q4_K, 144), (Kind.Q6_K, 210)])
def test_large_matrices_of_gguf_files_are_read_in_pieces(
    kind: Kind, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(2)
    rows = random.integers(0, 64, (50, 2 * row), dtype=np.uint8)
    whole = read_codes("x", kind, rows)
    monkeypatch.setattr(gguf_codes, "WHOLE_BYTES", 100)
    monkeypatch.setattr(gguf_codes, "_PIECE_BYTES", 7 * 2 * row)
    found = read_codes("x", kind, rows)
    assert isinstance(found.codes, CodeRows)
    np.testing.assert_array_equal(found.dequantize(), whole.dequantize())
    np.testing.assert_array_equal(found.codes[13:29], whole.codes[13:29])

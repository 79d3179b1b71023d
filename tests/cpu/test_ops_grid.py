"""The op grid on the CPU, and how a backend is chosen and reported."""

from __future__ import annotations

import inspect

import pytest
import torch

from pagedcli.errors import ConfigError
from pagedcli.ops.protocol import Ops
from pagedcli.ops.select import make_ops
from pagedcli.ops.torch_ops import TorchOps
from tests import op_grid

CPU_DTYPES = ("float32", "bfloat16")


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("case", op_grid.ATTENTION, ids=lambda case: case.label)
def test_attention(dtype: str, case: op_grid.AttentionCase) -> None:
    op_grid.check_attention(TorchOps("cpu", dtype), case)


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", op_grid.LINEAR)
def test_linear(dtype: str, sizes: tuple[int, int, int], bias: bool) -> None:
    op_grid.check_linear(TorchOps("cpu", dtype), sizes, bias=bias)


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize(("rows", "features"), [(1, 33), (17, 576), (300, 100)])
def test_elementwise(dtype: str, rows: int, features: int) -> None:
    op_grid.check_elementwise(TorchOps("cpu", dtype), rows, features)


def test_every_op_is_reported() -> None:
    named = {name for name, _ in inspect.getmembers(Ops) if not name.startswith("_")}
    ops = {name for name in named if not name.startswith("load_")}
    assert set(make_ops("cpu", "float32").report()) == ops - {"report", "device", "dtype", "tied_head"}


def test_float16_runs_as_bfloat16_on_a_cpu() -> None:
    assert make_ops("cpu", "float16").dtype == "bfloat16"


@pytest.mark.parametrize(("device", "dtype", "words"), [("tpu", "float32", "tpu"), ("cpu", "int3", "int3")])
def test_unknown_device_and_dtype_are_refused(device: str, dtype: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_ops(device, dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_cuda_without_a_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="--device cpu"):
        make_ops("cuda", "float32")

"""The op grid on CUDA."""

from __future__ import annotations

import pytest
import torch

from pagedcli.ops.torch_ops import TorchOps
from tests import op_grid

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("dtype", op_grid.DTYPES)
@pytest.mark.parametrize("case", op_grid.ATTENTION, ids=lambda case: case.label)
def test_attention(dtype: str, case: op_grid.AttentionCase) -> None:
    op_grid.check_attention(TorchOps("cuda", dtype), case)


@pytest.mark.parametrize("dtype", op_grid.DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", op_grid.LINEAR)
def test_linear(dtype: str, sizes: tuple[int, int, int], bias: bool) -> None:
    op_grid.check_linear(TorchOps("cuda", dtype), sizes, bias=bias)


@pytest.mark.parametrize("dtype", op_grid.DTYPES)
@pytest.mark.parametrize(("rows", "features"), [(1, 33), (17, 576), (300, 100)])
def test_elementwise(dtype: str, rows: int, features: int) -> None:
    op_grid.check_elementwise(TorchOps("cuda", dtype), rows, features)

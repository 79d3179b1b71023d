"""The C interface of the CUDA kernels (kernels/src/cuda/*.h) for ctypes. Standard library only.

Addresses are plain integers, of device memory or, for the emulated library, of host memory. Every function returns 0, a
CUDA error code, or -1 for a shape without a kernel; `check` makes an exception of it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

DTYPES = {"float16": 0, "bfloat16": 1}
NO_KERNEL = -1
MEANINGS = {
    2: " (out of memory)",
    35: " (the driver is missing or older than the CUDA toolkit that built the kernels)",
    100: " (there is no CUDA device)",
    209: " (the kernels were not built for this GPU: run paged build-cuda --force)",
    222: " (the driver does not know the PTX of this CUDA toolkit: run paged build-cuda --force --arch for this GPU)",
    700: " (an illegal address)",
    716: " (a misaligned address)",
}
"""Of CUDA error codes that a user can do something about, or should report."""


class CudaKernelError(RuntimeError):
    """A kernel did not start; the message names it and the CUDA error code."""


class PagedAttention(ctypes.Structure):
    """`PagedAttention` of attention.h."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "keys", "values", "blocks", "row_start", "lengths", "out", "partial")
        ),
        *(
            (name, ctypes.c_int32)
            for name in (
                "max_blocks",
                "block_size",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "dtype",
                "window",
                "split",
                "num_splits",
            )
        ),
        ("scale", ctypes.c_float),
    )


class PagedRope(ctypes.Structure):
    """`PagedRope` of elementwise.h."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("qkv", "cos", "sin", "positions", "slots", "q_norm", "k_norm", "q", "keys", "values")
        ),
        *(
            (name, ctypes.c_int32)
            for name in ("num_rows", "num_heads", "num_kv_heads", "head_dim", "block_size", "dtype")
        ),
        ("eps", ctypes.c_float),
    )


class PagedCodes(ctypes.Structure):
    """`PagedCodes` of w4a16.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zeros", "bias")),
        *((name, ctypes.c_int32) for name in ("n", "k", "group", "dtype")),
    )


class PagedSampleRow(ctypes.Structure):
    """`PagedSampleRow` of sampling.h; addresses are whole numbers, so that numpy can hold an array of it."""

    _fields_ = (
        ("logit_row", ctypes.c_int64),
        *(
            (name, ctypes.c_double)
            for name in (
                "temperature",
                "top_p",
                "min_p",
                "repetition_penalty",
                "presence_penalty",
                "frequency_penalty",
            )
        ),
        ("top_k", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("position", ctypes.c_int64),
        ("sample_index", ctypes.c_int64),
        ("tokens", ctypes.c_uint64),
        ("num_prompt", ctypes.c_int64),
        ("min_tokens", ctypes.c_int64),
        *(
            (name, ctypes.c_uint64)
            for name in ("forbidden", "early", "bias_ids", "bias", "bad_heads", "bad_last")
        ),
        *(
            (name, ctypes.c_int64)
            for name in ("num_forbidden", "num_early", "num_bias", "num_bad", "bad_length")
        ),
        ("room", ctypes.c_uint64),
    )


class PagedSample(ctypes.Structure):
    """`PagedSample` of sampling.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "rows", "tokens", "faults")),
        ("stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
    )


class PagedLogprobs(ctypes.Structure):
    """`PagedLogprobs` of sampling.h."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "logits",
                "logit_rows",
                "tokens",
                "num_top",
                "logprobs",
                "ranks",
                "top_ids",
                "top",
            )
        ),
        ("stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("num_rows", "vocab_size", "max_top")),
    )


_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_CODES = ctypes.POINTER(PagedCodes)
SIGNATURES = {
    "paged_cuda_attention_decode": (ctypes.POINTER(PagedAttention), _POINTER, _INT, _INT, _POINTER),
    "paged_cuda_attention_prefill": (ctypes.POINTER(PagedAttention), _POINTER, _INT, _POINTER),
    "paged_cuda_attention_tile_rows": (_INT,),
    "paged_cuda_rows": (_POINTER, _POINTER, _POINTER, _INT, _INT, _INT, _POINTER),
    "paged_cuda_rms_norm": (*(5 * (_POINTER,)), _INT, _INT, _FLOAT, _INT, _POINTER),
    "paged_cuda_gated": (_POINTER, _POINTER, _INT, _INT, _INT, _INT, _POINTER),
    "paged_cuda_add": (_POINTER, _POINTER, _POINTER, _LONG, _INT, _POINTER),
    "paged_cuda_rope_kv_write": (ctypes.POINTER(PagedRope), _POINTER),
    "paged_cuda_w4a16": (_CODES, _POINTER, _POINTER, _INT, _POINTER, _POINTER),
    "paged_cuda_w4a16_scratch": (_CODES,),
    "paged_cuda_w4a16_max_rows": (),
    "paged_cuda_w4a16_dequantize": (_CODES, _POINTER, _POINTER),
    "paged_cuda_columns": (_POINTER, _POINTER, _POINTER, _INT, _INT, _POINTER),
    "paged_cuda_sample": (ctypes.POINTER(PagedSample), _POINTER),
    "paged_cuda_sample_room": (),
    "paged_cuda_sample_max_vocabulary": (),
    "paged_cuda_logprobs": (ctypes.POINTER(PagedLogprobs), _POINTER),
}
_LONG_RESULTS = frozenset({"paged_cuda_w4a16_scratch"})


def load(path: Path) -> ctypes.CDLL:
    """The library at `path` with the types of its functions declared."""
    library = ctypes.CDLL(str(path))
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int64 if name in _LONG_RESULTS else ctypes.c_int
    return library


def check(name: str, code: int) -> None:
    """Raise for a code other than 0.

    Raises:
        CudaKernelError: With the kernel's name and the code.
    """
    if code == NO_KERNEL:
        raise CudaKernelError(f"{name}: there is no kernel for this shape")
    if code != 0:
        raise CudaKernelError(f"{name}: CUDA error {code}{MEANINGS.get(code, '')}")

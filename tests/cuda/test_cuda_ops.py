"""`CudaOps` on the emulator: the op grid, and whole tiny models against torch's ops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from emulated_library import emulated_library
from paged_kernels import cuda_abi

from pagedcli.checkpoint.sources import open_checkpoint
from pagedcli.errors import ConfigError
from pagedcli.models.load import Model, load_model
from pagedcli.ops.cuda_codes import is_codes
from pagedcli.ops.cuda_ops import CudaOps, split_size
from pagedcli.ops.cuda_start import TriedSizes, open_cuda_ops, wrong_kernels
from pagedcli.ops.torch_ops import TorchOps
from tests import op_grid
from tests.forward_support import chunked, run_steps
from tests.quant_support import write_quantized_model

DTYPES = ("bfloat16", "float16")
SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
MAX_LEN = 512


def ops(dtype: str) -> CudaOps:
    return CudaOps("cpu", dtype, emulated_library())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", op_grid.ATTENTION, ids=lambda case: case.label)
def test_attention(dtype: str, case: op_grid.AttentionCase) -> None:
    op_grid.check_attention(ops(dtype), case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "features"), [(1, 33), (17, 576), (30, 1000)])
def test_elementwise(dtype: str, rows: int, features: int) -> None:
    op_grid.check_elementwise(ops(dtype), rows, features)


def greedy(model: Model, prompt: list[int], count: int) -> list[int]:
    """What a prompt goes on with, alone, token by token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(run_steps(model, [ids], [[(0, len(ids))]])[0][-1].argmax()))
    return ids[len(prompt) :]


def best_after_each(model: Model, ids: list[int], count: int) -> list[int]:
    """The best tokens after the last `count` ids: what is before them in whole, then id by id through the cache."""
    steps = [[(0, len(ids) - count)], *[[(0, 1)]] * count]
    return [int(best) for best in run_steps(model, [ids], steps)[0][-count:].argmax(-1)]


PROMPTS = [[5, 9, 200, 31, 7], list(range(60, 200))]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_tokens_of_whole_models(tiny_checkpoint: Callable[..., Path], family: str) -> None:
    """The reference's own tokens, and its logits within rounding."""
    checkpoint = open_checkpoint(tiny_checkpoint(family, **SHAPE, initializer_range=0.3))
    ours = load_model(checkpoint, ops("bfloat16"), MAX_LEN)
    reference = load_model(checkpoint, TorchOps("cpu", "bfloat16"), MAX_LEN)
    assert ours.ops.report()["attention"].implementation == "cuda"
    for prompt in PROMPTS:
        answer = greedy(reference, prompt, 6)
        assert best_after_each(ours, prompt + answer[:-1], 6) == answer
    sequences = [list(range(3, 150)), [7] * 20]
    steps = [[(0, 100), (1, 7)], [(0, 47), (1, 13)]]
    for got, want in zip(
        run_steps(ours, sequences, steps), run_steps(reference, sequences, steps), strict=True
    ):
        assert (got - want).abs().max() <= 0.03 * want.abs().max()


def test_same_bits_under_any_schedule(tiny_checkpoint: Callable[..., Path]) -> None:
    """Whole, in chunks, token by token, on other pages: attention's way of computing is not told by the bits."""
    model = load_model(open_checkpoint(tiny_checkpoint("llama", **SHAPE)), ops("bfloat16"), MAX_LEN)
    sequences = [[3 + at * at % 300 for at in range(150)], [9] * 33]
    whole = run_steps(model, sequences, [[(0, 150), (1, 33)]])
    for chunk, block_size in ((1, 16), (7, 5), (64, 256)):
        parts = run_steps(model, sequences, chunked(0, 150, chunk) + chunked(1, 33, chunk), block_size)
        assert all(torch.equal(part, want) for part, want in zip(parts, whole, strict=True))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("awq", {"symmetric": False}),
        ("gptq", {}),
        ("gptq", {"act_order": True}),
        ("gptq_v2", {"symmetric": False}),
    ],
)
def test_quantized_models(tmp_path: Path, kind: str, settings: dict[str, bool]) -> None:
    """4-bit linears stay codes, for few rows and for many, and give what their dequantized weights give."""
    written = write_quantized_model(tmp_path, kind, group=64, **settings, **SHAPE)
    checkpoint = open_checkpoint(written.folder)
    ours = load_model(checkpoint, ops("float16"), MAX_LEN)
    assert "8 fused linears" in ours.ops.report()["linear"].detail
    assert is_codes(ours.decoder.layers[0].attention.qkv.weight)
    reference = load_model(checkpoint, TorchOps("cpu", "float32"), MAX_LEN)
    sequences = [list(range(3, 103)), [7] * 20]
    for steps in ([[(0, 100), (1, 20)]], chunked(0, 100, 9) + chunked(1, 20, 9)):
        got, want = (run_steps(model, sequences, steps) for model in (ours, reference))
        for a, b in zip(got, want, strict=True):
            assert (a - b).abs().max() <= 0.01 * b.abs().max()


def test_what_kernels_do_not_take_is_said(tmp_path: Path) -> None:
    written = write_quantized_model(tmp_path, "gptq", bits=8, group=64, **SHAPE)
    model = load_model(open_checkpoint(written.folder), ops("float16"), MAX_LEN)
    assert not model.ops.report()["linear"].detail.startswith("4-bit")
    [note] = model.ops.load_notes()
    assert "8 fused linears" in note
    assert note.endswith("8 bits")


def test_heads_without_a_kernel_are_said(tiny_checkpoint: Callable[..., Path]) -> None:
    model = load_model(open_checkpoint(tiny_checkpoint("mistral")), ops("float16"), MAX_LEN)
    assert model.ops.load_notes() == ("torch's attention is used: there is no CUDA kernel for heads of 8",)


@pytest.mark.parametrize(("longest", "split"), [(1, 128), (4096, 128), (4097, 160), (131072, 4096)])
def test_splits_depend_on_the_longest_sequence(longest: int, split: int) -> None:
    assert split_size(longest) == split


class WithoutKernel:
    """The library with one kernel that does nothing."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel

    def __getattr__(self, name: str) -> object:
        return (lambda *arguments: 0) if name == self.kernel else getattr(emulated_library(), name)


def start_check(kernel: str) -> tuple[CudaOps, dict[str, str]]:
    broken = CudaOps("cpu", "bfloat16", WithoutKernel(kernel))  # type: ignore[arg-type]
    return broken, wrong_kernels(broken, TorchOps("cpu", "bfloat16"), TriedSizes(64))


OP_OF_KERNEL = {
    "none": [],
    "rows": ["embedding"],
    "rms_norm": ["rms_norm", "add_rms_norm"],
    "gated": ["gated"],
    "add": ["add"],
    "rope_kv_write": ["rope_kv_write"],
    "attention_decode": ["attention"],
    "attention_prefill": ["attention"],
    "w4a16": ["linear"],
    "w4a16_dequantize": ["linear"],
    "columns": ["linear"],
    "sample": ["sampling"],
    "logprobs": ["sampling"],
}


@pytest.mark.parametrize("kernel", OP_OF_KERNEL)
def test_every_kernel_is_tried_at_the_start(kernel: str) -> None:
    """One that does nothing is found, though memory freed by a run that was right may hold what it should write."""
    assert start_check("none")[1] == {}
    assert list(start_check(f"paged_cuda_{kernel}")[1]) == OP_OF_KERNEL[kernel]


class Without:
    """The library without kernels for some sizes of a model, or with one that brings the GPU to a halt."""

    def __init__(self, head_dim: int = 0, vocab_size: int = 0, halts: str = "") -> None:
        self.head_dim, self.vocab_size, self.halts = head_dim, vocab_size, halts

    def __getattr__(self, name: str) -> object:
        function = getattr(emulated_library(), name)

        def call(*arguments: object) -> object:
            if name == self.halts:
                raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")
            told = {getattr(arguments[0], key, -1) for key in ("head_dim", "vocab_size")} if arguments else ()
            return -1 if {self.head_dim, self.vocab_size} & set(told) else function(*arguments)

        return call


def tried(library: Without, sizes: TriedSizes) -> set[str]:
    ours = CudaOps("cpu", "float16", library)  # type: ignore[arg-type]
    return set(wrong_kernels(ours, TorchOps("cpu", "float16"), sizes))


def test_kernels_are_tried_with_the_sizes_of_the_model() -> None:
    """There is one for each head size, and the sampler's shared memory grows with the vocabulary."""
    broken = Without(head_dim=80, vocab_size=4001)
    assert tried(broken, TriedSizes(80, 4001)) == {"rope_kv_write", "attention", "sampling"}
    assert tried(broken, TriedSizes(64, 300)) == set()
    assert tried(broken, TriedSizes(72, 300_001)) == set()  # torch's anyway


@pytest.mark.parametrize("kernel", ["rms_norm", "sample"])
def test_a_kernel_that_halts_the_gpu_ends_the_start_in_one_line(kernel: str) -> None:
    """Nothing can be computed after that, so torch's op cannot stand in."""
    with pytest.raises(ConfigError) as caught:
        tried(Without(halts=f"paged_cuda_{kernel}"), TriedSizes(64))
    assert "an illegal memory access was encountered): build it" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_trial_leaves_nothing_in_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_abi, "load", lambda path: emulated_library())
    ours = open_cuda_ops("cpu", "bfloat16", Path(__file__), strict=True, sizes=TriedSizes(64))
    assert (ours.weight_bytes, ours.notes, ours.load_notes()) == (0, (), ())
    assert ours.report()["linear"].implementation == "torch"  # no weights are codes yet


def test_a_library_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    broken = tmp_path / "libpaged_cuda.so"
    broken.write_bytes(b"cut off")
    taken = open_cuda_ops("cpu", "bfloat16", broken, strict=False)
    assert type(taken) is TorchOps
    assert "cannot be loaded" in taken.notes[0]
    assert taken.notes[0].endswith("(run: paged build-cuda --force)")


def test_every_kernel_of_the_library_is_among_those_tried() -> None:
    answers = {
        "attention_tile_rows",
        "w4a16_scratch",
        "w4a16_max_rows",
        "sample_room",
        "sample_max_vocabulary",
    }
    assert {name.removeprefix("paged_cuda_") for name in cuda_abi.SIGNATURES} == OP_OF_KERNEL.keys() - {
        "none"
    } | answers


def test_torchs_op_stands_in_for_a_wrong_kernel() -> None:
    """With a note, and its result is torch's."""
    broken, wrong = start_check("paged_cuda_gated")
    broken.replace("gated", wrong["gated"])
    assert broken.report()["gated"].implementation == "torch"
    assert "torch's gated is used" in broken.notes[0]
    x = op_grid.values(broken, 3, 64)
    assert torch.equal(broken.gated(x, "silu"), TorchOps("cpu", "bfloat16").gated(x, "silu"))


@pytest.mark.parametrize(("dtype", "reason"), [("float32", "not float32"), ("bfloat16", "paged build-cuda")])
def test_torch_stands_in_only_where_that_is_allowed(tmp_path: Path, dtype: str, reason: str) -> None:
    taken = open_cuda_ops("cpu", dtype, tmp_path / "missing.so", strict=False)
    assert type(taken) is TorchOps
    assert reason in taken.notes[0]
    with pytest.raises(ConfigError, match="--strict-kernels"):
        open_cuda_ops("cpu", dtype, tmp_path / "missing.so", strict=True)

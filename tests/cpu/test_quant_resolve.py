"""Which weights run as codes and what activations become; the whole way from a quantized folder to an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagedcli.api.resolve_quantization import check_method, choose_weights
from pagedcli.checkpoint.quant_tensor import Quantization
from pagedcli.checkpoint.quant_writer import copy_companions
from pagedcli.checkpoint.sources import open_checkpoint
from pagedcli.config import ModelConfig
from pagedcli.errors import ConfigError
from pagedcli.ops.select import int8_pays
from tests.conftest import MakeModel
from tests.quant_support import write_quantized_model


def found(method: str = "awq", bits: int = 4) -> Quantization:
    return Quantization(method, ((bits, 3),), 100, 60, f"{method}, {bits} bits", ("a note",))


@pytest.mark.parametrize(
    ("settings", "quantization", "dtype", "backend", "dot", "expected"),
    [
        ({}, found(), "bfloat16", "native", True, (True, "int8")),
        ({}, found(), "bfloat16", "native", False, (True, "bf16")),
        ({}, found(bits=8), "bfloat16", "native", True, (True, "bf16")),
        ({}, found(bits=2), "bfloat16", "native", True, (True, "int8")),
        ({"dtype": "float32"}, found(), "float32", "native", True, (True, "float32")),
        ({"activation": "int8"}, found(bits=8), "bfloat16", "native", False, (True, "int8")),
        ({"activation": "float32"}, found(), "bfloat16", "native", True, (True, "float32")),
        ({}, found(), "bfloat16", "torch", True, (True, "bf16")),
        ({}, found("gguf"), "bfloat16", "native", True, (True, "int8")),
        ({"dtype": "bfloat16"}, found("gguf"), "bfloat16", "native", True, (False, "bf16")),
        ({"dtype": "float32"}, found("gguf"), "float32", "native", True, (False, "float32")),
        ({}, None, "bfloat16", "native", True, (False, "bf16")),
        ({"activation": "bf16"}, None, "bfloat16", "native", True, (False, "bf16")),
        ({}, None, "float16", "torch", True, (False, "float16")),
    ],
)
def test_what_auto_becomes(
    settings: dict[str, Any],
    quantization: Quantization | None,
    dtype: str,
    backend: str,
    dot: bool,
    expected: tuple[bool, str],
) -> None:
    choice = choose_weights(
        ModelConfig(**settings), quantization, dtype=dtype, backend=backend, int8_dot=lambda: dot
    )
    assert (choice.as_codes, choice.activation) == expected
    assert choice.quantization == (quantization.method if quantization and expected[0] else None)
    assert choice.notes == (("a note",) if expected[0] else ())


@pytest.mark.parametrize(
    ("settings", "quantization", "dtype", "backend", "words"),
    [
        ({"activation": "int8"}, None, "bfloat16", "native", "needs quantized weights"),
        ({"activation": "int8"}, found(), "bfloat16", "torch", "native CPU engine"),
        ({"activation": "float32"}, None, "bfloat16", "native", "--dtype float32"),
        ({"activation": "bf16"}, None, "float32", "native", "--dtype bfloat16"),
        ({"activation": "int8", "dtype": "float32"}, found("gguf"), "float32", "native", "needs quantized"),
    ],
)
def test_combinations_that_cannot_be_are_refused(
    settings: dict[str, Any], quantization: Quantization | None, dtype: str, backend: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_weights(
            ModelConfig(**settings), quantization, dtype=dtype, backend=backend, int8_dot=lambda: True
        )


@pytest.mark.parametrize(
    ("isa", "flags", "pays"),
    [
        ("amx", "", True),
        ("avx512bf16", "", True),
        ("neondot", "", True),
        ("avx512", "avx512f avx512_vnni", True),
        ("avx512", "avx512f avx512bw", False),
        ("avx512", "avx512_vnni_of_another_name", False),
        ("avx2", "avx2 avx_vnni", True),
        ("avx2", "avx2 fma", False),
        ("neon", "avx512_vnni", False),
        ("portable", "avx512_vnni", False),
    ],
)
def test_int8_pays_where_one_instruction_multiplies_it(
    isa: str, flags: str, pays: bool, tmp_path: Path
) -> None:
    """Cascade Lake and Ice Lake have VNNI and no bfloat16, so that they run the variant of plain AVX-512."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\nvmx flags\t: x\nbugs\t: avx_vnni\n\n" * 2)
    assert int8_pays(isa, cpuinfo) is pays
    assert int8_pays(isa, tmp_path / "nowhere") is (pays and not flags)


def test_the_method_is_checked_against_what_is_there() -> None:
    path = Path("m")
    check_method(None, None, path)
    check_method(None, found(), path)
    check_method("awq", found(), path)
    with pytest.raises(ConfigError, match="is gptq, and m is another: its weights are awq, 4 bits"):
        check_method("gptq", found(), path)
    with pytest.raises(ConfigError, match="its weights are not quantized"):
        check_method("awq", None, path)
    with pytest.raises(ConfigError, match="its weights are gguf"):
        check_method("awq", found("gguf"), path)


@pytest.mark.parametrize("kind", ["awq", "gptq_v2", "compressed-tensors"])
def test_a_quantized_folder_answers(kind: str, tmp_path: Path) -> None:
    from pagedcli import LLM, SamplingParams

    inferred = kind != "compressed-tensors"
    settings_in = () if inferred else ("config.json",)
    write_quantized_model(tmp_path, kind, symmetric=False, dtype="bfloat16", settings_in=settings_in)
    with LLM(str(tmp_path), device="cpu", num_pages=16) as llm:
        resolved = llm.engine.resolved
        assert resolved.quantization == kind.removesuffix("_v2")
        assert any("read off the tensors" in note for note in resolved.notes) == inferred
        (output,) = llm.generate([[1, 70, 200]], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(output.samples[0].token_ids) == 4


def test_a_gguf_source_gives_tokenizer_files_that_encode_alike(tiny_gguf: MakeModel, tmp_path: Path) -> None:
    """Read back by ours and by transformers."""
    import transformers

    source = open_checkpoint(tiny_gguf("llama"))
    copy_companions(tmp_path, source)
    assert {path.name for path in tmp_path.iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    }
    from pagedcli.text.tokenizer import Tokenizer

    ours, theirs = source.load_tokenizer(), transformers.AutoTokenizer.from_pretrained(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    for text in ("the other thing", "Hä? 12 \n\n<|im_end|>x", ""):
        assert again.encode(text) == ours.encode(text) == theirs(text).input_ids
    messages = [{"role": "user", "content": "hi"}]
    assert again.encode_chat(messages) == ours.encode_chat(messages)
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == ours.apply_chat_template(messages)
    assert again.eos_token_ids[0] == ours.eos_token_ids[0]

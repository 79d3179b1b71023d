"""Tiny random models for tests: Hugging Face folders and GGUF files of every family, written with numpy.

Test code; needs numpy, and `gguf` for the GGUF files. All is seeded: the same arguments give the same bytes.
A folder and a GGUF file made with the same arguments hold the same model (up to the precision asked for).
The tokenizer is a byte-level BPE that encodes any text, with a chat template of ChatML kind.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MERGE_TEXT = (
    "Ġ t|Ġ a|i n|h e|r e|o n|e r|Ġt he|a t|Ġ s|Ġ o|e n|Ġ c|e s|Ġ w|n d|i t|o r|i s|a l|Ġ b|a n|Ġ p|in g|"
    "Ġ f|o u|Ġa nd|e d|Ġ m|Ġo f|l e|Ġ d|Ġt o|a r|i c|Ġ h|Ġ in|Ġ l|Ġ he|i on|Ġb e|Ġ is|Ġ re|o m|a s|e l|Ġ n|"
    "en t|Ġm e|l l|o t|Ġ g|v e"
)
MERGES = _MERGE_TEXT.split("|")
GGUF_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

_COMMON: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 24,
        "tie_word_embeddings": False,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "rms_norm_eps": 1e-6,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,  # on purpose not hidden_size / num_attention_heads
        "tie_word_embeddings": True,
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
    },
}


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """The config.json of a tiny model. `family`: llama, mistral, qwen2 or qwen3."""
    return {"model_type": family, **_COMMON, **_FAMILIES[family], **overrides}


def head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor that the model of this config has."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], head_dim(config)
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            shapes[f"{layer}self_attn.{name}.weight"] = (rows, hidden)
            if config["model_type"] == "qwen2" or config.get("attention_bias"):
                shapes[f"{layer}self_attn.{name}.bias"] = (rows,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (hidden, q)
        if config["model_type"] == "qwen3":
            shapes[f"{layer}self_attn.q_norm.weight"] = (dim,)
            shapes[f"{layer}self_attn.k_norm.weight"] = (dim,)
        shapes[f"{layer}mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{layer}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{layer}mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{layer}input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def tiny_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights, large enough that logits differ clearly from one another."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        values = random.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight"):
            values = 1.0 + 0.1 * values
        elif name.endswith(".bias"):
            values = 0.2 * values
        elif "embed_tokens" not in name:
            values = values * np.float32(1.5 / shape[-1] ** 0.5)
        tensors[name] = np.ascontiguousarray(values, dtype=np.float32)
    return tensors


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """float32 -> the uint16 patterns of bfloat16, rounded to the nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


_STORED = {
    "float32": ("F32", lambda x: x.astype(np.float32)),
    "float16": ("F16", lambda x: x.astype(np.float16)),
    "bfloat16": ("BF16", bfloat16_bits),
}


def safetensors_bytes(tensors: dict[str, np.ndarray], dtype: str = "float32") -> bytes:
    """The bytes of a safetensors file; float32 arrays are stored as `dtype`, written without the package."""
    code, store = _STORED[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, values in tensors.items():
        data = store(values).tobytes()
        header[name] = {
            "dtype": code,
            "shape": list(values.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(body)


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 bytes, in the order of the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(rest)) for b in range(256)]


def tiny_vocabulary() -> list[str]:
    """Special tokens, the 256 bytes, then the merged pieces; the id is the position."""
    tokens = [*SPECIAL_TOKENS, *byte_alphabet()]
    for merge in MERGES:
        left, right = merge.split(" ")
        assert {left, right} <= set(tokens), merge
        tokens.append(left + right)
    return tokens


def tokenizer_json() -> dict[str, Any]:
    """A byte-level BPE tokenizer.json in the layout of the `tokenizers` package."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": t, **flags} for i, t in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tiny_vocabulary())},
            "merges": list(MERGES),
        },
    }


def write_tokenizer(folder: Path) -> None:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_tiny_checkpoint(
    folder: Path, family: str, *, dtype: str = "float32", seed: int = 0, shards: int = 1, **overrides: Any
) -> Path:
    """Writes a tiny Hugging Face model folder and returns it.

    Args:
        folder: Where to write; made if missing.
        family: llama, mistral, qwen2 or qwen3.
        dtype: How weights are stored: float32, bfloat16 or float16.
        seed: Seed of the weights.
        shards: Number of safetensors files; more than one are written with an index.
        **overrides: Fields of config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, **overrides)
    tensors = tiny_tensors(config, seed)
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype}, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [2, 0]}))
    write_tokenizer(folder)
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, dtype))
        return folder
    weight_map = {}
    for i in range(shards):
        part = dict(list(tensors.items())[i::shards])
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        (folder / file).write_bytes(safetensors_bytes(part, dtype))
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """Hugging Face tensor name -> the name llama.cpp's converter gives it."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[rest]}.{kind}"
    return f"{_GGUF_NAMES[stem]}.{kind}"


def permute_rows(values: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of llama: halves of a head interleaved, row by row."""
    rows = values.shape[0] // num_heads // 2
    return values.reshape(num_heads, 2, rows, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _add_metadata(writer: Any, config: dict[str, Any]) -> None:
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_dim(config))
    writer.add_vocab_size(config["vocab_size"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if config.get("sliding_window") and config["model_type"] == "mistral":
        writer.add_sliding_window(config["sliding_window"])


def _add_tokenizer(writer: Any, config: dict[str, Any], pre: str) -> None:
    tokens = tiny_vocabulary()
    padding = [f"[PAD{i}]" for i in range(len(tokens), config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, *padding])
    writer.add_token_types(
        [3] * len(SPECIAL_TOKENS) + [1] * (len(tokens) - len(SPECIAL_TOKENS)) + [5] * len(padding)
    )
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def add_gguf_tensor(writer: Any, name: str, values: np.ndarray, tensor_type: str) -> None:
    """Adds one tensor to a GGUFWriter, quantized to `tensor_type` (F32, F16, BF16, Q8_0, Q4_0, Q4_1, ...)."""
    import gguf

    kind = gguf.GGMLQuantizationType[tensor_type]
    data = values.astype(np.float32)
    if tensor_type != "F32":
        data = gguf.quants.quantize(data, kind)
    writer.add_tensor(name, data, raw_dtype=kind)


def write_tiny_gguf(
    path: Path,
    family: str,
    *,
    tensor_type: str = "F32",
    embedding_type: str | None = None,
    head_type: str | None = None,
    seed: int = 0,
    pre: str = "smollm",
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    big_endian: bool = False,
    **overrides: Any,
) -> Path:
    """Writes a tiny GGUF file, as llama.cpp's converter would from the folder of the same arguments.

    Args:
        path: The file to write.
        family: llama, mistral (architecture llama in GGUF), qwen2 or qwen3.
        tensor_type: Storage of matrices; vectors are F32. Block types need rows that are a multiple of 32.
        embedding_type: Storage of the embedding, if another.
        head_type: For a tied model: stores the embedding once more as `output.weight`, in this type.
        seed: Seed of the weights.
        pre: Name of the pre-tokenizer.
        metadata: More string, int, float or bool fields by full key; they may not repeat one.
        extra_tensors: More F32 tensors under their GGUF names.
        tensors: Weights to write instead of `tiny_tensors(config, seed)`, Hugging Face names.
        big_endian: Writes the byte order of big-endian machines.
        **overrides: Fields of config.json.
    """
    import gguf

    config = tiny_config(family, **overrides)
    endian = gguf.GGUFEndian.BIG if big_endian else gguf.GGUFEndian.LITTLE
    writer = gguf.GGUFWriter(path, GGUF_ARCHITECTURES[family], endianess=endian)
    _add_metadata(writer, config)
    _add_tokenizer(writer, config, pre)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (metadata or {}).items():
        add[type(value)](key, value)
    weights = tiny_tensors(config, seed) if tensors is None else tensors
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, values in weights.items():
        part = name.split(".")[-2]
        if GGUF_ARCHITECTURES[family] == "llama" and part in heads:
            values = permute_rows(values, heads[part])
        kind = (embedding_type or tensor_type) if part == "embed_tokens" else tensor_type
        add_gguf_tensor(writer, gguf_name(name), values, kind if values.ndim > 1 else "F32")
    if head_type is not None:
        add_gguf_tensor(writer, "output.weight", weights["model.embed_tokens.weight"], head_type)
    for name, values in (extra_tensors or {}).items():
        add_gguf_tensor(writer, name, values, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

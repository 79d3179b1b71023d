"""A GGUF file as a checkpoint: Hugging Face names, q and k in Hugging Face order, dequantized on reading.

Imports numpy, `gguf` (block formats), `text` and `errors`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind

from pagedcli.checkpoint.base import RawTensor, StoredTensor
from pagedcli.checkpoint.computed import ComputedTensor
from pagedcli.checkpoint.dequantize import dequantize_rows, is_known
from pagedcli.checkpoint.gguf_codes import read_codes, runs_as_codes, width_of
from pagedcli.checkpoint.gguf_file import GGUFFile, GGUFTensor
from pagedcli.checkpoint.gguf_map import ROPE_FACTORS, end_token_ids, hf_config, hf_name
from pagedcli.checkpoint.quant_tensor import Quantization, QuantTensor
from pagedcli.errors import CheckpointError

if TYPE_CHECKING:
    from pagedcli.text.tokenizer import Tokenizer

_STORED = {Kind.F32: ("F32", 4), Kind.F16: ("F16", 2), Kind.BF16: ("BF16", 2)}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SAMPLED_ROWS = 256
Rows = slice | np.ndarray
"""Which rows of a tensor: a range, or their numbers."""


class GGUFCheckpoint:
    """A GGUF file; see `Checkpoint`.

    Args:
        path: The file. Its metadata and table of tensors are read and checked at once.
    """

    format: Literal["gguf"] = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile(path)
        self.metadata = self._file.metadata
        self._factors = self._file.tensors.get(ROPE_FACTORS)
        self._tensors = {hf_name(name) or name: tensor for name, tensor in self._file.tensors.items()}
        self.config = self._make_config()
        self._permuted_heads = self._heads_to_restore()
        self._check_names()
        self._check_tokens()
        self.config["tie_word_embeddings"] = self._settle_head()
        self.config["torch_dtype"] = self._dtype()
        self.generation_config = self._make_generation_config()

    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it."""
        return self._tensor(name).shape

    def kind(self, name: str) -> str:
        """How one tensor is stored: F32, Q8_0, Q4_K ..."""
        return self._tensor(name).kind.name

    def tensor(self, name: str) -> StoredTensor:
        """One tensor: as stored if it is F32, F16 or BF16, else dequantized to F32, row by row as it is read."""
        entry = self._tensor(name)
        order = self._row_order(name, entry)
        if entry.kind in _STORED and order is None:
            return RawTensor(name, _STORED[entry.kind][0], entry.shape, self._file.data(entry))
        if entry.kind not in _STORED and not is_known(entry.kind):
            raise CheckpointError(
                f"{self.path}: tensor {entry.name}: the installed gguf package cannot dequantize {entry.kind.name}: "
                "pip install -U gguf, or use a file of another quantization, such as Q8_0 or Q4_K_M"
            )
        dtype = _STORED[entry.kind][0] if entry.kind in _STORED else "F32"

        def read(rows: slice) -> np.ndarray:
            return self._values(entry, rows if order is None else order[rows])[1]

        return ComputedTensor(name, dtype, entry.shape, read, self._file.data(entry), entry.kind.name, order)

    @property
    def quantization(self) -> Quantization | None:
        """How linears are quantized, of those that run as they are stored; None: none is."""
        stored = {name: tensor for name, tensor in self._tensors.items() if self._has_codes(name)}
        if not stored:
            return None
        widths = Counter(width_of(tensor.kind) for tensor in stored.values())
        kinds = Counter(tensor.kind.name for tensor in stored.values())
        listed = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common())
        return Quantization(
            method="gguf",
            widths=tuple(sorted(widths.items())),
            num_weights=sum(tensor.shape[0] * tensor.shape[1] for tensor in stored.values()),
            num_bytes=sum(tensor.num_bytes for tensor in stored.values()),
            detail=f"GGUF {listed}, {len(stored)} matrices",
        )

    def quantized(self, linear: str) -> QuantTensor | None:
        """The codes of a linear, as stored, its rows in Hugging Face order; None if it is stored in another way."""
        name = f"{linear}.weight"
        if name not in self._tensors or not self._has_codes(name):
            return None
        entry = self._tensors[name]
        rows = self._file.data(entry).reshape(entry.shape[0], -1)
        order = self._row_order(name, entry)
        return read_codes(linear, entry.kind, rows if order is None else rows[order])

    def _has_codes(self, name: str) -> bool:
        entry = self._tensors[name]
        return len(entry.shape) == 2 and runs_as_codes(entry.kind)

    def stored_bytes(self) -> int:
        """Bytes that the tensors take in the file."""
        return sum(tensor.num_bytes for tensor in self._tensors.values())

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer and chat template of the file."""
        from pagedcli.text.tokenizer import Tokenizer  # costs an import that reading weights does not need

        return Tokenizer.from_gguf(self.metadata)

    def _tensor(self, name: str) -> GGUFTensor:
        entry = self._tensors.get(name)
        if entry is None:
            raise CheckpointError(
                f"{self.path}: has no tensor {name}: the file is incomplete, or of a model that differs from what its "
                "metadata says"
            )
        return entry

    def _make_config(self) -> dict[str, Any]:
        embedding = self._tensors.get(_EMBEDDING)
        rows = 1 if embedding is None else embedding.shape[0]  # without one, _check_names says so
        return hf_config(
            self.path,
            self.metadata,
            rows,
            biased="model.layers.0.self_attn.q_proj.bias" in self._tensors,
            factors=None if self._factors is None else _float32(*self._values(self._factors)),
        )

    def _heads_to_restore(self) -> dict[str, int]:
        """llama.cpp's converter interleaves the halves of each head of q and k, for llama alone."""
        if self.metadata["general.architecture"] != "llama":
            return {}
        return {"q_proj": self.config["num_attention_heads"], "k_proj": self.config["num_key_value_heads"]}

    def _check_names(self) -> None:
        """Every tensor must be one that the family has: one more means that the model computes something else."""
        self._tensor(_EMBEDDING)
        self._tensors.pop(ROPE_FACTORS, None)  # read into the configuration
        for name, tensor in self._tensors.items():
            layer = name.split(".")[2] if name.startswith("model.layers.") else "0"
            if name == tensor.name or int(layer) >= self.config["num_hidden_layers"]:
                raise CheckpointError(
                    f"{self.path}: tensor {tensor.name}: a {self.config['model_type']} model of "
                    f"{self.config['num_hidden_layers']} layers has no such tensor: the file holds another kind"
                )

    def _check_tokens(self) -> None:
        tokens, types = (self.metadata.get(f"tokenizer.ggml.{key}", []) for key in ("tokens", "token_type"))
        if not isinstance(tokens, list) or (types and not isinstance(types, list)):
            raise CheckpointError(
                f"{self.path}: metadata tokenizer.ggml.tokens: the vocabulary is not a list"
            )
        if types and len(types) != len(tokens):
            raise CheckpointError(
                f"{self.path}: metadata tokenizer.ggml.token_type: {len(types)} types for {len(tokens)} tokens"
            )
        if len(tokens) > self.config["vocab_size"]:
            raise CheckpointError(
                f"{self.path}: metadata tokenizer.ggml.tokens: {len(tokens)} tokens, but token_embd.weight has "
                f"{self.config['vocab_size']} rows"
            )

    def _dtype(self) -> str:
        """What the model computes in if nothing else is asked for: as stored, bfloat16 if it is quantized."""
        kinds = {t.kind for t in self._tensors.values() if len(t.shape) > 1}
        if kinds <= {Kind.F32}:
            return "float32"
        return "float16" if kinds <= {Kind.F32, Kind.F16} else "bfloat16"

    def _make_generation_config(self) -> dict[str, Any]:
        ids = {f"{key}_token_id": self.config[f"{key}_token_id"] for key in ("bos", "pad")}
        found = {key: value for key, value in ids.items() if value is not None}
        ends = end_token_ids(self.metadata)
        return found | ({"eos_token_id": ends} if ends else {})

    def _values(self, entry: GGUFTensor, rows: Rows = slice(None)) -> tuple[str, np.ndarray]:
        """Dtype and array (uint16 stands for BF16) of a tensor, or of some of its rows (first dimension)."""
        data = self._file.data(entry)
        if entry.kind in _STORED:
            dtype, size = _STORED[entry.kind]
            return dtype, data.view(f"<{'u2' if dtype == 'BF16' else f'f{size}'}").reshape(entry.shape)[rows]
        columns = entry.shape[-1]
        if len(entry.shape) == 1:
            return "F32", dequantize_rows(data.reshape(1, -1), entry.kind, columns)[0][rows]
        codes = data.reshape(entry.shape[0], -1)[rows]
        return "F32", dequantize_rows(codes, entry.kind, columns).reshape(-1, *entry.shape[1:])

    def _row_order(self, name: str, entry: GGUFTensor) -> np.ndarray | None:
        """For q and k of llama: where in the file each Hugging Face row lies; their heads are interleaved there.

        in GGUF:       h0.a0 h0.b0 h0.a1 h0.b1 ...      (a: first half of the head, b: second half)
        Hugging Face:  h0.a0 h0.a1 ... h0.b0 h0.b1 ...
        """
        heads = self._permuted_heads.get(name.split(".")[-2])
        if heads is None:
            return None
        rows = entry.shape[0]
        if rows % (2 * heads):
            raise CheckpointError(
                f"{self.path}: tensor {name}: {rows} rows do not divide into {heads} heads of even size"
            )
        return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)

    def _settle_head(self) -> bool:
        """Whether the head is the embedding; if it is stored a second time, the finer copy serves both."""
        head, embedding = self._tensors.get(_HEAD), self._tensors[_EMBEDDING]
        if head is None:
            return True
        if head.shape != embedding.shape or not self._same_matrix(head, embedding):
            return False
        finer = max(head, embedding, key=lambda tensor: tensor.bits_per_weight)
        self._tensors[_EMBEDDING] = finer
        del self._tensors[_HEAD]
        return True

    def _same_matrix(self, a: GGUFTensor, b: GGUFTensor) -> bool:
        """Whether two tensors differ by no more than the rounding of the coarser, judged on a sample of rows."""
        rows = slice(None, None, max(1, a.shape[0] // _SAMPLED_ROWS))
        x, y = (_float32(*self._values(tensor, rows)) for tensor in (a, b))
        # A corrupt file may hold any number; NaN and infinity are the same as nothing.
        with np.errstate(over="ignore", invalid="ignore"):
            difference, size = float(np.linalg.norm(x - y)), float(np.linalg.norm(y))
        return difference <= _rounding(min(a.bits_per_weight, b.bits_per_weight)) * size


def _float32(dtype: str, values: np.ndarray) -> np.ndarray:
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _rounding(bits_per_weight: float) -> float:
    """Largest relative difference (Frobenius norm) that storing at so many bits explains.

    About twice what is measured on normal random weights (the test prints it); independent matrices differ by 1.4.
    """
    limits = ((16, 0.005), (8, 0.02), (6, 0.05), (5, 0.1), (4, 0.2), (3, 0.35))
    return next((limit for bits, limit in limits if bits_per_weight >= bits), 0.6)

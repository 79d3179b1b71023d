"""Decode rates of a whole model of random weights, for one engine: `make gpu-check` runs it for each.

    python tools/gpu_model.py paged-bf16|paged-int4|transformers --json FILE [--shape NAME] [--batches 1,16,64,256]

All requests of a batch arrive together, with prompts of one length. The rate is that of the tokens which come while all
of them decode: after the last first token, before the first last one. Batches begin with the smallest and end when the
time is up. What is written: a row for each batch that was run, with the least time that the bytes of a step take.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
TINY = LLAMA_3_8B | {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
}
SHAPES = {"llama-3-8b": LLAMA_3_8B, "tiny": TINY}
ENGINES = ("paged-bf16", "paged-int4", "transformers")
GROUP = 128
PAGE = 16
STEP_TOKENS = 8192
Times = list[list[float]]
"""Of each request, when each of its tokens came."""
RunBatch = Callable[[list[list[int]], int], Times]


@dataclass(frozen=True, slots=True)
class Engine:
    """What can run a batch.

    Attributes:
        run: Prompts and new tokens of each; when each token came, by `time.perf_counter`.
        weight_bytes: Read in a step: all weights but the embedding table.
        kv_bytes: Of one token.
        notes: How it computes.
        close: Frees it.
    """

    run: RunBatch
    weight_bytes: int
    kv_bytes: int
    notes: tuple[str, ...]
    close: Callable[[], object]


def window(times: Times) -> tuple[float, int]:
    """(seconds, tokens) while all requests decode; (0, 0) if they never did."""
    first = max(request[0] for request in times)
    last = min(request[-1] for request in times)
    count = sum(first < moment <= last for request in times for moment in request)
    return (last - first, count) if last > first else (0.0, 0)


def prompts(batch: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Of random ids; no two begin alike."""
    draw = random.Random(seed)
    return [[draw.randrange(3, vocab_size) for _ in range(length)] for _ in range(batch)]


def row(engine: Engine, times: Times, context: int, limits: Any, began: float) -> dict[str, Any]:
    """What a batch came to, beside the least time of a step's bytes."""
    seconds, count = window(times)
    batch, length = len(times), context + len(times[0]) / 2
    least = (engine.weight_bytes + batch * length * engine.kv_bytes) / limits.read_bytes_per_s
    found = {
        "batch": batch,
        "context": context,
        "decode_tokens": count,
        "decode_seconds": seconds,
        "tokens_per_s": count / seconds if seconds else None,
        "limit_tokens_per_s": batch / least,
        "prefill_tokens_per_s": batch * context / (max(request[0] for request in times) - began),
    }
    found["share"] = found["tokens_per_s"] / found["limit_tokens_per_s"] if seconds else None
    return found


# ---- paged


def open_paged(config: dict[str, Any], device: str, bits: int, most: int, length: int) -> Engine:
    """Our engine, its weights drawn in memory.

    Args:
        config: In Hugging Face terms.
        device: "cuda", or "cpu" for torch's ops there.
        bits: 4 or 16.
        most: Requests at once.
        length: Tokens of each at most.
    """
    from pagedcli.api.backend import load_backend
    from pagedcli.api.resolve import choose_run
    from pagedcli.bench.random_checkpoint import RandomCheckpoint
    from pagedcli.bench.requests_run import open_engine
    from pagedcli.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
    from pagedcli.models.spec import ModelSpec
    from pagedcli.runtime.memory import block_bytes
    from pagedcli.text.tokenizer import Tokenizer
    from tests.fixtures_checkpoints import write_tokenizer

    checkpoint: Any = RandomCheckpoint(config, group_size=GROUP if bits == 4 else None)
    spec = ModelSpec.from_config(config)
    settings = EngineConfig(
        model=ModelConfig(dtype="bfloat16"),
        device=DeviceConfig(device=device, backend="torch"),  # type: ignore[arg-type]
    )
    choice = choose_run(settings, spec, has_cuda=device == "cuda", cores=1)
    choice = dataclasses.replace(choice, as_codes=bits == 4, model_len=max(length, 1024))
    backend = load_backend(checkpoint, choice)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        codec = Tokenizer.from_folder(Path(folder))
    pages = most * (-(-length // PAGE) + 1)
    opened = open_engine(
        backend,
        codec,
        depth=choice.depth,
        cache=CacheConfig(num_pages=pages, page_size=PAGE, prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=most, max_num_batched_tokens=STEP_TOKENS),
        max_model_len=length,
    )
    table = 0 if spec.tied_head else 2 * spec.vocab_size * spec.hidden_size
    return Engine(
        run=_paged_run(opened.__enter__()),
        weight_bytes=backend.weight_bytes - table,
        kv_bytes=block_bytes(spec, PAGE, "bfloat16") // PAGE,
        notes=(*choice.notes, *backend.notes),
        close=lambda: opened.__exit__(None, None, None),
    )


def _paged_run(engine: Any) -> RunBatch:
    import queue

    from pagedcli.core.sampling import SamplingParams
    from pagedcli.engine.prompt import RequestSpec

    def run(ids: list[list[int]], new: int) -> Times:
        answers: queue.SimpleQueue[tuple[float, Any]] = queue.SimpleQueue()
        params = SamplingParams(max_tokens=new, ignore_eos=True)

        def take(delta: Any) -> None:
            answers.put((time.perf_counter(), delta))

        names = [engine.client.add(RequestSpec(prompt=prompt, params=params), take) for prompt in ids]
        times: dict[str, list[float]] = {name: [] for name in names}
        open_requests = len(names)
        while open_requests:
            moment, delta = answers.get(timeout=120)
            times[delta.request_id] += [moment] * len(delta.token_ids)
            if delta.output is not None:
                if delta.output.error is not None:
                    raise RuntimeError(f"a request failed: {delta.output.error}")
                open_requests -= 1
        return [times[name] for name in names]

    return run


# ---- transformers


def open_transformers(config: dict[str, Any], device: str, most: int, length: int) -> Engine:
    """Transformers' continuous batching on a model of the same shape; arguments as of `open_paged`."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

    sizes = {name: value for name, value in config.items() if name not in ("architectures", "torch_dtype")}
    shape = LlamaConfig(**sizes, bos_token_id=1, eos_token_id=None)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.eval()

    def run(ids: list[list[int]], new: int) -> Times:
        settings = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
        outputs = model.generate_batch(
            inputs=ids, generation_config=settings, record_timestamps=True, **_without_hub(model)
        )
        found = [list(output.timestamps) for output in outputs.values()]
        if len(found) != len(ids) or any(len(times) < new for times in found):
            raise RuntimeError(f"{len(found)} of {len(ids)} requests answered, some with too few tokens")
        return found

    table = model.get_input_embeddings().weight.nbytes
    return Engine(
        run=run,
        weight_bytes=sum(parameter.nbytes for parameter in model.parameters()) - table,
        kv_bytes=4 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim,
        notes=("transformers' continuous batching, with the settings it chooses itself",),
        close=lambda: None,
    )


def _without_hub(model: Any) -> dict[str, Any]:
    """Keeps it from fetching attention kernels, where no package of them is installed and it can be told so."""
    packages = ("flash_attn", "flash_attn_interface")
    name = "continuous_batching_config"
    if (
        any(map(importlib.util.find_spec, packages))
        or name not in inspect.signature(model.generate_batch).parameters
    ):
        return {}
    from transformers import ContinuousBatchingConfig

    flag = "auto_switch_to_flash"
    if flag not in {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}:
        return {}
    return {name: ContinuousBatchingConfig(**{flag: False})}


# ---- all


def measure(engine: Engine, arguments: argparse.Namespace, limits: Any, write: Callable[[Any], None]) -> None:
    """Batch after batch until the time is up; each result is written at once."""
    vocab_size = SHAPES[arguments.shape]["vocab_size"]
    end = time.monotonic() + arguments.seconds
    rows: list[dict[str, Any]] = []
    few = prompts(min(2, max(arguments.batches)), min(32, arguments.context), vocab_size, 1)
    engine.run(few, min(8, arguments.new_tokens))  # compiles, records, allocates
    spent = 0.0
    for number, batch in enumerate(arguments.batches):
        left = end - time.monotonic()
        # A prompt's work grows with the batch; decoding grows less.
        if rows and left < spent * batch / rows[-1]["batch"]:
            write({"rows": rows, "left_out": f"batches from {batch} on: {left:.0f} s were left"})
            return
        began = time.perf_counter()
        times = engine.run(prompts(batch, arguments.context, vocab_size, 2 + number), arguments.new_tokens)
        spent = time.perf_counter() - began
        rows.append(row(engine, times, arguments.context, limits, began))
        write({"rows": rows})


def open_named(arguments: argparse.Namespace) -> Engine:
    """The engine that is asked for."""
    config, most = SHAPES[arguments.shape], max(arguments.batches)
    length = arguments.context + arguments.new_tokens
    if arguments.engine == "transformers":
        return open_transformers(config, arguments.device, most, length)
    return open_paged(config, arguments.device, 4 if arguments.engine == "paged-int4" else 16, most, length)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Decode rates of a model of random weights.")
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama-3-8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--batches", default="1,16,64,256", type=lambda text: sorted(map(int, text.split(",")))
    )
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=45.0, help="for the batches, loading not included")
    parser.add_argument("--bytes-per-s", type=float, help="of memory; measured if not given")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Open the engine, run the batches, write JSON after each."""
    arguments = parse(words)
    from pagedcli.bench.machine import MachineLimits, measure_limits

    if arguments.bytes_per_s:
        limits = MachineLimits(arguments.device, 0, arguments.bytes_per_s, None, "bfloat16", "told")
    else:
        limits = measure_limits(arguments.device, "bfloat16", "", 1)
    began = time.monotonic()
    engine = open_named(arguments)
    head = {
        "engine": arguments.engine,
        "shape": arguments.shape,
        "bytes_per_s": limits.read_bytes_per_s,
        "open_seconds": time.monotonic() - began,
        "notes": list(engine.notes),
    }
    try:
        measure(
            engine,
            arguments,
            limits,
            lambda found: arguments.json.write_text(json.dumps(head | found, indent=1) + "\n"),
        )
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

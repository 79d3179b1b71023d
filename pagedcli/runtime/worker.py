"""One rank's device: the model, its KV cache and the batch state; turns a plan into a result. May import torch.

`launch` issues a plan and returns without waiting for the device, `PendingStep.read` waits. On a CPU `launch` computes.
A worker is used by one thread at a time, and plans are launched in the order of submission (I10).
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pagedcli.core.plan import NO_TOKEN, StepPlan, StepResult, TokenLogprob
from pagedcli.engine.executor import ExecutorInfo
from pagedcli.errors import ConfigError
from pagedcli.models.spec import ModelSpec
from pagedcli.ops.batch import ForwardBatch, KVCache
from pagedcli.runtime.batch_state import BatchState, SamplingBatch
from pagedcli.runtime.kv_cache import PagedKVCache
from pagedcli.runtime.sampler import Fault, Logprobs
from pagedcli.runtime.samplers import Sampler, TorchSampler
from pagedcli.runtime.transfer import integers, to_host


class RunsSteps(Protocol):
    """The part of a model that a worker needs."""

    def forward(self, batch: ForwardBatch, kv: KVCache, /) -> Tensor:
        """Logits of the batch's logit rows, [num_logit_rows, vocab_size] float32."""


class Timer:
    """Seconds that the device is busy between start and stop."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._events[0].record()
        self._started = time.perf_counter()
        self._seconds = 0.0

    def stop(self) -> None:
        """All that is to be timed has been issued."""
        if self._cuda:
            self._events[1].record()
        self._seconds = time.perf_counter() - self._started

    def done(self) -> bool:
        """Whether the device has done it."""
        return not self._cuda or bool(self._events[1].query())  # type: ignore[no-untyped-call]

    def wait(self) -> float:
        """Wait until the device has done it; the seconds it took."""
        if not self._cuda:
            return self._seconds
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1000.0


@dataclass(slots=True)
class PendingStep:
    """A plan that was launched; its values are on their way to the host.

    Attributes:
        plan: What was launched.
        sampling: What was asked of the logits.
        tokens: [len(sampling.samples)] int64, or None without samples.
        faults: As `tokens`, `Fault` values.
        logprobs: Of sampled tokens, or None.
        prompt: Of prompt tokens, or None.
        timer: Stopped after the last copy.
    """

    plan: StepPlan
    sampling: SamplingBatch
    tokens: Tensor | None
    faults: Tensor | None
    logprobs: Logprobs | None
    prompt: Logprobs | None
    timer: Timer

    def done(self) -> bool:
        """Whether `read` would return at once."""
        return self.timer.done()

    def read(self) -> StepResult:
        """Wait for the device and return plain values."""
        seconds = self.timer.wait()
        count = len(self.plan.entries)
        tokens = [NO_TOKEN] * count
        chosen: list[TokenLogprob | None] = [None] * count
        prompts: list[list[TokenLogprob]] = [[] for _ in range(count)]
        errors: list[str | None] = [None] * count
        if self.tokens is not None:
            for entry, token in zip(self.sampling.sample_entries, self.tokens.tolist(), strict=True):
                tokens[entry] = token
        if self.logprobs is not None:
            for sample_index, item in zip(self.sampling.logprob_samples, self.logprobs.read(), strict=True):
                chosen[self.sampling.sample_entries[sample_index]] = item
        if self.prompt is not None:
            for entry, item in zip(self.sampling.prompt_entries, self.prompt.read(), strict=True):
                prompts[entry].append(item)
        for entry, fault in self._faults(prompts):
            errors[entry] = fault.message()
            tokens[entry], chosen[entry], prompts[entry] = NO_TOKEN, None, []
        return StepResult(
            step=self.plan.step,
            tokens=tuple(tokens),
            logprobs=tuple(chosen),
            prompt_logprobs=tuple(tuple(items) for items in prompts),
            seconds=seconds,
            errors=tuple(errors) if any(errors) else (),
        )

    def _faults(self, prompts: list[list[TokenLogprob]]) -> list[tuple[int, Fault]]:
        faults = [
            (entry, Fault.NOT_FINITE)
            for entry, items in enumerate(prompts)
            if any(math.isnan(item.logprob) for item in items)
        ]
        if self.faults is not None:
            values = zip(self.sampling.sample_entries, self.faults.tolist(), strict=True)
            faults += [(entry, Fault(value)) for entry, value in values if value != Fault.NONE]
        return faults


class Worker:
    """Runs plans on one device.

    Args:
        model: Computes logits.
        spec: Its sizes.
        dtype: Of the KV cache: "float32", "bfloat16", "float16".
        device: "cpu", "cuda:0", ...
        num_blocks: Blocks of the KV cache.
        block_size: Tokens in a block.
        max_num_seqs: Slots.
        max_model_len: Longest sequence in tokens.
        threads: Compute threads on a CPU; 0 leaves torch's setting alone.
        weight_bytes: Memory of the weights, for `info`.
        sampler: As `samplers.sampler_for` chooses it for the model's ops; None: torch.
    """

    def __init__(
        self,
        model: RunsSteps,
        spec: ModelSpec,
        *,
        dtype: str,
        device: str = "cpu",
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        threads: int = 0,
        weight_bytes: int = 0,
        sampler: Sampler | None = None,
    ) -> None:
        self._model = model
        self._sampler = sampler or TorchSampler()
        self._device = torch.device(device)
        self._threads = threads
        self._prepared = threading.local()
        self._kv = PagedKVCache(
            num_layers=spec.num_layers,
            num_blocks=num_blocks,
            num_kv_heads=spec.num_kv_heads,
            block_size=block_size,
            head_dim=spec.head_dim,
            dtype=getattr(torch, dtype),
            device=self._device,
        )
        self._state = BatchState(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            vocab_size=spec.vocab_size,
            device=self._device,
        )
        self.info = ExecutorInfo(
            device=device,
            dtype=dtype,
            threads=threads if self._device.type == "cpu" else 0,
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            vocab_size=spec.vocab_size,
            weight_bytes=weight_bytes,
            kv_bytes=self._kv.num_bytes,
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Issue all work of a plan."""
        self._prepare_thread()
        timer = Timer(self._device)
        self._kv.copy_blocks(plan.copies)
        batch, sampling = self._state.apply(plan)
        pending = PendingStep(plan, sampling, None, None, None, None, timer)
        try:
            self._compute(batch, pending)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{self._device} ran out of memory in a step of {plan.num_tokens} tokens ({error}): lower "
                "--gpu-memory-utilization (less KV) or --max-num-batched-tokens"
            ) from error
        timer.stop()
        return pending

    def run(self, plan: StepPlan) -> StepResult:
        """Carry a plan out and wait for its result."""
        return self.launch(plan).read()

    def _compute(self, batch: ForwardBatch, pending: PendingStep) -> None:
        logits = self._model.forward(batch, self._kv)
        sampling = pending.sampling
        if sampling.samples:
            self._sample(logits, sampling, pending)
        if sampling.prompt_tokens is not None:
            pending.prompt = self._sampler.logprobs(logits, sampling.prompt, sampling.prompt_tokens).to_host()

    def _sample(self, logits: Tensor, sampling: SamplingBatch, pending: PendingStep) -> None:
        tokens, faults = self._sampler.sample(logits, sampling.samples, self._state.store)
        self._state.write_tokens(sampling.samples, tokens)
        pending.tokens, pending.faults = to_host(tokens), to_host(faults)
        if sampling.logprobs:
            chosen = tokens[integers(sampling.logprob_samples, self._device)]
            pending.logprobs = self._sampler.logprobs(logits, sampling.logprobs, chosen).to_host()

    def _prepare_thread(self) -> None:
        """Settings that torch keeps for each thread: the current GPU and, built on OpenMP, the number of threads."""
        if getattr(self._prepared, "done", False):
            return
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        elif self._threads:
            torch.set_num_threads(self._threads)
        self._prepared.done = True

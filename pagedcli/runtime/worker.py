"""One rank's device: the model, its KV cache and the batch state; turns a plan into a result. May import torch.

`launch` issues a plan and returns without waiting for the device, `PendingStep.read` waits for the plan's results, not
for later plans. On a CPU `launch` computes. Decode steps are graphs where the worker has any (`decode_graphs`), all
others are issued op by op. A worker is used by one thread at a time, and plans are launched in the order of submission
(I10).
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedcli.core.plan import NO_TOKEN, StepPlan, StepResult, TokenLogprob
from pagedcli.engine.executor import ExecutorInfo
from pagedcli.models.spec import ModelSpec
from pagedcli.runtime.batch_state import BatchState, SamplingBatch
from pagedcli.runtime.decode_graphs import DecodeGraphs, RunsSteps
from pagedcli.runtime.gpu_memory import out_of_memory
from pagedcli.runtime.graphs import Captures
from pagedcli.runtime.kv_cache import PagedKVCache
from pagedcli.runtime.sampler import Fault, Logprobs
from pagedcli.runtime.samplers import Sampler, TorchSampler
from pagedcli.runtime.transfer import HostCopies, Mark, host_copies, integers


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
        timer: Round the work.
        chosen: [2, len(sampling.samples)] int64, tokens and `Fault` values, or None without samples.
        logprobs: Of sampled tokens, or None.
        prompt: Of prompt tokens, or None.
        copied: When all of them are on the host; set once all is issued.
    """

    plan: StepPlan
    sampling: SamplingBatch
    timer: Timer
    chosen: Tensor | None = None
    logprobs: Logprobs | None = None
    prompt: Logprobs | None = None
    copied: Mark | None = None

    def done(self) -> bool:
        """Whether `read` would return at once."""
        return self.copied is not None and self.copied.done()

    def read(self) -> StepResult:
        """Wait for the results and return plain values."""
        assert self.copied is not None, "a step that was not issued to its end"
        self.copied.wait()
        seconds = self.timer.wait()
        count = len(self.plan.entries)
        tokens = [NO_TOKEN] * count
        chosen: list[TokenLogprob | None] = [None] * count
        prompts: list[list[TokenLogprob]] = [[] for _ in range(count)]
        errors: list[str | None] = [None] * count
        if self.chosen is not None:
            for entry, token in zip(self.sampling.sample_entries, self.chosen[0].tolist(), strict=True):
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
        if self.chosen is not None:
            values = zip(self.sampling.sample_entries, self.chosen[1].tolist(), strict=True)
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
        graph_sizes: Numbers of rows for which decode steps are graphs, ascending; none: all steps are issued op by op.
        copies: How results come to the host; None: as the device does it.

    Attributes:
        info: Facts for the engine.
        graph_sizes: As given.
        num_replays: Decode steps that were carried out as graphs.
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
        graph_sizes: Sequence[int] = (),
        copies: HostCopies | None = None,
    ) -> None:
        self._model = model
        self._sampler = sampler or TorchSampler()
        self._device = torch.device(device)
        self._threads = threads
        self._prepared = threading.local()
        self._copies = copies or host_copies(self._device)
        self.graph_sizes = tuple(graph_sizes)
        self.num_replays = 0
        self._kv = PagedKVCache(
            num_layers=spec.num_layers,
            num_blocks=num_blocks,
            num_kv_heads=spec.num_kv_heads,
            block_size=block_size,
            head_dim=spec.head_dim,
            dtype=getattr(torch, dtype),
            device=self._device,
            num_scratch=1 if graph_sizes else 0,
        )
        self._state = BatchState(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            vocab_size=spec.vocab_size,
            device=self._device,
            scratch_block=num_blocks if graph_sizes else 0,
        )
        self._graphs = DecodeGraphs(model, self._kv, self._state, graph_sizes) if graph_sizes else None
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
    def capture(self, captures: Captures) -> None:
        """Record the decode steps of all `graph_sizes`; before the first plan."""
        assert self._graphs is not None, "no sizes were given"
        self._prepare_thread()
        self._graphs.capture(captures)

    def add_notes(self, *notes: str) -> None:
        """More for `info.notes`."""
        self.info = dataclasses.replace(self.info, notes=self.info.notes + notes)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Issue all work of a plan."""
        self._prepare_thread()
        timer = Timer(self._device)
        self._kv.copy_blocks(plan.copies)
        pending = PendingStep(plan, self._state.take(plan), timer)
        try:
            self._compute(pending)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(
                self._device,
                f"in a step of {plan.num_tokens} tokens",
                "lower --gpu-memory-utilization (less KV) or --max-num-batched-tokens",
                error,
            ) from error
        timer.stop()
        pending.copied = self._copies.mark()
        return pending

    def run(self, plan: StepPlan) -> StepResult:
        """Carry a plan out and wait for its result."""
        return self.launch(plan).read()

    def _compute(self, pending: PendingStep) -> None:
        sampling = pending.sampling
        if self._graphs is not None and self._graphs.takes(pending.plan):
            self.num_replays += 1
            decoded = self._graphs.run(pending.plan)
            logits, chosen = decoded.logits, decoded.chosen
            self._sample_special(logits, sampling, chosen)
            self._deliver(logits, chosen, pending)
            return
        logits = self._model.forward(self._state.lay_out(pending.plan), self._kv)
        if sampling.samples:
            chosen = torch.stack(self._sampler.sample(logits, sampling.samples, self._state.store))
            self._state.write_tokens(sampling.samples, chosen[0])
            self._deliver(logits, chosen, pending)
        if sampling.prompt_tokens is not None:
            prompt = self._sampler.logprobs(logits, sampling.prompt, sampling.prompt_tokens)
            pending.prompt = prompt.to_host(self._copies.begin)

    def _sample_special(self, logits: Tensor, sampling: SamplingBatch, chosen: Tensor) -> None:
        """Choose for the rows for which the greatest logit was not what was asked for, in the place of that."""
        special = [index for index, request in enumerate(sampling.samples) if not request.is_plain]
        if not special:
            return
        requests = [sampling.samples[index] for index in special]
        sampled = torch.stack(self._sampler.sample(logits, requests, self._state.store))
        chosen.index_copy_(1, integers(special, self._device), sampled)
        self._state.write_tokens(requests, sampled[0])

    def _deliver(self, logits: Tensor, chosen: Tensor, pending: PendingStep) -> None:
        """Start the way of sampled tokens to the host."""
        sampling = pending.sampling
        pending.chosen = self._copies.begin(chosen)
        if sampling.logprobs:
            tokens = chosen[0][integers(sampling.logprob_samples, self._device)]
            told = self._sampler.logprobs(logits, sampling.logprobs, tokens)
            pending.logprobs = told.to_host(self._copies.begin)

    def _prepare_thread(self) -> None:
        """Settings that torch keeps for each thread: the current GPU and, built on OpenMP, the number of threads."""
        if getattr(self._prepared, "done", False):
            return
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        elif self._threads:
            torch.set_num_threads(self._threads)
        self._prepared.done = True

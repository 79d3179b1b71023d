"""What a workload asks of a machine at least: operations and bytes, counted from the model's sizes.

May import `models.spec` and `bench.run`. Counted are multiply-adds (two operations each) of the body's linears for
every token that is computed, of the head for every row of logits, and of attention (scores and weighted sums over all
earlier positions); and bytes of weights, keys and values read. Not counted: norms, rotations, activations, sampling,
writes. Tokens of a prefix that requests share are computed once. So a share of 100% cannot be reached, unless what is
read stays in a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedcli.bench.run import StepRecord
from pagedcli.models.spec import ModelSpec
from pagedcli.workloads.requests import WorkloadRequest


@dataclass(frozen=True, slots=True)
class Work:
    """Operations and bytes; `+` adds two."""

    body_flops: float = 0.0
    head_flops: float = 0.0
    attention_flops: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.body_flops + other.body_flops,
            self.head_flops + other.head_flops,
            self.attention_flops + other.attention_flops,
            self.weight_bytes + other.weight_bytes,
            self.kv_bytes + other.kv_bytes,
        )

    @property
    def flops(self) -> float:
        """All operations."""
        return self.body_flops + self.head_flops + self.attention_flops

    @property
    def num_bytes(self) -> float:
        """All bytes."""
        return self.weight_bytes + self.kv_bytes

    def least_seconds(self, flops_per_s: float, bytes_per_s: float) -> float:
        """No machine of these rates is faster, whatever overlaps."""
        return max(self.flops / flops_per_s, self.num_bytes / bytes_per_s)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Elements that a token and a row of logits go through.

    Attributes:
        body: Elements of the linears of all layers.
        head: Elements of the head.
        attention: Multiply-adds of one token for each earlier position (itself included), all layers.
        kv: Elements of keys and values of one position, all layers.
        item_bytes: Of the run's dtype.
    """

    body: int
    head: int
    attention: int
    kv: int
    item_bytes: int

    @classmethod
    def of(cls, spec: ModelSpec, dtype: str) -> ModelSizes:
        """Full attention is assumed; no benchmarked model has a window."""
        qkv = spec.hidden_size * (spec.q_size + 2 * spec.kv_size)
        layer = qkv + spec.q_size * spec.hidden_size + 3 * spec.hidden_size * spec.intermediate_size
        return cls(
            body=spec.num_layers * layer,
            head=spec.vocab_size * spec.hidden_size,
            attention=2 * spec.num_layers * spec.q_size,
            kv=spec.kv_elements_per_token(),
            item_bytes=4 if dtype == "float32" else 2,
        )

    def prefill(self, start: int, count: int) -> Work:
        """Positions `start` to `start + count` - 1 in one step, with the logits of the last."""
        pairs = count * start + count * (count + 1) // 2
        return Work(
            body_flops=2.0 * self.body * count,
            head_flops=2.0 * self.head,
            attention_flops=2.0 * self.attention * pairs,
            weight_bytes=float(self.item_bytes * (self.body + self.head)),
            kv_bytes=float(self.item_bytes * self.kv * (start + count)),
        )

    def decode(self, start: int, count: int) -> Work:
        """Positions `start` to `start + count` - 1 one after the other; weights are not counted."""
        pairs = count * start + count * (count + 1) // 2
        return Work(
            body_flops=2.0 * self.body * count,
            head_flops=2.0 * self.head * count,
            attention_flops=2.0 * self.attention * pairs,
            kv_bytes=float(self.item_bytes * self.kv * pairs),
        )

    def weights(self, steps: int) -> Work:
        """Reading all weights once a step."""
        return Work(weight_bytes=float(steps * self.item_bytes * (self.body + self.head)))

    def workload(self, requests: Sequence[WorkloadRequest]) -> Work:
        """Requests that arrive together: the fewest steps are those of the longest output, its prompt in the first."""
        total = Work()
        seen: set[tuple[int, ...]] = set()
        for request in requests:
            prompt = request.prompt_token_ids
            shared = max((n for n in _prefix_lengths(len(prompt)) if prompt[:n] in seen), default=0)
            seen.update(prompt[:n] for n in _prefix_lengths(len(prompt)))
            first = self.prefill(shared, len(prompt) - shared)
            total += Work(first.body_flops, first.head_flops, first.attention_flops, kv_bytes=first.kv_bytes)
            # The last token sampled is never computed.
            total += self.decode(len(prompt), request.output_tokens - 1)
        return total + self.weights(max(request.output_tokens for request in requests))


def _prefix_lengths(length: int) -> range:
    """Lengths of prefixes that may be shared: whole pages of 16, and at least one token is computed."""
    return range(16, length, 16)


@dataclass(frozen=True, slots=True)
class Least:
    """What steps ask of a machine at least.

    Attributes:
        seconds: No machine of these rates does them faster.
        flops: Operations.
        num_bytes: Bytes read.
        bound_by: "bytes" or "operations": which of the two takes up most of the seconds.
    """

    seconds: float
    flops: float
    num_bytes: float
    bound_by: str


@dataclass(frozen=True, slots=True)
class RunWork:
    """Counts the work of steps that were really done, whatever was shared or computed again.

    Attributes:
        sizes: Of the model.
        weight_bytes: That one step reads; codes where the weights are quantized.
        has_windows: Attention is then left out, since it does not go over all earlier positions.
    """

    sizes: ModelSizes
    weight_bytes: float
    has_windows: bool = False

    @classmethod
    def of(cls, spec: ModelSpec, dtype: str, weight_bytes: int) -> RunWork:
        """Of a loaded model; an embedding that is not the head is not read."""
        sizes = ModelSizes.of(spec, dtype)
        share = 1.0 if spec.tied_head else 1.0 - sizes.head / (sizes.body + 2 * sizes.head)
        return cls(sizes, weight_bytes * share, any(window is not None for window in spec.windows))

    def of_step(self, step: StepRecord) -> Work:
        """Of one step."""
        pairs, kv = (0, 0) if self.has_windows else (step.num_pairs, step.num_kv)
        return Work(
            body_flops=2.0 * self.sizes.body * step.num_tokens,
            head_flops=2.0 * self.sizes.head * step.num_logits,
            attention_flops=2.0 * self.sizes.attention * pairs,
            weight_bytes=self.weight_bytes,
            kv_bytes=float(self.sizes.item_bytes * self.sizes.kv * kv),
        )

    def least(self, steps: Sequence[StepRecord], bytes_per_s: float, flops_per_s: float | None) -> Least:
        """Of steps one after the other; None: operations take no time."""
        reading = computing = seconds = 0.0
        total = Work()
        for step in steps:
            work = self.of_step(step)
            total += work
            read_s = work.num_bytes / bytes_per_s
            compute_s = work.flops / flops_per_s if flops_per_s else 0.0
            seconds += max(read_s, compute_s)
            if read_s >= compute_s:
                reading += read_s
            else:
                computing += compute_s
        return Least(seconds, total.flops, total.num_bytes, "bytes" if reading >= computing else "operations")

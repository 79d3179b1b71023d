"""A small test bed: scheduler, shadow executor and step loop, with requests made in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagedcli.config import CacheConfig, SchedulerConfig
from pagedcli.core.allocation import make_kv
from pagedcli.core.kv_manager import KVManager
from pagedcli.core.plan import StepPlan, TokenEvent
from pagedcli.core.request import FinishReason, Request
from pagedcli.core.sampling import SamplingParams
from pagedcli.core.scheduler import Scheduler
from pagedcli.engine.core import EngineCore
from tests.core.shadow import Handle, ShadowExecutor, sample

SCHEDULER_FIELDS = frozenset(SchedulerConfig.__dataclass_fields__)
CACHE_FIELDS = frozenset(CacheConfig.__dataclass_fields__)
VOCAB = 1000


def numbers(count: int, start: int = 0) -> list[int]:
    """A prompt that shares no prefix with one of another start."""
    return list(range(start, start + count))


def alone(prompt: Sequence[int], count: int, seed: int = 0, sample_index: int = 0) -> list[int]:
    """What the model says after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sample(tokens, seed, sample_index, VOCAB))
    return tokens[len(prompt) :]


class Bed:
    """Settings of both configuration sections by name, e.g. `Bed(num_pages=50, page_size=16, max_num_seqs=4)`.

    Attributes:
        output: Tokens so far, by request.
        first_step: Step of the loop in which the first token came.
        token_steps: Steps of the loop in which tokens came.
        plans: Every plan that was submitted.
    """

    def __init__(
        self, *, depth: int = 1, max_model_len: int = 100_000, kv: KVManager | None = None, **settings: Any
    ) -> None:
        cache = {"num_pages": 100, "watermark": 0.0} | {
            k: v for k, v in settings.items() if k in CACHE_FIELDS
        }
        config = SchedulerConfig(**{k: v for k, v in settings.items() if k in SCHEDULER_FIELDS})
        assert not settings.keys() - CACHE_FIELDS - SCHEDULER_FIELDS, "unknown setting"
        self.cache = CacheConfig(**cache)
        self.kv = kv or make_kv(self.cache, cache["num_pages"], max_model_len)
        self.scheduler = Scheduler(
            config, self.kv, max_model_len=max_model_len, watermark=self.cache.watermark
        )
        self.shadow = ShadowExecutor(self.kv.num_blocks, self.kv.block_size, config.max_num_seqs, VOCAB)
        self.core = EngineCore(self.scheduler, self, depth, lambda: float(self.now))
        self.info = self.shadow.info
        self.now = 0
        self.requests: dict[int, Request] = {}
        self.plans: list[StepPlan] = []
        self.events: list[TokenEvent] = []
        self.output: dict[int, list[int]] = {}
        self.finish: dict[int, FinishReason] = {}
        self.token_steps: dict[int, list[int]] = {}

    def add(
        self, prompt: Sequence[int], *, fork_of: int | None = None, sample_index: int = 0, **params: Any
    ) -> int:
        """Add a request; its number is returned."""
        request_id = len(self.requests)
        request = Request(
            request_id,
            list(prompt),
            len(prompt),
            SamplingParams(**{"max_tokens": 4} | params),
            fork_of=fork_of,
            sample_index=sample_index,
        )
        self.scheduler.add(request, float(self.now))
        self.requests[request_id] = request
        self.output[request_id], self.token_steps[request_id] = [], []
        return request_id

    def step(self, count: int = 1) -> None:
        """Turns of the loop, with all invariants checked after each."""
        for _ in range(count):
            for event in self.core.step():
                self.events.append(event)
                if event.token is not None:
                    self.output[event.request_id].append(event.token)
                    self.token_steps[event.request_id].append(self.now)
                if event.finish is not None:
                    self.finish[event.request_id] = event.finish
            self.scheduler.check()
            self.now += 1

    def drain(self, limit: int = 20_000) -> Bed:
        """Run until nothing is left."""
        end = self.now + limit
        while self.core.has_work:
            self.step()
            assert self.now < end, "P5: no end in sight"
        return self

    def first_step(self, request_id: int) -> int:
        return self.token_steps[request_id][0]

    def submit(self, plan: StepPlan) -> Handle:
        self.plans.append(plan)
        return self.shadow.submit(plan)

    def close(self) -> None:
        self.shadow.close()

    def shadow_tables(self) -> list[list[int]]:
        return [slot.table for slot in self.shadow.slots.values()]

    @property
    def counters(self) -> Any:
        return self.scheduler.stats.counters

    def assert_right(self, *request_ids: int) -> None:
        """Outputs are what each request gives alone, in full."""
        for request_id in request_ids or self.requests:
            request = self.requests[request_id]
            prompt = request.tokens[: request.num_prompt]
            wanted = alone(prompt, request.max_len - request.num_prompt, request.seed, request.sample_index)
            assert self.output[request_id] == wanted, f"P2: request {request_id}"

    def assert_idle(self) -> None:
        """P1: free + cached == all, every reference count is 0."""
        snapshot = self.scheduler.snapshot()
        assert snapshot.counts.free + snapshot.counts.cached == self.kv.num_blocks
        assert [block.refs for block in snapshot.blocks] == [0] * self.kv.num_blocks
        assert snapshot.counts.reserved == 0

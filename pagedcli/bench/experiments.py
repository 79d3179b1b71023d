"""What `paged bench compare` runs: experiments, each of arms that are run in turns on the same requests.

Plain values, made from a `Scale`; may import `scales`, `config` and `workloads`. Nothing here runs anything. Every
request has an id of its own over all experiments, so that an answer can be compared wherever it was answered.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

from pagedcli.bench.scales import ONE_PAGE, Scale
from pagedcli.config import AllocationName, BatchingName, EngineConfig, PolicyName
from pagedcli.errors import ConfigError
from pagedcli.workloads.files import Encode
from pagedcli.workloads.parse import parse_workload
from pagedcli.workloads.requests import WorkloadRequest

ORIGINAL = "original"
RESERVED_TOKENS, USED_PROMPT, USED_OUTPUT = 2048, 150, 50
"""Of the claim about 200 of 2,048 reserved tokens."""
PAGES_BATCH = 8
"""Requests at once in the experiment with page sizes."""
PAGES_POOL = (PAGES_BATCH + 2) * ONE_PAGE
"""Its memory: one page of the largest size is kept free when a request is admitted."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run requests.

    Attributes:
        name: Within its experiment.
        workload: What is run.
        model: Which checkpoint: "original", "awq" or "gptq".
        allocation: Of KV.
        batching: Continuous or static.
        sharing: Whether common prefixes are shared.
        policy: Order of admission.
        page_size: Tokens in a page.
        pool_tokens: Memory for KV, in tokens.
        max_model_len: The longest sequence: what contiguous allocation reserves.
        max_num_seqs: Requests at once, at most.
    """

    name: str
    workload: tuple[WorkloadRequest, ...]
    pool_tokens: int
    max_model_len: int
    max_num_seqs: int
    model: str = ORIGINAL
    allocation: AllocationName = "paged"
    batching: BatchingName = "continuous"
    sharing: bool = False
    policy: PolicyName = "fcfs"
    page_size: int = 16

    def configure(self, base: EngineConfig) -> EngineConfig:
        """The settings of a run; model, device and dtype are those of `base`."""
        return dataclasses.replace(
            base,
            model=dataclasses.replace(base.model, max_model_len=self.max_model_len),
            cache=dataclasses.replace(
                base.cache,
                allocation=self.allocation,
                page_size=self.page_size,
                num_pages=self.pool_tokens // self.page_size,
                kv_memory_bytes=None,
                prefix_caching=self.sharing,
            ),
            scheduler=dataclasses.replace(
                base.scheduler, batching=self.batching, policy=self.policy, max_num_seqs=self.max_num_seqs
            ),
        )


@dataclass(frozen=True, slots=True)
class Experiment:
    """Arms that belong together.

    Attributes:
        name: Stable, for programs.
        title: For people.
        about: What is run, in a sentence or two.
        of: What an arm is: heads the column of their names.
        arms: In the order of tables.
        rounds: Turns over the arms; one where no times are compared.
    """

    name: str
    title: str
    about: str
    of: str
    arms: tuple[Arm, ...]
    rounds: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known before anything runs.

    Attributes:
        scale: How much.
        seed: Of all requests.
        vocab_size: Token ids are below it.
        longest: The longest sequence that the model allows.
        models: Checkpoints that are there, "original" first.
        encode: Makes token ids of the texts of a workload's file.
    """

    scale: Scale
    seed: int
    vocab_size: int
    longest: int
    models: tuple[str, ...]
    encode: Encode | None = None

    @property
    def quantized(self) -> tuple[str, ...]:
        """All but the original."""
        return tuple(name for name in self.models if name != ORIGINAL)

    def experiments(self) -> list[Experiment]:
        """All that can be run."""
        found = [self.modes(), self.context(), self.batch(), self.pages(), self.fairness()]
        if self.longest >= RESERVED_TOKENS:
            found.insert(1, self.reserved())
        return [*found, self.int4()] if self.quantized else found

    def modes(self) -> Experiment:
        """The main comparison."""
        scale, longest = self.scale, min(self.scale.longest, self.longest)
        requests = parse_workload(
            scale.workload,
            vocab_size=self.vocab_size,
            seed=self.seed,
            num_requests=scale.requests,
            encode=self.encode,
        )
        self._refuse_long(requests, longest)
        plain = Arm("", _renamed("modes", requests), scale.pool_tokens, longest, len(requests))
        arms = [
            dataclasses.replace(
                plain, name=f"{allocation}, {batching}", allocation=allocation, batching=batching
            )
            for allocation in ("contiguous", "first-fit", "paged")
            for batching in ("static", "continuous")
        ]
        arms.append(dataclasses.replace(plain, name="+ prefix sharing", sharing=True))
        arms += [
            dataclasses.replace(plain, name=f"+ {name.upper()}", sharing=True, model=name)
            for name in self.quantized
        ]
        return Experiment(
            "modes", "The main comparison", "The same requests.", "Mechanism", tuple(arms), scale.rounds
        )

    def _refuse_long(self, requests: Sequence[WorkloadRequest], longest: int) -> None:
        """Every request of the main comparison must fit into what is reserved for it, and into the memory."""
        request = max(requests, key=_most_tokens)
        needs, pool = _most_tokens(request), self.scale.pool_tokens
        if needs <= min(longest, pool):
            return
        remedies = {
            f"--max-model-len {needs}": longest < needs <= self.longest,
            f"--kv-tokens {max(needs, longest if needs <= longest else 0)}": pool < needs <= self.longest,
        }
        told = " and ".join(text for text, helps in remedies.items() if helps)
        raise ConfigError(
            f"request {request.id} may take {needs} tokens, the comparison reserves {longest} for each and has "
            f"{pool}: give {told or 'shorter requests'}"
        )

    def reserved(self) -> Experiment:
        """The claim about 200 of 2,048 reserved tokens."""
        workload = self._fixed("reserved", 2, USED_PROMPT, USED_OUTPUT)
        arm = Arm("contiguous", workload, 2 * RESERVED_TOKENS, RESERVED_TOKENS, 2, allocation="contiguous")
        about = (
            f"Requests of {USED_PROMPT} prompt and {USED_OUTPUT} output tokens, {RESERVED_TOKENS:,} "
            "tokens reserved for each."
        )
        return Experiment("reserved", "A reservation that is hardly used", about, "Allocation", (arm,), 1)

    def context(self) -> Experiment:
        """How long one request can be beside short ones, all running at once in the same memory."""
        pool, (prompt, output) = self.scale.context_pool, self.scale.context_short
        others, page = PAGES_BATCH - 1, 16
        held = others * -(-(prompt + output) // page) * page
        limit = 2 * output  # a sender does not know how long the answer will be
        reserved = others * -(-(prompt + limit) // page) * page
        margin = page * (1 + pool // page // 100)  # the watermark, and a page
        lengths: dict[AllocationName, int] = {
            "contiguous": pool // PAGES_BATCH,
            "first-fit": pool - reserved,
            "paged": pool - held - margin,
        }
        arms = []
        for allocation, most in lengths.items():
            length = min(most, self.longest)
            region = length if allocation == "contiguous" else max(length, prompt + limit)
            long = self._fixed(f"context-{length}", 1, length - output, output)
            short = [
                dataclasses.replace(r, max_tokens=limit)
                for r in self._fixed("context", others, prompt, output)
            ]
            if allocation == "contiguous":
                short = [dataclasses.replace(r, max_tokens=min(limit, region - prompt)) for r in short]
            arms.append(Arm(allocation, (*short, *long), pool, region, PAGES_BATCH, allocation=allocation))
        about = (
            f"One long request beside {others} of {prompt} prompt and {output} output tokens (max_tokens "
            f"{limit}), all running "
            f"at once, in memory for {pool:,} tokens. The long one is as long as each way of allocating allows."
        )
        return Experiment("context", "Context length in the same memory", about, "Allocation", tuple(arms), 1)

    def batch(self) -> Experiment:
        """Batch sizes."""
        scale = self.scale
        prompt, output = scale.batch_lengths
        workload = self._fixed("batch", scale.batch_requests, prompt, output)
        pool = scale.batch_requests * (prompt + output + 32)
        arms = tuple(
            Arm(str(size), workload, pool, self._length(prompt + output), size) for size in scale.batches
        )
        about = (
            f"{scale.batch_requests} requests of {prompt} prompt and {output} output tokens, page 16, so many "
            "at once; memory "
            "for all."
        )
        return Experiment("batch", "Batch size", about, "Batch", arms, scale.rounds)

    def pages(self) -> Experiment:
        """Page sizes at an equal batch."""
        scale = self.scale
        text = f"random:{_range(scale.page_prompt)}:{_range(scale.page_output)}"
        requests = parse_workload(text, vocab_size=self.vocab_size, seed=self.seed, num_requests=PAGES_BATCH)
        workload = _renamed("pages", requests)
        arms = tuple(
            Arm(
                str(size),
                workload,
                PAGES_POOL,
                self._length(ONE_PAGE),
                PAGES_BATCH,
                page_size=size,
            )
            for size in scale.pages
        )
        about = (
            f"{PAGES_BATCH} requests at once, prompts of {_range(scale.page_prompt)} and outputs of "
            f"{_range(scale.page_output)} tokens, the same memory ({PAGES_POOL:,} tokens), which "
            "holds all of them "
            f"at every page size. With page {ONE_PAGE} each has one page."
        )
        return Experiment("pages", "Page size", about, "Page", arms, scale.many_rounds)

    def fairness(self) -> Experiment:
        """Short requests beside long ones."""
        scale = self.scale
        short = self._fixed("fair-short", scale.num_short, *scale.short)
        long = self._fixed("fair-long", scale.num_long, *scale.long)
        length = self._length(sum(scale.long))
        pool = 4 * (sum(scale.long) + 32)
        both = Arm("fcfs", (*long, *short), pool, length, 4)
        arms = (
            dataclasses.replace(both, name="short only", workload=short),
            both,
            dataclasses.replace(both, name="shortest", policy="shortest"),
        )
        about = (
            f"{scale.num_long} requests of {scale.long[0]} prompt and {scale.long[1]} output tokens arrive "
            "just before "
            f"{scale.num_short} of {scale.short[0]} and {scale.short[1]}; 4 run at once."
        )
        return Experiment("fairness", "Long requests and short ones", about, "Policy", arms, scale.rounds)

    def int4(self) -> Experiment:
        """One request at a time, original and quantized."""
        scale = self.scale
        workload = self._fixed("single", scale.single_requests, *scale.single)
        arms = tuple(
            Arm(name, workload, 4096, self._length(sum(scale.single)), 1, model=name) for name in self.models
        )
        about = (
            f"{scale.single_requests} requests of {scale.single[0]} prompt and {scale.single[1]} output "
            "tokens, one at a time."
        )
        return Experiment("int4", "4 bits, one request at a time", about, "Weights", arms, scale.many_rounds)

    def _length(self, tokens: int) -> int:
        return min(self.longest, max(tokens, ONE_PAGE))

    def _fixed(self, name: str, num: int, prompt: int, output: int) -> tuple[WorkloadRequest, ...]:
        """Requests of one length; their tokens follow from the name, so that no two experiments share a prefix."""
        rng = random.Random(f"{self.seed}/{name}")
        return tuple(
            WorkloadRequest(
                f"{name}-{index}",
                tuple(rng.randrange(self.vocab_size) for _ in range(prompt)),
                output,
                output,
            )
            for index in range(num)
        )


def _most_tokens(request: WorkloadRequest) -> int:
    return len(request.prompt_token_ids) + request.max_tokens


def _renamed(name: str, requests: Sequence[WorkloadRequest]) -> tuple[WorkloadRequest, ...]:
    return tuple(
        dataclasses.replace(request, id=f"{name}-{index}", arrival_s=0.0, follows=None)
        for index, request in enumerate(requests)
    )


def _range(lengths: tuple[int, int]) -> str:
    return f"{lengths[0]}-{lengths[1]}"

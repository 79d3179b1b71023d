"""Stand-ins without torch: an executor that computes scripted tokens, and a tokenizer whose tokens are bytes."""

from __future__ import annotations

import codecs
import itertools
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pagedcli.config import SchedulerConfig
from pagedcli.core.kv_manager import PagedKV
from pagedcli.core.plan import NO_TOKEN, PlanEntry, StepPlan, StepResult, TokenLogprob
from pagedcli.core.scheduler import Scheduler
from pagedcli.engine.admission import QueueLimits
from pagedcli.engine.client import EngineSettings, EngineThread
from pagedcli.engine.executor import ExecutorInfo, StepHandle
from pagedcli.errors import RequestError

EOS = 257
BOS = 256
VOCAB_SIZE = 258

# (tokens so far, length of the prompt, sample index, seed, temperature) -> next token
NextToken = Callable[[Sequence[int], int, int, int, float], int]


def letters(tokens: Sequence[int], num_prompt: int, sample_index: int, seed: int, temperature: float) -> int:
    """A letter or a space that depends on every token before it, and, when sampling, on seed and sample."""
    chain = zlib.crc32(repr(tuple(tokens)).encode())
    if temperature > 0:
        chain = zlib.crc32(repr((chain, seed, sample_index)).encode())
    return b"etaoin shrdlu cmfwypvbgkqjxz"[chain % 28]


def scripted(answers: Mapping[str, str | bytes | Sequence[int]], default: str = "") -> NextToken:
    """Answers by the prompt's text (without start token); end of sequence after the answer."""

    def next_token(
        tokens: Sequence[int], num_prompt: int, sample_index: int, seed: int, temperature: float
    ) -> int:
        prompt = bytes(t for t in tokens[:num_prompt] if t < 256).decode(errors="replace")
        answer = answers.get(prompt, default)
        ids = list(answer.encode()) if isinstance(answer, str) else list(answer)
        done = len(tokens) - num_prompt
        return ids[done] if done < len(ids) else EOS

    return next_token


@dataclass
class _Slot:
    tokens: list[int]
    table: list[int]
    entry: PlanEntry


@dataclass(frozen=True)
class _Ready:
    value: StepResult | Exception

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@dataclass
class FakeExecutor:
    """Keeps a token store and checks that every position's cell holds exactly the token chain it needs.

    Args:
        next_token: What the "model" says.
        threaded: Compute on an own thread, else inside `submit`.
        step_seconds: Time that a step takes.
        fail_at: Step number that raises RuntimeError.
    """

    next_token: NextToken = letters
    num_blocks: int = 64
    block_size: int = 16
    max_num_seqs: int = 8
    max_model_len: int = 256
    threaded: bool = False
    step_seconds: float = 0.0
    fail_at: int | None = None
    vocab_size: int = VOCAB_SIZE
    plans: list[StepPlan] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        self._slots: dict[int, _Slot] = {}
        self._cells: dict[int, int] = {}  # cell (block * block_size + offset) -> checksum of its token chain
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="fake-device") if self.threaded else None
        self._lock = threading.Lock()

    @property
    def info(self) -> ExecutorInfo:
        return ExecutorInfo(
            device="cpu",
            dtype="float32",
            threads=1,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            weight_bytes=0,
            kv_bytes=self.num_blocks * self.block_size,
        )

    def submit(self, plan: StepPlan) -> StepHandle:
        self.plans.append(plan)
        if self._pool is not None:
            return self._pool.submit(self._run, plan)
        try:
            return _Ready(self._run(plan))
        except RuntimeError as error:
            return _Ready(error)

    def close(self) -> None:
        self.closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _run(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        if self.step_seconds:
            time.sleep(self.step_seconds)
        if plan.step == self.fail_at:
            raise RuntimeError("the fake device is on fire")
        for slot in plan.freed_slots:
            self._slots.pop(slot, None)
        self._copy(plan.copies)
        tokens, logprobs, prompt_logprobs = zip(
            *(self._compute(entry) for entry in plan.entries), strict=True
        )
        seconds = time.perf_counter() - started
        return StepResult(plan.step, tokens, logprobs, prompt_logprobs, seconds)

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        size = self.block_size
        read = [
            (destination * size + i, self._cells.get(source * size + i))
            for source, destination in copies
            for i in range(size)
        ]
        for cell, value in read:
            if value is None:
                self._cells.pop(cell, None)
            else:
                self._cells[cell] = value

    def _compute(self, entry: PlanEntry) -> tuple[int, TokenLogprob | None, tuple[TokenLogprob, ...]]:
        if entry.admission is not None:
            admission = entry.admission
            self._slots[entry.slot] = _Slot(list(admission.tokens), list(admission.table), entry)
        slot = self._slots[entry.slot]
        slot.table += entry.new_blocks
        self._write_and_check(slot, entry)
        admission = slot.entry.admission
        assert admission is not None
        params = admission.params
        end = entry.start + entry.n
        prompt_logprobs = tuple(
            self._logprob(slot.tokens[entry.start + row + 1], params.prompt_logprobs or 0)
            for row in entry.logit_rows
            if entry.start + row + 1 < admission.num_prompt
        )
        if not entry.samples:
            return NO_TOKEN, None, prompt_logprobs
        assert len(slot.tokens) == end, "a sampled position must be the next unknown one"
        token = self.next_token(
            slot.tokens, admission.num_prompt, admission.sample_index, admission.seed, params.temperature
        )
        if end - admission.num_prompt < params.min_tokens and token in admission.stop_ids:
            token = ord(".")
        slot.tokens.append(token)
        logprob = self._logprob(token, params.logprobs) if params.logprobs is not None else None
        return token, logprob, prompt_logprobs

    def _write_and_check(self, slot: _Slot, entry: PlanEntry) -> None:
        size, end, chain = self.block_size, entry.start + entry.n, 0
        assert entry.n >= 1
        assert end <= len(slot.tokens)
        for position in range(end):
            chain = zlib.crc32(str(slot.tokens[position]).encode(), chain)
            cell = slot.table[position // size] * size + position % size
            if position >= entry.start:
                self._cells[cell] = chain
            assert self._cells.get(cell) == chain, (
                f"stale KV at position {position} of request {entry.request_id}"
            )

    @staticmethod
    def _logprob(token: int, num_top: int) -> TokenLogprob:
        top = tuple((token + i, -1.0 - i) for i in range(num_top))
        return TokenLogprob(token=token, logprob=-1.0, rank=1, top=top)


class ByteDetokenizer:
    def __init__(self, *, skip_special_tokens: bool = True, strip_space: bool = False) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._skip = skip_special_tokens
        self._strip_space = strip_space

    def push(self, token_id: int) -> str:
        strip, self._strip_space = self._strip_space, False
        if strip and token_id == ord(" "):
            return ""
        if token_id < 256:
            return self._decoder.decode(bytes([token_id]))
        if self._skip:
            return ""
        return self._decoder.decode(b"", final=True) + {BOS: "<s>", EOS: "</s>"}[token_id]

    def push_all(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.push, token_ids))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """Token ids 0 to 255 are the bytes of UTF-8, 256 starts and 257 ends a sequence.

    As SentencePiece does, it strips a space from the start of a decoded text that does not continue another.
    """

    vocab_size = VOCAB_SIZE
    eos_token_ids: tuple[int, ...] = (EOS,)
    bos_token_id: int | None = BOS
    special_ids = frozenset({BOS, EOS})
    ids_by_bytes: Mapping[bytes, int] = {bytes([byte]): byte for byte in range(256)}

    def __init__(self, *, add_bos: bool = False) -> None:
        self._add_bos = add_bos
        self.chat_template: str | None = "bytes"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        start = [BOS] if self._add_bos and add_special_tokens else []
        try:
            return start + list(text.encode())
        except UnicodeEncodeError:
            raise RequestError(
                "prompt has half a surrogate pair", code="invalid_value", field="prompt"
            ) from None

    def encode_inside(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join([*(detokenizer.push(i) for i in ids), detokenizer.finish()])

    def token_bytes(self, token_id: int) -> bytes | None:
        return bytes([token_id]) if token_id < 256 else None

    def token_text(self, token_id: int) -> str:
        return ByteDetokenizer(skip_special_tokens=False).push(token_id) or "\ufffd"

    def detokenizer(self, *, skip_special_tokens: bool = True, continuing: bool = False) -> ByteDetokenizer:
        return ByteDetokenizer(skip_special_tokens=skip_special_tokens, strip_space=not continuing)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **arguments: Any,
    ) -> str:
        roles = [message["role"] for message in messages]
        if any(first == second for first, second in itertools.pairwise(roles)):
            raise RequestError("Conversation roles must alternate", code="chat_template", field="messages")
        text = "".join(f"[{message['role']}]{message['content']}\n" for message in messages)
        return text + ("[assistant]" if add_generation_prompt else "")


def fake_engine(
    executor: FakeExecutor | None = None,
    *,
    depth: int = 2,
    seed: int = 0,
    add_bos: bool = False,
    caching: bool = True,
    clock: Callable[[], float] = time.monotonic,
    limits: QueueLimits | None = None,
    **settings: Any,
) -> EngineThread:
    """A running engine over the fakes; `settings` are fields of `SchedulerConfig`. Close it."""
    executor = executor or FakeExecutor()
    config = SchedulerConfig(**{"max_num_seqs": executor.max_num_seqs, **settings})
    scheduler = Scheduler(
        config,
        PagedKV(executor.num_blocks, executor.block_size, caching=caching),
        max_model_len=min(executor.max_model_len, executor.num_blocks * executor.block_size + 1),
        watermark=0.01,
    )
    tokenizer = ByteTokenizer(add_bos=add_bos)
    engine_settings = EngineSettings(seed, depth, limits=limits or QueueLimits())
    return EngineThread(scheduler, executor, tokenizer, engine_settings, clock=clock).start()

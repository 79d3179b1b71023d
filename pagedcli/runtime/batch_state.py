"""What a rank remembers between steps: tokens, block tables and sampling of every slot. May import torch and `core`.

    token store (device) [max_num_seqs + 1, max_model_len + 1]     block tables [max_num_seqs + 1, max_blocks]
    slot 0 | prompt ... sampled ... |                              slot 0 | 7 3 9 . |
    slot 1 | prompt ...             |                              slot 1 | 7 4 . . |

Sampled ids are written to the store where they were sampled, on the device, so that the next plan can be prepared and
issued before anybody has read them. Everything else that a plan needs is known on the host. Plans are applied in the
order of submission (I10); an entry computes only positions whose tokens are in the store and whose blocks are in the
slot's table (I3), which is asserted. The last row of both belongs to no request: a batch of fixed size is filled up
with rows that compute position 0 of it (`decode_graphs`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagedcli.core.plan import Admission, PlanEntry, StepPlan
from pagedcli.ops.batch import ForwardBatch
from pagedcli.runtime.block_tables import BlockTables
from pagedcli.runtime.sampler import LogprobRequest, SampleRequest
from pagedcli.runtime.sampling_rows import SamplingRow, make_sampling_row
from pagedcli.runtime.transfer import to_device


@dataclass(slots=True)
class SamplingBatch:
    """What to take from the logits of a step.

    Attributes:
        samples: Tokens to sample.
        sample_entries: Plan entry of each of them.
        logprobs: Log-probabilities of sampled tokens.
        logprob_samples: Index into `samples` of each of them.
        prompt: Log-probabilities of prompt tokens.
        prompt_entries: Plan entry of each of them.
        prompt_tokens: [len(prompt)] int64, the prompt tokens themselves.
    """

    samples: list[SampleRequest] = field(default_factory=list)
    sample_entries: list[int] = field(default_factory=list)
    logprobs: list[LogprobRequest] = field(default_factory=list)
    logprob_samples: list[int] = field(default_factory=list)
    prompt: list[LogprobRequest] = field(default_factory=list)
    prompt_entries: list[int] = field(default_factory=list)
    prompt_tokens: Tensor | None = None


@dataclass(slots=True)
class _Slot:
    """Host facts of an occupied slot.

    Attributes:
        num_known: Tokens in the store, sampled ones included.
        num_blocks: Blocks in the table.
        row: Sampling.
    """

    num_known: int
    num_blocks: int
    row: SamplingRow


class BatchState:
    """Applies plans to the slots and lays out their rows.

    Args:
        max_num_seqs: Slots.
        max_model_len: Longest sequence in tokens.
        block_size: Tokens in a block.
        vocab_size: Rows of the head.
        device: Of the model.
        scratch_block: Block for rows that belong to no request; read and written, never looked at.

    Attributes:
        no_slot: The last row of both, which is no request's.
        store: [max_num_seqs + 1, max_model_len + 1] int32, always the same memory.
        tables: Of all slots.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        scratch_block: int = 0,
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.device = device
        self.no_slot = max_num_seqs
        # One more than the longest sequence: the token after the last position may be sampled, never computed.
        self.store = _store(max_num_seqs + 1, max_model_len + 1, device)
        width = -(-max_model_len // block_size)
        self.tables = BlockTables(max_num_seqs + 1, width, scratch_block, device)
        self._slots: dict[int, _Slot] = {}

    def apply(self, plan: StepPlan) -> tuple[ForwardBatch, SamplingBatch]:
        """Take over what the plan changes and return the step's rows. Copies are the KV cache's business."""
        sampling = self.take(plan)
        return self.lay_out(plan), sampling

    def take(self, plan: StepPlan) -> SamplingBatch:
        """Take over what the plan changes; what to sample."""
        for slot in plan.freed_slots:
            # A slot freed before its admission was ever issued is unknown here.
            self._slots.pop(slot, None)
        for entry in plan.entries:
            self._update(entry)
        self.tables.flush()
        sampling = self._sampling(plan)
        for entry in plan.entries:
            self._slots[entry.slot].num_known += int(entry.samples)
        return sampling

    def write_tokens(self, samples: list[SampleRequest], tokens: Tensor) -> None:
        """Put sampled tokens, [len(samples)] int64, where the following steps find them."""
        slots, positions = self._to_device(
            [request.slot for request in samples], [request.position for request in samples]
        )
        self.store[slots, positions] = tokens.to(self.store.dtype)

    def _update(self, entry: PlanEntry) -> None:
        if entry.admission is not None:
            self._admit(entry.slot, entry.admission)
        slot = self._slots[entry.slot]
        if entry.new_blocks:
            end = slot.num_blocks + len(entry.new_blocks)
            self.tables.put(entry.slot, slot.num_blocks, entry.new_blocks)
            slot.num_blocks = end
        computed = entry.start + entry.n
        assert entry.n >= 1, f"request {entry.request_id}: an empty entry"
        assert computed <= slot.num_blocks * self.block_size, f"request {entry.request_id}: beyond its table"
        assert computed <= slot.num_known, f"request {entry.request_id}: a position without a token"
        assert not entry.samples or computed == slot.num_known, (
            f"request {entry.request_id}: samples too early"
        )

    def _admit(self, slot: int, admission: Admission) -> None:
        tokens = np.array(admission.tokens, dtype=np.int32)
        self.store[slot, : len(tokens)] = to_device(tokens, self.device)
        self.tables.put(slot, 0, admission.table)
        row = make_sampling_row(admission, self.vocab_size, self.device)
        self._slots[slot] = _Slot(len(tokens), len(admission.table), row)

    def lay_out(self, plan: StepPlan) -> ForwardBatch:
        """The rows of a plan that was taken over."""
        entries = plan.entries
        lens = np.array([entry.n for entry in entries])
        starts = np.array([entry.start for entry in entries])
        slots = np.array([entry.slot for entry in entries])
        query_start = np.concatenate([[0], np.cumsum(lens)])
        sequence = np.repeat(np.arange(len(entries)), lens)
        positions = np.arange(query_start[-1]) - query_start[sequence] + starts[sequence]
        row_slots = slots[sequence]
        blocks = self.tables.host[row_slots, positions // self.block_size].astype(np.int64)
        cells = blocks * self.block_size + positions % self.block_size
        logit_rows = [
            first + row for first, e in zip(query_start, entries, strict=False) for row in e.logit_rows
        ]
        seq_lens = starts + lens
        width = -(-int(seq_lens.max()) // self.block_size)
        on_device = self._to_device(row_slots, positions, cells, logit_rows, slots)
        return ForwardBatch(
            token_ids=self.store[on_device[0], on_device[1]].long(),
            positions=on_device[1],
            slot_mapping=on_device[2],
            query_start=self._int32(query_start),
            seq_lens=self._int32(seq_lens),
            block_table=self.tables.device[:, :width].index_select(0, on_device[4]),
            logit_rows=on_device[3],
            query_lens=lens.tolist(),
            host_seq_lens=seq_lens.tolist(),
        )

    def _sampling(self, plan: StepPlan) -> SamplingBatch:
        batch = SamplingBatch()
        next_positions: list[tuple[int, int]] = []
        logit_row = 0
        for index, entry in enumerate(plan.entries):
            row = self._slots[entry.slot].row
            for offset in entry.logit_rows:
                position = entry.start + offset + 1
                if position < row.num_prompt:
                    batch.prompt.append(LogprobRequest(logit_row, row.params.prompt_logprobs or 0))
                    batch.prompt_entries.append(index)
                    next_positions.append((entry.slot, position))
                elif entry.samples and offset == entry.n - 1:
                    self._add_sample(batch, SampleRequest(logit_row, entry.slot, position, row), index)
                logit_row += 1
        if next_positions:
            slots, positions = self._to_device(*zip(*next_positions, strict=True))
            batch.prompt_tokens = self.store[slots, positions].long()
        return batch

    @staticmethod
    def _add_sample(batch: SamplingBatch, request: SampleRequest, entry_index: int) -> None:
        num_top = request.row.params.logprobs
        if num_top is not None:
            batch.logprobs.append(LogprobRequest(request.logit_row, num_top))
            batch.logprob_samples.append(len(batch.samples))
        batch.samples.append(request)
        batch.sample_entries.append(entry_index)

    def _to_device(self, *columns: object) -> tuple[Tensor, ...]:
        """int64 arrays to the device in one transfer."""
        arrays = [np.asarray(column, dtype=np.int64).reshape(-1) for column in columns]
        joined = to_device(np.concatenate(arrays), self.device)
        ends = np.cumsum([len(array) for array in arrays]).tolist()
        return tuple(joined[end - len(array) : end] for end, array in zip(ends, arrays, strict=True))

    def _int32(self, array: npt.NDArray[np.generic]) -> Tensor:
        return to_device(array.astype(np.int32), self.device)


def _store(rows: int, columns: int, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(rows, columns, dtype=torch.int32, device=device)
    # numpy's zeros take memory only where they are written.
    return torch.from_numpy(np.zeros((rows, columns), dtype=np.int32))

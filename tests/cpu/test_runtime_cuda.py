"""What the runtime asks of CUDA, told by a stand-in: the order of streams and graphs, and who takes the memory."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from pagedcli.core.plan import StepPlan
from pagedcli.errors import ConfigError
from pagedcli.runtime.gpu_memory import GpuUse, out_of_memory
from pagedcli.runtime.graphs import CudaCaptures, sizes_for
from pagedcli.runtime.profile import largest_step, measure
from pagedcli.runtime.transfer import StreamCopies
from tests.cpu.fake_cuda import GIB, FakeCuda

DEVICE = torch.device("cuda:0")
MIB = 2**20


def test_work_is_done_on_the_side_and_then_recorded_there_in_one_pool() -> None:
    cuda = FakeCuda()
    captures = CudaCaptures(DEVICE, cuda)
    replays = captures.capture([lambda n=n: cuda.log.append(f"{n} on {cuda.current.name}") for n in (8, 4)])  # type: ignore[misc]
    once = [
        "side waits for main",
        "{} on side",
        "record into pool 1 (thread_local)",
        "{} on side",
        "recorded",
    ]
    assert cuda.log == [line.format(size) for size in (8, 4) for line in once]
    cuda.log.clear()
    replays[1]()
    assert cuda.log == ["replay on main"]
    # A worker's pool goes with it: the next one's graphs have another.
    captures.capture([lambda: None])
    assert "record into pool 2 (thread_local)" in cuda.log


class FakeTensor:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def record_stream(self, stream: object) -> None:
        self.cuda.log.append("kept for the copy")

    def to(self, device: str, *, non_blocking: bool) -> str:
        assert (device, non_blocking) == ("cpu", True)
        self.cuda.log.append(f"copy on {self.cuda.current.name}")
        return "on the host"


def test_results_are_copied_on_the_side_after_what_was_issued_before() -> None:
    cuda = FakeCuda()
    copies = StreamCopies(DEVICE, cuda)
    assert copies.begin(FakeTensor(cuda)) == "on the host"  # type: ignore[arg-type, comparison-overlap]
    mark = copies.mark()
    assert cuda.log == ["side waits for main", "kept for the copy", "copy on side", "event on side"]
    assert not mark.done()
    mark.wait()
    assert mark.done()
    assert cuda.current is cuda.main


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [(1, (1,)), (3, (1, 2, 3)), (10, (1, 2, 4, 8, 10)), (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64))],
)
def test_sizes_end_with_the_largest_step(max_rows: int, sizes: tuple[int, ...]) -> None:
    assert sizes_for(max_rows) == sizes


def test_sizes_grow_with_the_step_and_end() -> None:
    sizes = sizes_for(10_000)
    assert sizes[-1] == 512
    assert {8, 64, 128, 256} <= set(sizes)
    assert len(sizes) <= 24
    assert all(b - a <= max(8, a // 4) for a, b in pairwise(sizes))
    assert sizes_for(16, [64, 4, 4, 20]) == (4, 16)


# ---- memory


class FakeWorker:
    """Takes what a worker would, and gives it back when nothing refers to it any more."""

    kv_bytes, buffers, peak, graphs, workspace = 40 * MIB, 300 * MIB, 900 * MIB, 200 * MIB, 32 * MIB

    def __init__(self, cuda: FakeCuda, num_blocks: int) -> None:
        self.cuda, self.num_blocks, self.taken_outside = cuda, num_blocks, 0
        self.info = SimpleNamespace(kv_bytes=self.kv_bytes)
        cuda.take(self.kv_bytes + self.buffers)

    def run(self, plan: StepPlan) -> None:
        self.cuda.take(self.workspace)  # kept by a library for ever
        self.cuda.take(self.peak - self.workspace)
        self.cuda.give(self.peak - self.workspace)

    def capture(self, captures: object) -> None:
        self.cuda.outside += self.graphs
        self.taken_outside = self.graphs

    def __del__(self) -> None:
        self.cuda.give(self.kv_bytes + self.buffers)
        self.cuda.outside -= self.taken_outside


def measured(cuda: FakeCuda, **settings: object) -> GpuUse:
    plan = largest_step(16, 4, 100, 64)
    seen = []

    def make(num_blocks: int) -> FakeWorker:
        seen.append(num_blocks)
        return FakeWorker(cuda, num_blocks)

    use = measure("cuda:0", make, plan, captures=object(), cuda=cuda)  # type: ignore[arg-type]
    assert seen == [4 * 2]  # 25 tokens each, pages of 16
    return use


def test_everything_but_the_pool_is_measured() -> None:
    cuda = FakeCuda(outside=GIB, allocated=5 * GIB, cached=GIB)
    use = measured(cuda)
    worker = FakeWorker
    assert (use.total, use.others, use.weights) == (16 * GIB, GIB, 5 * GIB)
    # What a library keeps for ever was part of the step's peak, and is there in every step.
    assert (use.buffers, use.step, use.graphs) == (
        worker.buffers + worker.workspace,
        worker.peak,
        worker.graphs,
    )
    budget = use.kv_budget(0.9, MIB)
    assert budget == int(0.9 * 16 * GIB) - 6 * GIB - use.buffers - use.step - use.graphs
    # A pool of that size fits: with weights, buffers, graphs, the step and the others, 0.9 of it all is taken.
    cuda.outside += use.graphs
    cuda.take(budget + worker.buffers)
    cuda.take(worker.peak)
    assert 0.89 * cuda.total < cuda.outside + cuda.allocated <= 0.9 * cuda.total + worker.workspace


def test_no_room_for_a_page_is_told_with_all_numbers_and_the_share_that_would_do() -> None:
    use = measured(FakeCuda(outside=2 * GIB, allocated=8 * GIB))
    with pytest.raises(ConfigError) as caught:
        use.kv_budget(0.6, 2 * MIB)
    text = str(caught.value)
    assert "no page of KV (2 MiB) fits on cuda:0: 0.6 of 16 GiB may be used" in text
    assert (
        "weights 8 GiB, buffers 332 MiB, the largest step 900 MiB, CUDA graphs 200 MiB, others 2 GiB" in text
    )
    assert "\n" not in text
    remedy = float(text.rpartition("--gpu-memory-utilization ")[2])
    assert use.kv_budget(remedy, 2 * MIB) >= 2 * MIB
    with pytest.raises(ConfigError, match="fits on"):
        use.kv_budget(remedy - 0.01, 2 * MIB)


def test_where_no_share_would_do_something_must_be_smaller() -> None:
    use = measured(FakeCuda(total=16 * GIB, allocated=15 * GIB - 400 * MIB))
    with pytest.raises(ConfigError, match="--max-num-batched-tokens, --max-num-seqs or --max-model-len"):
        use.kv_budget(0.9, 2 * GIB)


def test_memory_that_ends_while_it_is_measured_is_told_with_the_numbers() -> None:
    cuda = FakeCuda(outside=3 * GIB, allocated=13 * GIB - 500 * MIB)
    with pytest.raises(ConfigError) as caught:
        measured(cuda)
    text = str(caught.value)
    assert text.startswith(
        "cuda:0 ran out of memory in the largest step that the settings allow, 100 tokens (asking"
    )
    assert "; of 16 GiB, " in text
    assert "--max-num-batched-tokens" in text
    assert "\n" not in text


def test_out_of_memory_says_what_is_ours_and_what_is_free() -> None:
    cuda = FakeCuda(outside=GIB, allocated=3 * GIB, cached=GIB)
    torchs = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."
    )
    text = str(out_of_memory(DEVICE, "after 3 GiB of weights", "free the GPU", torchs, cuda))
    assert text == (
        "cuda:0 ran out of memory after 3 GiB of weights (asking for 2.00 GiB; of 16 GiB, 4 GiB are ours and 11 GiB "
        "free): free the GPU"
    )

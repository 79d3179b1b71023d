"""How "auto" becomes a value: device, dtype, pages, longest sequence; settings as keywords."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pagedcli.api.calls import as_conversations, as_params, as_prompts
from pagedcli.api.resolve import choose_model_len, choose_pages, choose_run, resolve_device, resolve_dtype
from pagedcli.api.settings import config_from_settings, section_of_setting
from pagedcli.config import EngineConfig
from pagedcli.core.sampling import SamplingParams
from pagedcli.errors import ConfigError, RequestError
from pagedcli.models.spec import ModelSpec
from tests.fixtures_checkpoints import tiny_config

SPEC = ModelSpec.from_config(tiny_config("llama", torch_dtype="float16", max_position_embeddings=512))
MIB = 1 << 20


def config(**settings: Any) -> EngineConfig:
    return config_from_settings(EngineConfig(), settings)


def test_every_setting_is_a_keyword_of_one_section() -> None:
    sections = section_of_setting()
    names = [
        field.name
        for part in dataclasses.fields(EngineConfig)
        if dataclasses.is_dataclass(section := getattr(EngineConfig(), part.name))
        for field in dataclasses.fields(section)
    ]
    assert len(names) == len(set(names)), "two sections have a setting of the same name"
    assert set(sections) == {*names, "seed"}
    made = config(model="m", page_size=8, max_num_seqs=3, device="cpu", seed=5)
    assert (made.model.model, made.cache.page_size, made.scheduler.max_num_seqs) == ("m", 8, 3)
    assert (made.device.device, made.seed) == ("cpu", 5)
    assert config(block_size=4).cache.page_size == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pagesize": 8}, "unknown setting 'pagesize': did you mean page_size?"),
        ({"zzz": 8}, "unknown setting 'zzz': known are activation, "),
        ({"block_size": 4, "page_size": 8}, "page_size is given twice"),
        ({"page_size": 1000}, "cache.page_size is 1000: choose 1 to 256"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_device() -> None:
    assert resolve_device(config(), has_cuda=False) == "cpu"
    assert resolve_device(config(), has_cuda=True) == "cuda"
    assert resolve_device(config(device="cpu"), has_cuda=True) == "cpu"
    assert resolve_device(config(gpu_memory_utilization=0.5), has_cuda=True) == "cuda"
    with pytest.raises(ConfigError, match="--device cpu"):
        resolve_device(config(device="cuda"), has_cuda=False)
    with pytest.raises(ConfigError, match="--kv-memory 2GiB or --num-pages"):
        resolve_device(config(gpu_memory_utilization=0.5), has_cuda=False)


def test_graphs_are_for_cuda() -> None:
    assert resolve_device(config(cuda_graphs=False), has_cuda=False) == "cpu"  # what happens anyway
    assert resolve_device(config(cuda_graphs=True, cuda_graph_sizes=[4, 1]), has_cuda=True) == "cuda"
    for settings in ({"cuda_graphs": True}, {"cuda_graph_sizes": [1, 8]}):
        with pytest.raises(ConfigError, match="runs on a CPU"):
            resolve_device(config(**settings), has_cuda=False)
    with pytest.raises(ConfigError, match="choose sizes from 1"):
        config(cuda_graph_sizes=[0])
    with pytest.raises(ConfigError, match="leave one of them out"):
        config(cuda_graphs=False, cuda_graph_sizes=[8])
    with pytest.raises(ConfigError, match="a list of whole numbers"):
        config(cuda_graph_sizes=8)


@pytest.mark.parametrize(
    ("wanted", "stored", "device", "expected"),
    [
        ("auto", "float32", "cpu", "float32"),
        ("auto", "bfloat16", "cpu", "bfloat16"),
        ("auto", "float16", "cpu", "bfloat16"),
        ("auto", "float16", "cuda", "float16"),
        ("float16", "float32", "cpu", "bfloat16"),
        ("float32", "bfloat16", "cpu", "float32"),
        ("float16", "bfloat16", "cuda", "float16"),
    ],
)
def test_dtype(wanted: str, stored: str, device: str, expected: str) -> None:
    notes: list[str] = []
    assert resolve_dtype(wanted, stored, device, notes) == expected
    assert bool(notes) == (
        (wanted, stored) in (("auto", "float16"), ("float16", "float32")) and device == "cpu"
    )


def test_run() -> None:
    run = choose_run(config(), SPEC, has_cuda=False, cores=3)
    assert (run.device, run.dtype, run.threads, run.model_len) == ("cpu", "bfloat16", 3, 512)
    assert run.notes == ("float16 runs as bfloat16 on a CPU",)
    run = choose_run(config(threads=7, depth=3, max_model_len=100), SPEC, has_cuda=False, cores=3)
    assert (run.threads, run.depth, run.model_len) == (7, 3, 100)
    assert choose_run(config(), SPEC, has_cuda=False, cores=3).depth == 1
    on_cuda = choose_run(config(), SPEC, has_cuda=True, cores=3)
    assert (on_cuda.threads, on_cuda.depth) == (0, 2)
    with pytest.raises(ConfigError, match="max_model_len is 513, and the model was made for 512"):
        choose_run(config(max_model_len=513), SPEC, has_cuda=False, cores=3)


def pages(free: int, page_bytes: int = MIB, **settings: Any) -> int:
    made = config(**settings)
    run = choose_run(made, SPEC, has_cuda=False, cores=1)
    return choose_pages(made, run, page_bytes, room_bytes=lambda: free, budget_bytes=lambda: int(free * 0.4))


def test_pages() -> None:
    assert pages(100 * MIB) == 40
    assert pages(100 * MIB, num_pages=7) == 7
    assert pages(100 * MIB, kv_memory_bytes=10 * MIB + 5) == 10
    # No more than every slot at its longest needs: 2 sequences of 512 tokens in pages of 16.
    assert pages(1000 * MIB, max_num_seqs=2) == 64
    with pytest.raises(ConfigError, match="--num-pages 100"):
        pages(100 * MIB, num_pages=101)
    with pytest.raises(ConfigError, match="--kv-memory 100MiB"):
        pages(100 * MIB, kv_memory_bytes=200 * MIB)
    with pytest.raises(ConfigError, match="--kv-memory"):
        pages(2 * MIB)
    with pytest.raises(ConfigError, match="--kv-memory"):
        pages(100 * MIB, kv_memory_bytes=5)


def test_longest_sequence_is_at_most_what_the_pool_holds_and_said_if_it_was_asked_for() -> None:
    assert choose_model_len(config(), 512, num_pages=100) == (512, ())
    assert choose_model_len(config(), 512, num_pages=10) == (161, ())
    length, notes = choose_model_len(config(max_model_len=512), 512, num_pages=10)
    assert length == 161
    assert "is 161, not 512" in notes[0]
    assert "--num-pages 32" in notes[0]


def test_prompts_conversations_and_parameters_in_any_form() -> None:
    assert as_prompts("a") == ["a"]
    assert as_prompts([1, 2]) == [[1, 2]]
    assert as_prompts(["a", [1]]) == ["a", [1]]
    assert as_prompts(("a", "b")) == ["a", "b"]
    assert as_prompts([]) == []
    message = {"role": "user", "content": "x"}
    assert as_conversations([message]) == [[message]]
    assert as_conversations([[message], [message]]) == [[message], [message]]
    assert as_params(None, 2) == [SamplingParams()] * 2
    one, other = SamplingParams(seed=1), SamplingParams(seed=2)
    assert as_params(one, 2) == [one, one]
    assert as_params([one, other], 2) == [one, other]
    with pytest.raises(RequestError, match="2 sampling parameters for 3 prompts"):
        as_params([one, other], 3)


def test_enforce_eager_is_the_opposite_of_graphs() -> None:
    """A name of vLLM's."""
    made = config_from_settings(EngineConfig(), {"enforce_eager": True})
    assert made.device.cuda_graphs is False
    assert config_from_settings(EngineConfig(), {"enforce_eager": False}).device.cuda_graphs is None
    with pytest.raises(ConfigError, match="enforce_eager is 'no': give True or False"):
        config_from_settings(EngineConfig(), {"enforce_eager": "no"})
    with pytest.raises(ConfigError, match="cuda_graphs is given twice, also as enforce_eager"):
        config_from_settings(EngineConfig(), {"cuda_graphs": True, "enforce_eager": True})
    with pytest.raises(ConfigError, match="did you mean enforce_eager"):
        config_from_settings(EngineConfig(), {"enforce_eagr": True})

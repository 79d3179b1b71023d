"""Limits of containers, sizes of pools and numbers of threads, on made-up file trees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pagedcli.config_file import show_bytes
from pagedcli.errors import ConfigError
from pagedcli.models.spec import ModelSpec
from pagedcli.runtime.cgroups import ControlGroups
from pagedcli.runtime.memory import (
    automatic_blocks,
    block_bytes,
    blocks_within,
    check_kv_fits,
    cpu_kv_budget,
    free_memory,
)
from pagedcli.runtime.threads import allowed_cpus, compute_threads, core_cpus, physical_cores

MIB = 2**20


def tree(root: Path, proc: str, files: dict[str, str]) -> ControlGroups:
    (root / "cgroup").write_text(proc)
    for name, text in files.items():
        path = root / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return ControlGroups(root / "cgroup", root / "sys")


def test_no_control_groups_means_no_limits(tmp_path: Path) -> None:
    groups = ControlGroups(tmp_path / "none", tmp_path / "none")
    assert groups.free_memory() is None
    assert groups.cpu_quota() is None


def test_v2_limits_are_the_tightest_up_to_the_root(tmp_path: Path) -> None:
    groups = tree(
        tmp_path,
        "0::/a/b\n",
        {
            "a/b/memory.max": "max\n",
            "a/b/memory.current": f"{100 * MIB}\n",
            "a/memory.max": f"{500 * MIB}\n",
            "a/memory.current": f"{300 * MIB}\n",
            "a/memory.stat": f"anon 5\ninactive_file {50 * MIB}\nactive_file 7\n",
            "memory.max": f"{5000 * MIB}\n",
            "memory.current": f"{300 * MIB}\n",
            "a/b/cpu.max": "max 100000\n",
            "a/cpu.max": "150000 100000\n",
        },
    )
    assert groups.free_memory() == (500 - 300 + 50) * MIB
    assert groups.cpu_quota() == 1.5


def test_v1_limits(tmp_path: Path) -> None:
    groups = tree(
        tmp_path,
        "4:memory:/job\n2:cpu,cpuacct:/job\n0::/\n",
        {
            "memory/job/memory.limit_in_bytes": f"{200 * MIB}\n",
            "memory/job/memory.usage_in_bytes": f"{150 * MIB}\n",
            "memory/job/memory.stat": f"cache 1\ntotal_inactive_file {MIB}\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/memory.usage_in_bytes": f"{900 * MIB}\n",
            "cpu,cpuacct/job/cpu.cfs_quota_us": "250000\n",
            "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    assert groups.free_memory() == 51 * MIB
    assert groups.cpu_quota() == 2.5


def test_a_path_that_is_not_mounted_falls_back_to_the_root_of_the_mount(tmp_path: Path) -> None:
    files = {"memory.max": f"{64 * MIB}\n", "memory.current": f"{60 * MIB}\n", "cpu.max": "50000 100000\n"}
    groups = tree(tmp_path, "0::/../../outside/of/here\n", files)
    assert groups.free_memory() == 4 * MIB
    assert groups.cpu_quota() == 0.5


def test_a_group_over_its_limit_has_no_room(tmp_path: Path) -> None:
    groups = tree(tmp_path, "0::/\n", {"memory.max": "10\n", "memory.current": "20\n"})
    assert groups.free_memory() == 0


def test_free_memory_is_the_smaller_of_machine_and_container(tmp_path: Path) -> None:
    limited = tree(tmp_path, "0::/\n", {"memory.max": f"{3 * MIB}\n", "memory.current": f"{MIB}\n"})
    assert free_memory(limited) == 2 * MIB
    assert cpu_kv_budget(limited) == int(2 * MIB * 0.4)
    nothing = ControlGroups(tmp_path / "none", tmp_path / "none")
    assert 0 < free_memory(nothing) <= psutil.virtual_memory().total


@pytest.mark.parametrize(("quota", "expected"), [("max", 2), ("150000", 1), ("50000", 1), ("800000", 2)])
def test_threads_are_physical_cores_within_the_quota(tmp_path: Path, quota: str, expected: int) -> None:
    """Four logical CPUs on two cores."""
    for cpu in range(4):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text("0\n")
        (folder / "core_id").write_text(f"{cpu % 2}\n")
    groups = tree(tmp_path, "0::/\n", {"cpu.max": f"{quota} 100000\n"})
    assert compute_threads({0, 1, 2, 3}, groups, tmp_path) == expected
    assert physical_cores({0, 2}, tmp_path) == 1
    assert physical_cores({0, 1, 7}, tmp_path) == 3
    assert compute_threads(set(), groups, tmp_path) == 1
    assert core_cpus({0, 1, 2, 3}, tmp_path) == (0, 1)
    assert core_cpus({2, 1}, tmp_path) == (1, 2)


def test_threads_of_this_machine() -> None:
    assert 1 <= compute_threads() <= len(allowed_cpus())


def test_block_bytes_counts_keys_and_values_of_all_layers() -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
    spec = ModelSpec.from_config(config)
    assert block_bytes(spec, 16, "bfloat16") == 30 * 2 * 3 * 64 * 16 * 2
    assert block_bytes(spec, 1, "float32") == 30 * 2 * 3 * 64 * 4


def test_pools_are_sized_by_the_budget_and_by_what_can_be_used() -> None:
    assert blocks_within(1000, 300) == 3
    assert automatic_blocks(10**9, 300, block_size=16, max_num_seqs=4, max_model_len=100) == 28
    assert automatic_blocks(3000, 300, block_size=16, max_num_seqs=4, max_model_len=100) == 10
    with pytest.raises(ConfigError, match=r"a page of KV takes 300 bytes.*299 bytes: give --kv-memory 300"):
        blocks_within(299, 300)
    with pytest.raises(ConfigError, match="0 bytes"):
        blocks_within(-5, 300)


def test_a_pool_that_does_not_fit_is_refused_with_the_largest_that_does() -> None:
    check_kv_fits(10, MIB, 10 * MIB)
    with pytest.raises(
        ConfigError, match=r"11 pages of 1 MiB take 11 MiB for KV, 10 MiB is free: use --num-pages 10"
    ):
        check_kv_fits(11, MIB, 10 * MIB)
    with pytest.raises(ConfigError, match="use a smaller model"):
        check_kv_fits(1, MIB, MIB - 1)
    # Who asked for a size is told a size, which fits.
    with pytest.raises(ConfigError, match=r"7 MiB is free: use --kv-memory 6MiB$"):
        check_kv_fits(5, 3 * MIB, 7 * MIB, asked_bytes=16 * MIB)
    check_kv_fits(blocks_within(6 * MIB, 3 * MIB), 3 * MIB, 7 * MIB, asked_bytes=6 * MIB)
    with pytest.raises(ConfigError, match=r"use --kv-memory 900$"):
        check_kv_fits(5, 300, 1000, asked_bytes=1600)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (3 * 2**30, "3 GiB")],
)
def test_show_bytes(count: int, text: str) -> None:
    assert show_bytes(count) == text


def test_sizing_and_executors_start_without_torch() -> None:
    script = (
        "import sys; import pagedcli.runtime.memory, pagedcli.runtime.threads, pagedcli.runtime.executors; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)

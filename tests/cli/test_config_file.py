"""Settings from files, --set and flags: precedence, names, types, sizes, errors that name their source."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedcli.config import EngineConfig
from pagedcli.config_file import Value, load_settings, parse_size
from pagedcli.core.sampling import SamplingParams
from pagedcli.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


def load(folder: Path, **sources):
    return load_settings(folder=folder, extra_sections={"sampling": SamplingParams}, **sources)


def test_no_source_gives_the_defaults(tmp_path):
    assert load(tmp_path).engine == EngineConfig()


def test_later_sources_win(tmp_path):
    (tmp_path / "paged.toml").write_text(
        "seed = 1\n[cache]\npage_size = 1\n"
        "[scheduler]\nmax_num_seqs = 1\ndecode_interval = 2\nmax_preemptions = 1\n"
    )
    config = tmp_path / "other.toml"
    config.write_text("[cache]\npage_size = 2\n[scheduler]\nmax_num_seqs = 2\ndecode_interval = 3\n")
    settings = load(
        tmp_path,
        config_file=config,
        assignments=["cache.page_size=3", "scheduler.max_num_seqs=3"],
        flags={"cache.page_size": Value(4, "--page-size")},
    )
    engine = settings.engine
    assert engine.cache.page_size == 4
    assert engine.scheduler.max_num_seqs == 3
    assert engine.scheduler.decode_interval == 3
    assert engine.scheduler.max_preemptions == 1
    assert engine.seed == 1


def test_later_pool_size_replaces_the_other_way_to_say_it(tmp_path):
    (tmp_path / "paged.toml").write_text("[cache]\nnum_pages = 10\n")
    flags = {"cache.kv_memory_bytes": Value("2GiB", "--kv-memory")}
    cache = load(tmp_path, flags=flags).engine.cache
    assert (cache.num_pages, cache.kv_memory_bytes) == (None, 2 << 30)


def test_both_pool_sizes_at_once_are_refused_with_their_flags(tmp_path):
    flags = {
        "cache.kv_memory_bytes": Value("2GiB", "--kv-memory"),
        "cache.num_pages": Value(3, "--num-pages"),
    }
    with pytest.raises(ConfigError, match=r"^--kv-memory, --num-pages: .* give one of them"):
        load(tmp_path, flags=flags)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[cache]\npagesize = 4\n", "unknown setting cache.pagesize: did you mean page_size?"),
        ("[cash]\npage_size = 4\n", "unknown setting cash: did you mean cache?"),
        ("page_size = 4\n", "unknown setting page_size: did you mean cache.page_size?"),
        ("zzz = 4\n", "unknown setting zzz: known: model, cache, scheduler, device, sampling, seed"),
        ("[sampling]\ntemprature = 0.5\n", "unknown setting sampling.temprature: did you mean temperature?"),
        ("cache = 3\n", r"cache is a section: write \[cache\]"),
        ("[cache]\npage_size = '4'\n", "cache.page_size is '4': give a whole number"),
        ("[cache]\npage_size = true\n", "cache.page_size is True: give a whole number"),
        ("[cache]\nwatermark = 'x'\n", "cache.watermark is 'x': give a number"),
        ("[cache]\nprefix_caching = 1\n", "cache.prefix_caching is 1: give true or false"),
        ("[cache]\npage_size = 0\n", "cache.page_size is 0: choose 1 to 256"),
        ("[cache]\nkv_memory_bytes = 'lots'\n", "cache.kv_memory_bytes is 'lots': give a size"),
        ("[model]\ndtype = 'float23'\n", "model.dtype is 'float23': choose one of .*; did you mean float32?"),
        ("[model]\nmodel = 3\n", "model.model is 3: give text in quotes"),
        ("seed = 'x'\n", "seed is 'x': give a whole number"),
        ("seed = \n", "not TOML"),
        ("seed = " + "[" * 3000 + "]" * 3000, "not TOML that can be read: nested too deeply"),
        ("[cache]\nwatermark = 1" + "0" * 400, "cache.watermark is 10+: give a number of fewer digits"),
        ("[cache]\nkv_memory_bytes = '1" + "0" * 400 + "'", "give a size that a machine can have"),
        ("[scheduler]\nmax_num_seqs = 999999999\n", "is 999999999: it can be at most 65536"),
        ("[scheduler]\nmax_num_batched_tokens = 999999999\n", "is 999999999: it can be at most 1048576"),
        ("[device]\nthreads = 100000\n", "device.threads is 100000: it can be at most 1024"),
    ],
)
def test_errors_name_file_key_and_remedy(tmp_path, text, message):
    path = tmp_path / "paged.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("model.dtype=float32", "float32"),
        ('model.dtype="float32"', "float32"),
        (" model.dtype = auto", "auto"),
    ],
)
def test_set_takes_toml_values_and_bare_text(tmp_path, assignment, expected):
    assert load(tmp_path, assignments=[assignment]).engine.model.dtype == expected.strip()


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("cache.page_size", "write --set section.key=value"),
        ("cache.page_sise=3", "did you mean page_size?"),
        ("cache.page_size=three", "cache.page_size is 'three': give a whole number"),
        ("sede=3", "did you mean seed?"),
    ],
)
def test_set_errors_repeat_the_assignment(tmp_path, assignment, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path, assignments=[assignment])
    assert str(caught.value).startswith(f"--set {assignment}")


def test_set_never_drops_what_follows_a_line_feed(tmp_path):
    assignment = "cache.num_pages=1\nx=2"
    with pytest.raises(ConfigError, match="give a whole number"):
        load(tmp_path, assignments=[assignment])
    deep = "[" * 3000
    with pytest.raises(ConfigError, match="give a whole number"):
        load(tmp_path, assignments=[f"cache.num_pages={deep}"])


def test_missing_and_unreadable_config_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        load(tmp_path, config_file=tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path, config_file=tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.toml: not TOML"):
        load(tmp_path, config_file=tmp_path / "binary.toml")


def test_extra_section_comes_back_as_given(tmp_path):
    settings = load(tmp_path, assignments=["sampling.temperature=0.5", 'sampling.stop=["a", "b"]'])
    assert settings.extra == {"sampling": {"temperature": 0.5, "stop": ["a", "b"]}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GiB", 2 << 30),
        ("512 MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("4g", 4 << 30),
        ("65536", 65536),
        ("10kB", 10_000),
        ("1TiB", 1 << 40),
        ("7B", 7),
    ],
)
def test_sizes(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2XiB", "two", "1e9"])
def test_bad_sizes(text):
    with pytest.raises(ValueError, match="give a size"):
        parse_size(text)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_presets_load(tmp_path, path):
    settings = load(tmp_path, config_file=path)
    assert settings.given, "a preset sets something"
    SamplingParams(**settings.extra["sampling"])

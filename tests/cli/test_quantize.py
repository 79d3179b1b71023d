"""`paged quantize` from end to end on tiny models: what it writes, goes on with, demands, and refuses."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedcli.checkpoint.sources import open_checkpoint
from pagedcli.cli.main import run
from pagedcli.errors import how_to_install
from tests.fixtures_checkpoints import write_tiny_checkpoint

pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ROOT = Path(__file__).parents[2]
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
TEXT = "".join(f"Sentence number {number} tells of {number * 7 % 13} small things.\n" for number in range(80))
SMALL = (
    "--calibration",
    "text.txt",
    "--samples",
    "8",
    "--seq-len",
    "32",
    "--eval",
    "held.txt",
    "--threads",
    "1",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a model and texts."""
    monkeypatch.chdir(tmp_path)
    write_tiny_checkpoint(tmp_path / "model", "llama", dtype="bfloat16", num_hidden_layers=3, **SHAPE)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "held.txt").write_text("Held out: " + TEXT[:600][::-1])
    return tmp_path


def quantize(*arguments: str) -> int:
    return run(["quantize", "model", *arguments])


def quality(out: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(Path(out, "quality.json").read_text())
    return value


def digest(out: str) -> str:
    return hashlib.sha256(Path(out, "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("flags", "name", "method", "quant_method"),
    [
        (("--awq",), "model-awq-4bit-g64", "awq", "awq"),
        (("--gptq", "--group-size", "32", "--desc-act"), "model-gptq-4bit-g32", "gptq", "gptq"),
        (("--gptq", "--bits", "8", "--asym"), "model-gptq-8bit-g64", "gptq", "gptq"),
        (("--rtn", "--format", "compressed-tensors"), "model-rtn-4bit-g64", "rtn", "compressed-tensors"),
    ],
)
def test_a_folder_that_generates_with_its_report(
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    name: str,
    method: str,
    quant_method: str,
) -> None:
    used = SMALL if method != "rtn" else SMALL[6:]
    assert quantize(*flags, *used) == 0
    out, err = capfd.readouterr()
    assert "KL from the original" in out
    assert f"written: {name}" in out
    assert "group size 64" in err or "--group-size" in flags
    found = quality(name)
    assert set(found) == {
        *(
            "perplexity",
            "kl_mean",
            "top1_agreement",
            "first_divergence",
            "bits_per_weight",
            "bytes",
            "layers",
        ),
        *("calibration", "eval", "tokens_per_second"),
    }
    assert len(found["layers"]) == 3 * 7
    assert {layer["method"] for layer in found["layers"]} == {method}
    assert found["eval"]["window"] == found["eval"]["stride"] == 512
    assert found["tokens_per_second"]["after"] > 0
    assert found["bytes"] == open_checkpoint(Path(name)).stored_bytes()
    assert (
        json.loads(Path(name, "config.json").read_text())["quantization_config"]["quant_method"]
        == quant_method
    )
    assert sorted(path.name for path in Path(name).iterdir() if path.is_dir()) == []
    assert str(folder) not in "".join(path.read_text() for path in Path(name).glob("*.json"))
    assert str(folder) not in Path(name, "README.md").read_text()
    assert run(["generate", "-p", "Sentence", "-m", name, "--max-tokens", "4", "-q"]) == 0


def _unpacked_gptq(out: str, *, less: int) -> dict[str, Any]:
    """The tensors of a GPTQ folder, dequantized with nothing of ours; float32 by name. Zero points lack `less`."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(Path(out, "model.safetensors"))
    weights = {name: value.float() for name, value in tensors.items() if name.endswith((".weight", ".bias"))}
    lanes = 4 * torch.arange(8)
    for name in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
        words, zeros = tensors[f"{name}.qweight"].long(), tensors[f"{name}.qzeros"].long()
        codes = ((words[:, None, :] >> lanes[None, :, None]) & 15).reshape(-1, words.shape[1])
        points = ((zeros[:, :, None] >> lanes) & 15).reshape(zeros.shape[0], -1) + less
        group = tensors[f"{name}.g_idx"].long()
        scaled = (codes - points[group]) * tensors[f"{name}.scales"].float()[group]
        weights[f"{name}.weight"] = scaled.T.contiguous()
    return weights


@pytest.mark.parametrize(("flags", "less"), [((), 1), (("--asym",), 0)])
def test_the_report_agrees_with_plain_transformers_on_the_files(
    folder: Path, flags: tuple[str, ...], less: int
) -> None:
    """Groups out of order, symmetric as version 1 and asymmetric as version 2; what runs the files agrees, too."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.quant_logits import native_logits

    assert quantize("--gptq", "--desc-act", "--group-size", "32", *flags, *SMALL, "-q", "-o", "out") == 0
    assert any(
        (tensor := open_checkpoint(Path("out")).quantized(f"model.layers.0.mlp.{name}")) is not None
        and tensor.g_idx is not None
        for name in ("gate_proj", "down_proj")
    )
    ids = AutoTokenizer.from_pretrained("model")(Path("held.txt").read_text(), return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    perplexities = []
    for weights in (None, _unpacked_gptq("out", less=less)):
        if weights is not None:
            weights.pop("lm_head.bias", None)
            model.load_state_dict(weights)
        with torch.no_grad():
            logits = [model(part).logits[0, :-1] for part in ids.split(512, 1)]
        targets = [part[0, 1:] for part in ids.split(512, 1)]
        losses = [
            torch.nn.functional.cross_entropy(*pair, reduction="none")
            for pair in zip(logits, targets, strict=True)
        ]
        perplexities.append(float(torch.cat(losses).mean().exp()))
    first = ids[0, :64]
    with torch.no_grad():
        want = model(first[None]).logits[0].numpy()
    found_logits = native_logits(Path("out"), "float32", "float32", first.tolist())
    np.testing.assert_allclose(found_logits, want, rtol=0, atol=1e-4 * np.abs(want).max())
    found = quality("out")["perplexity"]
    assert [found["original"], found["quantized"]] == pytest.approx(perplexities, rel=1e-3)
    assert quality("out")["eval"]["tokens"] == sum(map(len, targets))


@pytest.mark.model
@pytest.mark.parametrize(
    "method",
    [
        pytest.param("--rtn", marks=pytest.mark.timeout(400)),
        pytest.param("--awq", marks=[pytest.mark.nightly, pytest.mark.timeout(3600)]),
        pytest.param("--gptq", marks=[pytest.mark.nightly, pytest.mark.timeout(3600)]),
    ],
)
def test_the_default_model(
    method: str,
    smollm2_gguf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("held.txt").write_text(TEXT[:800])
    assert run(["quantize", method, "--samples", "8", "--seq-len", "128", "--eval", "held.txt"]) == 0
    out, err = capfd.readouterr()
    assert "SmolLM2-135M-Instruct.Q4_1.gguf is quantized already (GGUF Q4_1" in err
    name = f"SmolLM2-135M-Instruct-{method[2:]}-4bit-g64"
    assert f"written: {name}" in out
    assert "suspect" not in out
    assert quality(name)["perplexity"]["quantized"] < 1.5 * quality(name)["perplexity"]["original"]
    prompt = ["-p", "The capital of France is", "--max-tokens", "8", "-q"]
    assert run(["generate", "-m", name, *prompt]) == 0
    assert "Paris" in capfd.readouterr().out


def test_the_model_writes_its_own_text(folder: Path) -> None:
    arguments = ("--awq", "--samples", "8", "--seq-len", "32", "--eval", "held.txt", "--threads", "1", "-q")
    assert quantize(*arguments, "-o", "a") == 0
    assert quantize(*arguments, "-o", "b") == 0
    assert quantize(*arguments, "-o", "c", "--seed", "1") == 0
    assert quality("a")["calibration"] == {"source": "written by the model itself", "tokens": 256, "seed": 0}
    assert digest("a") == digest("b") != digest("c")


def test_threads_do_not_change_the_weights(folder: Path) -> None:
    assert quantize("--gptq", *SMALL[:-2], "-q", "--threads", "1", "-o", "a") == 0
    assert quantize("--gptq", *SMALL[:-2], "-q", "--threads", "2", "-o", "b") == 0
    assert digest("a") == digest("b")


def test_a_finished_folder_is_refused_and_made_anew_on_demand(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert quantize("--rtn", *SMALL[6:], "-q") == 0
    before = digest("model-rtn-4bit-g64")
    assert quantize("--rtn", *SMALL[6:], "-q") == 2
    assert "is finished already: give --overwrite" in capfd.readouterr().err
    assert (
        quantize("--rtn", "--group-size", "32", *SMALL[6:], "-q", "-o", "model-rtn-4bit-g64", "--overwrite")
        == 0
    )
    assert digest("model-rtn-4bit-g64") != before


def _start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", "from pagedcli.cli.main import main; main()", "quantize", "model", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def test_killed_anywhere_it_goes_on_to_the_same_weights(folder: Path) -> None:
    assert quantize("--awq", *SMALL, "-q", "-o", "whole") == 0
    layers = [f"layer-000{index}.json" for index in range(3)]
    for awaited in (layers[0], layers[1]):
        process = _start(folder, "--awq", *SMALL, "-o", "killed")
        end = time.monotonic() + 100
        while not list(folder.glob(f"killed/quantize-work/*/{awaited}")) and process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.002)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert not (folder / "killed" / "quality.json").exists()
    process = _start(folder, "--awq", *SMALL, "-o", "killed")
    said = process.communicate(timeout=100)[0].decode()
    assert process.returncode == 0, said
    assert digest("killed") == digest("whole")
    first, second = quality("killed"), quality("whole")
    first.pop("tokens_per_second")
    second.pop("tokens_per_second")
    assert first == second
    assert not (folder / "killed" / "quantize-work").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_that_it_goes_on(folder: Path, number: int) -> None:
    process = _start(folder, "--awq", *SMALL, "-o", "out")
    end = time.monotonic() + 100
    while not list(folder.glob("out/quantize-work/*/layer-0000.json")):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.002)
    process.send_signal(number)
    said = process.communicate(timeout=100)[0].decode()
    assert process.returncode == 130, said
    assert said.splitlines()[-1] == "interrupted: the same command goes on"
    assert quantize("--awq", *SMALL, "-q", "-o", "out") == 0


def test_an_unfinished_run_with_other_settings_is_refused(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    process = _start(folder, "--awq", *SMALL, "-o", "out")
    end = time.monotonic() + 100
    while not list(folder.glob("out/quantize-work/*/layer-0000.json")):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert quantize("--gptq", *SMALL, "-q", "-o", "out") == 2
    err = capfd.readouterr().err
    assert "other settings" in err
    assert "--overwrite" in err
    assert err.count("\n") == 1
    assert quantize("--gptq", *SMALL, "-q", "-o", "out", "--overwrite") == 0


def test_a_contract_is_met_by_leaving_groups_unquantized(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert quantize("--rtn", *SMALL[6:], "-q", "-o", "free") == 0
    limit = quality("free")["kl_mean"] * 0.8
    assert quantize("--rtn", *SMALL[6:], "-o", "bound", "--max-kl", str(limit)) == 0
    assert "leaving" in capfd.readouterr().err
    found = quality("bound")
    assert found["kl_mean"] <= limit
    kept = [layer["name"] for layer in found["layers"] if layer["method"] == "kept"]
    assert 0 < len(kept) < 21
    assert all(layer["error"] < 1e-4 for layer in found["layers"] if layer["name"] in kept)
    checkpoint = open_checkpoint(Path("bound"))
    assert all(
        (checkpoint.quantized(layer["name"]) is None) == (layer["name"] in kept) for layer in found["layers"]
    )
    settings = json.loads(Path("bound", "config.json").read_text())["quantization_config"]
    assert all(any(name.replace(".", r"\.") in key for key in settings["dynamic"]) for name in kept)


def test_a_contract_that_cannot_be_met_is_exit_code_4_and_marked(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        quantize("--rtn", *SMALL[6:], "-o", "out", "--max-kl", "1e-9", "--max-perplexity-increase", "0") == 4
    )
    out = capfd.readouterr().out
    assert "over --max-kl 1e-09" in out
    found = quality("out")
    assert found["contract_missed"][0].startswith(f"KL {found['kl_mean']:.4f} is over")
    assert "was missed" in Path("out", "README.md").read_text()
    assert run(["generate", "-p", "Sentence", "-m", "out", "--max-tokens", "4", "-q"]) == 0
    assert quantize("--rtn", *SMALL[6:], "-q", "-o", "out", "--max-kl", "1e-9") == 2


def test_a_sabotaged_linear_is_named(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagedcli.quant import job

    honest = job.quantize_layers

    def sabotaged(*args: Any, **kwargs: Any) -> Any:
        for result in honest(*args, **kwargs):
            for tensor in result.tensors:
                if tensor.name == "model.layers.1.mlp.down_proj":
                    tensor.codes[:] = np.roll(tensor.codes, 1, axis=0)
            yield result

    monkeypatch.setattr(job, "quantize_layers", sabotaged)
    monkeypatch.setattr(
        job,
        "check_written",
        lambda written, plan, results: {
            record.name: record.method for result in results for record in result.records
        },
    )
    assert quantize("--awq", *SMALL, "-o", "out") == 0
    out = capfd.readouterr().out
    assert "suspect: model.layers.1.mlp.down_proj" in out
    assert "model.layers.1.mlp.down_proj" in Path("out", "README.md").read_text()


def test_damping_that_is_raised_and_given_up_is_reported(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from pagedcli.quant import gptq

    real, calls = gptq.factorize, []

    def factorize(gram: torch.Tensor, damp: float, *, by_activation: bool) -> Any:
        calls.append(gram)
        beside = {2: 1.05, 4: 3.0}.get(len(calls))
        if beside is None:
            return real(gram, damp, by_activation=by_activation)
        bent = torch.eye(len(gram))  # with one eigenvalue of 1 - beside
        bent[0, 1] = bent[1, 0] = beside
        return real(bent, damp, by_activation=by_activation)

    monkeypatch.setattr(gptq, "factorize", factorize)
    assert quantize("--gptq", *SMALL, "-o", "out") == 0
    raised = "model.layers.0.self_attn.o_proj: damping raised to 0.1"
    given_up = (
        "model.layers.0.mlp.down_proj: the Hessian cannot be factored at any damping: rounded to nearest"
    )
    err = capfd.readouterr().err
    card = Path("out", "README.md").read_text()
    for note in (raised, given_up):
        assert note in err
        assert note in card
    assert quality("out")["notes"] == [raised, given_up]
    methods = {layer["name"]: layer["method"] for layer in quality("out")["layers"]}
    assert [name for name, method in methods.items() if method == "rtn"] == ["model.layers.0.mlp.down_proj"]


def test_a_useless_model_is_said_aloud_without_a_contract(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagedcli.quant import job

    honest = job.compare
    monkeypatch.setattr(
        job,
        "compare",
        lambda *args, **kwargs: dataclasses.replace(honest(*args, **kwargs), perplexity_quantized=1e9),
    )
    assert quantize("--rtn", *SMALL[6:], "-o", "out", "-q") == 0
    err = capfd.readouterr().err
    assert "WARNING: out is not usable: perplexity is" in err
    assert "times the original's (over 2 times)" in err
    assert len(quality("out")["warnings"]) == 1
    assert "**WARNING: not usable" in Path("out", "README.md").read_text()


def test_the_self_check_finds_a_file_that_is_not_what_was_made(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagedcli.quant import job

    honest = job.quantize_layers

    def sabotaged(*args: Any, **kwargs: Any) -> Any:
        for result in honest(*args, **kwargs):
            if result.layer == 2:
                result.tensors[0].codes[0, 0] ^= 1
            yield result

    monkeypatch.setattr(job, "quantize_layers", sabotaged)
    assert quantize("--awq", *SMALL, "-q", "-o", "out") == 1
    assert "model.layers.2.self_attn.q_proj 1 codes read back differently" in capfd.readouterr().err
    assert not Path("out", "quality.json").exists()


def test_a_quantized_source_is_warned_of(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert quantize("--rtn", *SMALL[6:], "-q", "-o", "first") == 0
    assert run(["quantize", "first", "--rtn", "--bits", "8", *SMALL[6:], "-o", "second"]) == 0
    assert "first is quantized already (GPTQ version 1, 4 bits" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ((), "say how to quantize: --awq, --gptq or --rtn"),
        (("--awq", "--rtn"), "--awq and --rtn are given: give one"),
        (("--awq", "-m", "other"), "the model is given twice"),
        (("--awq", "--calibration", "nowhere.txt"), "--calibration nowhere.txt: there is no such file"),
        (("--awq", "--keep", "nothing_proj", *SMALL), "--keep nothing_proj matches no linear"),
        (("--rtn", "--calibration", "text.txt"), "--rtn uses no calibration text"),
        (("--awq", *SMALL, "--seq-len", "4096"), "0 full samples of 4096, at least 8"),
        (("--awq", "-o", "model", *SMALL), "-o model is the model itself"),
        (("--awq", "--eval", "nowhere.txt"), "--eval nowhere.txt: there is no such file"),
        (("--awq", "--threads", "0"), "--threads is 0"),
    ],
)
def test_the_users_mistakes_are_one_line_and_leave_nothing(
    folder: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], what: str
) -> None:
    assert quantize(*arguments, "-q") == 2
    err = capfd.readouterr().err
    assert what in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in folder.iterdir()) == ["held.txt", "model", "text.txt"]


def test_without_torch_one_line_says_what_to_install(folder: Path) -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from pagedcli.cli.main import run\n"
        "sys.exit(run(['quantize', 'model', '--awq']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"paged: paged quantize needs PyTorch, torch is not installed: {how_to_install('quantize')}\n"
    )


def test_help_is_one_screen(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["quantize", "--help"]) == 0
    text = capfd.readouterr().out
    assert text.count("\n") <= 50
    for flag in ("--awq", "--gptq", "--rtn", "--max-kl", "--calibration", "--backend", "--overwrite"):
        assert flag in text

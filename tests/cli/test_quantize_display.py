"""What `paged quantize` shows while it runs."""

from __future__ import annotations

import pytest

from pagedcli.cli.quantize_display import (
    QuantizeDisplay,
    QuantizeView,
    plain_line,
    render,
    short_name,
    sparkline,
)
from pagedcli.quant.options import QuantizeEvent


def _text(view: QuantizeView, width: int = 100) -> str:
    from rich.console import Console

    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as capture:
        console.print(render(view, width))
    return capture.get()


def test_the_display_shows_layer_loss_eta_and_memory() -> None:
    view = QuantizeView(
        phase="quantize 30 layers",
        done=0.5,
        what="layer 15 of 30",
        elapsed_s=61,
        eta_s=59,
        memory_bytes=3 << 29,
        recent=(("model.layers.14.mlp.down_proj", 0.01234), ("model.layers.14.mlp.up_proj", None)),
        layer_errors=(0.1, 0.2),
        finished=(("open the model", 2.0),),
    )
    text = _text(view)
    for part in (
        "50%",
        "layer 15 of 30",
        "1:01 elapsed",
        "ETA 0:59",
        "1.50 GiB",
        "loss 0.01234",
        "▅█",
        "open the model",
    ):
        assert part in text
    assert all(len(line) <= 60 for line in _text(view, 60).splitlines())
    line = plain_line(view)
    assert "\n" not in line
    assert "layer 15 of 30" in line
    assert "ETA 0:59" in line


def test_parts_of_a_fused_linear_are_named_shortly() -> None:
    assert short_name("model.layers.4.self_attn.q_proj + model.layers.4.self_attn.k_proj") == (
        "model.layers.4.self_attn.q_proj + k_proj"
    )


def test_the_time_to_the_end_counts_what_was_read_back_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from pagedcli.cli import quantize_display
    from pagedcli.cli.console import Messages

    clock = [100.0]
    monkeypatch.setattr(quantize_display.time, "monotonic", lambda: clock[0])
    lines: list[str] = []
    messages = Messages(Console(quiet=True))
    monkeypatch.setattr(Messages, "say", lambda self, text: lines.append(text))
    display = QuantizeDisplay(messages)
    with display, display.phase("quantize 4 layers"):
        display.quantizing(QuantizeEvent("resume", 0, 4, "", None, 0.0, 0))
        display.quantizing(QuantizeEvent("resume", 1, 4, "", None, 0.0, 0))
        clock[0] += 30.0
        display.quantizing(QuantizeEvent("linear", 2, 4, "a", 0.5, 30.0, 1 << 30))
        display.quantizing(QuantizeEvent("layer", 2, 4, "", None, 30.0, 1 << 30))
        clock[0] += 15.0
        display.quantizing(QuantizeEvent("linear", 3, 4, "b", 0.25, 45.0, 1 << 30))
    assert lines[0] == "quantize 4 layers ..."
    assert lines[1] == "going on with layer 3 of 4"
    # One of two layers took 30 seconds: nothing is known before its end, then as long again.
    assert "layer 3 of 4" in lines[2]
    assert "ETA" not in lines[2]
    assert "100%" in lines[3]
    assert "loss 0.25000" in lines[3]
    assert len(lines) == 4


def test_the_sparkline_is_as_wide_as_allowed() -> None:
    assert sparkline((0.0, 1.0, 2.0, 4.0), 3) == "▃▅█"
    assert sparkline((0.0, 0.0), 10) == "▁▁"

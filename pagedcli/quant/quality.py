"""The quality report of a quantized checkpoint: quality.json, the model card's section, and the contract.

Standard library and `errors` only. What is reported was measured on the files that were written.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QUALITY_FILE = "quality.json"
CARD_FILE = "README.md"
_CARD_START, _CARD_END = "<!-- quantization -->", "<!-- /quantization -->"
# A linear is suspect if its error is so many times the median of its kind, and is no trifle.
SUSPECT_FACTOR, SUSPECT_ERROR = 5.0, 0.02
# A model beyond either cannot be meant, whether or not a contract was given: KL in nats a token.
ABSURD_PERPLEXITY, ABSURD_KL = 2.0, 1.0


@dataclass(frozen=True, slots=True)
class LinearQuality:
    """One linear.

    Attributes:
        name: In the checkpoint, without ".weight".
        error: Relative squared error of its output on held-out text, for the original's input.
        method: How it was quantized, or "kept".
    """

    name: str
    error: float
    method: str


@dataclass(frozen=True, slots=True)
class Contract:
    """What the user demands; None: nothing.

    Attributes:
        max_kl: Most that the mean KL divergence may be, nats a token.
        max_perplexity_increase: Most that perplexity may rise, as a part of the original's (0.02 is 2%).
    """

    max_kl: float | None = None
    max_perplexity_increase: float | None = None

    def misses(self, kl_mean: float, perplexity_increase: float) -> tuple[str, ...]:
        """By how much it is missed, a text each; empty: it is met."""
        found = []
        if self.max_kl is not None and not kl_mean <= self.max_kl:
            found.append(f"KL {kl_mean:.4f} is over --max-kl {self.max_kl:g}")
        limit = self.max_perplexity_increase
        if limit is not None and not perplexity_increase <= limit:
            found.append(
                f"perplexity rose by {perplexity_increase:.2%}, over --max-perplexity-increase {limit:g} ({limit:.2%})"
            )
        return tuple(found)

    def excess(self, kl_mean: float, perplexity_increase: float) -> float:
        """The part of the damage that must go, 0 to 1, by the harder of the demands."""
        parts = [0.0]
        for limit, found in (
            (self.max_kl, kl_mean),
            (self.max_perplexity_increase, perplexity_increase),
        ):
            if limit is not None and not found <= limit:
                parts.append(1.0 - limit / found if math.isfinite(found) else 1.0)
        return max(parts)


@dataclass(frozen=True, slots=True)
class Quality:
    """The report.

    Attributes:
        perplexity_original: On held-out text.
        perplexity_quantized: On the same tokens.
        kl_mean: KL(original || quantized), mean over the scored positions, nats.
        top1_agreement: Part of them at which both find the same token likeliest.
        first_divergence: Tokens of greedy continuations until the first that differs, mean over the prompts.
        bits_per_weight: Of the decoder's linears, codes, scales and zero points, and what was left unquantized.
        bytes: Of all tensors in the files.
        original_bytes: The same of the original.
        layers: Every linear of the decoder.
        calibration: Source, tokens and seed.
        eval_source: Where the held-out text is from.
        eval_tokens: Positions scored.
        eval_window: Tokens of a window.
        eval_stride: Tokens from one window to the next.
        tokens_per_second_before: One stream, decoding, of the original as it runs here; the median of its turns.
        tokens_per_second_after: The same of the quantized model.
        turns: That each of them had.
        notes: What happened to linears on the way, such as damping that had to be raised.
        repeats_one_token: Whether it answers every prompt with one token again and again, and the original does not.
    """

    perplexity_original: float
    perplexity_quantized: float
    kl_mean: float
    top1_agreement: float
    first_divergence: float
    bits_per_weight: float
    bytes: int
    original_bytes: int
    layers: tuple[LinearQuality, ...]
    calibration: Mapping[str, Any]
    eval_source: str
    eval_tokens: int
    eval_window: int
    eval_stride: int
    tokens_per_second_before: float
    tokens_per_second_after: float
    turns: int = 1
    notes: tuple[str, ...] = ()
    repeats_one_token: bool = False

    @property
    def perplexity_increase(self) -> float:
        """As a part of the original's."""
        return self.perplexity_quantized / self.perplexity_original - 1.0

    @property
    def kept(self) -> tuple[str, ...]:
        """Linears that are not quantized."""
        return tuple(layer.name for layer in self.layers if layer.method == "kept")

    def suspects(self) -> tuple[LinearQuality, ...]:
        """Linears whose error is far from that of their kind in other layers, in the order of the model."""
        kinds: dict[str, list[float]] = {}
        for layer in self.layers:
            kinds.setdefault(kind(layer.name), []).append(layer.error)
        usual = {name: statistics.median(errors) for name, errors in kinds.items()}
        return tuple(
            layer
            for layer in self.layers
            if not math.isfinite(layer.error)
            or layer.error > max(SUSPECT_ERROR, SUSPECT_FACTOR * usual[kind(layer.name)])
        )

    def warnings(self) -> tuple[str, ...]:
        """Why nobody should use this model, a text each; no contract is needed for them."""
        found = []
        factor = self.perplexity_quantized / self.perplexity_original
        if not factor <= ABSURD_PERPLEXITY:
            found.append(
                f"perplexity is {factor:,.1f} times the original's (over {ABSURD_PERPLEXITY:g} times)"
            )
        if not self.kl_mean <= ABSURD_KL:
            found.append(f"KL from the original is {self.kl_mean:.2f} nats a token (over {ABSURD_KL:g})")
        if self.repeats_one_token:
            found.append("it repeats a single token whatever the prompt")
        return tuple(found)

    def misses(self, contract: Contract) -> tuple[str, ...]:
        """By how much the contract is missed; see `Contract.misses`."""
        return contract.misses(self.kl_mean, self.perplexity_increase)

    def as_json(self) -> dict[str, Any]:
        """The object of quality.json."""
        return {
            "perplexity": {
                "original": _number(self.perplexity_original),
                "quantized": _number(self.perplexity_quantized),
            },
            "kl_mean": _number(self.kl_mean),
            "top1_agreement": self.top1_agreement,
            "first_divergence": self.first_divergence,
            "bits_per_weight": self.bits_per_weight,
            "bytes": self.bytes,
            "layers": [
                {"name": layer.name, "error": _number(layer.error), "method": layer.method}
                for layer in self.layers
            ],
            "calibration": dict(self.calibration),
            "eval": {"tokens": self.eval_tokens, "window": self.eval_window, "stride": self.eval_stride},
            "tokens_per_second": {
                "before": self.tokens_per_second_before,
                "after": self.tokens_per_second_after,
            },
        }


def _number(value: float) -> float | None:
    """JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else None


def kind(name: str) -> str:
    """The linear's place in its layer, such as "down_proj"."""
    return name.rsplit(".", 1)[-1]


def quality_rows(quality: Quality) -> list[tuple[str, str, str]]:
    """(what, original, quantized) for tables; the last column is "" where there is one value only."""
    mega = 1e6
    saved = 1 - quality.bytes / quality.original_bytes
    return [
        (
            "perplexity",
            _perplexity(quality.perplexity_original),
            f"{_perplexity(quality.perplexity_quantized)} ({quality.perplexity_increase:+.2%})",
        ),
        ("KL from the original", "", f"{quality.kl_mean:.4f} nats a token"),
        ("same likeliest token", "", f"{quality.top1_agreement:.1%}"),
        ("greedy text differs after", "", f"{quality.first_divergence:.1f} tokens (mean)"),
        (
            "size",
            f"{quality.original_bytes / mega:,.1f} MB",
            f"{quality.bytes / mega:,.1f} MB ({-saved:+.0%})",
        ),
        ("bits a weight, in the layers", "", f"{quality.bits_per_weight:.2f}"),
        (
            "tokens/s, one stream",
            f"{quality.tokens_per_second_before:,.1f}",
            f"{quality.tokens_per_second_after:,.1f}",
        ),
    ]


def _perplexity(value: float) -> str:
    """Three decimals; what is absurd stays short."""
    return f"{value:.3f}" if value < 1e7 else f"{value:.3g}"


def write_quality(folder: Path, quality: Quality, missed: Sequence[str]) -> None:
    """Write quality.json; a missed contract, and quality that cannot be meant, are marked in it."""
    value = quality.as_json()
    if quality.notes:
        value["notes"] = list(quality.notes)
    if warnings := quality.warnings():
        value["warnings"] = list(warnings)
    if missed:
        value["contract_missed"] = list(missed)
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    temporary = folder / (QUALITY_FILE + ".new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(folder / QUALITY_FILE)


def write_card(folder: Path, title: str, how: str, quality: Quality, missed: Sequence[str]) -> None:
    """Put the section on quantization into the model card, in place of the one that an earlier run wrote."""
    file = folder / CARD_FILE
    before = file.read_text(encoding="utf-8") if file.is_file() else f"# {title}\n"
    if _CARD_START in before and _CARD_END in before:
        before = before[: before.index(_CARD_START)] + before[before.index(_CARD_END) + len(_CARD_END) :]
    section = "\n".join(card_lines(how, quality, missed))
    file.write_text(f"{before.rstrip()}\n\n{_CARD_START}\n{section}\n{_CARD_END}\n", encoding="utf-8")


def card_lines(how: str, quality: Quality, missed: Sequence[str]) -> list[str]:
    """The section in Markdown."""
    lines = ["## Quantization", "", how, ""]
    if warnings := quality.warnings():
        lines += [f"**WARNING: not usable: {'; '.join(warnings)}.**", ""]
    lines += ["| | original | quantized |", "|---|---|---|"]
    lines += [f"| {what} | {first} | {second} |" for what, first, second in quality_rows(quality)]
    lines += ["", _how_measured(quality)]
    if quality.kept:
        lines += ["", f"Left unquantized: {', '.join(quality.kept)}."]
    for note in quality.notes:
        lines += ["", f"{note}."]
    if suspects := quality.suspects():
        named = ", ".join(f"{layer.name} ({layer.error:.3g})" for layer in suspects)
        lines += ["", f"**Errors far above those of other layers:** {named}."]
    if missed:
        lines += ["", f"**The quality asked for was missed:** {'; '.join(missed)}."]
    return lines


def _how_measured(quality: Quality) -> str:
    calibration = quality.calibration
    text = f"{calibration['tokens']:,} tokens {_written(calibration['source'])} (seed {calibration['seed']})"
    return (
        f"Measured on {quality.eval_tokens:,} tokens of {quality.eval_source} in windows of {quality.eval_window} with "
        f"a stride of {quality.eval_stride}, in float32 on the weights as they are in these files; tokens/s on the "
        f"machine that quantized it, original and quantized in turns, the median of {quality.turns}. "
        f"Calibration: {text}. The error of each layer is in {QUALITY_FILE}."
    )


def _written(source: str) -> str:
    return source if source.startswith(("written", "(")) else f"of {source}"

"""What a quantization will do, before it does anything: linears, groups, memory, and what the user should hear.

May import `models`, `checkpoint`, `errors`; no torch, so that a refusal costs nothing.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pagedcli.checkpoint.base import Checkpoint
from pagedcli.errors import ConfigError
from pagedcli.models.load import TensorNotes, check_tensors
from pagedcli.models.registry import family_of
from pagedcli.models.spec import ModelSpec
from pagedcli.ops.weights import FusedLinear, Shard
from pagedcli.quant.memory import peak_bytes, work_bytes
from pagedcli.quant.options import DEFAULT_GROUP_SIZES, PlannedLinear, QuantizeOptions, QuantizePlan

HEAD = "lm_head"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def plan_quantization(
    checkpoint: Checkpoint, options: QuantizeOptions, sample_lengths: Sequence[int], threads: int
) -> QuantizePlan:
    """Decide everything that can be decided without reading a weight.

    Args:
        checkpoint: Open.
        options: As asked for.
        sample_lengths: Tokens of each calibration sample; empty for rtn, which needs none.
        threads: That will work; they need memory.

    Raises:
        CheckpointError: The model cannot be served, so it cannot be quantized.
        ConfigError: Nothing would be quantized, or a pattern keeps nothing.
    """
    spec = ModelSpec.from_config(checkpoint.config, f"{checkpoint.path}: config")
    check_tensors(checkpoint, spec)
    _check_samples(options, sample_lengths)
    linears = decoder_linears(spec)
    _check_patterns(options.keep, linears)
    chosen, notes = _group_size(options, linears)
    planned = tuple(_planned(linear, options, chosen) for linear in linears)
    if all(linear.kept is not None for linear in planned):
        raise ConfigError(_nothing(planned, options))
    plan = QuantizePlan(options, chosen, planned, spec.num_layers, 0, 0, (*notes, *_kept_notes(planned)))
    return replace(
        plan,
        peak_bytes=peak_bytes(plan, spec, sample_lengths, threads),
        work_bytes=work_bytes(plan, spec, sample_lengths),
    )


@dataclass(frozen=True, slots=True)
class LinearNotes(TensorNotes):
    """`Weights` that note the fused linears too."""

    linears: list[FusedLinear] = field(default_factory=list)

    def linear(
        self, parts: Sequence[tuple[str, int]], in_features: int, *, bias: bool, shard: Shard
    ) -> FusedLinear:
        """Noted whole."""
        handle = TensorNotes.linear(self, parts, in_features, bias=bias, shard=shard)
        self.linears.append(handle)
        return handle


def decoder_linears(spec: ModelSpec) -> list[FusedLinear]:
    """The fused linears of all decoder layers, in the model's order; the head is not among them."""
    notes = LinearNotes()
    family_of(spec.architecture).wire(notes, spec)
    return [linear for linear in notes.linears if _LAYER.match(linear.parts[0].name)]


def _check_samples(options: QuantizeOptions, lengths: Sequence[int]) -> None:
    if options.method == "rtn":
        if lengths:
            raise ConfigError("round to nearest uses no calibration text: leave --calibration out")
        return
    if not lengths or min(lengths) < 1:
        raise ConfigError(
            f"{options.method} needs calibration text: {len(lengths)} samples, {sum(lengths)} tokens"
        )


def _check_patterns(patterns: Sequence[str], linears: Sequence[FusedLinear]) -> None:
    names = [part.name for linear in linears for part in linear.parts]
    for pattern in patterns:
        if not any(matches(name, pattern) for name in (*names, HEAD)):
            raise ConfigError(f"--keep {pattern} matches no linear; they are named like {names[0]}")


def matches(name: str, pattern: str) -> bool:
    """Whether a shell pattern stands for a name, the end of it, or something that it lies in."""
    forms = (pattern, f"*.{pattern}", f"{pattern}.*", f"*.{pattern}.*")
    return any(fnmatch.fnmatchcase(name, form) for form in forms)


def _group_size(options: QuantizeOptions, linears: Sequence[FusedLinear]) -> tuple[int, list[str]]:
    """As formats say it, and what the user should hear of the choice."""
    if options.group_size is not None:
        return options.group_size, []
    wanted = [linear for linear in linears if not _named(linear, options.keep)]
    for size in DEFAULT_GROUP_SIZES:
        if all(linear.in_features % size == 0 for linear in wanted):
            return size, [_choice(size, wanted)]
    covered = {
        size: sum(x.in_features * x.out_features for x in wanted if x.in_features % size == 0)
        for size in DEFAULT_GROUP_SIZES
    }
    size = max(DEFAULT_GROUP_SIZES, key=lambda size: (covered[size], size))
    return size, [
        f"group size {size}: none of 128, 64 and 32 divides every layer, it divides the most weights"
    ]


def _choice(size: int, linears: Sequence[FusedLinear]) -> str:
    if size == DEFAULT_GROUP_SIZES[0]:
        return f"group size {size}: it divides every layer"
    larger = size * 2
    odd = next(linear for linear in linears if linear.in_features % larger)
    return (
        f"group size {size}: the largest of 128, 64 and 32 that divides every layer "
        f"({odd.parts[0].name} has {odd.in_features} inputs)"
    )


def _named(linear: FusedLinear, patterns: Sequence[str]) -> str | None:
    return next((p for part in linear.parts for p in patterns if matches(part.name, p)), None)


def _planned(linear: FusedLinear, options: QuantizeOptions, chosen: int) -> PlannedLinear:
    size = linear.in_features if chosen == -1 else chosen
    match = _LAYER.match(linear.parts[0].name)
    assert match is not None
    return PlannedLinear(
        int(match[1]),
        tuple(part.name for part in linear.parts),
        tuple(part.size for part in linear.parts),
        linear.in_features,
        size,
        _why_kept(linear, options, size),
    )


def _why_kept(linear: FusedLinear, options: QuantizeOptions, size: int) -> str | None:
    pattern = _named(linear, options.keep)
    if pattern is not None:
        return f"--keep {pattern}"
    if linear.in_features % size:
        return f"its {linear.in_features} inputs are no multiple of the group size {size}"
    word = 32 // options.bits
    for what, number in (("inputs", linear.in_features), *(("outputs", part.size) for part in linear.parts)):
        if number % word:
            return f"its {number} {what} are no multiple of {word}, the codes of a stored word"
    return None


def _nothing(planned: Sequence[PlannedLinear], options: QuantizeOptions) -> str:
    """That nothing is left to quantize, and the smallest change that helps."""
    first = planned[0]
    said = f"nothing would be quantized: {first.names[0]} is kept because "
    if options.keep:
        return f"{said}{first.kept}; leave a --keep out"
    word = 32 // options.bits
    for size in (*DEFAULT_GROUP_SIZES, -1):
        if any(linear.in_features % (word if size == -1 else size) == 0 for linear in planned):
            what = "each row has one scale then" if size == -1 else "it divides such layers"
            return f"{said}{first.kept}: use --group-size {size} ({what})"
    return f"{said}{first.kept}"


def _kept_notes(planned: Sequence[PlannedLinear]) -> list[str]:
    """A line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for linear in planned:
        if linear.kept is not None:
            by_reason.setdefault(linear.kept, []).extend(linear.names)
    return [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} left as they are: {reason}"
        for reason, names in by_reason.items()
    ]

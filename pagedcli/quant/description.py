"""How a checkpoint was quantized, in a sentence or two for its model card. Plain values only."""

from __future__ import annotations

from collections.abc import Iterable

from pagedcli.quant.options import LinearRecord, QuantizePlan
from pagedcli.quant.request import QuantizeRequest

_NAMES = {"awq": "AWQ", "gptq": "GPTQ", "rtn": "round to nearest"}


def describe(plan: QuantizePlan, request: QuantizeRequest, model: str, made_by: str) -> str:
    """Such as "SmolLM2 quantized with AWQ to 4 bits, asymmetric, one scale for 64 inputs, in the format autoawq"."""
    options = plan.options
    grouping = "one scale a row" if plan.group_size == -1 else f"one scale for {plan.group_size} inputs"
    symmetry = "symmetric" if options.symmetric else "asymmetric"
    order = ", groups in order of activations" if options.desc_act else ""
    by = "paged" if made_by == "paged" else f"paged --backend {request.backend} ({made_by})"
    return (
        f"{model}, quantized by {by} with {_NAMES[options.method]} to "
        f"{options.bits} bits, {symmetry}, {grouping}{order}, in the format `{request.target_format}`. "
        "The embedding, the head and the norms are not quantized."
    )


def notes_of(records: Iterable[LinearRecord]) -> tuple[str, ...]:
    """What happened to quantized linears that a user should hear, a line for each kind of thing."""
    by_note: dict[str, list[str]] = {}
    for record in records:
        if record.note and record.method != "kept":
            by_note.setdefault(record.note, []).append(record.name)
    return tuple(f"{', '.join(names)}: {note}" for note, names in by_note.items())

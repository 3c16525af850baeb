"""Writes candidates as a table for people, or as data for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from appliance.engine.memory.experts.streaming import HOST_GB_PER_SECOND
from appliance.fit.candidates import AS_IT_IS, ROUNDED
from appliance.fit.expected import KERNEL_SECONDS, READ_SHARE
from appliance.fit.published import FORM, quotes_for
from appliance.wording import as_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.fit.candidates import FitRow
    from appliance.fit.place import ModelPlace

_HEADS = ("", "weights", "KV cache", "context", "at once", "memory", "tokens/s", "loss")
# Mean KL divergence of the KV cache's precisions on SmolLM2-135M (benchmark kv_quality).
_KV_COSTS = {"bf16": "0", "fp16": "0", "int8": "0.0007", "int4-sealed": "0.006"}


def as_table(found: Sequence[FitRow], place: ModelPlace, card: str | None, title: str) -> str:
    """Write the table; `serve --auto` takes the first row among weights as they are.

    Args:
        found: ranked.
        card: figures of the model's quality card, if it has one.
    """
    rows = [_HEADS, *(_row(number, one) for number, one in enumerate(found, 1))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    lines = [f"{title} on {place.name}"]
    lines += [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.append("")
    if place.bandwidth is not None and any(one.rate is not None for one in found):
        how = place.how.partition(";")[0]
        lines.append(
            "tokens/s: at most, for one stream without drafts at half of the context:"
            f" {place.bandwidth:,.0f} GB/s ({how}) over the bytes that a step reads."
        )
        if place.is_busy:
            lines.append(
                "other programs were running while it was measured: it is more when they rest."
            )
    numbered = enumerate(found, 1)
    number, first = next((one for one in numbered if one[1].expected is not None), (0, None))
    if first is not None:
        lines.append(
            f"expected, not measured: {first.expected:,.0f} tokens/s in row {number}, by"
            f" {READ_SHARE:.0%} of the bandwidth and {1e6 * KERNEL_SECONDS:.0f} µs for each of"
            f" {first.kernels} kernels of a step."
        )
    if place.count > 1:
        lines.append(
            f"{place.count} cards (--ranks {place.count}): as if their memory and bandwidth were"
            " one card's. What each of them holds whole is not counted, nor is their link."
        )
    if place.is_gpu:
        lines += [
            f"quoted, not ours: {one.model} {one.weights}, {one.engine}, {one.settings}:"
            f" {one.tokens} tokens/s of one stream ({one.source}, {one.date}, {one.address})"
            for one in quotes_for(place.name, title)
        ]
        lines.append(FORM)
    own = max((one.plan.picture_bytes for one in found if one.plan is not None), default=0)
    pictures = f", {as_size(own)} of what reads pictures (--no-images leaves it out)" if own else ""
    lines.append(
        f"memory: weights, KV cache, the largest step{pictures}, and the engine's process. loss:"
        " mean KL divergence that the KV cache adds on SmolLM2-135M (other models differ), and ?"
        " where weights are rounded, too: more, which only a card tells."
    )
    if any(one.experts_on_cpu for one in found):
        lines.append(
            "on the CPU: the experts of so many layers stay in host memory and are multiplied there"
            f" (--experts-on-cpu); {HOST_GB_PER_SECOND:,.0f} GB/s are assumed for it."
        )
    if card is not None:
        lines.append(f"these weights, by their card: {card}")
    fitting = {one.weights for one in found if one.plan}
    if fitting & ROUNDED.keys():
        lines.append(
            "--weight-bits, --end-bits: serve rounds all weights, or embedding and head alone,"
            " while it loads them."
        )
    if fitting - ROUNDED.keys() - {AS_IT_IS}:
        lines.append(
            "other weights: appliance quantize makes them, with a card that says the cost."
        )
    if any(one.states == "fp16" for one in found):
        lines.append(
            "states fp16: recurrent states are kept in 16 bits (--mamba-cache-dtype), where float32"
            " leaves less context or does not fit."
        )
    refused = next((one.refusal for one in found if one.refusal), "")
    if refused:
        lines.append(refused)
    return "\n".join(lines)


def as_data(found: Sequence[FitRow], place: ModelPlace, title: str) -> dict[str, Any]:
    return {
        "place": {"name": place.name, "gb_per_second": place.bandwidth, "how": place.how},
        "quoted": [asdict(one) for one in quotes_for(place.name, title)] if place.is_gpu else [],
        "candidates": [
            {
                "weights": one.weights,
                "weight_bits": ROUNDED.get(one.weights, (None, None))[0],
                "end_bits": ROUNDED.get(one.weights, (None, None))[1],
                "mamba_cache_dtype": one.states,
                "kv_cache_dtype": one.kv,
                "kv_format": one.kv_format,
                "context_length": one.context_length,
                "streams": one.streams,
                "fits": one.plan is not None,
                "experts_on_cpu": one.experts_on_cpu,
                "refusal": one.refusal,
                "tokens_per_second_at_most": None if one.rate is None else round(one.rate, 1),
                "tokens_per_second_expected": None
                if one.expected is None
                else round(one.expected, 1),
                "bytes": None
                if one.plan is None
                else {
                    "weights": one.plan.weight_bytes,
                    "kv_cache": one.plan.kv_bytes,
                    "states": one.plan.states.num_bytes,
                    "workspace": one.plan.workspace_bytes,
                    "pictures": one.plan.picture_bytes,
                    "drafts": one.plan.draft_bytes,
                    "process": one.plan.process_bytes,
                    "total": one.total_bytes,
                    "budget": one.plan.budget_bytes,
                },
            }
            for one in found
        ],
    }


def _row(number: int, one: FitRow) -> tuple[str, ...]:
    memory = f"{one.total_bytes / 2**30:.2f} GiB" if one.plan else "does not fit"
    return (
        str(number),
        one.weights + (f", {layers} on the CPU" if (layers := one.experts_on_cpu) else ""),
        one.kv_format + (f", states {one.states}" if one.states != "fp32" else ""),
        f"{one.context_length:,}",
        str(one.streams),
        memory,
        "" if one.rate is None else f"{one.rate:,.0f}",
        _loss(one),
    )


def _loss(one: FitRow) -> str:
    cost = _KV_COSTS.get(one.kv_format, "")
    if one.weights == AS_IT_IS:
        return cost
    return "?" if cost in ("", "0") else f"? + {cost}"

"""Builds a quality card's tables as text, for HTML and the terminal, and the card in Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.quant.quality.card import BY_TOKEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.quant.quality.card import (
        Alternative,
        Card,
        Comparison,
        Figure,
        KindRow,
        KVRow,
        PictureLoss,
        TaskScore,
        ToolCalls,
    )

Row = tuple[str, ...]
KINDS_IN_WORDS = (
    "Passages of other kinds, against the base; none of them is in the calibration text. Of a chat"
    " the last answer counts, of tool calls the call that the question asks for, both in the"
    " model's own template."
)
KINDS_HEADER = ("kind of text", "passages", "mean KLD", "same top", "perplexity ratio", "tokens")
KV_HEADER = ("KV cache", "bits per value", "mean KLD", "p99 KLD", "same top", "perplexity ratio")
TASKS_HEADER = ("task", "metric", "score", "questions")
ALTERNATIVES_HEADER = ("stored as", "bits per weight", "mean KLD", "same top", "perplexity")


def measures(card: Card) -> list[Row]:
    rows: list[Row] = [("perplexity", figure(card.perplexity, 3))]
    found = card.comparison
    rounded = [] if card.prompt_int8 is None else [_rounded_inputs(card.prompt_int8)]
    if found is None:
        return [*rows, *rounded]
    return [
        *rows,
        ("perplexity of the base", figure(found.base_perplexity, 3)),
        ("perplexity ratio", figure(found.perplexity_ratio, 4)),
        ("mean KLD, nats", figure(found.kld_mean, 5)),
        ("median KLD", f"{found.kld_median:.5f}"),
        ("p99 KLD", f"{found.kld_p99:.4f}"),
        ("p99.9 KLD", f"{found.kld_p999:.4f}"),
        ("largest KLD", f"{found.kld_max:.4f}"),
        ("same top token", figure(found.same_top_percent, 2) + " %"),
        (
            "mean change of the true token's probability",
            figure(found.mean_change_percent, 3) + " %",
        ),
        ("RMS change of it", figure(found.rms_change_percent, 3) + " %"),
        ("tokens compared", f"{found.places:,}"),
        *rounded,
        *([] if card.calls is None else [("tool calls", calls_in_words(card.calls))]),
        *([] if card.pictures is None else [("pictures", pictures_in_words(card.pictures))]),
    ]


def _rounded_inputs(found: Comparison) -> Row:
    top = figure(found.same_top_percent, 2)
    said = f"mean KLD {figure(found.kld_mean, 5)}, same top {top} %, {found.places:,} tokens"
    return "prompts in int8, against its own", said


def calls_in_words(calls: ToolCalls) -> str:
    """Compare the right tool calls of base and checkpoint, or say why there are none."""
    if not calls.asked:
        return f"not asked for: {calls.reason}"
    said = (
        f"{calls.base_right} of {calls.asked} right before and {calls.right} after,"
        f" {calls.same} the same in both"
    )
    if not calls.base_right:
        said = f"the base gets none of {calls.asked} right, so nothing can be lost; after"
        said += f" {calls.right}"
    return said + ("" if calls.in_template else "; the chat template lists no tools")


def pictures_in_words(found: PictureLoss) -> str:
    """Compare the losses of texts behind pictures, or say why there are none."""
    if not found.pictures:
        return f"not shown: {found.reason}"
    written = f", {found.written} written by the base" if found.written else ""
    return (
        f"loss {figure(found.base, 4)} before, {figure(found.change, 4)} more after, same top"
        f" {figure(found.same_top_percent, 2)} %, {found.tokens:,} tokens of {found.pictures} texts"
        f"{written}; as served, \u00b1 over pictures"
    )


def to_markdown(card: Card) -> str:
    sections = [f"# Quality of {card.model.name}", f"{card.line()}."]
    against = "" if card.base is None else f", beside {card.base.name}"
    sections.append(
        f"Measured on held-out text{against}: dequantized weights, float32 arithmetic."
        " KL divergence in nats, base first; \u00b1 is one standard error over"
        f" {errors_over(card)}."
    )
    sections.append(_table(("measure", "value"), measures(card)))
    if card.kinds:
        rows = list(map(kind_row, card.kinds))
        sections += ["## Kinds of text", KINDS_IN_WORDS, _table(KINDS_HEADER, rows)]
    if rows := alternatives(card):
        sections += ["## Size against quality", _table(ALTERNATIVES_HEADER, rows)]
    if card.kv:
        sections += [
            "## KV cache",
            kv_in_words(card),
            _table(KV_HEADER, [kv_row(row) for row in card.kv]),
        ]
    if card.tasks:
        rows = list(map(task_row, card.tasks))
        sections += ["## Tasks (lm-eval)", _table(TASKS_HEADER, rows)]
    if card.layers:
        rows = [
            (str(index), f"{error.stream:.2%}", f"{error.attention:.2%}", f"{error.mlp:.2%}")
            for index, error in enumerate(card.layers)
        ]
        header = ("layer", "residual stream", "attention's output", "MLP's output")
        sections += ["## Relative error by layer", _table(header, rows)]
    sections += ["## Facts", _table(("", ""), facts(card))]
    if found := notes(card):
        sections += ["## Notes", "\n".join(f"- {note}" for note in found)]
    return "\n\n".join(sections) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:" if len(header) > 2 else "---"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def facts(card: Card) -> list[Row]:
    """List facts about the checkpoint and the run that made it."""
    model, run, text = card.model, card.quantize, card.text
    rows: list[Row] = [
        ("architecture", model.architecture),
        ("weights", model.weights),
        (
            "size",
            f"{megabytes(model.stored_bytes)}; {model.bits_per_weight:.2f} bits per weight of the"
            f" whole model, {model.linear_bits_per_weight:.2f} of the layers' linears, scales"
            " included",
        ),
    ]
    if card.base is not None:
        rows.append(
            (
                "base",
                f"{card.base.name}, {card.base.weights},"
                f" {card.base.bits_per_weight:.2f} bits per weight",
            )
        )
    if run is not None:
        rows.append(("method", f"{run.method}, {run.scheme}"))
        if run.calibration:
            rows.append(("calibration", f"{run.calibration} ({run.calibration_fingerprint})"))
        if run.seconds:
            rows.append(
                (
                    "made in",
                    f"{run.seconds:,.1f} s{_peaks(run.peak_ram_bytes, run.peak_vram_bytes)}",
                )
            )
    overlap = "" if text.stride >= text.window else f", the last {text.stride} of each scored"
    rows += [
        (
            "measured on",
            f"{text.source}: {text.windows} windows of {text.window} tokens{overlap}"
            f" ({text.fingerprint})",
        ),
        (
            "measured in",
            f"{card.cost.seconds:,.1f} s, {card.cost.cpu_seconds:,.1f} CPU-s on {card.cost.device}"
            + _peaks(card.cost.peak_ram_bytes, card.cost.peak_vram_bytes),
        ),
        ("can be read by", "; ".join(model.readers)),
        ("card", f"{card.created}, appliance {card.version}, schema {card.schema}"),
    ]
    return rows


def kind_row(row: KindRow) -> Row:
    """Format a row under `KINDS_HEADER`."""
    found = row.comparison
    return (
        row.kind,
        f"{row.windows}",
        figure(found.kld_mean, 4),
        figure(found.same_top_percent, 1) + " %",
        f"{found.perplexity_ratio.value:.4f}",
        f"{found.places:,}",
    )


def errors_over(card: Card) -> str:
    """Name the samples of a card's standard errors."""
    return "tokens" if card.schema <= BY_TOKEN else "windows of text"


def kv_row(row: KVRow) -> Row:
    """Format a row under `KV_HEADER`."""
    found = row.comparison
    return (
        row.format + (" (its own)" if row.declared else ""),
        f"{row.bits_per_value:.2f}",
        f"{found.kld_mean.value:.5f}",
        f"{found.kld_p99:.4f}",
        f"{found.same_top_percent.value:.1f} %",
        f"{found.perplexity_ratio.value:.4f}",
    )


def alternatives(card: Card) -> list[Row]:
    """List this checkpoint, its alternatives and its base under `ALTERNATIVES_HEADER`."""
    found, base = card.comparison, card.base
    if found is None or base is None:
        return []
    ours: Row = (
        ours_in_words(card),
        f"{card.model.bits_per_weight:.2f}",
        f"{found.kld_mean.value:.4f}",
        f"{found.same_top_percent.value:.1f} %",
        f"{found.perplexity.value:.3f}",
    )
    unchanged: Row = (
        "the base",
        f"{base.bits_per_weight:.2f}",
        "0",
        "100 %",
        f"{found.base_perplexity.value:.3f}",
    )
    return [ours, *map(_alternative, card.alternatives), unchanged]


def task_row(score: TaskScore) -> Row:
    """Format a row under `TASKS_HEADER`."""
    error = "" if score.error is None else f" \u00b1 {score.error:.4f}"
    return score.task, score.metric, f"{score.value:.4f}{error}", f"{score.questions:,}"


def ours_in_words(card: Card) -> str:
    """Name this checkpoint among its alternatives."""
    return "this" if card.quantize is None else f"this, {card.quantize.method}"


def kv_in_words(card: Card) -> str:
    """Describe the comparison of the KV caches."""
    places = card.kv[0].comparison.places
    return f"This checkpoint with each cache, against a float32 cache, over {places:,} tokens."


def notes(card: Card) -> list[str]:
    """List the notes of the run and of the measurement."""
    return [*(card.quantize.notes if card.quantize is not None else ()), *card.notes]


def figure(value: Figure, digits: int) -> str:
    """Format a value with its standard error."""
    return f"{value.value:,.{digits}f} \u00b1 {value.error:,.{digits}f}"


def megabytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _alternative(found: Alternative) -> Row:
    return (
        found.name,
        f"{found.bits_per_weight:.2f}",
        f"{found.kld_mean:.4f}",
        f"{found.same_top_percent:.1f} %",
        f"{found.perplexity:.3f}",
    )


def _peaks(ram: int, vram: int) -> str:
    said = f", at most {megabytes(ram)} of memory" if ram else ""
    return said + (f" and {megabytes(vram)} of the GPU's" if vram else "")

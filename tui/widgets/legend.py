"""The line under the block map: its colours and the number of blocks per colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from appliance.tui import numbers, palette
from appliance.tui.raster import (
    ACTIVE,
    AGE_LIMITS,
    FREE,
    LETTERS,
    PAINT,
    ColorMode,
    appearance,
    letter_of,
)
from appliance.tui.widgets.block_map import BlockMap
from appliance.tui.widgets.lines import Lines

if TYPE_CHECKING:
    from appliance.tui.blocks import BlockCounts, Blocks
    from appliance.tui.view import View

_SWATCH = "■"
_REFERENCES = ("1", "2", "3-4", "5-8", "9+")
_AGES = ("<1 s", "<10 s", "<1 min", "<10 min", "older")
assert len(_AGES) == len(AGE_LIMITS) + 1


class Legend(Lines):
    DEFAULT_CSS = "Legend { height: 1; }"

    def reads(self, view: View) -> tuple[object, ...]:
        precisions = view.state.info.precisions if view.state.info else ()
        names = precisions, view.adapters, view.adapter_of_slot
        return view.state.blocks, view.mode, *names, self._lettered(view), _swapped(view)

    def _lettered(self, view: View) -> bool:
        """Return True if the map shows letters, be it zoomed in or without colours."""
        return view.lettered or self.screen.query_one(BlockMap).viewport(view).lettered

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        """Draw swatches on the left, and the number of blocks on the right if it fits."""
        blocks = view.state.blocks
        if blocks is None:
            return []
        line = Text("  ").join(_entries(view, blocks, lettered=self._lettered(view)))
        total = Text(
            f"{numbers.counted(blocks.num_blocks, 'block')} of"
            f" {numbers.counted(blocks.block_size, 'token')}",
            palette.MUTED,
        )
        gap = width - line.cell_len - total.cell_len
        if gap >= 2:
            line.append(" " * gap).append_text(total)
        return [line]


def _entries(view: View, blocks: Blocks, *, lettered: bool) -> list[Text]:
    counts = blocks.counts()

    def entry(color: str, name: str, number: int | None = None) -> Text:
        swatch = LETTERS[PAINT.index(color)] if lettered else _SWATCH
        words = name if number is None else f"{name} {numbers.count(number)}"
        return Text.assemble((swatch, color), (f" {words}", palette.TEXT))

    free = entry(palette.FREE, "free", counts.free)
    cached = entry(palette.CACHED, "cached", counts.cached)
    shared = entry(palette.SHARED, "shared", counts.shared)
    loading = [entry(palette.SWAPPED, "loading", counts.loading)] if counts.loading else []
    swapped = [_outside(view, _swapped(view))] if _swapped(view) else []
    match view.mode:
        case ColorMode.OWNER:
            owned = f" owned {numbers.count(counts.active - counts.shared)}"
            hues = Text("a-z", palette.TEXT)
            if not view.lettered:
                hues = Text().join(Text(_SWATCH, hue) for hue in palette.OWNER_HUES)
                hues.append(" a-z" if lettered else "", palette.TEXT)
            return [free, cached, *loading, hues.append(owned, palette.TEXT), shared, *swapped]
        case ColorMode.STATE:
            plain = counts.active - counts.shared - counts.writing
            writing = [entry(palette.WRITING, "written", counts.writing)] if counts.writing else []
            active = entry(palette.ACTIVE, "active", plain)
            return [free, cached, *loading, active, *writing, shared, *swapped]
        case ColorMode.REFERENCES:
            return [free, cached, _steps("used by", palette.REFERENCE_STEPS, _REFERENCES, entry)]
        case ColorMode.PRECISION:
            return [free, *_precisions(view, blocks, counts, entry)]
        case ColorMode.ADAPTER:
            adapters = _adapters(view, blocks, entry, lettered=lettered)
            return [free, cached, *loading, *adapters, *swapped]
        case ColorMode.AGE:
            return [free, _steps("changed", palette.AGE_STEPS, _AGES, entry)]


def _swapped(view: View) -> int:
    """Return the blocks of swapped sequences in host memory, which the map lacks."""
    return view.state.stats.engine.kv_host_swapped if view.state.stats is not None else 0


def _outside(view: View, blocks: int) -> Text:
    swatch = "s" if view.lettered else _SWATCH
    words = f" swapped {numbers.count(blocks)}"
    return Text.assemble((swatch, palette.SWAPPED), (words, palette.TEXT))


def _steps(title: str, colors: tuple[str, ...], names: tuple[str, ...], entry: _Entry) -> Text:
    steps = Text(" ").join(entry(*step) for step in zip(colors, names, strict=True))
    return Text(f"{title} ", palette.MUTED).append_text(steps)


def _precisions(view: View, blocks: Blocks, counts: BlockCounts, entry: _Entry) -> list[Text]:
    """List the formats of blocks, most frequent first."""
    names = view.state.info.precisions if view.state.info else ()
    held = appearance(blocks.cells) != FREE
    per_index = np.bincount(blocks.precisions[held], minlength=1).tolist()
    order = sorted(range(len(per_index)), key=lambda index: -per_index[index])
    return [
        entry(
            palette.owner_hue(index),
            names[index] if index < len(names) else f"format {index}",
            per_index[index],
        )
        for index in order
        if per_index[index]
    ]


def _adapters(view: View, blocks: Blocks, entry: _Entry, *, lettered: bool) -> list[Text]:
    """List the blocks held without an adapter, then those of each adapter."""
    owners = blocks.owners[appearance(blocks.cells) >= ACTIVE]
    per_slot = np.bincount(owners, minlength=1)
    counts = [0] * len(view.adapters)
    for slot, number in view.adapter_of_slot.items():
        counts[number] += int(per_slot[slot]) if slot < len(per_slot) else 0
    entries = [entry(palette.ACTIVE, "no adapter", owners.size - sum(counts))]
    for number, (name, count) in enumerate(zip(view.adapters, counts, strict=True)):
        hue = palette.owner_hue(number)
        swatch = letter_of(number % len(palette.OWNER_HUES)) if lettered else _SWATCH
        words = f" {name} {numbers.count(count)}"
        entries.append(Text.assemble((swatch, hue), (words, palette.TEXT)))
    return entries


if TYPE_CHECKING:
    from typing import Protocol

    class _Entry(Protocol):
        def __call__(self, color: str, name: str, number: int | None = None) -> Text: ...

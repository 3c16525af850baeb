"""The line under the block map: what its colours mean, and how many blocks have each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from appliance.tui import numbers, palette
from appliance.tui.raster import ColorMode
from appliance.tui.widgets.lines import Lines

if TYPE_CHECKING:
    from appliance.tui.blocks import BlockCounts
    from appliance.tui.view import View

_SWATCH = "■"
_REFERENCES = ("1", "2", "3-4", "5-8", "9+")


class Legend(Lines):
    """One line of swatches."""

    DEFAULT_CSS = "Legend { height: 1; }"

    def reads(self, view: View) -> tuple[object, ...]:
        """The block map, the mode and the focus."""
        return view.state.blocks, view.mode, view.focus

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        """Swatches on the left; on the right how many blocks a pixel stands for, if it fits."""
        blocks = view.state.blocks
        if blocks is None:
            return []
        line = Text("  ").join(_entries(view.mode, blocks.counts()))
        total = Text(
            f"{numbers.count(blocks.num_blocks)} blocks of {blocks.block_size} tokens",
            palette.MUTED,
        )
        gap = width - line.cell_len - total.cell_len
        if gap >= 2:
            line.append(" " * gap).append_text(total)
        return [line]


def _entries(mode: ColorMode, counts: BlockCounts) -> list[Text]:
    entries = [
        _entry(palette.FREE, "free", counts.free),
        _entry(palette.CACHED, "cached", counts.cached),
    ]
    match mode:
        case ColorMode.OWNER:
            hues = Text().join(Text(_SWATCH, hue) for hue in palette.OWNER_HUES)
            owned = f" owned {numbers.count(counts.active - counts.shared)}"
            entries.append(hues.append(owned, palette.TEXT))
            entries.append(_entry(palette.SHARED, "shared", counts.shared))
        case ColorMode.STATE:
            entries.append(_entry(palette.ACTIVE, "active", counts.active - counts.shared))
            entries.append(_entry(palette.SHARED, "shared", counts.shared))
        case ColorMode.REFERENCES:
            steps = zip(palette.REFERENCE_STEPS, _REFERENCES, strict=True)
            used = Text("used by ", palette.MUTED)
            entries.append(used.append_text(Text(" ").join(_entry(*step) for step in steps)))
    return entries


def _entry(color: str, name: str, number: int | None = None) -> Text:
    words = name if number is None else f"{name} {numbers.count(number)}"
    return Text.assemble((_SWATCH, color), (f" {words}", palette.TEXT))

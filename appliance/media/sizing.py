"""Rules for the size of a picture before the tower, each as its reference rounds: plain arithmetic.

A rule plans canvases for a height and width. It knows neither pixels nor words. The references are
transformers' image processors (5.24); divergences of a side by one step of rounding are errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

import msgspec

from appliance.errors import ConfigError, ImageError

Size = tuple[int, int]  # height, width in pixels
MAX_RATIO = 200  # of the sides, where the reference refuses more
USUAL_MOST = 4096  # image rows of a picture where nothing is asked for, as in llama.cpp


class TokenRange(NamedTuple):
    """Image rows that a picture may take in the prompt; `most` None means no limit."""

    least: int = 1
    most: int | None = None

    @classmethod
    def of(cls, text: str) -> TokenRange:
        """Read LEAST:MOST; either may be left out, and all of it.

        Raises:
            ConfigError: it is something else, or LEAST exceeds MOST.
        """
        least, _, most = text.strip().partition(":")
        try:
            found = cls(int(least or 1), int(most) if most else None)
        except ValueError:
            found = cls(0)
        if found.least < 1 or (found.most is not None and found.most < 1):
            raise ConfigError(
                f"image_tokens is {text!r}, but must be LEAST:MOST, two numbers of which one may be"
                " left out, such as 64:1024 or :256"
            )
        if found.most is not None and found.least > found.most:
            raise ConfigError(
                f"image_tokens is {text!r}, but LEAST must not exceed MOST in LEAST:MOST, as in"
                " 64:1024"
            )
        return found

    def within(self, limit: int) -> TokenRange:
        """Return the range for a model whose pictures have up to `limit` rows.

        Raises:
            ConfigError: a bound exceeds it.
        """
        if max(self.least, self.most or 1) > limit:
            raise ConfigError(
                f"image_tokens is {self.least}:{self.most or ''}, and a picture has at most {limit}"
                f" tokens in this model; keep both bounds within 1:{limit}"
            )
        if self.most is None and limit > USUAL_MOST:
            return TokenRange(self.least, max(self.least, USUAL_MOST))
        return self

    def below(self, most: int) -> int:
        return most if self.most is None else min(most, self.most)


class Canvas(msgspec.Struct, frozen=True, gc=False):
    """A picture resized, and cut into equal tiles.

    Attributes:
        sizes: each step of resizing, in order; what the reference resizes twice is rounded twice.
        rows: of tiles.
        columns: of tiles.
    """

    sizes: tuple[Size, ...]
    rows: int = 1
    columns: int = 1

    @property
    def height(self) -> int:
        return self.sizes[-1][0]

    @property
    def width(self) -> int:
        return self.sizes[-1][1]

    @property
    def tiles(self) -> int:
        return self.rows * self.columns

    @property
    def tile(self) -> Size:
        """Height and width of each tile in pixels."""
        return self.height // self.rows, self.width // self.columns


class Small(StrEnum):
    """Treatment of sides below one cell, before rounding."""

    AS_IS = "as_is"  # Qwen2VL
    CELL = "cell"  # LFM2-VL: rounded to at least a cell, and no ratio refused
    SCALE = "scale"  # GLM-4.xV: both sides enlarged, rounded down
    SCALE_ROUNDED = "scale_rounded"  # PaddleOCR-VL: one side after the other, rounded


class AreaRule(msgspec.Struct, frozen=True, tag=True):
    """Sides rounded to whole cells, and the area moved between two bounds.

    Attributes:
        cell: pixels along a side of what becomes one image row.
        min_pixels: of all frames.
        max_pixels: of all frames.
        small: for sides below a cell.
        frames: that a still picture counts as.
        most: cells at most, where the bounds on the area let strips or small pictures pass.
    """

    cell: int
    min_pixels: int
    max_pixels: int
    small: Small = Small.AS_IS
    frames: int = 1
    most: int | None = None

    def plan(self, height: int, width: int) -> tuple[Canvas, ...]:
        """Plan one canvas of one tile.

        Raises:
            ImageError: one side is more than 200 times the other.
        """
        own = height, width
        height, width = self._enlarged(height, width)
        if self.small is not Small.CELL and max(height, width) > MAX_RATIO * min(height, width):
            raise _too_long(*own)
        rounded = self._rounded(height), self._rounded(width)
        area = self.frames * rounded[0] * rounded[1]
        if area > self.max_pixels:
            scale = math.sqrt(self.frames * height * width / self.max_pixels)
            rounded = self._down(height / scale), self._down(width / scale)
        elif area < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (self.frames * height * width))
            rounded = self._up(height * scale), self._up(width * scale)
        return (Canvas((self._within(rounded, height, width),)),)

    @property
    def most_rows(self) -> int:
        """Rows of the largest picture; a strip of another ratio may have more than the area."""
        rows = max(1, self.max_pixels // (self.frames * self.cell**2))
        if self.small is not Small.CELL:
            rows = max(rows, math.isqrt(MAX_RATIO * rows))
        return rows if self.most is None else min(rows, self.most)

    @property
    def most_tiles(self) -> tuple[int, int]:
        return 1, self.most_rows

    def narrowed(self, tokens: TokenRange) -> AreaRule:
        """Keep the area within a range, and strips of any length within the most rows."""
        per_row = self.frames * self.cell**2
        rows = tokens.below(max(1, self.max_pixels // per_row))
        most = min(self.max_pixels, rows * per_row)
        least = min(max(self.min_pixels, tokens.least * per_row), most)
        is_bounded = tokens.most is not None or self.small is Small.CELL
        return msgspec.structs.replace(
            self, min_pixels=least, max_pixels=most, most=rows if is_bounded else None
        )

    def _within(self, rounded: Size, height: int, width: int) -> Size:
        """At most `most` cells, which the reference does not promise."""
        if self.most is None or rounded[0] * rounded[1] <= self.most * self.cell**2:
            return rounded
        scale = math.sqrt(height * width / (self.most * self.cell**2))
        sides = self._down(height / scale), self._down(width / scale)
        longest = self.most * self.cell  # of a strip, whose other side is one cell
        return min(sides[0], longest), min(sides[1], longest)

    def _enlarged(self, height: int, width: int) -> Size:
        if self.small is Small.SCALE and min(height, width) < self.cell:
            scale = max(self.cell / height, self.cell / width)
            return int(height * scale), int(width * scale)
        if self.small is Small.SCALE_ROUNDED:
            if height < self.cell:
                height, width = self.cell, round(width * self.cell / height)
            if width < self.cell:
                height, width = round(height * self.cell / width), self.cell
        return height, width

    def _rounded(self, side: float) -> int:
        """To the nearest multiple, halves to the even one."""
        cells = round(side / self.cell)
        return max(cells, 1 if self.small is Small.CELL else 0) * self.cell

    def _down(self, side: float) -> int:
        return max(1, math.floor(side / self.cell)) * self.cell

    def _up(self, side: float) -> int:
        return math.ceil(side / self.cell) * self.cell


class FixedRule(msgspec.Struct, frozen=True, tag=True):
    """Every picture is squashed to one size (Gemma 3)."""

    cell: int
    height: int
    width: int

    @property
    def most_rows(self) -> int:
        """Rows of every picture."""
        return (self.height // self.cell) * (self.width // self.cell)

    @property
    def most_tiles(self) -> tuple[int, int]:
        return 1, self.most_rows

    def plan(self, height: int, width: int) -> tuple[Canvas, ...]:
        return (Canvas(((self.height, self.width),)),)

    def narrowed(self, tokens: TokenRange) -> FixedRule:
        """Return the rule itself.

        Raises:
            ConfigError: its number of rows is outside of the range.
        """
        rows = self.most_rows
        if not tokens.least <= rows <= tokens.below(rows):
            raise _impossible(tokens, [rows])
        return self


class BudgetRule(msgspec.Struct, frozen=True, tag=True):
    """The ratio kept and the area brought to a budget, sides rounded down to cells (Gemma 4).

    Attributes:
        budget: image rows at most.
        budgets: what the model was trained with.
    """

    cell: int
    budget: int
    budgets: tuple[int, ...] = (70, 140, 280, 560, 1120)

    @property
    def most_rows(self) -> int:
        """Rows of the largest picture."""
        return self.budget

    @property
    def most_tiles(self) -> tuple[int, int]:
        return 1, self.most_rows

    def plan(self, height: int, width: int) -> tuple[Canvas, ...]:
        """Plan one canvas; a long strip gets one row or column of cells.

        Raises:
            ImageError: both sides round to nothing.
        """
        scale = math.sqrt(self.budget * self.cell**2 / (height * width))
        rows = math.floor(height * scale / self.cell)
        columns = math.floor(width * scale / self.cell)
        if rows == columns == 0:
            raise _too_long(height, width)
        if rows == 0:
            rows, columns = 1, min(width // height, self.budget)
        elif columns == 0:
            rows, columns = min(height // width, self.budget), 1
        return (Canvas(((rows * self.cell, columns * self.cell),)),)

    def narrowed(self, tokens: TokenRange) -> BudgetRule:
        """Take the trained budget in the range that is nearest to the rule's own.

        Raises:
            ConfigError: none is in the range.
        """
        fitting = [n for n in self.budgets if tokens.least <= n <= tokens.below(n)]
        if not fitting:
            raise _impossible(tokens, self.budgets)
        budget = min(fitting, key=lambda n: abs(n - self.budget))
        return msgspec.structs.replace(self, budget=budget)


class EdgeRule(msgspec.Struct, frozen=True, tag=True):
    """Shrunk until the longer edge fits, then each side up to whole cells (Pixtral)."""

    cell: int
    longest: int

    @property
    def most_rows(self) -> int:
        return math.ceil(self.longest / self.cell) ** 2

    @property
    def most_tiles(self) -> tuple[int, int]:
        return 1, self.most_rows

    def plan(self, height: int, width: int) -> tuple[Canvas, ...]:
        ratio = max(height / self.longest, width / self.longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        return (Canvas(((self._up(height), self._up(width)),)),)

    def narrowed(self, tokens: TokenRange) -> EdgeRule:
        """Lower the longer edge until a square fits; `least` has no effect, as nothing grows."""
        cells = -(-self.longest // self.cell)
        longest = math.isqrt(tokens.below(cells**2)) * self.cell
        return msgspec.structs.replace(self, longest=min(self.longest, longest))

    def _up(self, side: int) -> int:
        """To whole cells; of a thread's side nothing is left, and the reference fails there."""
        return math.ceil(max(1, side) / self.cell) * self.cell


class SplitRule(msgspec.Struct, frozen=True, tag=True):
    """The longer edge to a length, sides up to whole tiles, and one more view (SmolVLM, Idefics3).

    Attributes:
        longest: edge before tiles are cut.
        side: of a square tile.
        split: False leaves only the view, squashed to one tile.
    """

    cell: int
    longest: int
    side: int
    split: bool = True

    @property
    def most_rows(self) -> int:
        count, rows = self.most_tiles
        return (count + 1 if count > 1 else 1) * rows

    @property
    def most_tiles(self) -> tuple[int, int]:
        edge = math.ceil(self.longest / self.side) if self.split else 1
        return edge**2, (self.side // self.cell) ** 2

    def plan(self, height: int, width: int) -> tuple[Canvas, ...]:
        first = self._limited(*self._stretched(height, width))
        view = (self.side, self.side)
        if not self.split:
            return (Canvas((first, view)),)
        second = self._whole_tiles(*first)
        if second == view:
            return (Canvas((first, second)),)
        tiles = Canvas((first, second), second[0] // self.side, second[1] // self.side)
        return tiles, Canvas((first, second, view))

    def narrowed(self, tokens: TokenRange) -> SplitRule:
        """Lower the number of tiles.

        Raises:
            ConfigError: the range excludes the view, or what all tiles have.
        """
        per_tile = (self.side // self.cell) ** 2
        edge = math.ceil(self.longest / self.side)
        largest = per_tile * (edge**2 + 1 if self.split else 1)
        most = tokens.below(largest) // per_tile
        if most < 1 or tokens.least > largest:
            raise _impossible(tokens, [per_tile, largest])
        edge = min(edge, math.isqrt(max(1, most - 1)))
        return msgspec.structs.replace(
            self,
            longest=min(self.longest, edge * self.side),
            split=self.split and edge > 1,
        )

    def _stretched(self, height: int, width: int) -> Size:
        """The longer edge becomes `longest`; the other is made even, upwards."""
        ratio = width / height
        if width >= height:
            return _even(self.longest / ratio), self.longest
        return self.longest, _even(self.longest * ratio)

    def _limited(self, height: int, width: int) -> Size:
        limit = 4096  # of the reference, whatever the model says
        ratio = width / height
        if width >= height and width > limit:
            return max(1, int(limit / ratio)), limit
        if height > width and height > limit:
            return limit, max(1, int(limit * ratio))
        return height, width

    def _whole_tiles(self, height: int, width: int) -> Size:
        ratio = width / height
        if width >= height:
            width = self._up(width)
            return self._up(int(width / ratio)), width
        height = self._up(height)
        return height, self._up(int(height * ratio))

    def _up(self, length: int) -> int:
        return math.ceil(length / self.side) * self.side


class TileRule(msgspec.Struct, frozen=True, tag=True):
    """The grid of tiles whose ratio is nearest, and a view of the whole (InternVL, LFM2-VL).

    Attributes:
        height: of a tile.
        width: of a tile.
        min_tiles: without the view.
        max_tiles: without the view; below `min_tiles`, none is cut.
        whole: for the view, and for pictures that stay whole; None squashes the view to a tile.
        threshold: pixels beyond which a picture is cut, with its sides rounded to cells.
        smallest: that such a side counts at least, in pixels.
        view: False leaves it out where tiles are.
    """

    cell: int
    height: int
    width: int
    min_tiles: int
    max_tiles: int
    whole: AreaRule | None = None
    threshold: float = 0.0
    smallest: int = 1
    view: bool = True

    @property
    def most_rows(self) -> int:
        count, _ = self.most_tiles
        view = self.whole.most_rows if self.whole else self._tile_rows
        if self.max_tiles < max(self.min_tiles, 2):
            return view
        return max(view, count * self._tile_rows + view * self.view)

    @property
    def most_tiles(self) -> tuple[int, int]:
        rows = max(self._tile_rows, self.whole.most_rows if self.whole else 0)
        return max(1, self.max_tiles), rows

    @property
    def _tile_rows(self) -> int:
        return (self.height // self.cell) * (self.width // self.cell)

    def plan(self, height: int, width: int) -> tuple[Canvas, ...]:
        view = self._view(height, width)
        if self.max_tiles < self.min_tiles or not self._is_large(height, width):
            return view
        columns, rows = self._grid(height, width)
        tiles = Canvas(((rows * self.height, columns * self.width),), rows, columns)
        return (tiles, *view) if self.view and tiles.tiles > 1 else (tiles,)

    def narrowed(self, tokens: TokenRange) -> TileRule:
        """Lower the number of tiles, then the size of the view.

        Raises:
            ConfigError: the range excludes a single tile, or what all tiles have.
        """
        per_tile = self._tile_rows
        whole = self.whole and self.whole.narrowed(tokens)
        view = whole.max_pixels // self.cell**2 if whole else per_tile
        largest = max(1, self.max_tiles) * per_tile + view
        most = tokens.below(largest)
        if most < view or tokens.least > largest:
            raise _impossible(tokens, [view, largest])
        tiles = (most - view * self.view) // per_tile
        alone = 0 if whole else 1  # a grid of one tile is the view itself
        tiles = tiles if tiles >= max(self.min_tiles, 2) else alone
        least = min(self.min_tiles, tiles) if alone else self.min_tiles
        return msgspec.structs.replace(
            self, whole=whole, min_tiles=least, max_tiles=min(self.max_tiles, tiles)
        )

    def _view(self, height: int, width: int) -> tuple[Canvas, ...]:
        if self.whole:
            return self.whole.plan(height, width)
        return (Canvas(((self.height, self.width),)),)

    def _is_large(self, height: int, width: int) -> bool:
        sides = [
            max(round(side / self.cell) * self.cell, self.smallest) for side in (height, width)
        ]
        return sides[0] * sides[1] > self.threshold

    def _grid(self, height: int, width: int) -> Size:
        """Columns and rows; of equally near ratios the last whose tiles the picture half fills."""
        best, best_distance = (1, 1), math.inf
        for columns, rows in _grids(self.min_tiles, self.max_tiles):
            distance = abs(width / height - columns / rows)
            area = self.height * self.width * columns * rows
            if distance < best_distance or (
                distance == best_distance and height * width > 0.5 * area
            ):
                best, best_distance = (columns, rows), distance
        return best


# Each has `most_rows`, of a whole picture, and `most_tiles`: tiles of a canvas, and rows of the
# largest tile.
SizeRule = AreaRule | FixedRule | BudgetRule | EdgeRule | SplitRule | TileRule


def row_limit(rule: SizeRule) -> int:
    """Return the rows of the largest picture that a model can be asked for."""
    return max(rule.budgets) if isinstance(rule, BudgetRule) else rule.most_rows


def _even(length: float) -> int:
    return max(1, int(length) + int(length) % 2)


def _grids(least: int, most: int) -> list[Size]:
    """All (columns, rows) of a number of tiles, by that number."""
    found = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
        if least <= columns * rows
    ]
    return sorted(found, key=lambda grid: grid[0] * grid[1])


def _too_long(height: int, width: int) -> ImageError:
    return ImageError(
        f"the image has {width} x {height} pixels, too long for its width; this model takes sides "
        f"that differ by a factor of {MAX_RATIO} at most: send a part of it"
    )


def _impossible(tokens: TokenRange, possible: Iterable[int]) -> ConfigError:
    words = ", ".join(str(count) for count in possible)
    most = "any" if tokens.most is None else tokens.most
    return ConfigError(
        f"this model cannot give an image {tokens.least} to {most} tokens; it can: {words}"
    )

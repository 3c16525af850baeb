"""Decodes pictures with Pillow; runs only in the process with limits, see `pictures`.

Bytes say what a picture is, never a label. The first frame counts, upright, on white.
"""

from __future__ import annotations

import io
from importlib import import_module
from typing import TYPE_CHECKING

from PIL import Image, ImageOps, UnidentifiedImageError

from appliance.errors import ImageError, ImageTooLargeError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.media.sizing import Canvas, Size

# Other parsers stay closed, and only these are loaded.
_PLUGINS = ("Png", "Jpeg", "Webp", "Gif", "Bmp", "Tiff", "Avif")
FORMATS = tuple(name.upper() for name in _PLUGINS)
MAX_PIXELS = 64 << 20  # of the widest phone's camera; 256 MiB once decoded

# What people send besides, by bytes at a place.
_FOREIGN = (
    (4, b"ftyphei", "HEIC"),
    (4, b"ftyphev", "HEIC"),
    (4, b"ftypmif1", "HEIF"),
    (4, b"ftypmsf1", "HEIF"),
    (0, b"%PDF", "PDF"),
    (0, b"<svg", "SVG"),
    (0, b"<?xml", "SVG or another XML"),
    (0, b"\xff\x0a", "JPEG XL"),
    (4, b"JXL ", "JPEG XL"),
    (4, b"jP  ", "JPEG 2000"),
    (0, b"8BPS", "Photoshop"),
)
_BEGINNING = 16  # bytes by which Pillow's parsers know their formats
_WHITE = (255, 255, 255, 255)


def load_plugins() -> None:
    """Load the parsers of `FORMATS`."""
    for name in _PLUGINS:
        import_module(f"PIL.{name.replace('Webp', 'WebP')}ImagePlugin")


def decode(data: bytes) -> Image.Image:
    """Decode a picture.

    Returns:
        An RGB picture: upright (EXIF 1 to 8), transparency over white, 16 bits cut to the upper 8.

    Raises:
        ImageError: no format of ours, or damaged.
        ImageTooLargeError: it has too many pixels; nothing was decoded.
    """
    Image.MAX_IMAGE_PIXELS = None  # ours is checked below, before anything is decoded
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise ImageError(_unread(data)) from error
    except MemoryError:
        raise
    except Exception as error:
        raise _damaged(error) from error
    _check_size(picture)
    try:
        ImageOps.exif_transpose(picture, in_place=True)
        return _flat(picture)
    except (ImageError, MemoryError):
        raise
    except Exception as error:
        raise _damaged(error) from error


def resize(picture: Image.Image, canvases: Sequence[Canvas], resample: int) -> list[bytes]:
    """Resize an RGB picture to canvases, in their steps; steps that they share are made once.

    Returns:
        (height, width, 3) bytes for each canvas.
    """
    made: dict[tuple[Size, ...], Image.Image] = {(): picture}
    for canvas in canvases:
        for end in range(len(canvas.sizes)):
            before, steps = canvas.sizes[:end], canvas.sizes[: end + 1]
            if steps not in made:
                height, width = steps[-1]
                made[steps] = made[before].resize((width, height), resample=resample)
    return [made[canvas.sizes].tobytes() for canvas in canvases]


def _check_size(picture: Image.Image) -> None:
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise ImageTooLargeError(
            f"the image has {width} x {height} pixels, and at most {MAX_PIXELS >> 20} million are "
            "taken; send a smaller one"
        )


def _flat(picture: Image.Image) -> Image.Image:
    """To RGB, with white behind what is transparent."""
    if picture.mode.startswith("I;16"):
        return _upper_bytes(picture).convert("RGB")
    if picture.mode in ("I", "F"):
        raise ImageError("the image has 32 bits for each value; send one of 8 or 16 bits")
    if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, _WHITE)
        picture = Image.alpha_composite(white, picture)
    return picture.convert("RGB")


def _upper_bytes(picture: Image.Image) -> Image.Image:
    """The upper 8 of 16 bits; Pillow's own conversion clips instead."""
    data = picture.tobytes("raw", picture.mode)
    upper = 0 if picture.mode == "I;16B" else 1
    return Image.frombytes("L", picture.size, data[upper::2])


def _unread(data: bytes) -> str:
    """Say what bytes are that no parser takes."""
    known = f"send one of {', '.join(FORMATS)}"
    if not data:
        return f"the image is empty; {known}"
    for place, mark, name in _FOREIGN:
        if data.startswith(mark, place):
            return f"the image is {name}; {known}"
    for name in FORMATS:
        _, accepts = Image.OPEN[name]
        if accepts is not None and accepts(data[:_BEGINNING]):
            return (
                f"the image is {name} of a kind that is not read here, or damaged; send it again,"
                " or in another format"
            )
    return f"these bytes are no image that is known here; {known}"


def _damaged(error: Exception) -> ImageError:
    return ImageError(f"the image is damaged or cut short ({one_line(error)}); send it again")

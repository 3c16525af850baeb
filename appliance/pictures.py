"""Pictures in messages: found in what clients send, decoded, and laid out in the prompt.

The server and offline use share it. Templates write one placeholder for a picture. It becomes the
words and rows that the model's image processor plans, among the prompt's ids, where no text of a
message can imitate it.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.engine.nouns.picture import (
    MOST_PIXEL_BYTES,
    TEXTS_ONLY,
    CanvasPixels,
    PictureSpan,
    PromptPictures,
)
from appliance.errors import ChatTemplateError, ImageError, RequestError
from appliance.media.spec import ImageDetail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.dialects.turns import Turn
    from appliance.media.pictures import Picture, Pictures
    from appliance.media.sizing import Canvas
    from appliance.tokenizer import Tokenizer

MOST_PICTURES = 64  # of a request
_ORIENTATION = 0x0112  # EXIF's tag
_ALPHA_FIRST = {"PA": "RGBA", "RGBa": "RGBA", "La": "LA"}
_MODES_OF_PNG = ("1", "L", "LA", "P", "I;16", "RGB", "RGBA")
_DATA_URL = re.compile(r"data:([^,;]{0,100})[^,]{0,200}?;base64,", re.IGNORECASE)
_UNNAMED = ("", "application/octet-stream", "binary/octet-stream")  # what clients call any bytes


@dataclass(frozen=True, slots=True)
class Attached:
    """A picture of a message as it was sent.

    Attributes:
        data: of its file; empty if it is to be fetched from `url`.
        where: its place in the body.
        detail: OpenAI's: auto, low, high or original.
    """

    data: bytes
    where: str
    detail: ImageDetail = ImageDetail.AUTO
    url: str = ""

    @property
    def part(self) -> dict[str, Any]:
        """Return the part of a turn's content."""
        return {"type": "image", "image": self}


def content_of(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a message's text, a line for each part, or the parts if pictures are among them."""
    if any(part["type"] == "image" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _param_of(where: str) -> str:
    """Return the body's field of a place, such as `input` of `input[0].content[1]`."""
    return re.split(r"[\[.]", where, maxsplit=1)[0]


def of_url(url: str | None, where: str, detail: ImageDetail = ImageDetail.AUTO) -> Attached:
    """Take a picture from a data URL, or the address where it is.

    Raises:
        ImageError: there is none, or it is a data URL without base64.
        RequestError: another URL.
    """
    if not url:
        raise ImageError(
            f"{where} is empty; send the picture itself as a data: URL with base64",
            param=_param_of(where),
        )
    if url[:5].lower() == "data:":
        if not _DATA_URL.match(url):
            raise ImageError(
                f"{where} is {url[:40]!r}, a data: URL without base64; write"
                " data:image/png;base64, with the type of yours, and the picture's bytes in base64",
                param=_param_of(where),
            )
        return of_base64(url, where, detail)
    if not url.lower().startswith(("http://", "https://")):
        raise _not_fetched(url, where)
    return Attached(b"", where, detail, url)


def _not_fetched(url: str, where: str) -> RequestError:
    return RequestError(
        f"{where} is {url[:40]!r}; send the picture itself as a data: URL with base64, since such"
        " addresses are not fetched (a server's allow_image_urls names hosts from which they are)",
        param=_param_of(where),
        code="unsupported_content",
    )


def detail_of(given: str | None, where: str) -> ImageDetail:
    """Read OpenAI's detail; none is auto.

    Raises:
        RequestError: there is no such.
    """
    try:
        return ImageDetail(given or "auto")
    except ValueError:
        raise RequestError(
            f"{where} has the detail {str(given)[:40]!r}; known are {', '.join(ImageDetail)}",
            param=_param_of(where),
        ) from None


def of_base64(
    text: str, where: str, detail: ImageDetail = ImageDetail.AUTO, media_type: str = ""
) -> Attached:
    """Take a picture from base64, with a data URL's prefix or none, and line ends or none.

    Args:
        media_type: what the client says it is, if there is no prefix. Which image it is, its bytes
            say.

    Raises:
        ImageError: it is none.
    """
    if found := _DATA_URL.match(text):
        text, media_type = text[found.end() :], found[1]
    kind = media_type.strip().lower()
    if kind not in _UNNAMED and not kind.startswith("image/"):
        raise ImageError(
            f"{where} has the media type {kind[:40]!r}; send an image, such as image/png or"
            " image/jpeg",
            param=_param_of(where),
        )
    plain = "".join(text.split()).translate(str.maketrans("-_", "+/")).rstrip("=")
    try:
        data = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (ValueError, binascii.Error) as error:
        raise ImageError(
            f"{where} is no base64: {error}; send a picture's bytes in it", param=_param_of(where)
        ) from error
    if not data:
        raise ImageError(
            f"{where} is empty; send a picture's bytes in base64", param=_param_of(where)
        )
    return Attached(data, where, detail)


def of_image(image: Any, where: str) -> Attached:
    """Take a picture that Pillow has opened or made, without loss of what its mode holds.

    Raises:
        RequestError: it is none of Pillow's, or has 32 bits for each value.
    """
    from PIL import Image

    if not isinstance(image, Image.Image):
        raise RequestError(
            f"{where} is a {type(image).__name__}; give a PIL image, a path, a file's bytes or a"
            " data URL"
        )
    if image.mode in ("I", "F"):
        raise RequestError(f"{where} has 32 bits for each value; convert it to RGB")
    file = io.BytesIO()
    try:
        upright = Image.Exif()
        upright[_ORIENTATION] = image.getexif().get(_ORIENTATION, 1)
        if image.mode in _ALPHA_FIRST:  # the only one that these can become
            image = image.convert(_ALPHA_FIRST[image.mode])
        if image.mode not in _MODES_OF_PNG:
            image = image.convert("RGB")
        image.save(file, "PNG", compress_level=1, exif=upright)
    except (ValueError, OSError, SystemError) as error:  # closed, cut short, or without a pixel
        raise ImageError(f"{where} is no picture that can be read: {error}") from error
    return Attached(file.getvalue(), where)


def attached_in(turns: Sequence[Turn], reader: Pictures | None) -> list[Attached]:
    """Return the pictures of messages, in order.

    Raises:
        RequestError: the model takes none, there are too many, or one is not fetched.
    """
    found = [part["image"] for part in image_parts(turns)]
    if found and reader is None:
        where = found[0].where
        raise RequestError(
            f"{where}: {TEXTS_ONLY}", param=_param_of(where), code="unsupported_content"
        )
    if len(found) > MOST_PICTURES:
        raise RequestError(
            f"the request has {len(found)} pictures, and at most {MOST_PICTURES} are taken; send"
            " fewer",
            param=_param_of(found[0].where),
            code="too_many_images",
        )
    return found


def read_pictures(
    turns: Sequence[Turn], reader: Pictures | None
) -> tuple[list[Turn], list[Picture]]:
    """Decode the pictures of messages; slow.

    Returns:
        The turns as a template takes them, and the pictures in order.

    Raises:
        ImageError: one is damaged, or too large.
        RequestError: see `attached_in`.
    """
    found = attached_in(turns, reader)
    return told(turns), [read_picture(one, reader) for one in found if reader is not None]


def read_picture(one: Attached, reader: Pictures) -> Picture:
    """Decode a picture; slow.

    Raises:
        ImageError: it is damaged, or too large.
        RequestError: it is an address, which is not fetched.
    """
    if one.url:
        raise _not_fetched(one.url, one.where)
    with placed(one):
        return reader.read(one.data, one.detail)


@contextmanager
def placed(one: Attached) -> Iterator[None]:
    """Name a picture's place in errors about it."""
    try:
        yield
    except ImageError as error:
        raise type(error)(f"{one.where}: {error.message}", param=_param_of(one.where)) from error


def image_parts(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return the parts of messages that are pictures, in order."""
    lists = (turn["content"] for turn in turns if isinstance(turn["content"], list))
    return [part for parts in lists for part in parts if part["type"] == "image"]


def told(turns: Sequence[Turn]) -> list[Turn]:
    """Return turns with `{"type": "image"}` in the place of each picture, as templates take it."""
    return [{**turn, "content": _told(turn["content"])} for turn in turns]


def _told(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [{"type": "image"} if part["type"] == "image" else part for part in content]


def texts_beside(
    pictures: Sequence[Picture], reader: Pictures | None
) -> dict[str, tuple[str, str]]:
    """Return the texts to encode beside placeholders of pictures, for `laid_out` to replace."""
    if not pictures or reader is None or not any(reader.spec.words.beside):
        return {}
    return {reader.spec.words.placeholder: reader.spec.words.beside}


def laid_out(
    ids: list[int], pictures: Sequence[Picture], reader: Pictures | None, tokenizer: Tokenizer
) -> tuple[list[int], PromptPictures | None]:
    """Put words and rows of pictures in the places of a prompt's placeholders.

    Raises:
        ChatTemplateError: the template did not write a placeholder for each.
        RequestError: they have too many pixels together.
    """
    if not pictures:
        return ids, None
    assert reader is not None, "it read them"
    num_bytes = sum(picture.num_bytes for picture in pictures)
    if num_bytes > MOST_PIXEL_BYTES:
        raise RequestError(
            f"the pictures have {num_bytes >> 20} MiB of pixels together, and at most"
            f" {MOST_PIXEL_BYTES >> 20} are taken; send fewer, or smaller ones",
            code="too_many_images",
        )
    word = reader.spec.words.placeholder
    placeholder = tokenizer.mark_ids((word,)).get(word)
    places = [place for place, one in enumerate(ids) if one == placeholder]
    if len(places) != len(pictures):
        raise ChatTemplateError(
            f"the prompt has {len(places)} placeholders {word} for {len(pictures)} pictures; write"
            " one for each, or put pictures into messages of the user, where the model's chat"
            " template writes them"
        )
    found: list[int] = []
    canvases: list[CanvasPixels] = []
    spans: list[PictureSpan] = []
    begin = 0
    for place, picture in zip(places, pictures, strict=True):
        found += ids[begin:place]
        begin = place + 1
        _lay_out(picture, reader, tokenizer, found, canvases, spans)
    return found + ids[begin:], PromptPictures(tuple(canvases), tuple(spans))


def _lay_out(
    picture: Picture,
    reader: Pictures,
    tokenizer: Tokenizer,
    ids: list[int],
    canvases: list[CanvasPixels],
    spans: list[PictureSpan],
) -> None:
    """Append a picture's words and rows to a prompt."""
    first = len(canvases)
    for index, (canvas, pixels) in enumerate(zip(picture.canvases, picture.pixels, strict=True)):
        key = picture.digest + bytes((index,))
        canvases.append(
            CanvasPixels(key, canvas, pixels, cells_of(canvas, reader.spec.size_rule.cell))
        )
    at, cell = first, 0
    for segment in picture.segments:
        ids += tokenizer.encode(segment.text, add_special_tokens=False)
        if not segment.rows:
            continue
        if cell == canvases[at].num_rows:
            at, cell = at + 1, 0
        spans.append(PictureSpan(len(ids), segment.rows, at, cell))
        ids += [0] * segment.rows
        cell += segment.rows


def cells_of(canvas: Canvas, cell: int) -> tuple[int, int]:
    """Return rows and columns of a tile's cells, each a square of `cell` pixels."""
    height, width = canvas.tile
    return height // cell, width // cell

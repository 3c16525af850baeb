"""Every kind of file that people send, and every way in which one is wrong."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from transformers.image_transforms import convert_to_rgb

from appliance.errors import ImageError, ImageTooLargeError
from appliance.media import decode
from appliance.media.decode import FORMATS

Array = NDArray[Any]
ORIENTATION = 0x0112
# The picture as stored, for each value of EXIF's orientation, from the upright one (rows, columns).
STORED = {
    1: lambda upright: upright,
    2: lambda upright: upright[:, ::-1],
    3: lambda upright: upright[::-1, ::-1],
    4: lambda upright: upright[::-1],
    5: lambda upright: upright.transpose(1, 0, 2),
    6: lambda upright: upright.transpose(1, 0, 2)[::-1],
    7: lambda upright: upright[::-1, ::-1].transpose(1, 0, 2),
    8: lambda upright: upright.transpose(1, 0, 2)[:, ::-1],
}


@pytest.fixture(autouse=True, scope="module")
def _plugins() -> None:
    decode.load_plugins()


def file_of(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def pixels(data: bytes) -> Array:
    picture = decode.decode(data)
    assert picture.mode == "RGB"
    return np.asarray(picture)


def noise(*shape: int, most: int = 256, kind: Any = np.uint8) -> Array:
    return np.random.default_rng(0).integers(0, most, shape, kind)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "TIFF"])
def test_formats_without_loss_give_their_pixels(kind: str) -> None:
    expected = noise(37, 61, 3)
    options = {"lossless": True} if kind == "WEBP" else {}
    found = pixels(file_of(Image.fromarray(expected), kind, **options))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", ["JPEG", "AVIF"])
def test_formats_with_loss_give_nearly_the_pixels(kind: str, photographs: Path) -> None:
    photograph = Image.open(photographs / "coffee.png").convert("RGB")
    found = pixels(file_of(photograph, kind, quality=95)).astype(int)
    assert np.abs(found - np.asarray(photograph)).mean() < 4


def test_real_files_are_what_transformers_makes_of_them(photographs: Path) -> None:
    files = sorted(path for path in photographs.iterdir() if path.suffix != "")
    assert len(files) > 20
    for path in files:
        data = path.read_bytes()
        if path.name == "multipage_rgb.tif":  # of a kind that Pillow does not know
            with pytest.raises(ImageError, match="is TIFF of a kind that is not read here"):
                decode.decode(data)
            continue
        opened = Image.open(io.BytesIO(data))
        assert not opened.mode.startswith("I"), "transformers clips 16 bits"
        expected = convert_to_rgb(opened, return_numpy=True)
        np.testing.assert_array_equal(pixels(data), expected, err_msg=path.name)


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_pictures_stand_upright(kind: str, orientation: int) -> None:
    """Four corners of different colours, and unlike sides."""
    upright = np.zeros((48, 96, 3), np.uint8)
    upright[:24, :48], upright[:24, 48:] = (255, 0, 0), (0, 255, 0)
    upright[24:, :48], upright[24:, 48:] = (0, 0, 255), (255, 255, 0)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](upright)))
    options = {"quality": 100} if kind in ("JPEG", "WEBP", "AVIF") else {}
    found = pixels(file_of(stored, kind, exif=exif, **options))
    assert found.shape == upright.shape
    for row, column in ((12, 24), (12, 72), (36, 24), (36, 72)):
        assert np.abs(found[row, column].astype(int) - upright[row, column]).max() < 12


def on_white(colour: Array, alpha: Array) -> Array:
    share = alpha[..., None].astype(float) / 255
    return colour * share + 255 * (1 - share)


def test_transparency_lies_on_white() -> None:
    colour, alpha = noise(20, 30, 3), noise(20, 30)
    found = pixels(file_of(Image.fromarray(np.dstack([colour, alpha]))))
    assert np.abs(found - on_white(colour, alpha)).max() <= 1
    found = pixels(file_of(Image.fromarray(np.dstack([colour[..., 0], alpha]), "LA")))
    assert np.abs(found - on_white(colour[..., :1].repeat(3, 2), alpha)).max() <= 1


def test_a_palette_may_be_transparent() -> None:
    picture = Image.fromarray(noise(8, 8, most=3), "P")
    picture.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    palette = np.array([[10, 20, 30], [40, 50, 60], [70, 80, 90]])
    indices = np.asarray(picture)
    np.testing.assert_array_equal(pixels(file_of(picture)), palette[indices])
    palette[1] = 255
    np.testing.assert_array_equal(pixels(file_of(picture, transparency=1)), palette[indices])
    np.testing.assert_array_equal(pixels(file_of(picture, "GIF", transparency=1)), palette[indices])


def test_one_colour_may_be_transparent() -> None:
    expected = noise(9, 9, 3, most=2)
    found = pixels(file_of(Image.fromarray(expected), transparency=(1, 1, 1)))
    expected[(expected == 1).all(axis=2)] = 255
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_of_16_bits_the_upper_8_count(kind: str) -> None:
    """Pillow, and transformers with it, clip them to 255."""
    values = noise(12, 17, most=1 << 16, kind=np.uint16)
    found = pixels(file_of(Image.fromarray(values), kind))
    np.testing.assert_array_equal(found, (values >> 8)[..., None].repeat(3, 2))


def test_of_a_big_endian_tiff_the_upper_8_count() -> None:
    values = noise(12, 17, most=1 << 16, kind=np.uint16)
    picture = Image.frombytes("I;16B", (17, 12), values.astype(">u2").tobytes())
    found = pixels(file_of(picture, "TIFF"))
    np.testing.assert_array_equal(found, (values >> 8)[..., None].repeat(3, 2))


def test_grey_black_and_white_and_print_colours() -> None:
    grey = noise(10, 20)
    found = pixels(file_of(Image.fromarray(grey)))
    np.testing.assert_array_equal(found, grey[..., None].repeat(3, 2))
    bits = noise(10, 20, most=2) * 255
    found = pixels(file_of(Image.fromarray(bits).convert("1")))
    np.testing.assert_array_equal(found, bits[..., None].repeat(3, 2))
    cyan = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    assert np.abs(pixels(file_of(cyan, "JPEG", quality=100)).astype(int) - [0, 255, 255]).max() < 4
    assert (pixels(file_of(cyan, "TIFF")) == [0, 255, 255]).all()


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF", "AVIF"])
def test_of_several_frames_the_first_counts(kind: str) -> None:
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = file_of(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert np.abs(pixels(data).astype(int) - [255, 0, 0]).max() <= 2


def chunk(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)


def png_bomb(width: int, height: int) -> bytes:
    """A black picture of one bit for each pixel."""
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    packed = zlib.compressobj(9)
    lines = packed.compress(bytes(height * (1 + width // 8))) + packed.flush()
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", lines) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def test_too_many_pixels_are_refused_before_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = png_bomb(20_000, 20_000)
    assert len(data) < 50_000
    monkeypatch.setattr(Image.Image, "load", None)
    with pytest.raises(ImageTooLargeError, match="20000 x 20000 pixels, and at most 64 million"):
        decode.decode(data)


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_cut_short_is_refused(kind: str, photographs: Path) -> None:
    photograph = Image.open(photographs / "chelsea.png").convert("RGB")
    data = file_of(photograph, kind)
    for share in (0.02, 0.3, 0.6, 0.95):
        with pytest.raises(ImageError, match="send"):
            decode.decode(data[: int(len(data) * share)])


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_damaged_gives_a_picture_or_our_error(kind: str, photographs: Path) -> None:
    photograph = Image.open(photographs / "chelsea.png").convert("RGB").resize((64, 48))
    data = file_of(photograph, kind)
    numbers = np.random.default_rng(7)
    refused = 0
    for _ in range(60):
        changed = bytearray(data)
        for place in numbers.integers(0, min(len(data), 400), 4):
            changed[place] = numbers.integers(0, 256)
        try:
            decode.decode(bytes(changed))
        except ImageError:
            refused += 1
    assert refused


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty; send one of PNG, JPEG"),
        (b"hello, this is text", "no image"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "is HEIC; send one of PNG, JPEG"),
        (b"\0\0\0\x18ftypmsf1\0\0\0\0", "is HEIF"),
        (b"\x89PNG\r\n\x1a\n" + bytes(20), "is PNG of a kind that is not read here, or damaged"),
        (b"%PDF-1.7\n", "is PDF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is SVG"),
        (b"P6 2 2 255\n" + bytes(12), "no image"),
    ],
)
def test_what_is_no_picture_of_ours_is_named(data: bytes, words: str) -> None:
    with pytest.raises(ImageError, match=words) as caught:
        decode.decode(data)
    assert caught.value.code == "invalid_image"
    assert caught.value.status == 400


def test_a_kind_that_is_not_read_is_named_with_its_format() -> None:
    """Such as the unfinished picture of a camera (TIFF's PhotometricInterpretation 32803)."""
    data = file_of(Image.new("RGB", (4, 4)), "TIFF")
    colours, mosaic = (struct.pack("<HHIHH", 262, 3, 1, value, 0) for value in (2, 32803))
    assert colours in data
    with pytest.raises(ImageError, match="is TIFF of a kind that is not read here, or damaged"):
        decode.decode(data.replace(colours, mosaic))


def test_rare_parsers_stay_closed(photographs: Path) -> None:
    photograph = Image.open(photographs / "chelsea.png").convert("RGB")
    for kind in ("PPM", "TGA", "ICO", "SGI", "PCX"):
        with pytest.raises(ImageError, match="no image"):
            decode.decode(file_of(photograph.resize((64, 64)), kind))


def test_values_of_32_bits_are_refused() -> None:
    floats = Image.fromarray(np.ones((4, 4), np.float32))
    with pytest.raises(ImageError, match="32 bits"):
        decode.decode(file_of(floats, "TIFF"))

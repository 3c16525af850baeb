"""Pictures through the process with limits: answers, limits, and what a broken one costs."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image
from support.media.processors import CASES
from support.runs.waiting import has_ended, wait_until

from appliance.errors import ConfigError, ImageError, ImageTooLargeError
from appliance.isolated_worker import Packet
from appliance.media import decode
from appliance.media import pictures as pictures_module
from appliance.media.decode import MAX_PIXELS, resize
from appliance.media.pictures import Pictures
from appliance.media.processor_config import image_processor_of
from appliance.media.sizing import TokenRange
from appliance.media.spec import ImageDetail
from tests.media.test_decode import file_of, png_bomb

ROOT = Path(__file__).parents[2]
NewChildren = Callable[[], list[psutil.Process]]


@pytest.fixture
def pictures() -> Iterator[Pictures]:
    made = Pictures(CASES["qwen3_5"].spec)
    yield made
    made.close()


@pytest.fixture
def new_children() -> NewChildren:
    earlier = {*psutil.Process().children()}
    return lambda: [child for child in psutil.Process().children() if child not in earlier]


def image(height: int = 90, width: int = 160) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


@pytest.mark.parametrize("name", ["qwen3_5", "smolvlm", "internvl", "mistral3"])
def test_a_picture_comes_back_as_it_is_resized_here(name: str, photographs: Path) -> None:
    spec = CASES[name].spec
    pictures = Pictures(spec)
    data = (photographs / "coffee.png").read_bytes()
    found = pictures.read(data)
    upright = Image.open(io.BytesIO(data))
    assert found.canvases == spec.canvases(upright.height, upright.width)
    assert found.pixels == tuple(resize(upright, found.canvases, spec.resample))
    assert found.rows == sum(segment.rows for segment in found.segments)
    pictures.close()


def test_a_turned_picture_is_planned_as_it_stands(pictures: Pictures) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    (canvas,) = pictures.read(file_of(image(200, 1000), "JPEG", exif=exif)).canvases
    assert canvas.height > canvas.width


@pytest.mark.parametrize(
    ("allowed", "low", "high"),
    [
        (TokenRange(), 256, 2025),
        (TokenRange(1, 1024), 256, 1024),
        (TokenRange(1, 100), 100, 100),
        (TokenRange(400, 1024), 400, 1024),
    ],
)
def test_detail_and_a_range_narrow_the_size(allowed: TokenRange, low: int, high: int) -> None:
    data = file_of(image(2000, 2000), "JPEG")
    pictures = Pictures(CASES["qwen3_5"].spec, allowed)
    assert pictures.read(data, ImageDetail.LOW).rows == low
    assert pictures.read(data).rows == pictures.read(data, ImageDetail.HIGH).rows == high
    pictures.close()


def test_little_detail_is_ignored_where_the_model_has_no_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = image_processor_of(
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}},
        {},
        {
            "model_type": "gemma3",
            "vision_config": {"patch_size": 14, "image_size": 896},
            "mm_tokens_per_image": 1024,
        },
    )
    assert spec.at_detail(ImageDetail.LOW, TokenRange()) == spec
    with pytest.raises(ConfigError, match="it can: "):
        Pictures(spec, TokenRange(1, 200))


def test_copies_of_equal_pixels_meet_and_others_do_not(pictures: Pictures) -> None:
    picture = image()
    first = pictures.read(file_of(picture))
    for kind, options in (
        ("BMP", {}),
        ("WEBP", {"lossless": True}),
        ("PNG", {"compress_level": 1}),
    ):
        again = pictures.read(file_of(picture, kind, **options))
        assert again.digest == first.digest
    nearly = picture.copy()
    red, green, blue = (int(value) for value in np.asarray(picture)[40, 80])
    nearly.putpixel((80, 40), (red ^ 128, green, blue))
    assert pictures.read(file_of(nearly)).digest != first.digest
    large = file_of(image(1000, 1000))
    assert pictures.read(large).digest != pictures.read(large, ImageDetail.LOW).digest


def test_equal_bytes_in_another_shape_are_another_picture() -> None:
    spec = CASES["qwen3_5"].spec
    flat = Image.new("RGB", (512, 256), "red"), Image.new("RGB", (256, 512), "red")
    digests = []
    for picture in flat:
        canvases = spec.canvases(picture.height, picture.width)
        digests.append(spec.digest(canvases, tuple(resize(picture, canvases, spec.resample))))
    assert digests[0] != digests[1]


def test_the_same_bytes_are_decoded_once_and_no_other_is_taken_for_them(
    pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients send all pictures of a conversation again with each question."""
    asked: list[int] = []
    ask = pictures.workers.ask

    def counted(content: Any, data: bytes, **more: Any) -> Packet:
        asked.append(len(data))
        return ask(content, data, **more)

    monkeypatch.setattr(pictures.workers, "ask", counted)
    one, other = file_of(image()), file_of(image(90, 161))
    first = pictures.read(one)
    assert pictures.read(bytes(bytearray(one))) == first
    assert len(asked) == 1
    assert pictures.read(other) != first
    assert pictures.read(one, ImageDetail.LOW).digest != b""
    assert len(asked) == 3, "another detail is resized anew"
    pictures.rest()
    assert pictures.read(one) == first
    assert len(asked) == 4
    monkeypatch.setattr(pictures_module, "KEPT_BYTES", first.num_bytes + 1)
    pictures.read(other)
    pictures.read(one)
    assert len(asked) == 6, "the oldest left, since both are too many"


def test_a_bomb_is_refused_at_once_and_in_little_memory(
    pictures: Pictures, new_children: NewChildren
) -> None:
    data = png_bomb(20_000, 20_000)
    pictures.read(file_of(image()))
    (worker,) = new_children()
    before, begin = worker.memory_info().rss, time.process_time()
    with pytest.raises(ImageTooLargeError) as caught:
        pictures.read(data)
    assert time.process_time() - begin < 0.1
    assert worker.memory_info().rss - before < 8 << 20
    assert caught.value.status == 413
    assert pictures.workers.started == 1, "it is kept"


def test_too_many_bytes_start_no_process(
    pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures_module, "MAX_BYTES", 1 << 20)
    with pytest.raises(ImageTooLargeError, match="1048577 bytes, and at most 1 MiB"):
        pictures.read(bytes((1 << 20) + 1))
    assert pictures.workers.started == 0


def test_a_strip_is_refused(pictures: Pictures) -> None:
    with pytest.raises(ImageError, match="3000 x 10 pixels"):
        pictures.read(file_of(image(10, 3000)))
    assert pictures.workers.started == 1, "it is kept"


@pytest.mark.parametrize("mode", ["RGBA", "I;16", "P", "CMYK"])
def test_the_largest_picture_fits_the_limits(mode: str, pictures: Pictures) -> None:
    side = int(MAX_PIXELS**0.5)
    exif = Image.Exif()
    exif[0x0112] = 6
    large = Image.new(mode, (side, side), 7 if mode in ("P", "I;16") else (9, 9, 9, 9))
    options: dict[str, Any] = {"exif": exif}
    if mode == "P":
        options |= {"transparency": 7}
    kind = "JPEG" if mode == "CMYK" else "PNG"
    found = pictures.read(file_of(large, kind, **options))
    assert found.rows > 1000


def test_an_idle_process_that_is_killed_costs_no_picture(
    pictures: Pictures, new_children: NewChildren
) -> None:
    assert pictures.read(file_of(image())).rows
    (worker,) = new_children()
    worker.send_signal(signal.SIGKILL)
    wait_until(lambda: has_ended(worker))
    large = file_of(image(1000, 1000), "BMP")  # more than the socket holds
    assert pictures.read(large).rows
    assert pictures.workers.started == 2


def test_a_process_that_hangs_is_ended(
    pictures: Pictures,
    monkeypatch: pytest.MonkeyPatch,
    new_children: NewChildren,
) -> None:
    monkeypatch.setattr(pictures_module, "CPU_SECONDS", 0.05)
    pictures.read(file_of(image()))
    (worker,) = new_children()
    worker.suspend()
    begin = time.monotonic()
    with pytest.raises(ImageError, match=r"more than 0\.05 s"):
        pictures.read(file_of(image(91)))
    assert time.monotonic() - begin < 5
    assert has_ended(worker)
    assert pictures.read(file_of(image(91))).rows


def test_too_little_time_or_memory_is_an_error_of_this_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = file_of(Image.new("RGBA", (6000, 6000), (1, 2, 3, 4)))
    monkeypatch.setattr(pictures_module, "MEMORY_BYTES", 256 << 20)
    pictures = Pictures(CASES["qwen3_5"].spec)
    for _ in range(2):
        with pytest.raises(ImageError, match="or 256 MiB"):
            pictures.read(large)
    assert pictures.read(file_of(image())).rows
    pictures.close()
    monkeypatch.setattr(pictures_module, "MEMORY_BYTES", 2 << 30)
    monkeypatch.setattr(pictures_module, "CPU_SECONDS", 0.02)
    pictures = Pictures(CASES["qwen3_5"].spec)
    with pytest.raises(ImageError, match=r"more than 0\.02 s"):
        pictures.read(large)
    pictures.close()


def test_an_answer_of_the_wrong_length_is_no_picture(
    pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder that was taken over could answer anything."""
    answer = Packet({"size": [90, 160]}, bytes(100))
    monkeypatch.setattr(pictures.workers, "ask", lambda *_, **__: answer)
    with pytest.raises(ImageError, match="gave no picture"):
        pictures.read(file_of(image()))


def test_threads_share_some_processes(pictures: Pictures, new_children: NewChildren) -> None:
    found: list[bytes] = []
    data = file_of(image())
    threads = [
        threading.Thread(target=lambda: found.append(pictures.read(data).digest)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({*found}) == 1
    assert pictures.workers.started <= pictures_module.MOST_WORKERS
    pictures.rest()
    assert not new_children()
    assert pictures.read(data).digest == found[0]


def test_this_process_loads_neither_pillow_nor_numpy() -> None:
    code = (
        "import sys\n"
        "from appliance.media.pictures import Pictures\n"
        "from appliance.media.processor_config import read_image_processor\n"
        "print(sorted({'PIL', 'numpy', 'torch'} & sys.modules.keys()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert ran.stdout.strip() == "[]"


def test_the_process_loads_no_parser_but_ours() -> None:
    code = (
        "import sys\n"
        "from appliance.media.pictures import picture_task\n"
        "picture_task()\n"
        "print(' '.join(sorted(n for n in sys.modules if n.endswith('ImagePlugin'))))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    loaded = {
        name.removeprefix("PIL.").removesuffix("ImagePlugin").upper() for name in ran.stdout.split()
    }
    assert loaded == {*decode.FORMATS}

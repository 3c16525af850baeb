"""Prepares pictures in processes with limits, so that no file holds or kills the server."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from appliance.errors import ImageError, ImageTooLargeError
from appliance.isolated_worker import Handler, Packet, WorkerEndedError, Workers
from appliance.media.processor_config import read_image_processor
from appliance.media.sizing import Canvas, SizeRule, TokenRange
from appliance.media.spec import ImageDetail

if TYPE_CHECKING:
    from appliance.media.spec import ImageProcessorSpec, PromptSegment

MAX_BYTES = 32 << 20  # of a file
CPU_SECONDS = 20.0  # per picture; the largest took 5
MEMORY_BYTES = 2 << 30  # four copies of the largest, and Python
MOST_WORKERS = 2  # at once
KEPT_BYTES = 64 << 20  # of pixels, for the next turn: clients send a conversation's pictures again

_ANY = TokenRange()
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture as the engine takes it.

    Attributes:
        canvases: in the order of the rows.
        pixels: of each canvas, (height, width, 3) bytes.
        rows: that it takes in the prompt, without words.
        segments: what replaces the placeholder.
        digest: of the content, see `ImageProcessorSpec.digest`.
    """

    canvases: tuple[Canvas, ...]
    pixels: tuple[bytes, ...]
    rows: int
    segments: tuple[PromptSegment, ...]
    digest: bytes

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.pixels))


class Pictures:
    """Decodes and resizes pictures for one model, and keeps the last ones.

    Thread-safe; nothing starts before the first.

    Args:
        allowed: image rows for each picture.

    Attributes:
        spec: of pictures of any size.

    Raises:
        ConfigError: the model cannot keep them.
    """

    def __init__(self, spec: ImageProcessorSpec, allowed: TokenRange = _ANY) -> None:
        self.spec = spec
        self._specs = {detail: spec.at_detail(detail, allowed) for detail in ImageDetail}
        self.workers = Workers(
            picture_task,
            {},
            cpu_seconds=CPU_SECONDS,
            memory_bytes=MEMORY_BYTES,
            most=MOST_WORKERS,
        )
        self._kept: OrderedDict[bytes, Picture] = OrderedDict()  # the oldest first
        self._lock = threading.Lock()

    @classmethod
    def of_model(cls, path: Path, image_tokens: str, projector: str = "") -> Self | None:
        """Make those of a model; None if it has no processor.

        Args:
            path: its folder or GGUF file.
            image_tokens: the setting, see `TokenRange.of`.
            projector: path of a GGUF model's projector file, see `EngineInfo`.

        Raises:
            ConfigError: the model cannot keep them.
            ModelError: the processor is unknown here.
        """
        spec = read_image_processor(path, Path(projector) if projector else None)
        return None if spec is None else cls(spec, TokenRange.of(image_tokens))

    def read(self, data: bytes, detail: ImageDetail = ImageDetail.AUTO) -> Picture:
        """Decode a file's bytes and resize, unless the same were read lately.

        Raises:
            ImageError: no picture, damaged, or its decoder needs too much time or memory.
            ImageTooLargeError: too many bytes or pixels.
        """
        spec = self._specs[detail]
        if len(data) > MAX_BYTES:
            raise ImageTooLargeError(
                f"the image has {len(data)} bytes, and at most {MAX_BYTES >> 20} MiB are taken; "
                "send a smaller one"
            )
        key = _key_of(data, detail)
        if (kept := self._find(key)) is not None:
            return kept
        picture = self._decode(data, spec)
        with self._lock:
            self._kept[key] = picture
            while sum(one.num_bytes for one in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
        return picture

    def kept(self, data: bytes, detail: ImageDetail = ImageDetail.AUTO) -> Picture | None:
        """Return a picture if it was read lately."""
        return self._find(_key_of(data, detail))

    def _find(self, key: bytes) -> Picture | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _decode(self, data: bytes, spec: ImageProcessorSpec) -> Picture:
        request = {"size_rule": msgspec.to_builtins(spec.size_rule), "resample": spec.resample}
        try:
            answer = self.workers.ask(request, data, cpu_seconds=CPU_SECONDS)
        except WorkerEndedError as error:
            raise ImageError(
                f"decoding the image takes more than {CPU_SECONDS:g} s or {MEMORY_BYTES >> 20} MiB,"
                " or fails; send it in another format, or smaller"
            ) from error
        return _picture(spec, answer)

    def rest(self) -> None:
        """End idle processes and forget pictures; the next one starts a process."""
        with self._lock:
            self._kept.clear()
        self.workers.rest()

    def close(self) -> None:
        """End the processes; the next picture starts one."""
        self.workers.close()


def _key_of(data: bytes, detail: ImageDetail) -> bytes:
    return blake2b(data, key=detail.value.encode(), digest_size=_KEY_BYTES).digest()


def _picture(spec: ImageProcessorSpec, answer: Packet) -> Picture:
    """Take an answer apart, by what the canvases must have: its process read foreign bytes."""
    if "too_large" in answer.content:
        raise ImageTooLargeError(answer.content["too_large"])
    if "refused" in answer.content:
        raise ImageError(answer.content["refused"])
    height, width = answer.content["size"]
    canvases = spec.canvases(height, width)
    ends = [0]
    for canvas in canvases:
        ends.append(ends[-1] + canvas.height * canvas.width * 3)
    if ends[-1] != len(answer.data):
        raise ImageError("decoding the image gave no picture; send it in another format")
    pixels = tuple(answer.data[first:end] for first, end in itertools.pairwise(ends))
    return Picture(
        canvases,
        pixels,
        spec.rows(canvases),
        spec.segments(canvases),
        spec.digest(canvases, pixels),
    )


# ---- in the process ----


def picture_task() -> Handler:
    """Make the handler that decodes and resizes."""
    from appliance.media import decode

    decode.load_plugins()

    def read(request: Packet) -> Packet:
        try:
            size_rule = msgspec.convert(request.content["size_rule"], SizeRule)
            picture = decode.decode(request.data)
            canvases = size_rule.plan(picture.height, picture.width)
        except ImageTooLargeError as error:
            return Packet({"too_large": error.message})
        except ImageError as error:
            return Packet({"refused": error.message})
        parts = decode.resize(picture, canvases, request.content["resample"])
        return Packet({"size": [picture.height, picture.width]}, b"".join(parts))

    return read

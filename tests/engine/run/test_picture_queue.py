"""Pictures that wait, are kept, leave, or cannot be encoded."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from appliance.engine.nouns.picture import CanvasPixels, PictureSpan, PromptPictures
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.run.encoded_pictures import EncodedPictures
from appliance.engine.run.host_device import HostDevice
from appliance.engine.run.picture_queue import PictureQueue
from appliance.errors import CheckpointError
from appliance.kernels import arrays
from appliance.media.sizing import Canvas
from appliance.model.vision.tower import PictureRows

CELLS = (2, 3)
ROW_BYTES = 4 * 5


class Encoder:
    """Makes rows of a picture's key; may wait, or fail."""

    def __init__(self) -> None:
        self.calls: list[bytes] = []
        self.may_go = threading.Event()
        self.may_go.set()
        self.failure: Exception | None = None

    def __call__(self, canvas: CanvasPixels) -> PictureRows:
        self.calls.append(canvas.key)
        assert self.may_go.wait(10)
        if self.failure is not None:
            raise self.failure
        rows = np.full((canvas.num_rows, 5), canvas.key[0], np.float32)
        return PictureRows(arrays.of_numpy(rows))


def request_of(name: str, *keys: int) -> Request:
    canvases = [CanvasPixels(bytes((key,)), Canvas(((1, 1),)), b"", CELLS) for key in keys]
    spans = [PictureSpan(7 * place, 6, place) for place in range(len(keys))]
    pictures = PromptPictures(tuple(canvases), tuple(spans))
    return Request(
        request_id=name,
        prompt_token_ids=(0,) * (7 * len(keys) + 1),
        sampling=SamplingParams(),
        pictures=pictures,
    )


def queue_of(encoder: Encoder, *, beside: bool, most: int = 100) -> PictureQueue:
    encoded = EncodedPictures(encoder, HostDevice(), limit_bytes=most * 6 * ROW_BYTES)
    return PictureQueue(encoder, encoded, beside_steps=beside)


def taken(queue: PictureQueue) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    while queue.waiting:
        found |= {one.request.request_id: one.error for one in queue.take()}
        queue.idle()
    return found


@pytest.mark.parametrize("beside", [True, False])
def test_requests_wait_for_their_own_pictures(beside: bool) -> None:
    encoder = Encoder()
    queue = queue_of(encoder, beside=beside)
    assert queue.hold(request_of("a", 1, 2), 0.0)
    assert queue.hold(request_of("b", 2, 3), 0.0)
    assert queue.held() == {"a", "b"}
    assert taken(queue) == {"a": None, "b": None}
    assert sorted(encoder.calls) == [b"\1", b"\2", b"\3"]  # each once
    assert not queue.hold(request_of("c", 3, 1), 0.0)
    queue.close()


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("failure", [MemoryError("64 MiB"), CheckpointError("torn")])
def test_a_picture_that_fails_ends_its_requests_alone(failure: Exception, beside: bool) -> None:
    encoder = Encoder()
    encoder.failure = failure
    queue = queue_of(encoder, beside=beside)
    queue.hold(request_of("a", 1), 0.0)
    queue.hold(request_of("b", 1, 2), 0.0)
    errors = taken(queue)
    assert all(str(failure) in str(errors[name]) for name in "ab")
    encoder.failure = None
    assert queue.hold(request_of("c", 1), 0.0)
    assert taken(queue) == {"c": None}
    queue.close()


def test_one_that_leaves_takes_its_waiting_pictures_along() -> None:
    encoder = Encoder()
    encoder.may_go.clear()
    queue = queue_of(encoder, beside=True)
    queue.hold(request_of("a", 1), 0.0)
    queue.hold(request_of("b", 2, 3), 0.0)
    queue.hold(request_of("c", 3), 0.0)
    assert queue.abandon("b")
    assert not queue.abandon("b")
    encoder.may_go.set()
    assert taken(queue) == {"a": None, "c": None}
    assert b"\2" not in encoder.calls
    queue.close()


def test_one_that_waits_beyond_its_limits_is_told_so() -> None:
    encoder = Encoder()
    encoder.may_go.clear()
    queue = queue_of(encoder, beside=True)
    several = SamplingParams(n=2)
    first = msgspec.structs.replace(request_of("a", 1), timeout=3.0, sampling=several)
    queue.hold(first, 10.0)
    queue.hold(msgspec.structs.replace(request_of("b", 2), max_queue_seconds=2.0), 11.0)
    queue.hold(request_of("c", 3), 11.0)
    assert queue.late(12.9) == []
    assert [(one.request_id, one.index) for one in queue.late(13.0)] == [
        ("a", 0), ("a", 1), ("b", 0),
    ]  # fmt: skip
    assert queue.held() == {"c"}
    assert queue.late(99.0) == []
    encoder.may_go.set()
    queue.close()


def test_rows_beyond_the_limit_leave_unless_a_request_needs_them() -> None:
    encoder = Encoder()
    queue = queue_of(encoder, beside=False, most=2)
    for name, keys in (("a", (1, 2)), ("b", (3,)), ("c", (4,))):
        queue.hold(request_of(name, *keys), 0.0)
    taken(queue)
    encoded = queue.encoded
    assert encoded.is_over
    encoded.trim({"a"})  # b and c are over
    assert encoded.num_bytes == 2 * 6 * ROW_BYTES
    assert not encoded.missing(request_of("again", 1, 2))
    assert [one.key for one in encoded.missing(request_of("other", 3, 4))] == [b"\3", b"\4"]


def test_rows_are_given_by_place_and_encoded_anew_if_they_left() -> None:
    encoder = Encoder()
    queue = queue_of(encoder, beside=False)
    request = request_of("a", 1, 2)

    class Sequence:
        pass

    from appliance.engine.nouns.plan import ScheduledSequence

    sequence: Any = Sequence()
    sequence.request = request
    text: Any = Sequence()
    text.request = Request(request_id="t", prompt_token_ids=(1, 2), sampling=SamplingParams())
    # One row of a text; then rows 4 to 9: two of the first picture, one word, three of the second.
    scheduled = [
        ScheduledSequence(text, 0, 1, samples=True),
        ScheduledSequence(sequence, 4, 6, samples=False),
    ]
    given = queue.encoded.given(scheduled)
    assert given is not None
    np.testing.assert_array_equal(np.asarray(given.sources), [-1, 0, 1, -1, 2, 3, 4])
    np.testing.assert_array_equal(np.asarray(given.embeddings)[:, 0], [1, 1, 2, 2, 2])
    assert encoder.calls == [b"\1", b"\2"]
    assert queue.encoded.given(scheduled[:1]) is None


def test_ids_of_rows_tell_all_pictures_and_cells_apart() -> None:
    random = np.random.default_rng(0)
    keys = [random.bytes(33) for _ in range(500)]
    keys += [key[:-1] + bytes((key[-1] ^ 1,)) for key in keys[:100]]  # nearly equal ones
    seen: dict[int, tuple[bytes, int]] = {}
    for key in keys:
        canvas = CanvasPixels(key, Canvas(((1, 1),)), b"", (4, 5))
        pictures = PromptPictures((canvas,), (PictureSpan(3, 12, 0, 8),))
        ids = pictures.ids([9] * 20)
        assert ids[:3] == [9] * 3
        assert ids[15:] == [9] * 5
        for cell, one in enumerate(ids[3:15], 8):
            assert one < 0
            assert seen.setdefault(one, (key, cell)) == (key, cell)
    assert len(seen) == 12 * len(keys)

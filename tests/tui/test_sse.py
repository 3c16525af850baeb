from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.tui import sse
from appliance.tui.sse import EventDecoder

STREAM = (
    b": keep-alive\n\nevent: info\ndata: {}\n\n"
    b"event: stats\r\nid: 7\r\ndata: one\r\ndata: two\r\n\r\n"
    b"data:no space\n\nevent: nothing to tell\n\ndata: \xe2\x82\xac\n\n"
)
FRAMES = [
    ("info", b"{}"),
    ("stats", b"one\ntwo"),
    ("message", b"no space"),
    ("message", "€".encode()),
]


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_frames_are_the_same_wherever_the_network_cuts(cuts: list[int]) -> None:
    decoder = EventDecoder()
    edges = [0, *sorted(cuts), len(STREAM)]
    frames = []
    for start, end in pairwise(edges):
        frames += decoder.feed(STREAM[start:end])
    assert frames == FRAMES
    assert not decoder.in_frame


@pytest.mark.parametrize("cut", [b"event: sta", b"event: stats\n", b"data: 1\n", b"data: 1\n\nd"])
def test_a_cut_in_a_frame_is_noticed(cut: bytes) -> None:
    decoder = EventDecoder()
    decoder.feed(b"data: whole\n\n" + cut)
    assert decoder.in_frame


def test_a_frame_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_FRAME_BYTES", 100)
    decoder = EventDecoder()
    for _ in range(10):
        assert len(decoder.feed(b"data: " + b"x" * 50 + b"\n\n")) == 1  # each of them alone is fine
    decoder.feed(b"data: " + b"x" * 60)
    with pytest.raises(ValueError, match="larger than 100 bytes"):
        decoder.feed(b"x" * 60)

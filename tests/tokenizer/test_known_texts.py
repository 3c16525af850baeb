from __future__ import annotations

from collections.abc import Sequence

from appliance.tokenizer.known_texts import KnownTexts


class Encoder:
    """Counts how often each text is encoded."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        self.encoded += texts
        return [list(map(ord, text)) for text in texts]


def test_a_text_is_encoded_once_for_each_salt() -> None:
    encoder = Encoder()
    known = KnownTexts(encoder)
    for _ in range(2):
        assert [list(ids) for ids in known.ids_of(["ab", "c", "ab"])] == [[97, 98], [99], [97, 98]]
    assert encoder.encoded == ["ab", "c"]
    known.ids_of(["ab", "d"])
    assert encoder.encoded == ["ab", "c", "d"]
    known.ids_of(["ab"], "another")
    assert encoder.encoded == ["ab", "c", "d", "ab"]


def test_the_texts_used_longest_ago_go_first_and_too_long_ones_are_not_kept() -> None:
    encoder = Encoder()
    known = KnownTexts(encoder, max_characters=6)
    known.ids_of(["aaa", "bbb"])
    known.ids_of(["aaa"])
    known.ids_of(["ccc"])
    encoder.encoded.clear()
    known.ids_of(["aaa", "ccc"])
    assert encoder.encoded == []
    known.ids_of(["bbb"])
    assert encoder.encoded == ["bbb"]
    assert list(known.ids_of(["x" * 7])[0]) == [120] * 7
    known.ids_of(["x" * 7])
    assert encoder.encoded == ["bbb", "x" * 7, "x" * 7]

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.server.growth import bytes_of

from appliance.tokenizer import StopStringMatcher

ALPHABET = st.text("abc", max_size=12)


def expected(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """By definition: the first complete stop string ends the text, the longest if several are."""
    for end in range(len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def feed(matcher: StopStringMatcher, pieces: list[str]) -> tuple[str, bool]:
    out = ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        out += text
        if matched:
            return out, True
    return out + matcher.flush(), False


@given(
    pieces=st.lists(ALPHABET, max_size=6),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
)
def test_result_is_the_same_however_the_text_is_cut(pieces: list[str], stop: list[str]) -> None:
    stops = tuple(stop)
    assert feed(StopStringMatcher(stops), pieces) == expected("".join(pieces), stops)


@given(pieces=st.lists(ALPHABET, max_size=8), stop=st.text("abc", min_size=1, max_size=4))
def test_no_more_is_held_back_than_needed(pieces: list[str], stop: str) -> None:
    matcher, seen, out = StopStringMatcher((stop,)), "", ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        seen, out = seen + piece, out + text
        if matched:
            return
        held = seen[len(out) :]
        assert seen == out + held
        assert stop.startswith(held)
        assert not any(
            stop.startswith(seen[-n:]) for n in range(len(held) + 1, min(len(stop), len(seen) + 1))
        )


@pytest.mark.parametrize(
    ("stop", "pieces", "result"),
    [
        (("\n\n",), ["one\n", "two\n", "\nthree"], ("one\ntwo", True)),
        (("END",), ["the E", "N", "d"], ("the ENd", False)),
        (("END",), ["the EN", "D of it"], ("the ", True)),
        (("abcd", "c"), ["ab", "cd"], ("ab", True)),
        (("🙂",), ["a", "🙂", "b"], ("a", True)),
        ((), ["any", "thing"], ("anything", False)),
    ],
)
def test_examples(stop: tuple[str, ...], pieces: list[str], result: tuple[str, bool]) -> None:
    assert feed(StopStringMatcher(stop), pieces) == result


@given(
    pieces=st.lists(ALPHABET, max_size=6),
    later=st.lists(ALPHABET, max_size=6),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_text_behind_a_match_is_dropped(
    pieces: list[str], later: list[str], stop: list[str]
) -> None:
    """Tokens of a step that come after the stop string are dropped."""
    matcher = StopStringMatcher(tuple(stop))
    feed(matcher, [*pieces, stop[0]])
    found = matcher.matched
    assert found
    for piece in [*later, "x", stop[0]]:
        assert matcher.push(piece) == ("", True)
    assert (matcher.matched, matcher.flush()) == (found, "")


def test_what_is_held_back_is_not_copied_for_each_piece() -> None:
    """A copy of a long beginning for each token takes the square of the answer's length."""
    matcher, half = StopStringMatcher(("a" * 200_000 + "b",)), "a" * 100_000
    assert matcher.push(half) == ("", False)
    assert bytes_of(lambda: matcher.push("a")) < 10_000
    assert bytes_of(lambda: matcher.push(half)) < 10_000
    assert bytes_of(lambda: matcher.push("a")) < 10_000, "one leaves, the rest stays"
    assert matcher.flush() == "a" * 200_000

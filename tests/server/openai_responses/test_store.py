from __future__ import annotations

import pytest

from appliance.server.openai_responses import history
from appliance.server.openai_responses.history import (
    ResponseNotFoundError,
    ResponseStore,
    StoredResponse,
)


def stored(response: bytes, conversation: bytes, **pictures: str) -> StoredResponse:
    return StoredResponse(response, conversation, frozenset(), slice(1, 3), pictures)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def has(kept: ResponseStore, owner: str, name: str) -> bool:
    try:
        kept.get(owner, name)
    except ResponseNotFoundError:
        return False
    return True


def test_the_least_recently_used_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_COUNT", 2)
    kept = ResponseStore()
    for name in ("a", "b"):
        kept.keep("ann", name, stored(b"{}", b"[  ]"))
    assert has(kept, "ann", "a")
    kept.keep("ann", "c", stored(b"{}", b"[  ]"))
    assert [has(kept, "ann", name) for name in "abc"] == [True, False, True]


def test_who_keeps_most_loses_something_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_BYTES", 1000)
    kept = ResponseStore()
    kept.keep("bob", "first", stored(b"{}", b"[  ]"))
    for number in range(20):
        kept.keep("ann", str(number), stored(b"x" * 90, b"[" + b" " * 8 + b"]"))
    assert has(kept, "bob", "first")
    assert [has(kept, "ann", str(number)) for number in range(20)] == [False] * 11 + [True] * 9
    kept.keep("ann", "huge", stored(b"x" * 2000, b"[]"))
    assert not has(kept, "ann", "huge")
    assert has(kept, "ann", "19"), "what cannot be kept displaces nothing"


def test_pictures_have_room_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_BYTES", 40)
    monkeypatch.setattr(history, "MAX_PICTURE_BYTES", 1000)
    kept = ResponseStore()
    kept.keep("ann", "text", stored(b"{}", b"[  ]"))
    kept.keep("ann", "a", stored(b"{}", b"[  ]", a="x" * 400))
    kept.keep("ann", "b", stored(b"{}", b"[  ]", b="x" * 400))
    assert all(has(kept, "ann", name) for name in ("text", "a", "b"))
    kept.keep("bob", "c", stored(b"{}", b"[  ]", a="x" * 400))
    assert has(kept, "bob", "c")
    names = ("text", "a", "b")
    assert [has(kept, "ann", name) for name in names] == [True, False, True], "who keeps most"
    kept.keep("bob", "huge", stored(b"{}", b"[]", a="x" * 1001))
    assert not has(kept, "bob", "huge")
    assert has(kept, "bob", "c"), "what cannot be kept displaces nothing"


def test_nothing_is_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    kept = ResponseStore(clock)
    kept.keep("ann", "a", stored(b"{}", b"[  ]"))
    clock.now = history.KEEP_SECONDS - 1
    assert has(kept, "ann", "a")
    clock.now += 2
    assert not has(kept, "ann", "a")
    monkeypatch.setattr(history, "MAX_BYTES", 6)
    kept.keep("bob", "b", stored(b"{}", b"[  ]"))
    assert has(kept, "bob", "b"), "what has expired takes no room"


def test_equal_pictures_of_a_key_take_room_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_PICTURE_BYTES", 1000)
    kept = ResponseStore()
    for number in range(20):
        kept.keep("ann", str(number), stored(b"{}", b"[  ]", a="".join(["x"] * 900)))
    found = kept.kept_by("ann")
    assert len(found) == 20
    assert len({id(one.pictures["a"]) for one in found}) == 1
    kept.keep("ann", "other", stored(b"{}", b"[  ]", b="y" * 101))
    assert [one.pictures for one in kept.kept_by("ann")] == [{"b": "y" * 101}]
    for number in range(3):
        kept.keep("ann", str(number), stored(b"{}", b"[  ]", a="x" * 899))
        kept.delete("ann", str(number))
    assert has(kept, "ann", "other"), "nothing of what was deleted counts"

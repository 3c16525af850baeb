from __future__ import annotations

import pytest

from appliance.server.openai_responses import history
from appliance.server.openai_responses.history import ResponseNotFoundError, ResponseStore

OWN, NO_NAMES = slice(1, 3), frozenset[str]()


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
        kept.keep("ann", name, b"{}", b"[  ]", NO_NAMES, OWN)
    assert has(kept, "ann", "a")
    kept.keep("ann", "c", b"{}", b"[  ]", NO_NAMES, OWN)
    assert [has(kept, "ann", name) for name in "abc"] == [True, False, True]


def test_who_keeps_most_loses_something_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_BYTES", 1000)
    kept = ResponseStore()
    kept.keep("bob", "first", b"{}", b"[  ]", NO_NAMES, OWN)
    for number in range(20):
        kept.keep("ann", str(number), b"x" * 90, b"[" + b" " * 8 + b"]", NO_NAMES, OWN)
    assert has(kept, "bob", "first")
    assert [has(kept, "ann", str(number)) for number in range(20)] == [False] * 11 + [True] * 9
    kept.keep("ann", "huge", b"x" * 2000, b"[]", NO_NAMES, OWN)
    assert not has(kept, "ann", "huge")
    assert has(kept, "ann", "19"), "what cannot be kept displaces nothing"


def test_pictures_have_room_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_BYTES", 40)
    monkeypatch.setattr(history, "MAX_PICTURE_BYTES", 1000)
    kept = ResponseStore()
    seen = b"[" + b"x" * 402 + b"]"
    kept.keep("ann", "text", b"{}", b"[  ]", NO_NAMES, OWN)
    kept.keep("ann", "a", b"{}", seen, NO_NAMES, OWN, 400)
    kept.keep("ann", "b", b"{}", seen, NO_NAMES, OWN, 400)
    assert all(has(kept, "ann", name) for name in ("text", "a", "b"))
    kept.keep("bob", "c", b"{}", seen, NO_NAMES, OWN, 400)
    assert has(kept, "bob", "c")
    names = ("text", "a", "b")
    assert [has(kept, "ann", name) for name in names] == [True, False, True], "who keeps most"
    kept.keep("bob", "huge", b"{}", b"x" * 1010, NO_NAMES, OWN, 1001)
    assert not has(kept, "bob", "huge")
    assert has(kept, "bob", "c"), "what cannot be kept displaces nothing"


def test_nothing_is_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    kept = ResponseStore(clock)
    kept.keep("ann", "a", b"{}", b"[  ]", NO_NAMES, OWN)
    clock.now = history.KEEP_SECONDS - 1
    assert has(kept, "ann", "a")
    clock.now += 2
    assert not has(kept, "ann", "a")
    monkeypatch.setattr(history, "MAX_BYTES", 6)
    kept.keep("bob", "b", b"{}", b"[  ]", NO_NAMES, OWN)
    assert has(kept, "bob", "b"), "what has expired takes no room"

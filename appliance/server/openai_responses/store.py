"""Stores responses for a while, so that a conversation can continue from a response's id.

In memory only, and private to each API key.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from appliance.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_COUNT = 1024  # of all keys together
MAX_BYTES = 64 << 20
KEEP_SECONDS = 24 * 3600.0
_ID_BYTES = 128  # of an item's id in a set


class ResponseNotFoundError(RequestError):
    """The response does not exist, was dropped, or belongs to another key."""

    status = 404


class ItemId(msgspec.Struct):
    """An item's id."""

    id: str


names_of = msgspec.json.Decoder(list[ItemId]).decode
raw_items_of = msgspec.json.Decoder(list[msgspec.Raw]).decode


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and the conversation up to its end, as JSON.

    Attributes:
        conversation: an array of items, earlier turns included.
        names: ids of its items.
        own: byte range of its own input's items in it.
        until: when it expires, in monotonic seconds.
    """

    response: bytes
    conversation: bytes
    names: frozenset[str]
    own: slice
    until: float

    @property
    def size(self) -> int:
        return len(self.response) + len(self.conversation) + _ID_BYTES * len(self.names)


# Before the first response of a conversation.
NOTHING = StoredResponse(b"", b"[]", frozenset(), slice(0), 0.0)


class ResponseStore:
    """Stored responses, least recently used first; evicts from the key with the most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of: dict[str, OrderedDict[str, StoredResponse]] = {}  # by key name

    def keep(
        self,
        owner: str,
        response_id: str,
        response: bytes,
        conversation: bytes,
        names: frozenset[str],
        own: slice,
    ) -> None:
        """Store a response, unless it exceeds the whole store; see `StoredResponse`."""
        kept = StoredResponse(response, conversation, names, own, self._clock() + KEEP_SECONDS)
        if kept.size > MAX_BYTES:
            return
        self._of.setdefault(owner, OrderedDict())[response_id] = kept
        self._drop()

    def get(self, owner: str, response_id: str) -> StoredResponse:
        """Return a key's response.

        Raises:
            ResponseNotFoundError: it is not stored.
        """
        found = self._of.get(owner, OrderedDict())
        kept = found.get(response_id)
        if kept is None or kept.until < self._clock():
            raise ResponseNotFoundError(
                f"the response {response_id[:80]!r} is not kept here (any more); the server keeps "
                f"the latest {MAX_COUNT} for {KEEP_SECONDS / 3600:.0f} h, until it is restarted"
            )
        found.move_to_end(response_id)
        return kept

    def kept_by(self, owner: str) -> list[StoredResponse]:
        """Return a key's responses, least recently used first."""
        now = self._clock()
        return [one for one in self._of.get(owner, {}).values() if one.until >= now]

    def delete(self, owner: str, response_id: str) -> None:
        """Delete a response, or raise ResponseNotFoundError."""
        self.get(owner, response_id)
        del self._of[owner][response_id]

    def _drop(self) -> None:
        now = self._clock()
        for found in self._of.values():
            for name in [name for name, kept in found.items() if kept.until < now]:
                del found[name]
        sizes = {owner: sum(kept.size for kept in self._of[owner].values()) for owner in self._of}
        counts = {owner: len(found) for owner, found in self._of.items()}
        while (too_many := sum(counts.values()) > MAX_COUNT) or sum(sizes.values()) > MAX_BYTES:
            by = counts if too_many else sizes
            owner = max(by, key=by.__getitem__)
            _, dropped = self._of[owner].popitem(last=False)
            sizes[owner] -= dropped.size
            counts[owner] -= 1


def find_items(kept: Sequence[StoredResponse], names: Sequence[str]) -> dict[str, bytes]:
    """Return items of conversations as JSON, by id: each from the latest that has it.

    Raises:
        ResponseNotFoundError: an item is in none of them.
    """
    found: dict[str, bytes] = {}
    wanted = set(names)
    for holder in reversed(kept):
        here = wanted & holder.names
        if not here:
            continue
        items = raw_items_of(holder.conversation)
        for named, item in zip(names_of(holder.conversation), items, strict=True):
            if named.id in here:
                found[named.id] = bytes(item)
        wanted -= here
    for name in names:
        if name in wanted:
            raise ResponseNotFoundError(f"the item {name[:80]!r} is not kept here (any more)")
    return found

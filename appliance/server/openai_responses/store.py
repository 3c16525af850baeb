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


_names_of = msgspec.json.Decoder(list[ItemId]).decode
_items_of = msgspec.json.Decoder(list[msgspec.Raw]).decode


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


class ResponseStore:
    """Stored responses, least recently used first; evicts from the key with the most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of: dict[str, OrderedDict[str, StoredResponse]] = {}  # by key name

    def keep(
        self, owner: str, response_id: str, response: bytes, conversation: bytes, own: slice
    ) -> None:
        """Store a response, unless it exceeds the whole store."""
        names = frozenset(item.id for item in _names_of(conversation))
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

    def items(self, owner: str, names: Sequence[str]) -> dict[str, bytes]:
        """Return items of a key's conversations as JSON, by id.

        Raises:
            ResponseNotFoundError: an item is not stored.
        """
        now = self._clock()
        kept = [one for one in self._of.get(owner, {}).values() if one.until >= now]
        found: dict[str, bytes] = {}
        for name in names:
            if name in found:
                continue
            holder = next((one for one in reversed(kept) if name in one.names), None)
            if holder is None:
                raise ResponseNotFoundError(f"the item {name[:80]!r} is not kept here (any more)")
            items = _items_of(holder.conversation)
            found |= {
                named.id: bytes(item)
                for named, item in zip(_names_of(holder.conversation), items, strict=True)
            }
        return found

    def delete(self, owner: str, response_id: str) -> None:
        """Delete a response, or raise ResponseNotFoundError."""
        self.get(owner, response_id)
        del self._of[owner][response_id]

    def _drop(self) -> None:
        now = self._clock()
        for found in self._of.values():
            for name in [name for name, kept in found.items() if kept.until < now]:
                del found[name]
        while True:
            sizes = {
                owner: sum(kept.size for kept in found.values())
                for owner, found in self._of.items()
            }
            count = sum(map(len, self._of.values()))
            if count <= MAX_COUNT and sum(sizes.values()) <= MAX_BYTES:
                return
            # Whichever limit is exceeded.
            by = sizes if count <= MAX_COUNT else {o: len(found) for o, found in self._of.items()}
            self._of[max(by, key=by.__getitem__)].popitem(last=False)

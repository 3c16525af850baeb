"""Keeps responses for a while, and puts together the conversation that a request continues.

In memory only, and private to each API key.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from appliance.errors import RequestError
from appliance.server.openai_responses.schema import Item
from appliance.server.openai_responses.turns import items_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from appliance.server.openai_responses.schema import InputPart, ResponsesRequest

MAX_COUNT = 1024  # responses of all keys together
MAX_BYTES = 64 << 20
KEEP_SECONDS = 24 * 3600.0
_ID_BYTES = 128  # of an item's id in a set
MAX_REFERENCES = 1024  # to earlier items, in a request
MAX_CONVERSATION = 8 << 20  # bytes of its items as JSON: a context of a million tokens has fewer
_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


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


@dataclass(frozen=True, slots=True)
class ReadInput:
    """A conversation up to an answer.

    Attributes:
        items: of the request, without those that add nothing to a prompt.
        own: these items as a JSON array, each with an id.
        names: their ids.
        before: the response that the request continues.
    """

    items: Sequence[Item]
    own: bytes
    names: frozenset[str]
    before: StoredResponse

    @property
    def is_open(self) -> bool:
        """True if its last item may be continued: a message that was cut, or has no status."""
        if self.items:
            return self.items[-1].status != "completed"
        kept = self.before.response
        return not kept or msgspec.json.decode(kept, type=_Status).status != "completed"


class _Status(msgspec.Struct):
    status: str


class InputReader:
    """Reads the conversation of one request.

    What is kept is looked up on construction, on the event loop; `read` decodes it, in a thread.

    Args:
        max_bytes: limit of what references stand for.

    Raises:
        RequestError: the previous response is not kept.
    """

    def __init__(
        self, store: ResponseStore, owner: str, body: ResponsesRequest, *, max_bytes: int
    ) -> None:
        self._input = body.input
        self._max_bytes = max_bytes
        self._kept = store.kept_by(owner)
        self._before = NOTHING
        if body.previous_response_id is not None:
            try:
                self._before = store.get(owner, body.previous_response_id)
            except ResponseNotFoundError as error:
                raise RequestError(
                    error.message,
                    param="previous_response_id",
                    code="previous_response_not_found",
                ) from None

    @property
    def size(self) -> int:
        """Bytes of what the request continues."""
        return len(self._before.conversation)

    def read(self) -> ReadInput:
        """Return the conversation.

        Raises:
            RequestError: it is too long, or a reference names nothing.
        """
        items = list(filter(None, map(_effective, self._resolved(items_of(self._input)))))
        named = [_with_id(item) for item in items]
        own = msgspec.json.encode(named)
        size = len(self._before.conversation) + len(own)
        if size > MAX_CONVERSATION:
            raise RequestError(
                f"the conversation has {size:,} bytes with this input; at most "
                f"{MAX_CONVERSATION:,} are kept, so begin another, with a summary of this one",
                param="input" if self._before is NOTHING else "previous_response_id",
                code="context_length_exceeded",
            )
        return ReadInput(items, own, frozenset(item.id or "" for item in named), self._before)

    def _resolved(self, items: list[Item]) -> list[Item]:
        """Replace references with the items that they name, each decoded once."""
        names = [item.id for item in items if item.type == "item_reference" and item.id is not None]
        if not names:
            return items
        if len(names) > MAX_REFERENCES:
            raise RequestError(
                f"input has {len(names)} references; at most {MAX_REFERENCES} are accepted, and "
                "previous_response_id names a whole conversation",
                param="input",
            )
        try:
            found = find_items(self._kept, names)
        except ResponseNotFoundError as error:
            raise RequestError(error.message, param="input", code="item_not_found") from None
        if (size := sum(len(found[name]) for name in names)) > self._max_bytes:
            raise RequestError(
                f"the items that input refers to have {size:,} bytes; at most "
                f"{self._max_bytes:,} are accepted, as of a body",
                param="input",
            )
        decoded = {name: msgspec.json.decode(item, type=Item) for name, item in found.items()}
        return [
            decoded[item.id] if item.type == "item_reference" and item.id is not None else item
            for item in items
        ]


def _effective(item: Item) -> Item | None:
    """Return an item without what no prompt shows of it; None if nothing is left.

    A thought is read from its text, else its summary, else what the client carries.
    """
    if item.type != "reasoning":
        return item
    if _shows(item.content or item.summary):
        return msgspec.structs.replace(item, encrypted_content=None)
    return item if item.encrypted_content else None


def _shows(content: str | list[InputPart] | None) -> bool:
    """Return True if there is text, or a part that is refused later."""
    if content is None or isinstance(content, str):
        return bool(content)
    return any((part.refusal if part.type == "refusal" else part.text) != "" for part in content)


def _with_id(item: Item) -> Item:
    if item.id is not None:
        return item
    name = f"{_PREFIXES.get(item.type or '', 'msg')}_{secrets.token_hex(12)}"
    return msgspec.structs.replace(item, id=name)

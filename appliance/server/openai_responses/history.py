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
from appliance.server.models.state import PICTURE_BYTES
from appliance.server.openai_responses.schema import Item
from appliance.server.openai_responses.turns import items_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from appliance.server.openai_responses.schema import InputPart, ResponsesRequest

MAX_COUNT = 1024  # responses of all keys together
MAX_BYTES = 64 << 20  # beside pictures
MAX_PICTURE_BYTES = 4 * PICTURE_BYTES  # in base64; every response has those of its conversation
KEEP_SECONDS = 24 * 3600.0
_ID_BYTES = 128  # of an item's id in a set
MAX_REFERENCES = 1024  # to earlier items, in a request
# Bytes of its items as JSON, without pictures: a context of a million tokens has fewer.
MAX_CONVERSATION = 8 << 20
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
        pictures: bytes of pictures in it, in base64.
        until: when it expires, in monotonic seconds.
    """

    response: bytes
    conversation: bytes
    names: frozenset[str]
    own: slice
    pictures: int
    until: float

    @property
    def size(self) -> int:
        """Bytes beside pictures."""
        whole = len(self.response) + len(self.conversation) + _ID_BYTES * len(self.names)
        return whole - self.pictures

    @property
    def takes(self) -> tuple[int, int, int]:
        """Return what it takes of each limit of the store: responses, bytes, and of pictures."""
        return 1, self.size, self.pictures


# Before the first response of a conversation.
NOTHING = StoredResponse(b"", b"[]", frozenset(), slice(0), 0, 0.0)


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
        pictures: int = 0,
    ) -> None:
        """Store a response, unless it exceeds the whole store; see `StoredResponse`."""
        until = self._clock() + KEEP_SECONDS
        kept = StoredResponse(response, conversation, names, own, pictures, until)
        if kept.size > MAX_BYTES or pictures > MAX_PICTURE_BYTES:
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
        for place, most in enumerate((MAX_COUNT, MAX_BYTES, MAX_PICTURE_BYTES)):
            taken = {
                owner: sum(kept.takes[place] for kept in found.values())
                for owner, found in self._of.items()
            }
            while sum(taken.values()) > most:
                owner = max(taken, key=taken.__getitem__)
                found = self._of[owner]
                oldest = next(name for name, kept in found.items() if kept.takes[place])
                taken[owner] -= found.pop(oldest).takes[place]


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
        pictures: bytes of pictures in them and before, in base64.
        before: the response that the request continues.
    """

    items: Sequence[Item]
    own: bytes
    names: frozenset[str]
    pictures: int
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
        max_bytes: limit of what references stand for, without pictures.

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
        pictures = self._before.pictures + _picture_bytes(items)
        size = len(self._before.conversation) + len(own) - pictures
        for found, most, what in (
            (size, MAX_CONVERSATION, "bytes"),
            (pictures, PICTURE_BYTES, "bytes of pictures, in base64,"),
        ):
            if found > most:
                raise RequestError(
                    f"the conversation has {found:,} {what} with this input; at most {most:,} are"
                    " kept, so begin another, with a summary of this one",
                    param="input" if self._before is NOTHING else "previous_response_id",
                    code="context_length_exceeded",
                )
        names = frozenset(item.id or "" for item in named)
        return ReadInput(items, own, names, pictures, self._before)

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
        decoded: dict[str, Item] = {}
        pictures: dict[str, int] = {}
        size = picture_size = 0
        for name in names:
            if name not in decoded:
                decoded[name] = msgspec.json.decode(found[name], type=Item)
                pictures[name] = _picture_bytes([decoded[name]])
            size += len(found[name]) - pictures[name]
            picture_size += pictures[name]
            if size > self._max_bytes:
                raise _too_large(f"{self._max_bytes:,} bytes")
            if picture_size > PICTURE_BYTES:
                raise _too_large(f"{PICTURE_BYTES:,} bytes of pictures, in base64,")
        return [
            decoded[item.id] if item.type == "item_reference" and item.id is not None else item
            for item in items
        ]


def _too_large(most: str) -> RequestError:
    return RequestError(
        f"the items that input refers to are too large; at most {most} are accepted, as of a body",
        param="input",
    )


def _picture_bytes(items: Sequence[Item]) -> int:
    """Return the bytes of items' pictures, in base64."""
    parts = [
        part
        for item in items
        for given in (item.content, item.output)
        if isinstance(given, list)
        for part in given
    ]
    return sum(len(part.image_url or "") for part in parts if part.type == "input_image")


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

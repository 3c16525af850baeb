"""Keeps responses for a while, and puts together the conversation that a request continues.

In memory only, and private to each API key. Equal pictures of a key's conversations are kept once:
in a conversation a mark stands for each.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from appliance.errors import RequestError
from appliance.server.models.state import PICTURE_BYTES
from appliance.server.openai_responses.schema import Item
from appliance.server.openai_responses.turns import items_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from appliance.server.openai_responses.schema import InputPart, ResponsesRequest

MAX_COUNT = 1024  # responses of all keys together
MAX_BYTES = 64 << 20  # beside pictures
MAX_PICTURE_BYTES = 4 * PICTURE_BYTES  # in base64
KEEP_SECONDS = 24 * 3600.0
_ID_BYTES = 128  # of an item's id in a set
MAX_REFERENCES = 1024  # to earlier items, in a request
# Bytes of its items as JSON, without pictures: a context of a million tokens has fewer.
MAX_CONVERSATION = 8 << 20
_MARK = "kept-picture:"  # before the digest of an image_url; no other is refused so surely
_LEAST_MARKED = 256  # characters of an image_url; most addresses have fewer
_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


class ResponseNotFoundError(RequestError):
    """The response does not exist, was dropped, or belongs to another key."""

    status = 404


class ItemId(msgspec.Struct):
    """An item's id."""

    id: str


names_of = msgspec.json.Decoder(list[ItemId]).decode
raw_items_of = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_items = msgspec.json.Decoder(list[Item]).decode


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and the conversation up to its end, as JSON.

    Attributes:
        conversation: an array of items, earlier turns included, with marks for pictures.
        names: ids of its items.
        own: byte range of its own input's items in it.
        pictures: the image_url of each mark.
        picture_bytes: of the conversation's pictures, in base64; equal ones count each time.
        until: when it expires, in monotonic seconds.
    """

    response: bytes
    conversation: bytes
    names: frozenset[str]
    own: slice
    pictures: Mapping[str, str] = field(default_factory=dict)
    picture_bytes: int = 0
    until: float = 0.0

    @property
    def size(self) -> int:
        """Bytes beside pictures."""
        return len(self.response) + len(self.conversation) + _ID_BYTES * len(self.names)

    @property
    def takes(self) -> tuple[int, int, int]:
        """Return what it takes of each limit of the store; pictures that others have too count."""
        return 1, self.size, len(self.pictures)

    def items(self) -> list[Item]:
        """Return the conversation's items, with their pictures."""
        return [_with_pictures(item, self.pictures) for item in _decode_items(self.conversation)]

    def own_items(self) -> bytes:
        """Return the items of its own input as JSON, with their pictures."""
        own = _decode_items(b"[" + self.conversation[self.own] + b"]")
        return msgspec.json.encode([_with_pictures(item, self.pictures) for item in own])


# Before the first response of a conversation.
NOTHING = StoredResponse(b"", b"[]", frozenset(), slice(0))


class KeyResponses:
    """The responses of one API key, least recently used first, and their pictures.

    Attributes:
        found: by id.
        size: bytes of all beside pictures.
        picture_bytes: of all pictures, equal ones once.
    """

    def __init__(self) -> None:
        self.found: OrderedDict[str, StoredResponse] = OrderedDict()
        self._pictures: dict[str, tuple[str, int]] = {}  # and the responses that have it, by mark
        self.size = 0
        self.picture_bytes = 0

    def add(self, response_id: str, kept: StoredResponse) -> None:
        self.remove(response_id)
        shared = {}
        for mark, url in kept.pictures.items():
            shared[mark], users = self._pictures.get(mark, (url, 0))
            self._pictures[mark] = shared[mark], users + 1
            self.picture_bytes += 0 if users else len(url)
        self.found[response_id] = replace(kept, pictures=shared)
        self.size += kept.size

    def remove(self, response_id: str) -> None:
        """Forget a response, if it is here."""
        kept = self.found.pop(response_id, None)
        if kept is None:
            return
        self.size -= kept.size
        for mark in kept.pictures:
            url, users = self._pictures.pop(mark)
            if users > 1:
                self._pictures[mark] = url, users - 1
            else:
                self.picture_bytes -= len(url)

    @property
    def takes(self) -> tuple[int, int, int]:
        """Return what they take of each limit of the store: responses, bytes, and of pictures."""
        return len(self.found), self.size, self.picture_bytes


class ResponseStore:
    """Stored responses, least recently used first; evicts from the key with the most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of: defaultdict[str, KeyResponses] = defaultdict(KeyResponses)  # by key name

    def keep(self, owner: str, response_id: str, kept: StoredResponse) -> None:
        """Store a response, unless it exceeds the whole store."""
        if kept.size > MAX_BYTES or sum(map(len, kept.pictures.values())) > MAX_PICTURE_BYTES:
            return
        self._of[owner].add(response_id, replace(kept, until=self._clock() + KEEP_SECONDS))
        self._drop()

    def get(self, owner: str, response_id: str) -> StoredResponse:
        """Return a key's response.

        Raises:
            ResponseNotFoundError: it is not stored.
        """
        found = self._of[owner].found
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
        return [one for one in self._of[owner].found.values() if one.until >= now]

    def delete(self, owner: str, response_id: str) -> None:
        """Delete a response, or raise ResponseNotFoundError."""
        self.get(owner, response_id)
        self._of[owner].remove(response_id)

    def _drop(self) -> None:
        now = self._clock()
        for one in self._of.values():
            for name in [name for name, kept in one.found.items() if kept.until < now]:
                one.remove(name)
        for place, most in enumerate((MAX_COUNT, MAX_BYTES, MAX_PICTURE_BYTES)):
            while sum(one.takes[place] for one in self._of.values()) > most:
                largest = max(self._of.values(), key=lambda one: one.takes[place])
                largest.remove(
                    next(name for name, kept in largest.found.items() if kept.takes[place])
                )


def find_items(
    kept: Sequence[StoredResponse], names: Sequence[str]
) -> dict[str, tuple[bytes, StoredResponse]]:
    """Return items of conversations as JSON, by id, and where each is: the latest that has it.

    Raises:
        ResponseNotFoundError: an item is in none of them.
    """
    found: dict[str, tuple[bytes, StoredResponse]] = {}
    wanted = set(names)
    for holder in reversed(kept):
        here = wanted & holder.names
        if not here:
            continue
        items = raw_items_of(holder.conversation)
        for named, item in zip(names_of(holder.conversation), items, strict=True):
            if named.id in here:
                found[named.id] = bytes(item), holder
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
        own: these items as a JSON array, each with an id, and marks for pictures.
        names: their ids.
        pictures: the image_url of each mark, in them and before.
        picture_bytes: of the pictures in them and before, see `StoredResponse`.
        before: the response that the request continues.
    """

    items: Sequence[Item]
    own: bytes
    names: frozenset[str]
    pictures: Mapping[str, str]
    picture_bytes: int
    before: StoredResponse

    @property
    def is_open(self) -> bool:
        """True if its last item may be continued: a message that was cut, or has no status."""
        if self.items:
            return self.items[-1].status != "completed"
        kept = self.before.response
        return not kept or msgspec.json.decode(kept, type=_Status).status != "completed"

    def kept_with(self, response: bytes, output: bytes, names: Iterable[str]) -> StoredResponse:
        """Return the response to keep.

        Args:
            output: its items, as a JSON array.
            names: their ids.
        """
        inner = [part[1:-1] for part in (self.before.conversation, self.own, output)]
        begin = 1 + len(inner[0]) + (1 if inner[0] and inner[1] else 0)
        return StoredResponse(
            response,
            b"[" + b",".join(filter(None, inner)) + b"]",
            self.names.union(self.before.names, names),
            slice(begin, begin + len(inner[1])),
            self.pictures,
            self.picture_bytes,
        )


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
        pictures = dict(self._before.pictures)
        own = msgspec.json.encode([_with_marks(item, pictures) for item in named])
        picture_bytes = self._before.picture_bytes + _picture_bytes(items)
        for found, most, what in (
            (len(self._before.conversation) + len(own), MAX_CONVERSATION, "bytes"),
            (picture_bytes, PICTURE_BYTES, "bytes of pictures, in base64,"),
        ):
            if found > most:
                raise RequestError(
                    f"the conversation has {found:,} {what} with this input; at most {most:,} are"
                    " kept, so begin another, with a summary of this one",
                    param="input" if self._before is NOTHING else "previous_response_id",
                    code="context_length_exceeded",
                )
        names = frozenset(item.id or "" for item in named)
        return ReadInput(items, own, names, pictures, picture_bytes, self._before)

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
                item, holder = found[name]
                shown = msgspec.json.decode(item, type=Item)
                decoded[name] = _with_pictures(shown, holder.pictures)
                pictures[name] = _picture_bytes([decoded[name]])
            size += len(found[name][0])
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
    return sum(len(url) for item in items for url in _marked(item) if len(url) >= _LEAST_MARKED)


def _marked(item: Item) -> list[str]:
    """Return the image_url of each of an item's parts that has one."""
    lists = [given for given in (item.content, item.output) if isinstance(given, list)]
    return [part.image_url for parts in lists for part in parts if part.image_url]


def _with_marks(item: Item, pictures: dict[str, str]) -> Item:
    """Return an item with marks for its pictures, whose image_url is added by mark."""
    marks = {}
    for url in _marked(item):
        if len(url) >= _LEAST_MARKED:
            marks[url] = _MARK + blake2b(url.encode(), digest_size=32).hexdigest()
            pictures.setdefault(marks[url], url)
    return _with_pictures(item, marks)


def _with_pictures(item: Item, urls: Mapping[str, str]) -> Item:
    """Return an item with another image_url in the place of each that is a key."""
    if urls.keys().isdisjoint(_marked(item)):
        return item
    found = {
        name: [
            msgspec.structs.replace(part, image_url=urls.get(part.image_url or "", part.image_url))
            for part in given
        ]
        for name, given in (("content", item.content), ("output", item.output))
        if isinstance(given, list)
    }
    return msgspec.structs.replace(item, **found)


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

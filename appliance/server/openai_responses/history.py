"""Puts together the conversation that a request continues, within limits."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from appliance.errors import RequestError
from appliance.server.openai_responses.schema import Item
from appliance.server.openai_responses.store import (
    NOTHING,
    ResponseNotFoundError,
    ResponseStore,
    StoredResponse,
    find_items,
)
from appliance.server.openai_responses.turns import items_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.server.openai_responses.schema import InputPart, ResponsesRequest

MAX_REFERENCES = 1024
MAX_CONVERSATION = 8 << 20  # bytes of its items as JSON: a context of a million tokens has fewer
_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


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

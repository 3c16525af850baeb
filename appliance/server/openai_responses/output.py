"""Builds the items of an answer as its parts arrive."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from appliance.dialects import CallArguments, CallBegin, Content, Part, Thought
from appliance.server.openai_responses.answers import (
    BUILT_IN_CALLS,
    CallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from appliance.server.openai_responses.built_in import call_item, fill
from appliance.server.openai_responses.carried import carried
from appliance.server.requests.tools import new_call_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from appliance.server.openai.answers import TokenLogprob

_KINDS: dict[type[Part], tuple[type[OutputItem], ...]] = {
    Content: (MessageItem,),
    Thought: (ReasoningItem,),
    CallArguments: (CallItem, *BUILT_IN_CALLS),
}


class OutputItems:
    """Makes items from parts; a run of one kind is one item.

    Args:
        names: namespace and name of each tool in one, by the model's name for it.
        kinds: kind of each tool that is no function, by that name; see `built_in`.
        short_ids: use the short call ids that some templates require.
        carries: add `encrypted_content` to thoughts.
    """

    def __init__(
        self,
        names: Mapping[str, tuple[str, str]],
        kinds: Mapping[str, str],
        *,
        short_ids: bool,
        carries: bool,
    ) -> None:
        self._logprobs: list[TokenLogprob] = []  # of the open item
        self.items: list[OutputItem] = []  # the last one may be open
        self.is_open = False
        self._names = names
        self._kinds = kinds
        self._short_ids = short_ids
        self._carries = carries
        self._texts: list[str] = []  # of the open item

    def begins(self, part: Part) -> bool:
        if isinstance(part, CallBegin) or not self.is_open:
            return True
        return not isinstance(self.items[-1], _KINDS[type(part)])

    def push(self, part: Part, logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Add a part with its tokens' log probabilities, closing the item that it ends."""
        if self.begins(part):
            self.close("completed")
            self.items.append(self._item(part))
            self.is_open = True
        if not isinstance(part, CallBegin):
            self._texts.append(part.text)
        self._logprobs += logprobs

    def close(self, status: str) -> None:
        """End the open item.

        Args:
            status: completed, or incomplete if the answer was cut off in it.
        """
        if not self.is_open:
            return
        self.is_open = False
        text = "".join(self._texts)
        self._texts.clear()
        logprobs, self._logprobs = self._logprobs, []
        item = self.items[-1]
        item.status = "completed" if status == "completed" else "incomplete"
        match item:
            case MessageItem():
                item.content = [OutputText(text=text, logprobs=logprobs)]
            case ReasoningItem():
                item.content = [ReasoningText(text=text)]
                if self._carries:
                    item.encrypted_content = carried(text)
            case CallItem():
                item.arguments = text
            case _:
                fill(item, text, item.status)

    def _item(self, part: Part) -> OutputItem:
        number = secrets.token_hex(12)
        if isinstance(part, CallBegin):
            call_id = new_call_id(short=self._short_ids)
            if part.name in self._kinds:
                return call_item(self._kinds[part.name], part.name, number, call_id)
            call = CallItem(id=f"fc_{number}", call_id=call_id, name=part.name)
            if part.name in self._names:
                call.namespace, call.name = self._names[part.name]
            return call
        if isinstance(part, Thought):
            return ReasoningItem(id=f"rs_{number}", content=[])
        return MessageItem(id=f"msg_{number}", content=[])

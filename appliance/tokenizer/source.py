"""The parts of a tokenizer, independent of its file format."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tokenizers import AddedToken

from appliance.model_files.retrieval_recipe import NOTHING_SAID, RetrievalRecipe
from appliance.model_files.sampling_defaults import NOTHING_RECOMMENDED, SamplingDefaults

if TYPE_CHECKING:
    import tokenizers

    from appliance.tokenizer.chat_template import ChatTemplate

# Control tokens that end a turn in several families. Some files omit them from the end-of-sequence
# ids, and a base model's file may list another one.
END_OF_TURN = (
    "<|im_end|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_text|>",
    "<turn|>",
    "<|return|>",
    "<|call|>",
    "<|tool_response>",
    "<end_of_utterance>",
    "[EOT]",
    "[e~[",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
# Harmony's, where a turn is several messages, each with its own end.
_MESSAGE_MARK, _MESSAGE_END = "<|message|>", "<|end|>"


class Encoder(Protocol):
    """Encodes texts in another process."""

    separator: str  # becomes a single token there, too

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of each text."""
        ...

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a pair, and 1 for each that is a control token."""
        ...

    def rest(self) -> None:
        """End an idle process; the next text starts a new one."""
        ...

    def close(self) -> None:
        """End the process; the next text starts a new one."""
        ...


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """A tokenizer as a file describes it.

    Attributes:
        bos_token_id: the token that begins a text, if there is one.
        chat_template: None for a base model.
        retrieval: how the model embeds texts and judges relevance.
        encoder: replaces the backend's encoder if its rules are untrusted.
        split_special_tokens: control tokens in texts and rendered chats are plain text.
        notes: what was assumed where the file is silent or wrong, for the banner.
    """

    backend: tokenizers.Tokenizer
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: ChatTemplate | None
    sampling: SamplingDefaults = NOTHING_RECOMMENDED
    retrieval: RetrievalRecipe = NOTHING_SAID
    encoder: Encoder | None = None
    split_special_tokens: bool = False
    notes: tuple[str, ...] = ()


def new_separator() -> str:
    """Return a random separator that no other text contains."""
    return f"\uf8ff{secrets.token_hex(16)}\uf8ff"


def with_separator(backend: tokenizers.Tokenizer, separator: str) -> tokenizers.Tokenizer:
    """Make the backend recognize the separator, and treat control tokens as plain text."""
    backend.encode_special_tokens = True
    backend.add_tokens([AddedToken(separator, normalized=False, special=False)])
    return backend


def with_end_of_turn(backend: tokenizers.Tokenizer, named: Iterable[int | None]) -> tuple[int, ...]:
    """Return a file's end-of-sequence ids, in its order, followed by the end-of-turn tokens."""
    added = backend.get_added_tokens_decoder()
    special = {token.content: token_id for token_id, token in added.items() if token.special}
    ends = [end for end in END_OF_TURN if end != _MESSAGE_END or _MESSAGE_MARK not in special]
    turn_ends = [special[content] for content in ends if content in special]
    return tuple(dict.fromkeys([*(i for i in named if i is not None), *turn_ends]))

"""What a tokenizer is made of, whatever kind of file it came from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.sampling_defaults import NOTHING_RECOMMENDED, SamplingDefaults

if TYPE_CHECKING:
    import tokenizers

    from appliance.tokenizer.chat_template import ChatTemplate

# Control tokens with which models of several families end their turn. A file does not always name
# them as end-of-sequence, and a base model's file may name another one.
END_OF_TURN = (
    "<|im_end|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_text|>",
)


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """A tokenizer as a file describes it.

    `sampling` lies in the same files, which take a while to read a second time.
    """

    backend: tokenizers.Tokenizer
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: ChatTemplate | None
    sampling: SamplingDefaults = NOTHING_RECOMMENDED


def with_end_of_turn(backend: tokenizers.Tokenizer, named: Iterable[int | None]) -> tuple[int, ...]:
    """End-of-sequence ids that a file names, in its order, and then the end-of-turn tokens."""
    added = backend.get_added_tokens_decoder()
    special = {token.content: token_id for token_id, token in added.items() if token.special}
    turn_ends = [special[content] for content in END_OF_TURN if content in special]
    return tuple(dict.fromkeys([*(i for i in named if i is not None), *turn_ends]))

"""The attention that transformers' modules call: it hands all to the step that they are given.

Transformers knows it under two names. Under one it also asks for masks, which then say in words
what a row sees; under the other it builds none.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch

from appliance.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

SERVING = "appliance"
PROBING = "appliance-probe"


class AttentionStep(Protocol):
    """A step of which modules ask attention."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,  # (1, num_heads, num_tokens, head_dim)
        key: Tensor,  # (1, num_kv_heads, num_tokens, head_dim)
        value: Tensor,
        mask: object,
        settings: dict[str, Any],
    ) -> Tensor:  # (1, num_tokens, num_heads, head_dim)
        """Attend from a module; `settings` are the further arguments that it gave."""
        ...


# Not every class hands arguments on to its attention, so the step is found here.
_STEP: ContextVar[AttentionStep] = ContextVar("step")


@dataclass(frozen=True, slots=True)
class SeenPositions:
    """A mask in words: a row sees this many latest positions, its own included; None: all."""

    window: int | None


@contextmanager
def running(step: AttentionStep) -> Iterator[None]:
    """Make modules that are called meanwhile, in this thread, attend by a step."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


@cache
def register() -> None:
    """Make both names known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(SERVING, _attend)
    AttentionInterface.register(PROBING, _attend)
    AttentionMaskInterface.register(PROBING, _mask_in_words)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    return _STEP.get().attend(module, query, key, value, attention_mask, settings), None


def _mask_in_words(
    *, kv_length: int, mask_function: Callable[..., Any], config: Any = None, **_: Any
) -> SeenPositions:
    length = max(kv_length, getattr(config, "max_position_embeddings", None) or 0)
    return seen_positions(mask_function, length)


def seen_positions(mask_function: Callable[..., Any], length: int) -> SeenPositions:
    """Find the window of a mask by asking what some rows of a sequence see.

    Args:
        mask_function: (sequence, head, position of a query, positions of keys) -> booleans.
        length: of the sequence.

    Raises:
        UnsupportedModelError: a row sees something else than the latest positions.
    """
    keys, first = torch.arange(length, device="cpu"), torch.tensor(0, device="cpu")

    def seen(position: int) -> Tensor:
        found = mask_function(first, first, torch.tensor(position, device="cpu"), keys)
        return torch.as_tensor(found).expand(length)

    last = length - 1
    window = int(seen(last).sum())
    for position in {0, 1, window - 1, window, length // 3, length // 2, last - 1, last}:
        if not 0 <= position < length:
            continue
        wanted = (keys <= position) & (keys > position - window)
        if not torch.equal(seen(position), wanted):
            raise UnsupportedModelError(
                f"its attention mask shows position {position} of {length} something else than "
                f"the latest {window} positions, as chunks or a prefix that sees ahead would"
            )
    return SeenPositions(None if window == length else window)

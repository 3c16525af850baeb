"""Caches of transformers' own classes, one for each sequence, and the executor that keeps them.

For models whose layers do not ask the engine's attention: recurrent ones, positions that are
compressed or indexed, biases of positions, states that layers hand to each other. A step runs one
sequence after the other.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from appliance.errors import UnsupportedModelError
from appliance.model.fallback.decoder import LaidOutModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn

    from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
    from appliance.kernels.rows.ragged import RaggedBatch

logger = logging.getLogger(__name__)

ONE_BY_ONE_NOTE = (
    "{} of transformers goes on with a text right only token by token, as its answers with several"
    " at once differ: what lies behind the first step of a prompt is read that way, slowly"
)
# What a class computes is tried on so many tokens before it serves.
_TRIED = 24
# What a tensor may keep alive, in its own sizes: a window keeps one token more.
_SPARE = 1.25
# Medians of errors, in lengths of the vector: rounding and the choice of other experts stay below
# the first, another past is above it; answers that do not look back differ by more than the second.
_OTHER_PAST, _OTHER_ANSWERS = 0.05, 0.3
_SEEN_AHEAD = 0.01  # of the same rows, by what stands behind them


class Held(NamedTuple):
    """The past of a sequence.

    Attributes:
        cache: of transformers' class; None before the first token.
        inside: what its modules keep in attributes of their own, see `Attributes`.
        length: tokens.
    """

    cache: Any
    inside: tuple[Any, ...]
    length: int


@dataclass(frozen=True, slots=True)
class Attributes:
    """Attributes in which modules keep what they have read, beside the cache.

    Attributes:
        places: module and name of each.
        first: their values before the first token.
    """

    places: tuple[tuple[nn.Module, str], ...] = ()
    first: tuple[Any, ...] = ()

    def put(self, values: tuple[Any, ...]) -> None:
        for (module, name), value in zip(self.places, values, strict=True):
            setattr(module, name, value)

    def take(self) -> tuple[Any, ...]:
        """Return the values, and leave the first ones."""
        values = tuple(getattr(module, name) for module, name in self.places)
        self.put(self.first)
        return values


@dataclass(frozen=True, slots=True)
class Begun:
    """A body of transformers with its cache, ready to read tokens.

    Attributes:
        body: all up to the head.
        parameter: name of its argument and of its output that is the cache.
        first: makes a cache as `generate` does; None where the body makes its own.
        shared: settings that caches refer to and that no copy needs.
        inside: what lies beside the cache.
    """

    body: nn.Module
    parameter: str
    first: Callable[[], Any] | None
    shared: tuple[Any, ...]
    inside: Attributes = field(default_factory=Attributes)

    def read(self, ids: Tensor, held: Held | None) -> tuple[Tensor, Held]:
        """Read the next tokens of a sequence.

        Args:
            ids: (num_rows,) int64.
            held: what the sequence has behind it; None at its beginning. It is not valid any more.

        Returns:
            Hidden states (num_rows, hidden_size), and what it has behind it now.
        """
        cache = held.cache if held is not None else None if self.first is None else self.first()
        self.inside.put(self.inside.first if held is None else held.inside)
        output = self.body(input_ids=ids.unsqueeze(0), use_cache=True, **{self.parameter: cache})
        after = getattr(output, self.parameter, None)
        length = len(ids) + (0 if held is None else held.length)
        after = cache if after is None else after
        inside = list(self.inside.take())
        _cut_loose([after, inside])
        return output.last_hidden_state[0], Held(after, tuple(inside), length)

    def copied(self, held: Held) -> Held:
        """Return the same for another sequence to go on from."""
        known = {id(one): one for one in self.shared}
        return copy.deepcopy(held, known)


def begin(model: Any, body: nn.Module) -> Begun:
    """Find out how a model takes its cache.

    Raises:
        UnsupportedModelError: it takes none.
    """
    import inspect

    from transformers import DynamicCache

    config = model.config.get_text_config(decoder=True)
    takes = inspect.signature(body.forward).parameters
    parameter = next((name for name in ("cache", "state") if name in takes), None)
    if parameter is None:
        raise UnsupportedModelError(f"{type(body).__name__} takes no cache")

    def make() -> Any:
        return DynamicCache(config=config)

    is_usual = parameter == "cache" and model._supports_default_dynamic_cache()
    return Begun(body, parameter, make if is_usual else None, (config, model.config))


class OwnCaches:
    """The caches of all sequences that run, by slot; it stands where others have blocks.

    Blocks only count here: their number bounds what all sequences hold together.

    Attributes:
        held: by slot.
        block_bytes: that a block's tokens add to a cache.
    """

    open_bytes = 0

    def __init__(self, begun: Begun, block_size: int, block_bytes: int) -> None:
        self.block_size = block_size
        self.block_bytes = block_bytes
        self.held: dict[int, Held] = {}
        self._begun = begun

    @property
    def states(self) -> Tensor:
        """No rows of bytes: see `held`."""
        raise AssertionError("caches of transformers' classes are no rows of bytes")

    @torch.inference_mode()
    def copy_state(self, source: int, destination: int) -> None:
        """Let the sequence of a slot go on where that of another is."""
        self.held[destination] = self._begun.copied(self.held[source])

    def drop_state(self, slot: int) -> None:
        """Forget what a slot holds."""
        self.held.pop(slot, None)

    def read_block(self, block: int, open_block: int = -1) -> bytes:
        raise AssertionError("no block leaves caches of transformers' classes")

    def write_block(
        self, block: int, content: bytes | bytearray | memoryview, open_block: int = -1
    ) -> None:
        raise AssertionError("no block comes back to caches of transformers' classes")

    def copy_blocks(self, sources: list[int], destinations: list[int]) -> None:
        """Copy nothing: a copy of the state has all."""

    def copy_open(self, sources: list[int], destinations: list[int]) -> None:
        """Copy nothing: none is sealed."""


@dataclass(frozen=True, slots=True)
class OwnCacheDecoder(LaidOutModel):
    """Its sequences keep caches of its class.

    Attributes:
        begun: all up to the head.
        on_pass: called after each pass, to show progress in a long step.
        several: a pass that goes on with a text may hold several rows.
    """

    begun: Begun
    on_pass: Callable[[], None]
    several: bool = True

    def notes(self) -> tuple[str, ...]:
        """Say what was found when the weights were tried."""
        return () if self.several else (ONE_BY_ONE_NOTE.format(type(self.head).__name__),)

    def allocate_cache(
        self,
        format: KVFormat | Sequence[LayerPrecision],
        *,
        num_blocks: int,
        block_size: int,
        num_open: int = 0,
        num_states: int = 0,
    ) -> OwnCaches:
        assert self.spec.own_cache is not None
        of_token = self.spec.own_cache.sizes(self.dtype.itemsize).token_bytes
        return OwnCaches(self.begun, block_size, block_size * of_token)

    @torch.inference_mode()
    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        cache: OwnCaches,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run one step up to the head, one sequence after the other."""
        assert batch.host_state_slots is not None, "the batch names no slots"
        found, first = [], 0
        each = zip(
            batch.host_state_slots, batch.host_query_lens, batch.host_context_lens, strict=True
        )
        for slot, count, context in each:
            if not count:
                continue
            held = cache.held.pop(slot, None) if context > count else None
            before = 0 if held is None else held.length
            assert before == context - count, f"slot {slot} holds {before} tokens, not {context}"
            for ids in self._cut(token_ids[first : first + count], before):
                with self.operations.modules_run(len(ids)):
                    hidden, held = self.begun.read(ids, held)
                found.append(hidden)
                self.on_pass()
            assert held is not None
            cache.held[slot] = held
            first += count
        hidden = torch.cat(found)
        return hidden if rows is None else hidden[rows]

    def _cut(self, ids: Tensor, before: int) -> Iterator[Tensor]:
        """Cut a sequence's rows into passes."""
        assert self.spec.own_cache is not None
        first = 0
        while first < len(ids):
            most = self.spec.own_cache.rows_at(before + len(ids))
            if before + first and not self.several:
                most = 1
            yield ids[first : first + most]
            first += most


@torch.inference_mode()
def goes_on_with_several(begun: Begun, vocab_size: int, device: torch.device) -> bool:
    """Try the weights: whether a pass that goes on with a text may hold several rows.

    A class may forget its state where it is given more than one token after others, as Mamba's
    does: then answers are those of another text, without a word.

    Raises:
        UnsupportedModelError: a text read token by token is not the text read at once, as where
            positions see those behind them.
    """
    ids = (torch.arange(_TRIED, device=device) * 7919 + 11) % vocab_size
    half = _TRIED // 2
    whole, _ = begun.read(ids, None)
    other, _ = begun.read(torch.cat([ids[:half], (ids[half:] + 1) % vocab_size]), None)
    if (error := _difference(other[:half], whole[:half])) > _SEEN_AHEAD:
        raise UnsupportedModelError(
            f"{type(begun.body).__name__} of transformers, tried on {_TRIED} tokens, reads the"
            f" first half of a text by what follows it ({error:.0%} apart): it attends in both"
            " directions, and what it says would depend on how a text is cut; choose another model"
        )
    start, held = begun.read(ids[:half], None)
    at_once, _ = begun.read(ids[half:], begun.copied(held))
    rows = []
    for place in range(half, _TRIED):
        row, held = begun.read(ids[place : place + 1], held)
        rows.append(row)
    singly = torch.cat(rows)
    for name, found, wanted in (
        ("the first half of a text", start, whole[:half]),
        ("a text token by token", singly, whole[half:]),
    ):
        if (error := _difference(found, wanted)) > _OTHER_ANSWERS:
            raise UnsupportedModelError(
                f"{type(begun.body).__name__} of transformers, tried on {_TRIED} tokens, reads"
                f" {name} otherwise than the whole at once ({error:.0%} apart): what it says would"
                " depend on how a text is cut; choose another model"
            )
    error = _difference(at_once, singly)
    if error > _OTHER_PAST:
        logger.warning("several rows at once differ by %.0f %% from single ones", 100 * error)
    return error <= _OTHER_PAST


def _difference(found: Tensor, wanted: Tensor) -> float:
    """Return the median over rows of the distance, in lengths of what is wanted."""
    apart = (found.float() - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1)
    return float(apart.nan_to_num(torch.inf).median())


def tensors_in(found: object) -> Iterator[tuple[Any, Any, Tensor]]:
    """Find the tensors of a cache: what holds each, its name or number there, and itself."""
    seen: set[int] = set()
    waiting = [found]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, torch.nn.Module):
            continue
        seen.add(id(one))
        if isinstance(one, dict):
            items: Any = list(one.items())
        elif isinstance(one, list | tuple):
            items = list(enumerate(one))
        elif type(one).__module__.startswith("transformers.") and hasattr(one, "__dict__"):
            if hasattr(one, "get_text_config"):
                continue  # settings
            items = list(vars(one).items())
        else:
            continue
        for name, value in items:
            if isinstance(value, torch.Tensor):
                yield one, name, value
            else:
                waiting.append(value)


def _cut_loose(cache: object) -> None:
    """Copy the tensors that are a part of a larger one, which they would keep alive."""
    for holder, name, tensor in list(tensors_in(cache)):
        is_most = tensor.untyped_storage().nbytes() <= _SPARE * tensor.nbytes
        if is_most or isinstance(holder, tuple):
            continue
        own = tensor.clone()
        if isinstance(holder, dict | list):
            holder[name] = own
        else:
            setattr(holder, name, own)

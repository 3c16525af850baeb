"""Executors of transformers' modules: with the engine's linears and attention, and its cache.

The attention that the modules call hands all to the step that they are given. Transformers knows it
under two names. Under one it also asks for masks, which then say in words what a row sees; under
the other it builds none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch

from appliance.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
    from appliance.kernels.rows.ragged import RaggedBatch
    from appliance.model.adapters.adapter import AdapterSlots
    from appliance.model.adapters.targets import AdapterTarget
    from appliance.model.fallback.operations import Attend, Operations
    from appliance.model.spec import AttentionSpec, DecoderSpec

SERVING = "appliance"
PROBING = "appliance-probe"


@dataclass(frozen=True, slots=True)
class LaidOutModel(ABC):
    """A model of transformers whose weights are laid out, whatever cache its layers have.

    Attributes:
        head: the model itself, with what it is given in the place of its body.
        weight_bytes: bytes of the weights as laid out.
        weight_format: in words.
    """

    spec: DecoderSpec
    operations: Operations
    head: nn.Module
    weight_bytes: int
    weight_format: str

    @property
    def dtype(self) -> torch.dtype:
        return self.operations.dtype

    @property
    def device(self) -> torch.device:
        return self.operations.device

    @property
    def is_enqueued(self) -> bool:
        """False: its modules may look at numbers, which no captured graph could."""
        return False

    def adapter_slots(
        self, targets: Mapping[str, AdapterTarget], count: int, most_ranks: int
    ) -> AdapterSlots:
        raise ConfigError(
            f"no adapters can be had with {self.spec.architecture}: leave out --lora and --lora-dir"
        )

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        cache: Any,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run one step; see `Executor.forward`."""
        return self.logits(self.hidden(token_ids, positions, batch, cache, rows))

    @abstractmethod
    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        cache: Any,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run one step up to the head; see `Executor.hidden`."""

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Run the head; see `Executor.logits`."""
        if not hidden.shape[0]:
            return hidden.new_empty((0, self.spec.vocab_size), dtype=torch.float32)
        with self.operations.modules_run(len(hidden)):
            output = self.head(inputs_embeds=hidden.unsqueeze(0), use_cache=False)
        logits: Tensor = output.logits[0].float()
        return logits.contiguous()


@dataclass(frozen=True, slots=True)
class FallbackDecoder(LaidOutModel):
    """Its layers attend over the engine's cache; it holds none.

    Attributes:
        body: all up to the head.
        places: layer of the cache, and arithmetic, of each module that attends.
        on_layer: called in each layer, to show progress in a long step.
    """

    body: nn.Module
    places: Mapping[nn.Module, tuple[int, AttentionSpec]]
    on_layer: Callable[[], None]

    def allocate_cache(
        self,
        format: KVFormat | Sequence[LayerPrecision],
        *,
        num_blocks: int,
        block_size: int,
        num_open: int = 0,
        num_states: int = 0,
    ) -> Any:
        return self.operations.allocate_cache(
            self.spec, format, num_blocks=num_blocks, block_size=block_size, num_open=num_open
        )

    @torch.inference_mode()
    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        cache: Any,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run one step up to the head: all rows as one sequence, which only attention divides."""
        attention = self.operations.begin(token_ids, positions, batch, cache)
        step = _Step(self.places, attention, self.on_layer)
        with self.operations.modules_run(len(token_ids)), running(step):
            output = self.body(
                input_ids=token_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden if rows is None else hidden[rows]


@dataclass(frozen=True, slots=True)
class _Step:
    """An `AttentionStep` over the cache."""

    places: Mapping[nn.Module, tuple[int, AttentionSpec]]
    attention: Attend
    on_layer: Callable[[], None]

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: object,
        settings: dict[str, Any],
    ) -> Tensor:
        layer, spec = self.places[module]
        width = value.shape[3]
        if width < spec.head_dim:  # zeros of values add nothing
            value = torch.nn.functional.pad(value, (0, spec.head_dim - width))
        qkv = torch.cat([heads[0].transpose(0, 1) for heads in (query, key, value)], dim=1)
        attended = self.attention(layer, spec, qkv, settings.get("s_aux"))
        self.on_layer()
        return attended.unsqueeze(0)[..., :width]


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

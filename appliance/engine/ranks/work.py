"""A rank's part of a step, alike in rank 0 and the others."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from appliance.engine.ranks.shared_step import RankStep
    from appliance.kernels.cpu.cache import NativeCache
    from appliance.kernels.cpu.group import NativeGroup
    from appliance.model.native import NativeDecoder

Held = TypeVar("Held", contravariant=True)  # the cache of what executes the part


class RankWork(Protocol[Held]):
    """One rank's part of each step."""

    def run(self, step: RankStep, cache: Held) -> Tensor | None:
        """Run its part; rank 0 returns the step's logits or hidden states."""
        ...

    def head(self, hidden: Tensor) -> Tensor | None:
        """Run its part of the head; rank 0 returns the logits."""
        ...


class SharedLayers:
    """A share of every layer, whose results the ranks sum; see `RankWork`.

    Between two steps rank 0 may run models that only it has.
    """

    def __init__(self, decoder: NativeDecoder, group: NativeGroup) -> None:
        self._decoder = decoder
        self._group = group

    def run(self, step: RankStep, cache: NativeCache) -> Tensor | None:
        run = self._decoder.forward if step.wants_logits else self._decoder.hidden
        with self._joined():
            return run(step.token_ids, step.positions, step.batch, cache, step.rows)

    def head(self, hidden: Tensor) -> Tensor | None:
        with self._joined():
            return self._decoder.logits(hidden)

    @contextlib.contextmanager
    def _joined(self) -> Iterator[None]:
        engine = self._decoder.engine
        engine.join(self._group.handle)
        try:
            yield
        finally:
            engine.join(None)

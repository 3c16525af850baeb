"""The engine's interface to a runner: launch a plan, collect its samples later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from appliance.engine.nouns.moves import SavedBlock
    from appliance.engine.nouns.plan import Plan, Sampled


class Runner(Protocol):
    """Runs plans in launch order; changes no sequence.

    Attributes:
        depth: plans that may be in flight when the next one is launched. If positive, a plan may
            hold rows whose token the previous plan samples.
        seconds: time of the last step in model and sampler.
    """

    @property
    def depth(self) -> int: ...
    @property
    def seconds(self) -> float: ...

    def launch(self, plan: Plan) -> tuple[SavedBlock, ...]:
        """Start a plan, with its saves, copies and loads in this order.

        Returns:
            The plan's saves, in its order.

        Raises:
            MemoryError: the device has too little memory.
            Exception: any error of the model.
        """
        ...

    def collect(self) -> list[Sampled]:
        """Wait for the oldest plan in flight; return a result per yielding entry, in order."""
        ...

    def discard(self) -> None: ...

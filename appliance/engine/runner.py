"""The engine's interface to a runner: launch a plan, collect its samples later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from appliance.engine.moves import SavedBlock
    from appliance.engine.plan import Plan, Sampled


class Runner(Protocol):
    """Runs plans in the order in which they are launched; changes no sequence.

    Attributes:
        depth: plans that may be in flight when the next one is launched. With one or more, a plan
            may hold rows whose token the plan before samples.
        seconds: spent in model and sampler by the last step.
    """

    @property
    def depth(self) -> int: ...
    @property
    def seconds(self) -> float: ...

    def launch(self, plan: Plan) -> tuple[SavedBlock, ...]:
        """Start a plan, with its saves, copies and loads in this order.

        May raise MemoryError, and any error of the model.

        Returns:
            The plan's saves, in its order.
        """
        ...

    def collect(self) -> list[Sampled]:
        """Wait for the oldest plan in flight: in its order a result for each that yields one."""
        ...

    def discard(self) -> None: ...

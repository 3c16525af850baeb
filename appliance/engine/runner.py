"""What the engine asks of whoever runs plans: enqueue one, and later what it sampled."""

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
        seconds: inside the model and the sampler, for the last step.
    """

    @property
    def depth(self) -> int: ...  # noqa: D102
    @property
    def seconds(self) -> float: ...  # noqa: D102

    def launch(self, plan: Plan) -> tuple[SavedBlock, ...]:
        """Start a plan, with its saves, copies and loads in this order.

        May raise MemoryError, and whatever else the model raises.

        Returns:
            What the plan saves, in its order.
        """
        ...

    def collect(self) -> list[Sampled]:
        """Wait for the oldest plan in flight: in its order a result for each that yields one."""
        ...

    def discard(self) -> None:
        """Forget all plans in flight."""
        ...

    @property
    def has_idle_work(self) -> bool:
        """Whether there is something for a moment without requests."""
        ...

    def idle(self) -> None:
        """Do a short piece of it."""
        ...

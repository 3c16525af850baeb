from __future__ import annotations

from support.simulation.plan_judge import num_results

from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.nouns.moves import BlockCopy
from appliance.engine.nouns.plan import Plan
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.nouns.sequence import Sequence
from appliance.engine.scheduling.plan_builder import PlanBuilder
from appliance.engine.tiers.host_memory import Arrival, HostBlock
from appliance.engine.tiers.tiers import Tiers


def sequence(num_tokens: int, num_computed: int) -> Sequence:
    request = Request(
        request_id="r", prompt_token_ids=tuple(range(num_tokens)), sampling=SamplingParams()
    )
    return Sequence(request, num_computed=num_computed)


def finished(builder: PlanBuilder) -> Plan:
    blocks = BlockManager(4, 4)
    return builder.finished(blocks, Tiers.none(blocks))


def test_single_rows_come_first_and_only_last_rows_sample() -> None:
    builder = PlanBuilder(budget=20)
    chunk, rest, decode = sequence(9, 2), sequence(9, 2), sequence(9, 8)
    builder.add(chunk, 3, ())
    builder.add(rest, 7, ())
    builder.add(decode, 1, ())
    plan = finished(builder)
    assert builder.budget == 9
    assert [(e.sequence, e.start, e.num_tokens, e.samples) for e in plan.scheduled] == [
        (decode, 8, 1, True),
        (chunk, 2, 3, False),
        (rest, 2, 7, True),
    ]
    assert (plan.num_tokens, num_results(plan)) == (11, 2)


def test_what_is_taken_back_leaves_nothing() -> None:
    builder = PlanBuilder(budget=8)
    victim, other = sequence(9, 4), sequence(9, 8)
    builder.add(victim, 5, (BlockCopy(1, 2),))
    builder.arrivals[victim] = [Arrival(3, HostBlock(), -1)]
    builder.take_back(victim)
    builder.take_back(other)
    assert builder.budget == 8
    assert finished(builder) == Plan(())

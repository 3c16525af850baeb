"""Count the prefix cache's hits of agents on replicas, beside one server and round robin.

    scripts/benchmark replicas --out scripts/bench/results/replicas.json

Agents hold growing conversations: each turn sends all of it again, with the answer and a tool's
output of some length, after a pause in which the tool runs. They share a system prompt. An agent
that is done is followed by one with a new conversation. Scheduler, block manager and prefix cache
are the engine's, one of each a replica; the model is left out, so nothing is timed and the result
is the same on any machine. A step of every replica is one tick.

One server is counted twice: with the KV memory, sequences and rows of all replicas together, to
which the ratio refers, and with those of one replica. Ideal is the most that any cache could serve:
all that a conversation has sent or received before, and the system prompt.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.nouns.plan import Sampled
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.process.router import ReplicaLoad, ReplicaRouter, prompt_hashes
from appliance.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions

BLOCK_SIZE = 16
SEQUENCES, ROWS = 16, 512  # of a replica's step
CONTEXT = 2**20
GOAL = 0.95

Choose = Callable[[Request, dict[int, ReplicaLoad]], int]


@dataclass(frozen=True, slots=True)
class Trace:
    """What the agents do; lengths in tokens, pauses in steps.

    Attributes:
        agents: that are at work at once.
        conversations: of all of them.
        turns: of each conversation.
        output: of a tool, on average; each is between half of it and one and a half.
        answer: of the model.
        pause: between answer and next turn, on average, spread like outputs.
    """

    agents: int = 12
    conversations: int = 60
    turns: int = 16
    system: int = 1200
    output: int = 240
    answer: int = 48
    pause: int = 40
    seed: int = 0

    @property
    def tokens_of_a_conversation(self) -> int:
        return self.system + self.turns * (self.output + self.answer)


@dataclass(slots=True)
class Agent:
    """One conversation."""

    chosen: random.Random
    history: list[int]
    turns: int
    wakes: int  # tick of the next turn
    known: int = 0  # tokens of its history that were sent or received


@dataclass(slots=True)
class Replica:
    """One scheduler with its cache, and the requests it was given."""

    num_blocks: int
    limits: SchedulerLimits
    scheduler: Scheduler = field(init=False)
    open: dict[str, Agent] = field(default_factory=dict)
    given: int = 0

    def __post_init__(self) -> None:
        blocks = BlockManager(self.num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(blocks, self.limits)

    def give(self, request: Request, agent: Agent) -> None:
        self.scheduler.add(request, 0.0)
        self.open[request.request_id] = agent
        self.given += 1

    def step(self) -> list[Agent]:
        """Run a step; return the agents whose answer is complete."""
        plan = self.scheduler.plan(0.0) if self.scheduler.has_work else None
        if plan is None:
            return []
        results = [
            Sampled(self.open[entry.sequence.request.request_id].chosen.randrange(2**31))
            for entry in plan.scheduled
            if entry.samples
        ]
        ended = []
        for update in self.scheduler.commit(plan, results):
            request = update.sequence.request
            if update.finish_reason is not None:
                agent = self.open.pop(request.request_id)
                agent.history += update.sequence.token_ids[len(request.prompt_token_ids) :]
                ended.append(agent)
        return ended


def around(chosen: random.Random, mean: int) -> int:
    return chosen.randint(mean - mean // 2, mean + mean // 2)


def play(trace: Trace, replicas: list[Replica], choose: Choose) -> dict[str, Any]:
    """Let the agents work; return what the caches found."""
    system = list(range(trace.system))
    begun, names, waiting = count(), count(), []
    ideal = largest = 0

    def begin(tick: int) -> None:
        number = next(begun)
        if number < trace.conversations:
            chosen = random.Random(f"{trace.seed} {number}")
            wakes = tick + chosen.randrange(trace.pause)
            waiting.append(Agent(chosen, list(system), trace.turns, wakes))

    for _ in range(trace.agents):
        begin(0)
    tick, was_begun = 0, False
    while waiting or any(replica.open for replica in replicas):
        for agent in [one for one in waiting if one.wakes <= tick]:
            waiting.remove(agent)
            ideal += agent.known or (len(system) if was_begun else 0)
            was_begun = True
            length = around(agent.chosen, trace.output)
            agent.history += [agent.chosen.randrange(2**31) for _ in range(length)]
            sampling = SamplingParams(max_tokens=trace.answer, ignore_eos=True)
            prompt = tuple(agent.history)
            request = Request(
                request_id=str(next(names)), prompt_token_ids=prompt, sampling=sampling
            )
            loads = {at: ReplicaLoad(len(one.open)) for at, one in enumerate(replicas)}
            replicas[choose(request, loads)].give(request, agent)
        counts = [len(replica.open) for replica in replicas]
        largest = max(largest, max(counts) - min(counts))
        for replica in replicas:
            for agent in replica.step():
                agent.known = len(agent.history)
                agent.turns -= 1
                if agent.turns:
                    agent.wakes = tick + around(agent.chosen, trace.pause)
                    waiting.append(agent)
                else:
                    begin(tick)
        tick += 1
    stats = [replica.scheduler.stats() for replica in replicas]
    asked = sum(one.prefix_queries_total for one in stats)
    return {
        "hit_rate": round(sum(one.prefix_hits_total for one in stats) / asked, 4),
        "ideal": round(ideal / asked, 4),
        "prompt_tokens": asked,
        "requests": [replica.given for replica in replicas],
        "largest_difference_of_open_requests": largest,
        "steps": tick,
    }


def served(trace: Trace, num_replicas: int, num_blocks: int, share: int = 1) -> list[Replica]:
    """Return replicas of so many blocks, each with the steps of `share` ordinary ones."""
    limits = SchedulerLimits(share * SEQUENCES, share * ROWS, CONTEXT)
    return [Replica(num_blocks, limits) for _ in range(num_replicas)]


def by_prefix(num_replicas: int, num_blocks: int) -> Choose:
    router = ReplicaRouter[int]()
    for replica in range(num_replicas):
        router.begin(replica, num_blocks)
    return lambda request, loads: router.route(prompt_hashes(request, BLOCK_SIZE), loads)


def in_turns(num_replicas: int) -> Choose:
    turns = count()
    return lambda request, loads: next(turns) % num_replicas


def least_loaded(request: Request, loads: dict[int, ReplicaLoad]) -> int:
    return min(loads, key=lambda one: loads[one].sequences)


def compare(trace: Trace, num_replicas: int, room: float) -> dict[str, Any]:
    """Play a trace in all ways.

    Args:
        room: KV memory of all replicas, as a multiple of the full conversations of the agents at
            work.
    """
    all_tokens = room * trace.agents * trace.tokens_of_a_conversation
    num_blocks = int(all_tokens / BLOCK_SIZE / num_replicas)
    several = [num_replicas, num_blocks]
    one = play(
        trace,
        served(trace, 1, num_replicas * num_blocks, share=num_replicas),
        lambda request, loads: 0,
    )
    small = play(trace, served(trace, 1, num_blocks), lambda request, loads: 0)
    ways = {
        "one server, all memory": one,
        "one server, a replica's memory": small,
        "by prefix": play(trace, served(trace, *several), by_prefix(*several)),
        "least loaded": play(trace, served(trace, *several), least_loaded),
        "round robin": play(trace, served(trace, *several), in_turns(num_replicas)),
    }
    for way in ways.values():
        way["of_one_server"] = round(way["hit_rate"] / one["hit_rate"], 4)
    return {
        "replicas": num_replicas,
        "room": room,
        "blocks_of_a_replica": num_blocks,
        "trace": asdict(trace),
        "ways": ways,
        "reaches_goal": ways["by prefix"]["of_one_server"] >= GOAL,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--room", type=float, nargs="+", default=[2.0, 1.0, 0.7])
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options: argparse.Namespace = parser.parse_args()
    trace = Trace(conversations=options.conversations, seed=options.seed)
    cases = []
    for num_replicas in options.replicas:
        for room in options.room:
            cases.append(compare(trace, num_replicas, room))
    result = {"benchmark": "replicas", "conditions": conditions(), "goal": GOAL, "cases": cases}
    write_result(options.out, result)


if __name__ == "__main__":
    main()

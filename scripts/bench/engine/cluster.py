"""Simulate 1 to 1,000 replicas behind a front, and draw throughput, p99 and hit rate.

    scripts/benchmark cluster --out scripts/bench/results/cluster.json
    scripts/benchmark cluster --plot appliance/docs/cluster.svg  # from that; needs matplotlib

Discrete events; the router is the product's (`engine/replicas/router.py`). What is assumed:

- A replica is SmolLM2-135M on two cores. A step takes a fixed time, one for each sequence and one
  for each prompt token, fitted to steps measured on a machine of that kind
  (`results/cpu/models.json`). Longer contexts cost no more, and prompts are computed one after the
  other while nothing else runs, so first tokens come a little later than with chunks.
- A cache holds whole blocks, forgets those used longest ago, and keeps those of a running sequence.
- Agents come at random (a Poisson process), as many per replica and second at every size: a
  conversation of some turns behind a system prompt that all share, and a tool's time in between.
- One front sees all requests and every end. It adds a fixed time, and the network another.
- No replica fails, and all have the same speed.

Nothing is timed, so the result is the same on any machine.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from appliance.engine.blocks.block_hashes import root_hash
from appliance.engine.replicas.router import KnownPrompts, ReplicaLoad, ReplicaRouter
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions

RESULTS = Path(__file__).parents[1] / "results"
BLOCK_SIZE = 16
SIZES = (1, 3, 10, 30, 100, 300, 1000)
HOP_SECONDS = 0.002  # front and network, for each request

Choose = Callable[[list[bytes], dict[int, ReplicaLoad]], int]


@dataclass(frozen=True, slots=True)
class Steps:
    """Seconds of a step: fixed, for each sequence, for each prompt token."""

    fixed: float
    sequence: float
    prompt_token: float

    @classmethod
    def measured(cls) -> Steps:
        """Fit the steps of SmolLM2-135M by least squares."""
        models = json.loads((RESULTS / "cpu" / "models.json").read_text())["models"]
        model = next(one for one in models if one["model"] == "smollm2-135m")
        points = [(one["batch"], one["ms_per_step"]["median"] / 1000) for one in model["decode"]]
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum(
            (x - mean_x) ** 2 for x, _ in points
        )
        each = 1 / model["prefill_tokens_per_second"]["median"]
        return cls(mean_y - slope * mean_x, slope, each)


@dataclass(frozen=True, slots=True)
class Load:
    """What agents ask; lengths in tokens, times in seconds, spread by half to both sides.

    Attributes:
        rate: conversations that begin per second and replica.
        conversations: per replica.
        blocks: of a replica's cache.
    """

    rate: float = 0.4
    conversations: int = 8
    turns: int = 6
    system: int = 640
    output: int = 160
    answer: int = 48
    pause: float = 2.0
    sequences: int = 16
    blocks: int = 1000
    seed: int = 0


@dataclass(slots=True)
class Agent:
    """One conversation; a block's hash stands for its content."""

    name: str
    chosen: random.Random
    turns: int
    tokens: int
    hashes: list[bytes] = field(default_factory=list)
    asked: float = 0.0  # when the turn began
    left: int = 0  # tokens to generate
    replica: int = 0

    def grow(self, tokens: int, system: list[bytes]) -> None:
        """Append tokens; the first blocks are those of the system prompt."""
        self.tokens += tokens
        for number in range(len(self.hashes), self.tokens // BLOCK_SIZE):
            own = root_hash(self.name, str(number))
            self.hashes.append(system[number] if number < len(system) else own)


@dataclass(slots=True)
class Replica:
    """One engine: what waits, what runs, and until when it is busy."""

    cache: KnownPrompts
    waiting: list[Agent] = field(default_factory=list)
    running: list[Agent] = field(default_factory=list)
    at: float = 0.0
    is_planned: bool = False
    busy: float = 0.0


class Cluster:
    """Replicas, the events that are due, and what was counted."""

    def __init__(self, number: int, load: Load, steps: Steps, choose: Choose) -> None:
        self.load, self.steps, self._choose = load, steps, choose
        self.replicas = [Replica(KnownPrompts(load.blocks)) for _ in range(number)]
        self._loads = {at: ReplicaLoad() for at in range(number)}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._system = [root_hash("system", str(n)) for n in range(load.system // BLOCK_SIZE)]
        self.first_tokens: list[float] = []
        self.generated = self.asked = self.found = 0
        self.ended = 0.0
        chosen = random.Random(load.seed)
        begin = 0.0
        for name in range(number * load.conversations):
            begin += chosen.expovariate(load.rate * number)
            own = random.Random(f"{load.seed} {name}")
            agent = Agent(str(name), own, load.turns, 0)
            agent.grow(load.system, self._system)
            self._after(begin, lambda now, agent=agent: self._ask(agent, now))  # type: ignore[misc]

    def run(self) -> dict[str, Any]:
        """Run all events; return what was counted."""
        while self._events:
            now, _, happen = heapq.heappop(self._events)
            happen(now)
        times = sorted(self.first_tokens)
        busy = sum(one.busy for one in self.replicas) / len(self.replicas)
        return {
            "tokens_per_second": round(self.generated / self.ended, 1),
            "first_token_p50_ms": round(1000 * times[len(times) // 2], 1),
            "first_token_p99_ms": round(1000 * times[len(times) * 99 // 100], 1),
            "hit_rate": round(self.found / self.asked, 4),
            "busy": round(busy / self.ended, 3),
            "requests": len(times),
        }

    def _after(self, when: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), happen))

    def _around(self, agent: Agent, mean: float) -> float:
        return agent.chosen.uniform(mean / 2, 3 * mean / 2)

    def _ask(self, agent: Agent, now: float) -> None:
        agent.asked = now
        agent.grow(round(self._around(agent, self.load.output)), self._system)
        agent.left = round(self._around(agent, self.load.answer))
        agent.replica = self._choose(agent.hashes, self._loads)
        self._count(agent.replica, 1)
        replica = self.replicas[agent.replica]
        self._advance(replica, now)
        replica.waiting.append(agent)
        self._plan(replica, now + HOP_SECONDS)

    def _count(self, replica: int, change: int) -> None:
        self._loads[replica] = ReplicaLoad(self._loads[replica].sequences + change)

    def _plan(self, replica: Replica, now: float) -> None:
        if not replica.is_planned:
            replica.is_planned = True
            replica.at = max(replica.at, now)
            self._after(replica.at, lambda when: self._step(replica, when))

    def _advance(self, replica: Replica, now: float) -> None:
        """Run the steps of a replica that are done by now, which changed nobody's batch."""
        step = self._step_seconds(replica)
        if not replica.running or now <= replica.at:
            return
        steps = min(int((now - replica.at) / step), min(one.left for one in replica.running) - 1)
        self._decode(replica, steps)

    def _step_seconds(self, replica: Replica) -> float:
        return self.steps.fixed + self.steps.sequence * len(replica.running)

    def _decode(self, replica: Replica, steps: int) -> None:
        seconds = steps * self._step_seconds(replica)
        replica.at += seconds
        replica.busy += seconds
        for agent in replica.running:
            agent.left -= steps
        self.generated += steps * len(replica.running)

    def _step(self, replica: Replica, now: float) -> None:
        """Admit what waits, or decode until a sequence ends; then plan what follows."""
        replica.is_planned = False
        if replica.at > now + 1e-9:
            self._plan(replica, replica.at)
            return
        if replica.waiting and len(replica.running) < self.load.sequences:
            self._admit(replica, replica.waiting.pop(0))
        elif replica.running:
            self._decode(replica, 1)
        for agent in [one for one in replica.running if one.left <= 0]:
            replica.running.remove(agent)
            self._count(agent.replica, -1)
            self._answered(replica, agent)
        if replica.waiting and len(replica.running) < self.load.sequences:
            self._plan(replica, replica.at)
        elif replica.running:
            # Nothing changes before a sequence is one token from its end, but by a request.
            least = min(one.left for one in replica.running) - 1
            replica.is_planned = True
            when = replica.at + least * self._step_seconds(replica)
            self._after(when, lambda at: self._go_on(replica, at))

    def _go_on(self, replica: Replica, now: float) -> None:
        self._advance(replica, now + 1e-9)
        self._step(replica, max(now, replica.at))

    def _admit(self, replica: Replica, agent: Agent) -> None:
        hits = replica.cache.match(agent.hashes)
        new = agent.tokens - min(hits * BLOCK_SIZE, agent.tokens - 1)
        self.asked += agent.tokens
        self.found += agent.tokens - new
        replica.cache.add(agent.hashes)
        seconds = self.steps.fixed + new * self.steps.prompt_token
        replica.at += seconds
        replica.busy += seconds
        replica.running.append(agent)
        agent.left -= 1
        self.generated += 1
        self.first_tokens.append(replica.at + HOP_SECONDS - agent.asked)

    def _answered(self, replica: Replica, agent: Agent) -> None:
        self.ended = max(self.ended, replica.at)
        agent.grow(self.load.answer, self._system)
        replica.cache.add(agent.hashes)
        agent.turns -= 1
        if agent.turns:
            wakes = replica.at + self._around(agent, self.load.pause)
            self._after(wakes, lambda now: self._ask(agent, now))


def by_prefix(number: int, blocks: int) -> Choose:
    router = ReplicaRouter[int]()
    for replica in range(number):
        router.begin(replica, blocks)
    return router.route


def in_turns(number: int, blocks: int) -> Choose:
    turns = count()
    return lambda hashes, loads: next(turns) % number


def least_loaded(number: int, blocks: int) -> Choose:
    return lambda hashes, loads: min(loads, key=lambda one: loads[one].sequences)


WAYS = {"by prefix": by_prefix, "round robin": in_turns, "least loaded": least_loaded}


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw throughput, the 99th percentile of first tokens and the hit rate."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "cluster"  # the same file every time
    panels = (
        ("tokens_per_second", "tokens per second", "log"),
        ("first_token_p99_ms", "first token, p99, ms", "log"),
        ("hit_rate", "prompt tokens found in a cache", "linear"),
    )
    figure, axes = pyplot.subplots(1, len(panels), figsize=(12, 3.6), layout="constrained")
    for axis, (name, title, scale) in zip(axes, panels, strict=True):
        for way in WAYS:
            cases = [one for one in result["cases"] if one["way"] == way]
            axis.plot(
                [one["replicas"] for one in cases], [one[name] for one in cases], "o-", label=way
            )
        axis.set(xscale="log", yscale=scale, xlabel="replicas", title=title)
        axis.grid(alpha=0.3)
    axes[2].set_ylim(0, 1)
    axes[0].legend()
    figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="numbers of replicas")
    parser.add_argument(
        "--plot", type=Path, default=argparse.SUPPRESS, help="draw the kept result here, no more"
    )
    options = parser.parse_args()
    if "plot" in options:
        draw(json.loads((RESULTS / "cluster.json").read_text()), options.plot)
        return
    load, steps, cases = Load(), Steps.measured(), []
    for number in map(int, options.sizes.split(",")):
        for way, make in WAYS.items():
            cluster = Cluster(number, load, steps, make(number, load.blocks))
            cases.append({"replicas": number, "way": way, **cluster.run()})
    write_result(
        options.out,
        {
            "benchmark": "cluster",
            "conditions": conditions(),
            "steps_seconds": asdict(steps),
            "load": asdict(load),
            "hop_seconds": HOP_SECONDS,
            "cases": cases,
        },
    )


if __name__ == "__main__":
    main()

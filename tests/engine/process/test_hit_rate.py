"""Agents on two replicas hit as much cache as on one server with all of the memory."""

from __future__ import annotations

from bench.engine.replicas import GOAL, Trace, compare


def test_agents_find_their_conversations_again() -> None:
    trace = Trace(agents=6, conversations=12, turns=8, system=320, output=120, answer=16)
    ways = compare(trace, num_replicas=2, room=1.2)["ways"]
    one, routed = ways["one server, all memory"], ways["by prefix"]
    assert routed["of_one_server"] >= GOAL
    assert routed["prompt_tokens"] == one["prompt_tokens"], "they asked the same"
    assert ways["round robin"]["of_one_server"] < 0.9
    assert min(routed["requests"]) >= 0.3 * sum(routed["requests"]), "both work"

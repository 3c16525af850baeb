"""The whole engine under a virtual clock and a virtual model: replays one script and judges it.

Every token is compared with the only right answer, every sequence must end, and an idle engine must
hold no block.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from unittest.mock import patch

from support.engine.plain_search import Found
from support.simulation.load_script import Event, Script, answer_of, beams_of, ends
from support.simulation.simulated_client import Choice, Search, first_limit
from support.simulation.simulated_pictures import prompt_of
from support.simulation.virtual_disk import VirtualDisk
from support.simulation.virtual_engine import build_engine, counts_of
from support.simulation.virtual_model import content_of, logprob_of, next_token
from support.simulation.virtual_runner import Clock, DeviceLostError

from appliance.engine.nouns.request import FinishReason
from appliance.engine.nouns.sequence import SequenceStatus
from appliance.engine.scheduling.beams import BeamGroup
from appliance.engine.scheduling.policy import may_admit, may_draft
from appliance.errors import RequestError
from appliance.text import Likelihood, best

if TYPE_CHECKING:
    from appliance.engine.nouns.messages import SequenceDelta
    from appliance.engine.nouns.request import Request
    from appliance.engine.nouns.sequence import Sequence

PATIENCE = 300  # steps in which no sequence gets a token
TICK = 1e-9  # seconds, more than a few rounding errors of the clock
MIN_WAIT = 1.0  # seconds: less than a slow disk takes for three reads
MIN_DISK_TOKENS = 4  # of what is written and of what is read: prompts are short here


@dataclass
class Simulation:
    """One engine, its clients and its disk.

    Args:
        script: arrivals and faults.
        check_every: steps between two checks of all invariants.

    Attributes:
        seen: how often each notable case came up.
    """

    script: Script
    check_every: int = 500
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        setting, noise = self.script.setting, random.Random(self.script.noise)
        self.noise = noise
        self.clock = Clock()
        self.failed = False  # whether the latest step failed
        self.moved = 0  # the last step in which a sequence got a token
        self.live: dict[tuple[str, int], Choice] = {}
        self.num_tokens = 0  # of this engine's answers
        self.searches = 0  # beam searches of this engine
        self.started: set[str] = set()  # requests of which something was computed
        self.ended: dict[str, list[Choice]] = {}  # choices of requests for the best of several
        self.disk: VirtualDisk | None = None
        if setting.disk_blocks and setting.prefix_caching:
            self.disk = VirtualDisk(self.clock, setting.disk_blocks, noise)
        self.start()

    def start(self) -> None:
        """Begin with an empty cache; of an engine before only the disk's blocks are left."""
        self.num_tokens = self.searches = 0
        self.blocks, self.runner, self.tiers, self.scheduler, self.engine = build_engine(
            self.script.setting, self.clock, self.disk, self.noise
        )

    def run(self) -> int:
        """Play the script to its end; return how many steps the last engine took."""
        setting = self.script.setting
        admission = fits_now if setting.admits_eagerly else may_admit
        drafting = always if setting.drafts_eagerly else may_draft
        with (
            patch("appliance.engine.scheduling.turns.may_admit", admission),
            patch("appliance.engine.scheduling.scheduler.may_draft", drafting),
            patch("appliance.engine.tiers.write_behind.MIN_TOKENS", MIN_DISK_TOKENS),
            patch("appliance.engine.tiers.read_ahead.MIN_READ_TOKENS", MIN_DISK_TOKENS),
            patch("appliance.engine.tiers.read_ahead.MIN_WAIT", MIN_WAIT),
            patch(
                "appliance.engine.scheduling.policy.FIRST_DISTANCE",
                setting.first_distance,
            ),
        ):
            return self.play()

    def play(self) -> int:
        events, at, step = self.script.events, 0, 0
        while True:
            while at < len(events) and events[at].step <= step:
                self.happen(events[at])
                at += 1
            if not self.engine.has_work:
                if at == len(events):
                    break
                step = self.moved = max(step, events[at].step)
                continue
            if self.step() or not self.scheduler.has_work:
                self.moved = step
            step += 1
            assert step < self.moved + PATIENCE, "there is work, but nobody gets a token"
            if step % self.check_every == 0:
                self.scheduler.check_invariants()
        self.check_end()
        return self.engine.stats().steps_total

    def happen(self, event: Event) -> None:
        self.clock.now += event.seconds
        if event.fault == "death":
            self.die()
        elif event.fault:
            self.runner.fault = event.fault
        if event.disk_fault is not None and self.disk is not None:
            self.disk.fault = event.disk_fault
        if event.arrives is not None:
            self.arrive(event.arrives)
        if event.leaves is not None:
            request_id, index = event.leaves
            if self.engine.pictures is not None and request_id in self.engine.pictures.held():
                index = None  # it ends as a whole
            gone = [
                choice
                for choice in self.live.values()
                if choice.request.request_id == request_id
                and (index in (None, choice.index) or choice.search)
            ]
            aborted = self.engine.abort(request_id, index)
            if gone and not aborted:
                assert self.failed, "it has ended and nobody was told"
                return  # its time ran out in a step that failed: the next report says so
            assert aborted == bool(gone)
            for choice in gone:
                self.end(choice, FinishReason.ABORT)

    def arrive(self, request: Request) -> None:
        setting = self.script.setting
        length = len(request.prompt_token_ids)
        fits = length < setting.context_length and length < setting.num_slots
        search = None
        if request.sampling.use_beam_search and fits:
            search = Search(beams_of(request, setting))
            fits = bool(search.right)
        before = list(self.scheduler.sequences())
        try:
            self.engine.submit(request)
        except RequestError:
            assert not fits, "a request was refused that fits"
            assert list(self.scheduler.sequences()) == before, "a refused request leaves something"
            self.seen["refused"] += 1
            return
        assert fits, "a request was accepted that can never be served"
        self.searches += search is not None
        last = 0
        for token in prompt_of(request):
            last = content_of(request.cache_salt, last, token)
        for index in range(request.sampling.num_choices):
            choice = Choice(request, index, last, self.clock.now, search=search)
            self.live[request.request_id, index] = choice

    def step(self) -> bool:
        """Take a step; return whether a sequence got a token or ended."""
        begin, before, first = self.clock.now, self.runner.latest, self.first_in_rank()
        try:
            report = self.engine.step()
        except DeviceLostError:
            self.seen["failed steps"] += 1
            self.failed = True
            self.started.update(choice.request.request_id for choice in self.live.values())
            return False
        self.failed = False
        plan = self.runner.latest
        if first is not None and plan is not None and plan is not before:
            scheduled = [entry.sequence for entry in plan.scheduled]
            is_live = first.finish_reason is not FinishReason.TIMEOUT
            assert first in scheduled or not is_live, "the first in rank stands still"
        self.started.update(report.started)
        for delta in report.deltas:
            self.receive(delta)
        for choice in self.live.values():
            self.look_at_time(choice, begin)
        self.look_at_books()
        return bool(report.deltas)

    def look_at_books(self) -> None:
        """Check after every step what is cheap to check."""
        host = self.tiers.host
        assert len(host) <= host.capacity, "host memory holds more than it may"
        assert host.room >= 0, "more of host memory is promised than there is"
        for sequence in self.scheduler.sequences():
            least = self.blocks.blocks_for(sequence.num_computed)
            idle = sequence not in self.scheduler.state.in_flight.entries
            assert not idle or len(sequence.block_table) <= least, "blocks behind its tokens"
        groups = {sequence.group for sequence in self.scheduler.sequences()}
        for group in groups:
            if isinstance(group, BeamGroup):
                group.check_invariants()
                begun = group.live[0].num_output_tokens > 0
                self.seen["beams without an answer"] += begun and len(group.beams) < len(group.live)

    def first_in_rank(self) -> Sequence | None:
        """The sequence that must get a row in the next step, at any cost to others, if any."""
        setting, live = self.script.setting, list(self.scheduler.sequences())
        enough = setting.max_num_batched_tokens >= setting.max_num_seqs
        if self.engine.pictures is not None and self.engine.pictures.waiting:
            return None  # one that waits for its pictures may come before it
        if len({one.request.owner for one in live}) != 1 or not (enough and self.runner.is_idle):
            return None
        first = min(live, key=lambda one: (one.request.priority, one.arrival, one.index))
        is_ready = first.status is SequenceStatus.RUNNING and not first.is_held
        return first if is_ready and first.num_uncomputed else None

    def look_at_time(self, choice: Choice, now: float) -> None:
        """Check that no sequence is served beyond its time limits."""
        request = choice.request
        now -= TICK  # of simultaneous arrivals, each is recorded a tick after the one before
        timeout, longest = request.timeout, request.max_queue_seconds
        assert timeout is None or now < choice.arrival + timeout, "its time is over"
        if longest is not None and choice.index == 0 and request.request_id not in self.started:
            assert now < choice.arrival + longest, "it waits for too long"

    def receive(self, delta: SequenceDelta) -> None:
        choice = self.live.get((delta.request_id, delta.index))
        assert choice is not None, "an answer goes on behind its end"
        request = choice.request
        if delta.finish_reason is FinishReason.TIMEOUT or delta.expired:
            assert self.clock.now >= choice.arrival + first_limit(request)
        if choice.search is not None and delta.token_ids:
            assert delta.finish_reason is not None
            choice.search.found[choice.index] = delta.token_ids, delta.finish_reason
            self.look_at_search(choice, choice.search)
            self.end(choice, delta.finish_reason)
            return
        choice.likelihood.add(delta)
        self.num_tokens += len(delta.token_ids)
        for left, token in enumerate(delta.token_ids, 1 - len(delta.token_ids)):
            assert token == next_token(choice.last, choice.index), "a wrong token"
            choice.last = content_of(request.cache_salt, choice.last, token)
            choice.num_tokens += 1
            length = len(request.prompt_token_ids) + choice.num_tokens
            over = ends(request.sampling, token, choice.num_tokens)
            over = over or length >= self.script.setting.max_tokens
            is_end = left == 0 and delta.finish_reason is not None
            assert over == is_end, "it ends where it should not"
        if delta.finish_reason is not None:
            assert (delta.finish_reason is FinishReason.ERROR) == (delta.error is not None)
            self.end(choice, delta.finish_reason)

    def look_at_search(self, choice: Choice, search: Search) -> None:
        """Check the answers found so far, for the whole search or for one that was cut off."""
        self.seen["beams"] += 1
        if search.is_part_of(search.right):
            return
        assert choice.request.timeout is not None, "another beam is the best one"
        assert self.clock.now >= choice.arrival + choice.request.timeout, "it was cut off early"
        self.seen["beams cut off"] += 1
        cuts: list[list[Found]] = []
        beams_of(choice.request, self.script.setting, cuts)
        assert any(map(search.is_part_of, cuts)), "another beam is the best one so far"

    def look_at_best(self, choices: list[Choice]) -> None:
        """Check that the best choices were returned, if none of them was disturbed."""
        request = choices[0].request
        if any(choice.reason not in (FinishReason.STOP, FinishReason.LENGTH) for choice in choices):
            return
        choices.sort(key=lambda choice: choice.index)
        right = []
        for choice in choices:
            answer = answer_of(request, choice.index, self.script.setting.max_tokens)
            likelihood, last = Likelihood(), 0
            for token in prompt_of(request):
                last = content_of(request.cache_salt, last, token)
            for token in answer:
                likelihood.cumulative_logprob += logprob_of(last, choice.index)
                likelihood.num_tokens += 1
                last = content_of(request.cache_salt, last, token)
            right.append(likelihood)
        found = best([choice.likelihood for choice in choices], request.sampling.n)
        assert found == best(right, request.sampling.n), "others are the best"
        self.seen["best of several"] += 1

    def die(self) -> None:
        """Kill the engine process with all its memory, and start the next one."""
        for choice in list(self.live.values()):
            self.end(choice, FinishReason.ERROR)
        self.seen += counts_of(self.engine, self.runner, self.blocks)
        self.seen["deaths"] += 1
        if self.disk is not None:
            self.disk.lose_engine()
        self.start()

    def end(self, choice: Choice, reason: FinishReason) -> None:
        choice.reason = reason
        self.seen[f"ended: {reason.value}"] += 1
        name, sampling = choice.request.request_id, choice.request.sampling
        del self.live[name, choice.index]
        if sampling.takes_best:
            ended = self.ended.setdefault(name, [])
            ended.append(choice)
            if len(ended) == sampling.num_choices:
                self.look_at_best(self.ended.pop(name))

    def check_end(self) -> None:
        assert not self.live, "somebody waits for ever"
        self.scheduler.check_invariants()
        stats = self.engine.stats()
        held = (stats.running, stats.waiting, stats.blocks_active, stats.kv_tokens)
        assert held == (0, 0, 0, 0), "nothing is left to do, but something is held"
        assert stats.blocks_cached + stats.blocks_free == self.script.setting.num_blocks
        host = self.tiers.host
        jobs = [] if self.disk is None else self.disk.unfinished
        unread = sum(host.room_of(job.hashes) for job in jobs)
        assert host.room == host.capacity - unread, "room in host memory is kept for nobody"
        if not self.searches:  # a search's tokens count for each beam
            assert stats.generation_tokens_total == self.num_tokens, "tokens are counted wrongly"
        self.seen += counts_of(self.engine, self.runner, self.blocks)
        if self.disk is not None:
            self.seen["damaged files"] += self.disk.counters.corrupt
            self.seen["blocks written to the disk"] += self.disk.counters.written


def always(num_prompts: int, num_startable: int) -> bool:
    return True


def fits_now(cost: int, num_free_blocks: int, num_promised: int) -> bool:
    return cost <= num_free_blocks

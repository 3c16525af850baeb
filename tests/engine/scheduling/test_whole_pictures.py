"""Pictures whose rows see each other run in one step, whatever runs beside them."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulation.plan_judge import look_at, num_results

from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.nouns.limits import SchedulerLimits
from appliance.engine.nouns.picture import CanvasPixels, PictureSpan, PromptPictures
from appliance.engine.nouns.plan import Plan, Sampled
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.scheduling.policy import uncut
from appliance.engine.scheduling.scheduler import Scheduler
from appliance.media.sizing import Canvas

LARGEST, BLOCK = 12, 4


@dataclass(frozen=True, slots=True)
class Prompt:
    """Lengths of texts and pictures in turn, from a text on; and whose it is."""

    lengths: tuple[int, ...]
    owner: str = ""
    priority: int = 0
    answers: int = 1
    kind: int = 0  # of equal kinds the beginnings are the same

    def request(self, name: str) -> Request:
        ids: list[int] = []
        canvases: list[CanvasPixels] = []
        spans: list[PictureSpan] = []
        for place, length in enumerate(self.lengths):
            if place % 2:
                key = bytes((self.kind, place, length))
                canvases.append(CanvasPixels(key, Canvas(((1, length),)), b"", (1, length)))
                spans.append(PictureSpan(len(ids), length, len(spans)))
            ids += [0 if place % 2 else 5 + place] * length
        pictures = PromptPictures(tuple(canvases), tuple(spans)) if spans else None
        sampling = SamplingParams(n=self.answers, max_tokens=3, ignore_eos=True)
        return Request(
            request_id=name,
            prompt_token_ids=tuple(ids),
            sampling=sampling,
            priority=self.priority,
            owner=self.owner,
            pictures=pictures,
        )


def scheduler(rows: int, *, seqs: int = 4, blocks: int = 40) -> Scheduler:
    spare = LARGEST - 1
    limits = SchedulerLimits(seqs, rows + spare, 200, spare_rows=spare)
    return Scheduler(BlockManager(blocks, BLOCK), limits)


def run(engine: Scheduler) -> list[list[tuple[str, int, int]]]:
    """Run to the end; return each step's requests with their first rows and numbers of rows."""
    steps = []
    while (plan := engine.plan(now=0.0)) is not None:
        look_at(plan, [], engine.state.blocks, depth=0)
        check_whole(plan, engine.state.bounds.limits)
        steps.append(
            [(e.sequence.request.request_id, e.start, e.num_tokens) for e in plan.scheduled]
        )
        engine.commit(plan, [Sampled(50)] * num_results(plan))
        engine.check_invariants()
        assert len(steps) < 500, "it does not end"
    assert not engine.has_work
    return steps


def check_whole(plan: Plan, limits: SchedulerLimits) -> None:
    assert plan.num_tokens <= limits.max_num_batched_tokens
    for entry in plan.scheduled:
        pictures = entry.sequence.request.pictures
        for span in () if pictures is None else pictures.spans:
            # Behind a cached beginning only the rest of it runs.
            assert not span.start < entry.end < span.stop, "a step ends inside a picture"


def test_a_picture_runs_whole_behind_the_text_before_it() -> None:
    engine = scheduler(rows=8)
    engine.add(Prompt((5, 12, 10, 4, 2)).request("a"), now=0.0)
    steps = run(engine)
    assert steps[:4] == [[("a", 0, 5)], [("a", 5, 12)], [("a", 17, 8)], [("a", 25, 8)]]


def test_a_picture_that_fits_runs_with_the_text() -> None:
    engine = scheduler(rows=30)
    engine.add(Prompt((5, 12, 10, 9, 2)).request("a"), now=0.0)
    assert run(engine)[:2] == [[("a", 0, 27)], [("a", 27, 11)]]


def test_a_picture_that_a_prefix_ends_in_runs_to_its_end() -> None:
    engine = scheduler(rows=8)
    engine.add(Prompt((5, 12)).request("a"), now=0.0)
    run(engine)
    engine.add(Prompt((5, 12, 3)).request("b"), now=0.0)
    again = engine.state.blocks.find_prefix(next(iter(engine.sequences())))
    assert again.num_tokens > 5
    (first, *_) = run(engine)
    ((_, start, rows),) = first
    assert start == again.num_tokens
    assert start + rows in (17, 20)


def test_the_end_moves_out_of_a_picture() -> None:
    engine = scheduler(rows=8)
    engine.add(Prompt((5, 12, 3)).request("a"), now=0.0)
    (sequence,) = engine.sequences()
    wanted = {4: 4, 5: 5, 6: 5, 16: 5, 17: 17, 18: 18}
    assert {end: uncut(sequence, 0, end) for end in wanted} == wanted
    assert [uncut(sequence, 5, end) for end in (6, 16, 17, 19)] == [17, 17, 17, 19]
    assert [uncut(sequence, 9, end) for end in (10, 16, 17)] == [17, 17, 17]


prompts = st.builds(
    Prompt,
    lengths=st.lists(st.integers(1, LARGEST), min_size=1, max_size=6).map(tuple),
    owner=st.sampled_from(["x", "y"]),
    priority=st.integers(0, 1),
    answers=st.integers(1, 2),
    kind=st.integers(0, 1),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(prompts, min_size=1, max_size=6), st.integers(4, 20), st.integers(22, 60), st.data()
)
def test_no_step_cuts_a_picture_or_has_too_many_rows(
    several: list[Prompt], rows: int, blocks: int, data: st.DataObject
) -> None:
    engine = scheduler(rows, blocks=blocks)
    for number, prompt in enumerate(several):
        engine.add(prompt.request(f"{number}"), now=float(number))
        if data.draw(st.booleans()):
            plan = engine.plan(now=0.0)
            if plan is not None:
                check_whole(plan, engine.state.bounds.limits)
                engine.commit(plan, [Sampled(50)] * num_results(plan))
    run(engine)

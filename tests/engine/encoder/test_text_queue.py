from __future__ import annotations

from appliance.engine.encoder.encoder_engine import TextQueue
from appliance.engine.nouns.request import Pooling, Request
from appliance.engine.nouns.sampling_params import SamplingParams


def text(
    name: str, length: int, *, owner: str = "", priority: int = 0, timeout: float | None = None
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=(1,) * length,
        sampling=SamplingParams(max_tokens=0),
        pooling=Pooling.MEAN,
        owner=owner,
        priority=priority,
        timeout=timeout,
    )


def queue_of(*texts: Request) -> TextQueue:
    queue = TextQueue()
    for at, one in enumerate(texts):
        queue.add(one, float(at))
    return queue


def taken(queue: TextQueue, max_texts: int = 10, max_tokens: int = 100) -> list[str]:
    return [one.request.request_id for one in queue.take(max_texts, max_tokens)]


def test_a_step_takes_what_fits_sorted_by_length() -> None:
    queue = queue_of(text("a", 50), text("b", 30), text("c", 40))
    assert taken(queue) == ["b", "a"]
    assert taken(queue) == ["c"]
    assert taken(queue) == []
    assert len(queue) == 0


def test_a_text_longer_than_a_step_is_taken_alone() -> None:
    assert taken(queue_of(text("long", 300), text("short", 1))) == ["long"]


def test_no_more_texts_are_taken_than_a_step_holds() -> None:
    assert taken(queue_of(text("a", 1), text("b", 1), text("c", 1)), max_texts=2) == ["a", "b"]


def test_the_urgent_come_first_and_owners_share_a_step() -> None:
    queue = queue_of(
        text("a1", 20, owner="a"),
        text("a2", 20, owner="a"),
        text("b1", 20, owner="b"),
        text("now", 20, owner="a", priority=-1),
    )
    assert set(taken(queue, max_tokens=60)) == {"now", "a1", "b1"}


def test_texts_that_waited_too_long_are_answered_and_gone() -> None:
    queue = queue_of(text("late", 1, timeout=5.0), text("patient", 1))
    (delta,) = queue.expire(5.0)
    assert (delta.request_id, delta.expired) == ("late", True)
    assert delta.error is not None
    assert taken(queue) == ["patient"]
    assert not queue.forget("late")

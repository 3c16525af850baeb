"""Tokens that a grammar forces: they take no steps, and change no answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.echo.byte_tokenizer import save_byte_tokenizer
from support.engine.drafting import draft_always
from support.engine.grammar_words import EOS, FIRST_BYTE, words

from appliance import LLM
from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.grammars.merge_order import MergeOrder
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.messages import Vocabulary
from appliance.engine.nouns.request import FinishReason, Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.grammar import Grammar

NAMES = Grammar.json_schema(
    {
        "type": "object",
        "properties": {
            "given_name": {"type": "string", "maxLength": 4},
            "is_raining_today": {"type": "boolean"},
            "kind": {"const": "a constant that is rather long"},
        },
        "required": ["given_name", "is_raining_today", "kind"],
        "additionalProperties": False,
    }
)
Found = dict[tuple[str, int], tuple[list[int], FinishReason | None]]


def load(folder: Path, *, jumps: bool = True, in_order: bool = True, **options: Any) -> LLMEngine:
    defaults = {"model": str(folder), "threads": 1, "max_num_batched_tokens": 64}
    config = EngineConfig(**{**defaults, "speculate": "auto" if jumps else "off", **options})
    engine = load_llm_engine(config, (EOS,), None, lambda *_: None, None)
    draft_always(engine)
    known = words()
    engine.set_vocabulary(Vocabulary(known.tokens, known.special, in_order=in_order))
    return engine


def request(name: str, grammar: Grammar = NAMES, **sampling: Any) -> Request:
    params = {"max_tokens": 200, "seed": 3, "temperature": 1.0, "grammar": grammar, **sampling}
    return Request(
        request_id=name,
        prompt_token_ids=tuple(range(10, 40)),
        sampling=SamplingParams(**params),
    )


def run(engine: LLMEngine, *requests: Request) -> tuple[Found, int]:
    """Answers, and the number of steps that they took."""
    found: Found = {}
    for one in requests:
        engine.submit(one)
    before = engine.stats().steps_total
    while engine.has_work:
        for delta in engine.step().deltas:
            assert delta.error is None, delta.error
            tokens, _ = found.get((delta.request_id, delta.index), ([], None))
            known = tokens + list(delta.token_ids)
            found[delta.request_id, delta.index] = (known, delta.finish_reason)
            if delta.logprobs is not None:
                assert len(delta.logprobs) == len(delta.token_ids)
        engine.check_invariants()
    return found, engine.stats().steps_total - before


REQUESTS = [
    request("plain"),
    request("greedy", temperature=0.0),
    request("several", n=3, seed=5),
    request("penalties", repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.2),
    request("reported", logprobs=2),
    request("cut", max_tokens=17),
    request("pattern", Grammar.regex("ab(cd|ef)ghi{2}")),
]


def test_answers_are_the_same_in_fewer_steps(tiny_llama: Path) -> None:
    expected, without = run(load(tiny_llama, jumps=False), *REQUESTS)
    engine = load(tiny_llama)
    assert run(engine, *REQUESTS)[0] == expected
    again, steps = run(engine, *REQUESTS)
    assert again == expected, "with the beginning from the cache"
    assert steps < without / 2
    tokens, reason = expected["cut", 0]
    assert (len(tokens), reason) == (17, FinishReason.LENGTH)


@pytest.mark.parametrize("host", [0, 2**20])
def test_sequences_that_make_room_go_on(tiny_llama: Path, host: int) -> None:
    requests = [request(str(number), seed=number) for number in range(6)]
    expected, _ = run(load(tiny_llama, jumps=False), *requests)
    small = load(tiny_llama, kv_cache_memory=2**16, max_model_len=160, kv_host_memory=host)
    assert run(small, *requests)[0] == expected
    assert small.stats().preemptions_total > 0


def test_every_answer_goes_on_in_every_step(tiny_llama: Path) -> None:
    """This includes steps with too few rows for all forced tokens."""
    options: dict[str, Any] = {"max_num_seqs": 12, "max_num_batched_tokens": 16}
    requests = [request(str(number), seed=number) for number in range(12)]
    engine = load(tiny_llama, **options)
    expected, _ = run(load(tiny_llama, jumps=False, **options), *requests)
    for one in requests:
        engine.submit(one)
    while engine.has_work:
        engine.step()
        plan = engine.scheduler.state.counters.last_plan
        running = {entry.sequence for entry in plan.scheduled}
        live = set(engine.scheduler.state.running)
        assert live <= running
        assert plan.num_tokens <= 16, "drafts take no rows from others"
    assert run(load(tiny_llama, **options), *requests)[0] == expected


def test_a_stop_token_ends_an_answer_that_would_go_on(tiny_llama: Path) -> None:
    engine = load(tiny_llama)
    stop = FIRST_BYTE + ord("w")
    found, _ = run(engine, request("stop", Grammar.regex("(x|y)zqzqwzq"), stop_token_ids=(stop,)))
    tokens, reason = found["stop", 0]
    assert (tokens[-1], reason) == (stop, FinishReason.STOP)
    assert stop not in tokens[:-1]


def test_a_stop_string_within_what_a_grammar_forces_ends_text_and_tokens(
    tiny_llama: Path, tmp_path: Path
) -> None:
    for file in tiny_llama.iterdir():
        (tmp_path / file.name).symlink_to(file)
    save_byte_tokenizer(tmp_path)
    sampling = SamplingParams(
        max_tokens=200, temperature=1.0, seed=3, n=3, logprobs=1, stop=("ther", "zz"), grammar=NAMES
    )
    found = []
    for speculate in ("off", "auto"):
        llm = LLM(str(tmp_path), threads=1, speculate=speculate)
        draft_always(llm.engine)
        (output,) = llm.generate("a prompt", sampling, progress=False)
        steps = llm.engine.stats().steps_total
        found.append((output.outputs, steps))
    (expected, without), (outputs, steps) = found
    assert outputs == expected
    assert steps < without / 2
    for one in outputs:
        assert one.text.endswith('"a constant that is ra')
        assert one.finish_reason is FinishReason.STOP
        assert len(one.logprobs) == len(one.token_ids) == len(one.text.encode()) + len("ther")


def test_a_vocabulary_in_no_order_is_left_its_own_spelling(tiny_llama: Path) -> None:
    requests = REQUESTS[:3]
    expected, without = run(load(tiny_llama, jumps=False, in_order=False), *requests)
    found, steps = run(load(tiny_llama, in_order=False), *requests)
    assert found == expected
    assert steps <= without


def test_texts_are_spelled_by_the_earliest_merges() -> None:
    tokens = (b"", b"a", b"b", b"c", b" ", b"bc", b"ab", b" a", b"abc")
    spell = MergeOrder(Vocabulary(tokens, (0,)))
    assert spell(b"abc") == [8], "through a and bc"
    assert spell(b"ab ac") == [6, 7, 3]
    assert spell(b"") == []
    assert spell(b"a?b") == []
    assert spell(b"a b?") == [1]
    assert len(spell(b"ab" * 5000)) == 5000

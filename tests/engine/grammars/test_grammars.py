"""Answers of the tiny model, whose words are random, under grammars."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from llguidance import LLParserLimits
from support.engine.grammar_words import CALL, EOS, FIRST_BYTE, text_of, words
from support.engine.late_device import LateDevice

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.grammars import compiling
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.request import FinishReason, Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.run.device import Device
from appliance.errors import RequestError
from appliance.grammar import Grammar

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}
YES = Grammar.choice(["yes", "no", "perhaps"])

Answer = tuple[str, FinishReason | None]


def load(folder: Path, device: Device | None = None, **options: Any) -> LLMEngine:
    defaults = {"threads": 1, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    config = EngineConfig(**{"model": str(folder), **defaults, **options})
    engine = load_llm_engine(config, (EOS,), None, lambda *_: None, device)
    engine.set_vocabulary(words())
    return engine


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> LLMEngine:
    return load(tiny_llama)


def request(name: str, grammar: Grammar | None, **sampling: Any) -> Request:
    defaults = {"max_tokens": 200, "seed": 7, "temperature": 1.0}
    prompt = sampling.pop("prompt", tuple(range(10, 30)))
    params = SamplingParams(grammar=grammar, **{**defaults, **sampling})
    return Request(request_id=name, prompt_token_ids=prompt, sampling=params)


def run(engine: LLMEngine, *requests: Request) -> dict[tuple[str, int], Answer]:
    tokens: dict[tuple[str, int], list[int]] = {}
    reasons: dict[tuple[str, int], FinishReason | None] = {}
    for one in requests:
        engine.submit(one)
    while engine.has_work:
        for delta in engine.step().deltas:
            assert delta.error is None, delta.error
            key = (delta.request_id, delta.index)
            tokens.setdefault(key, []).extend(delta.token_ids)
            reasons[key] = delta.finish_reason
        engine.check_invariants()
    assert not engine.grammars.matchers.places, "nothing is kept of what has ended"
    return {key: (text_of(found), reasons[key]) for key, found in tokens.items()}


def person(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    jsonschema.validate(found, PERSON)
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_every_answer_obeys_its_schema(engine: LLMEngine, temperature: float) -> None:
    grammar = Grammar.json_schema(PERSON)
    requests = [request(str(n), grammar, seed=n, temperature=temperature) for n in range(4)]
    for text, reason in run(engine, *requests).values():
        assert reason is FinishReason.STOP
        person(text)


def test_neighbours_with_and_without_one_do_not_change_each_other(engine: LLMEngine) -> None:
    requests = [
        request("schema", Grammar.json_schema(PERSON), seed=1),
        request("free", None, max_tokens=20),
        request("choice", YES, n=3),
        request("digits", Grammar.regex("[0-9]{3,5}"), top_p=0.9, top_k=50),
        request("penalties", Grammar.regex("(ab|cd){4}"), repetition_penalty=1.5),
    ]
    together = run(engine, *requests)
    alone = {key: answer for one in requests for key, answer in run(engine, one).items()}
    assert together == alone
    person(together["schema", 0][0])
    assert {together["choice", index][0] for index in range(3)} <= {"yes", "no", "perhaps"}


@pytest.mark.usefixtures("exact_products")
def test_a_device_that_works_by_itself_gives_the_same_answers(tiny_llama: Path) -> None:
    requests = [
        request("schema", Grammar.json_schema(PERSON), seed=1),
        request("free", None, max_tokens=40, temperature=0.0),
        request("choice", YES, n=3),
        request("biased", Grammar.regex("[ab]{5}"), logit_bias={FIRST_BYTE + ord("b"): 50.0}),
    ]
    options: dict[str, Any] = {"kernels": "torch"}
    expected = run(load(tiny_llama, **options), *requests)
    assert run(load(tiny_llama, LateDevice(), **options), *requests) == expected
    assert expected["biased", 0][0] == "bbbbb"


def test_sequences_that_make_room_go_on_where_they_were(tiny_llama: Path) -> None:
    long = Grammar.regex("(z|q|w){60}")
    requests = [request(str(n), long, seed=n, prompt=tuple(range(9 + n, 29))) for n in range(6)]
    expected = run(load(tiny_llama), *requests)
    for host in (0, 2**20):
        limits: dict[str, Any] = {
            "kv_cache_memory": 2**16,
            "max_model_len": 100,
            "kv_host_memory": host,
        }
        small = load(tiny_llama, speculate="off", **limits)  # else some answers end too soon
        assert run(small, *requests) == expected
        assert small.stats().preemptions_total > 0


def test_an_answer_ends_where_its_grammar_does_not_before(engine: LLMEngine) -> None:
    grammar = Grammar.regex("z{3,}")  # no token contains two of them
    bias = {EOS: 100.0}
    text, reason = run(engine, request("eos", grammar, logit_bias=bias))["eos", 0]
    assert (text, reason) == ("zzz", FinishReason.STOP)
    text, _ = run(engine, request("min", grammar, logit_bias=bias, min_tokens=6))["min", 0]
    assert text == "zzzzzz"
    assert run(engine, request("cut", grammar, max_tokens=2))["cut", 0] == (
        "zz",
        FinishReason.LENGTH,
    )
    exact = request("exact", Grammar.regex("z{3}"), ignore_eos=True, min_tokens=9)
    assert run(engine, exact)["exact", 0] == ("zzz", FinishReason.STOP)
    stop = request("stop", grammar, stop_token_ids=(FIRST_BYTE + ord("z"),))
    assert run(engine, stop)["stop", 0] == ("z", FinishReason.STOP)


def test_log_probabilities_are_the_models_own(engine: LLMEngine) -> None:
    free = request("free", None, max_tokens=1, logprobs=5, temperature=0.0)
    bound = request("bound", YES, logprobs=5, temperature=0.0)
    reports: dict[str, list[Any]] = {"free": [], "bound": []}
    for one in (free, bound):
        engine.submit(one)
    while engine.has_work:
        for delta in engine.step().deltas:
            reports[delta.request_id] += delta.logprobs or ()
    first = reports["bound"][0]
    assert first.top == reports["free"][0].top
    assert first.chosen.token_id not in {candidate.token_id for candidate in first.top}
    assert first.chosen.logprob < first.top[-1].logprob


def test_a_trigger_leaves_free_what_comes_before_it(engine: LLMEngine) -> None:
    grammar = Grammar(YES.kind, YES.text, after=CALL)
    bias = {CALL: 3.0}
    found = {}
    for seed in range(6):
        one = request(str(seed), grammar, seed=seed, logit_bias=bias, max_tokens=100)
        engine.submit(one)
        tokens: list[int] = []
        while engine.has_work:
            for delta in engine.step().deltas:
                tokens += delta.token_ids
                reason = delta.finish_reason
        if CALL in tokens:
            after = text_of(tokens[tokens.index(CALL) + 1 :])
            assert after in {"yes", "no", "perhaps"}
            found[seed] = (tokens.index(CALL), reason)
    assert any(before for before, _ in found.values()), "free tokens before it"
    assert {reason for _, reason in found.values()} == {FinishReason.STOP}


def test_special_tokens_stand_only_where_the_grammar_names_them(engine: LLMEngine) -> None:
    by_name = Grammar.lark('start: "ab" <call> "c"')
    by_number = Grammar.lark(f'start: "ab" <[{CALL}]> "c"')
    for grammar in (by_name, by_number):
        assert run(engine, request("call", grammar))["call", 0][0] == "ab<call>c"
    text = Grammar.regex("<call>")
    bias = {CALL: 100.0}
    engine.submit(request("text", text, logit_bias=bias))
    tokens = [i for delta in steps(engine) for i in delta.token_ids]
    assert CALL not in tokens
    assert text_of(tokens) == "<call>"


def steps(engine: LLMEngine) -> Iterator[Any]:
    while engine.has_work:
        yield from engine.step().deltas


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (Grammar.lark("start: <nowhere>"), "nowhere"),
        (Grammar.lark("start: x"), "line 1, column 8"),
        (Grammar.regex("("), "regex"),
        (Grammar.json_schema({"type": "strin"}), "strin"),
        (Grammar.json_schema({"enum": []}), "empty"),
    ],
)
def test_a_bad_grammar_ends_its_request_alone(
    engine: LLMEngine, grammar: Grammar, why: str
) -> None:
    engine.submit(request("bad", grammar))
    engine.submit(request("good", YES))
    ends = {}
    for delta in steps(engine):
        ends[delta.request_id] = (delta.finish_reason, delta.refused, delta.error)
    assert ends["good"] == (FinishReason.STOP, False, None)
    reason, refused, error = ends["bad"]
    assert (reason, refused) == (FinishReason.ERROR, True)
    assert why in error


def test_a_dead_end_is_an_error_of_its_request(engine: LLMEngine) -> None:
    banned = (FIRST_BYTE + ord("z"),)
    engine.submit(request("banned", Grammar.regex("zX"), min_tokens=5, stop_token_ids=banned))
    engine.submit(request("good", YES))
    ends = {delta.request_id: delta for delta in steps(engine)}
    assert ends["good"].finish_reason is FinishReason.STOP
    assert ends["banned"].finish_reason is FinishReason.ERROR
    assert "grammar" in ends["banned"].error


def test_a_grammar_that_becomes_too_wide_is_the_requests_fault(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = LLParserLimits(max_items_in_row=50, verbose_errors=False)
    for module in ("library", "c_library"):
        monkeypatch.setattr(f"appliance.engine.grammars.{module}.limits", lambda: narrow)
    ways = " | ".join(f'"k{number}" c' for number in range(60))
    engine.submit(request("wide", Grammar.lark(f'start: "a" b\nb: {ways}\nc: "z"')))
    engine.submit(request("good", YES))
    ends = {delta.request_id: delta for delta in steps(engine)}
    assert ends["good"].finish_reason is FinishReason.STOP
    assert (ends["wide"].finish_reason, ends["wide"].refused) == (FinishReason.ERROR, True)
    assert "the grammar cannot go on: Parser Error: Current row has" in ends["wide"].error


def test_a_model_without_an_end_token_ends_with_its_grammar(tiny_llama: Path) -> None:
    config = EngineConfig(model=str(tiny_llama), threads=1)
    engine = load_llm_engine(config, (), None, lambda *_: None, None)
    engine.set_vocabulary(words())
    for grammar in (YES, Grammar.regex("z{3}"), Grammar.json_schema(PERSON)):
        assert run(engine, request("one", grammar))["one", 0][1] is FinishReason.STOP


def test_requests_wait_for_their_grammar_and_can_be_aborted_there(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go, real = threading.Event(), compiling.GrammarCompiler.compile

    def slow(self: Any, grammar: Grammar) -> Any:
        may_go.wait(10)
        return real(self, grammar)

    monkeypatch.setattr(compiling.GrammarCompiler, "compile", slow)
    engine.submit(request("slow", Grammar.regex("b{2}")))
    engine.submit(request("gone", Grammar.regex("b{3}")))
    engine.submit(request("free", None, max_tokens=3))
    late = msgspec.structs.replace(request("late", Grammar.regex("b{4}")), timeout=0.01)
    engine.submit(late)
    assert engine.stats().waiting == 4
    time.sleep(0.02)
    seen = [delta for _ in range(4) for delta in engine.step().deltas]
    (over,) = (delta for delta in seen if delta.request_id == "late")
    assert over.expired
    assert "its timeout of 0.01 s" in (over.error or "")
    seen.remove(over)
    assert {delta.request_id for delta in seen} == {"free"}, "others go on meanwhile"
    assert engine.abort("gone")
    assert not engine.abort("gone")
    assert engine.has_work
    may_go.set()
    assert [delta.request_id for delta in steps(engine) if delta.finish_reason] == ["slow"]


def test_equal_grammars_are_compiled_once(tiny_llama: Path) -> None:
    engine = load(tiny_llama)
    for n in range(3):
        run(engine, request(str(n), Grammar.json_schema(PERSON)))
    run(engine, request("other", YES, n=2))
    stats = engine.stats()
    assert (stats.grammar_requests_total, stats.grammar_cache_hits_total) == (4, 2)
    assert sum(stats.grammar_compiles) == 2
    assert stats.grammar_compile_seconds_total > 0


def test_few_unused_grammars_are_kept(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(tiny_llama)

    def kept(names: str) -> list[str]:
        for name in names:
            run(engine, request(name, Grammar.regex(name)))
        compiler = engine.grammars.compiler
        assert compiler is not None
        return [text for _, text in compiler.kept]

    monkeypatch.setattr(compiling, "MAX_KEPT", 3)
    assert kept("stuvt") == ["u", "v", "t"]
    monkeypatch.setattr(compiling, "MAX_KEPT_TEXT", 2)
    assert kept("w") == ["t", "w"]
    monkeypatch.setattr(compiling, "MAX_KEPT_TEXT", 0)
    assert kept("xy") == ["y"]


def test_beams_refuse_grammars() -> None:
    with pytest.raises(RequestError) as found:
        SamplingParams(use_beam_search=True, best_of=2, grammar=YES)
    assert found.value.param == "use_beam_search"


def test_a_request_with_a_grammar_needs_a_vocabulary(tiny_llama: Path) -> None:
    config = EngineConfig(model=str(tiny_llama), threads=1)
    engine = load_llm_engine(config, (), None, lambda *_: None, None)
    with pytest.raises(RequestError, match="vocabulary"):
        engine.submit(request("early", YES))
    engine.set_vocabulary(words())
    assert run(engine, request("later", YES))["later", 0][0] in {"yes", "no", "perhaps"}


def test_the_vocabulary_is_read_while_nothing_runs(tiny_llama: Path) -> None:
    engine = load(tiny_llama)
    compiler = engine.grammars.compiler
    assert compiler is not None
    engine.submit(request("free", None, max_tokens=3))
    while engine.scheduler.has_work:
        assert not compiler.prepared, "not while others wait for their tokens"
        engine.step()
    assert engine.has_work
    engine.step()
    assert compiler.prepared
    assert not engine.has_work
    assert run(engine, request("yes", YES))["yes", 0][0] in {"yes", "no", "perhaps"}

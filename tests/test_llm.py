from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from appliance import LLM, SamplingParams
from appliance.engine.nouns.request import FinishReason, Request
from appliance.errors import ChatTemplateError, ConfigError, ContextLengthError, ModelError
from appliance.llm import CompletionOutput
from appliance.tokenizer import ChatTemplate, Tokenizer

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> LLM:
    return LLM(model=str(smollm2_gguf), max_model_len=512, threads=2)


def test_a_question_is_answered(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of Japan?"}]
    answer = llm.chat(question, SamplingParams(temperature=0, max_tokens=30), progress=False)[0]
    assert "Tokyo" in answer.outputs[0].text
    assert "<|im_end|>" not in answer.outputs[0].text
    assert answer.outputs[0].finish_reason is FinishReason.STOP


def test_a_template_of_a_stranger_takes_no_more_than_its_limits(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = Tokenizer.from_path(Path(llm.path))
    hostile.chat_template = ChatTemplate("{{ 'a' | center(10**10) }}", {})
    monkeypatch.setattr(llm, "tokenizer", hostile)
    with pytest.raises(ChatTemplateError, match="1024 MiB"):
        llm.chat([{"role": "user", "content": "hi"}], progress=False)


def test_prompts_come_back_in_order_with_a_progress_bar(
    llm: LLM, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = [f"The number {i} is" for i in range(40)]
    sampling = [
        SamplingParams(temperature=0.7, top_p=0.95, seed=i, max_tokens=3 + i % 5) for i in range(40)
    ]
    results = llm.generate(prompts, sampling)
    assert [result.prompt for result in results] == prompts
    assert all(len(result.outputs[0].token_ids) <= 3 + i % 5 for i, result in enumerate(results))
    assert all(result.outputs[0].text for result in results)
    assert "40/40" in capfd.readouterr().err


def test_text_prompts_and_their_token_ids_give_the_same(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=10)
    text = llm.generate("Once upon a time", sampling, progress=False)[0]
    ids = llm.generate([text.prompt_token_ids], sampling, progress=False)[0]
    assert ids.outputs[0].text == text.outputs[0].text
    assert ids.prompt == "Once upon a time"


def test_a_stop_string_ends_one_choice_and_is_not_shown(llm: LLM) -> None:
    prompt = "One, two, three, four, five,"
    free = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=20), progress=False)[0]
    stop = free.outputs[0].text[6:9]
    sampling = SamplingParams(temperature=0, max_tokens=20, stop=(stop,), logprobs=2)
    stopped = llm.generate(prompt, sampling, progress=False)[0].outputs[0]
    assert stopped.text == free.outputs[0].text[: free.outputs[0].text.index(stop)]
    assert stopped.finish_reason is FinishReason.STOP
    assert len(stopped.logprobs) == len(stopped.token_ids)
    assert not llm.engine.has_work


def test_a_prompt_that_is_too_long_is_refused_and_nothing_is_left_behind(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="512"):
        llm.generate(["short", [5] * 600], progress=False)
    assert not llm.engine.has_work


def test_without_settings_it_samples_as_its_makers_recommend(llm: LLM) -> None:
    assert llm.default_sampling == SamplingParams(temperature=0.2, top_p=0.9)
    asked: list[SamplingParams] = []
    submit = llm.engine.submit

    def noted(request: Request) -> None:
        asked.append(request.sampling)
        submit(request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine, "submit", noted)
        llm.generate("a", progress=False)
        llm.generate("a", SamplingParams(max_tokens=2), progress=False)
    assert asked == [llm.default_sampling, SamplingParams(max_tokens=2)]


def test_options_are_settings_and_settings_count(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="LLM option kv_cach_memory is not a setting; did you"):
        LLM("/nowhere", kv_cach_memory="1GiB")
    with pytest.raises(ConfigError, match="LLM option kv_cache_memory must be a size such as"):
        LLM("/nowhere", kv_cache_memory="much")
    with pytest.raises(ConfigError, match="LLM option port is not a setting"):
        LLM("/nowhere", port=1)
    with pytest.raises(ConfigError, match="a script has one engine"):
        LLM(replicas=2)
    monkeypatch.setenv("APPLIANCE_MODEL", "/a model of the settings")
    monkeypatch.setenv("APPLIANCE_PORT", "none of its business")
    with pytest.raises(ModelError, match="/a model of the settings"):
        LLM(kv_cache_memory="1GiB")


def test_as_many_settings_as_prompts(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 prompts but 1"):
        llm.generate(["a", "b"], [SamplingParams()], progress=False)


def test_the_best_of_several_answers_come_first(llm: LLM) -> None:
    sampling = SamplingParams(n=2, best_of=5, temperature=1.0, seed=3, max_tokens=12)
    (result,) = llm.generate("The moon is", sampling, progress=False)
    every = SamplingParams(n=5, temperature=1.0, seed=3, max_tokens=12, logprobs=0)
    (all_of_them,) = llm.generate("The moon is", every, progress=False)

    def mean(answer: CompletionOutput) -> float:
        return sum(one.chosen.logprob for one in answer.logprobs) / len(answer.token_ids)

    ranked = sorted(all_of_them.outputs, key=mean, reverse=True)
    assert [answer.text for answer in result.outputs] == [answer.text for answer in ranked[:2]]
    assert [answer.index for answer in result.outputs] == [0, 1]
    assert [answer.logprobs for answer in result.outputs] == [[], []]
    best = result.outputs[0]
    assert best.cumulative_logprob == pytest.approx(mean(ranked[0]) * len(best.token_ids))


def test_beams_stop_at_strings_which_are_not_shown(llm: LLM) -> None:
    prompt = "Three fruits: apples, pears and"
    search: dict[str, Any] = {"use_beam_search": True, "n": 4, "max_tokens": 16}
    (free,) = llm.generate(prompt, SamplingParams(**search), progress=False)
    scores = [answer.cumulative_logprob or 0.0 for answer in free.outputs]
    assert scores[0] > -30
    num_ended = 0
    for stop in (".", "ges", "\n"):
        (result,) = llm.generate(prompt, SamplingParams(**search, stop=(stop,)), progress=False)
        ended = [answer for answer in result.outputs if answer.finish_reason is FinishReason.STOP]
        assert all(stop not in answer.text for answer in result.outputs)
        for answer in ended:
            whole = llm.tokenizer.decode(answer.token_ids)
            assert stop not in llm.tokenizer.decode(answer.token_ids[:-1]), "it went on after it"
            assert whole.startswith(answer.text)
        num_ended += len(ended)
    assert num_ended >= 4
    assert not llm.engine.has_work

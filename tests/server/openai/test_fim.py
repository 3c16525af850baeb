"""A prompt with a suffix: the model's own tokens for infilling, or a refusal with the reason."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from support.echo.byte_tokenizer import save_byte_tokenizer
from support.runs.waiting import until

from appliance.tokenizer import Tokenizer
from appliance.tokenizer.fim import FORMS, end_ids, find_form

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.tokenizer.fim import FimForm
    from tests.server.conftest import Serve

STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_every_form_is_found_by_its_tokens(
    tokenizer_with: Callable[..., Tokenizer], form: FimForm
) -> None:
    tokenizer = tokenizer_with("{{ 1 }}", *form.marks, *form.ends[:1])
    assert find_form(tokenizer) is form
    assert [tokenizer.token_text(one) for one in end_ids(form, tokenizer)] == [*form.ends[:1]]
    ids = tokenizer.encode_filled(
        form.template, {"prefix": "ab", "suffix": "cd" + form.marks[0]}, add_special_tokens=True
    )
    texts = [tokenizer.token_text(one) for one in ids]
    assert [text for text in texts if text in form.marks] == list(form.marks)
    assert tokenizer.decode(ids, with_control=True).count(form.marks[0]) == 2, (
        "the one of the file stays text"
    )
    assert find_form(tokenizer_with("{{ 1 }}", *form.marks[1:])) is None


async def test_the_model_reads_both_sides_and_stops_at_its_own_ends(
    serve: Serve, tokenizer_with: Callable[..., Tokenizer]
) -> None:
    tokenizer = tokenizer_with("{{ 1 }}", *STARCODER)
    async with serve(tokenizer=tokenizer) as running:
        # The engine of these tests repeats its prompt.
        for prompts in ("ab", ["ab", "x"]):
            answer = await running.complete(prompts, suffix="cd", max_tokens=7, logprobs=0)
            choices = answer.json()["choices"]
            assert choices[0]["logprobs"]["tokens"] == [
                "<fim_prefix>",
                "a",
                "b",
                "<fim_suffix>",
                "c",
                "d",
                "<fim_middle>",
            ]
            assert choices[0]["text"] == "abcd"
        assert choices[1]["text"] == "xcd"
        echoed = await running.complete("ab", suffix="cd", max_tokens=2, echo=True)
        assert echoed.json()["choices"][0]["text"] == "aba"
        body = {"model": "echo", "prompt": "ab", "suffix": "cd", "stream": False}
        made = await running.http.post(
            "/api/generate", json={**body, "options": {"num_predict": 7}}
        )
        assert made.json()["response"] == "abcd"
        shown = await running.http.post("/api/show", json={"model": "echo"})
        assert "insert" in shown.json()["capabilities"]
        for field, value in (("system", "be kind"), ("think", True), ("raw", True)):
            refused = await running.http.post("/api/generate", json={**body, field: value})
            assert refused.status_code == 400
            assert field in refused.json()["error"]
        ids = await running.complete([97], suffix="x")
        assert ids.json()["error"]["param"] == "prompt"
        scored = await running.complete("ab", suffix="x", echo=True, logprobs=0)
        assert scored.json()["error"]["param"] == "suffix"


async def test_a_model_that_was_not_trained_to_says_so(serve: Serve) -> None:
    async with serve() as running:
        answer = await running.complete("ab", suffix="cd")
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "suffix")
        assert error["code"] == "suffix_unsupported"
        assert "not trained to fill in the middle" in error["message"]
        assert "StarCoder" in error["message"]
        assert (await running.complete("ab", suffix="", max_tokens=1)).status_code == 200


async def test_ollama_continues_and_fills_in_without_a_chat_template(
    serve: Serve, tmp_path: Path
) -> None:
    """/v1/completions does so too; Ollama's document says that `raw` applies no format."""
    save_byte_tokenizer(tmp_path, special=STARCODER)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    tokenizer = Tokenizer.from_path(tmp_path)
    assert tokenizer.chat_template is None
    async with serve(tokenizer=tokenizer) as running:
        for extra in ({"raw": True}, {"suffix": "cd"}):
            suffix = extra.get("suffix")
            told = (await running.complete("ab", suffix=suffix, max_tokens=6)).json()
            for stream in (False, True):
                answer = await running.http.post(
                    "/api/generate",
                    json={"model": "echo", "prompt": "ab", "stream": stream, **extra}
                    | {"options": {"num_predict": 6}},
                )
                assert answer.status_code == 200, answer.text
                lines = [json.loads(line) for line in answer.text.splitlines()]
                assert "".join(line["response"] for line in lines) == told["choices"][0]["text"]
                assert lines[-1]["done_reason"] == told["choices"][0]["finish_reason"] == "length"
        refused = await running.http.post("/api/generate", json={"model": "echo", "prompt": "ab"})
        assert refused.status_code == 400, "as a chat it needs the template"
        await until(running.idle)

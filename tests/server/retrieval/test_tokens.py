"""Token ids of texts and chats, and texts of token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.server.conftest import Running, Serve

CHAT = [{"role": "user", "content": "hi<eos>"}]


async def ask(running: Running, path: str, **body: Any) -> Any:
    answer = await running.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_prompt_has_the_tokens_that_a_completion_would_have(serve: Serve) -> None:
    async with serve() as running:
        found = await ask(running, "/tokenize", prompt="ab<eos>é", return_token_strs=True)
        assert found == {
            "count": 5,
            "max_model_len": 512,
            "tokens": [97, 98, 256, 195, 169],
            "token_strs": ["a", "b", "<eos>", "\ufffd", "\ufffd"],
        }
        back = await ask(running, "/detokenize", tokens=found["tokens"])
        assert back == {"prompt": "ab<eos>é"}
        assert await ask(running, "/detokenize", tokens=[]) == {"prompt": ""}
        assert running.state.engine.stats.steps_total == 0


async def test_what_a_harness_asks_of_the_tokenizer(serve: Serve) -> None:
    async with serve() as running:
        found = (await running.http.get("/tokenizer_info")).json()
        assert found["eos_token"] == "<eos>"
        assert found["bos_token"] is None
        assert (found["vocab_size"], found["model_max_length"]) == (272, 512)
        assert "<|im_start|>" in found["chat_template"]


async def test_a_chat_has_the_tokens_that_its_answer_would_follow(serve: Serve) -> None:
    async with serve() as running:
        found = await ask(running, "/tokenize", messages=CHAT, model="echo")
        answered = (
            await running.http.post(
                "/v1/chat/completions", json={"messages": CHAT, "max_tokens": 1}
            )
        ).json()
        assert found["count"] == len(found["tokens"]) == answered["usage"]["prompt_tokens"]
        assert found["token_strs"] is None
        text = (await ask(running, "/detokenize", tokens=found["tokens"]))["prompt"]
        assert text == "<|im_start|>user\nhi<eos><|im_end|>\n<|im_start|>assistant\n"
        assert found["tokens"].count(256) == 0, "what looks like a control token is text"

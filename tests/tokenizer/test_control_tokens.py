from __future__ import annotations

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from appliance.tokenizer import ChatTemplate, Tokenizer
from appliance.tokenizer.control_tokens import ContentGuard, ControlTokens
from appliance.tokenizer.source import TokenizerSource

TOKENS = {5: AddedToken("<|end|>", rstrip=True), 7: AddedToken("<|end"), 9: AddedToken("[X]")}

FRAGMENTS = ["<|im_end|>", "<|im_start|>", "<|end|>", "<s>", "<|im_", "end|>", "start|>", "<|",
             "|>", "<", ">", "s", "im_", " ", "\n", "user", "the fox", "é"]  # fmt: skip
hostile = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)


def test_the_longest_token_wins_and_takes_its_space_along() -> None:
    text = "é<|end|> \n<|end x[X]"
    found = ControlTokens(TOKENS).find(text)
    assert [(text[o.start : o.end], o.token_id) for o in found] == [
        ("<|end|> \n", 5),
        ("<|end", 7),
        ("[X]", 9),
    ]


def test_no_control_tokens_at_all() -> None:
    none = ControlTokens({})
    assert none.find("<|end|>") == []
    assert ContentGuard(none).hide([{"content": "<|end|> <"}]) == [{"content": "<|end|> <"}]


def test_ordinary_content_is_not_touched() -> None:
    guard = ContentGuard(ControlTokens(TOKENS))
    message = {
        "role": "user",
        "content": [{"type": "text", "text": "a < b, x | y > z <|emd|>"}],
        "n": 3,
        "none": None,
    }
    assert guard.hide([message]) == [message]


def test_hidden_text_comes_back() -> None:
    guard = ContentGuard(ControlTokens(TOKENS))
    text = "X] a<|end|>  b[X]<|end|>c <|e"
    hidden = guard.hide({"[X]": text})
    assert "<|end" not in str(hidden)
    assert "[X]" not in str(hidden)
    ((key, value),) = hidden.items()
    assert (guard.restore(key), guard.restore(value)) == ("[X]", text)


def chat_tokenizer(native: tokenizers.Tokenizer, source: str) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(native.to_str())
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return Tokenizer(TokenizerSource(backend, None, (), template))


TURNS = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    "{{ m.name }}<|end|>{{ m.content }}<|im_end|>\n{% endfor %}"
)


@settings(max_examples=150)
@given(first=hostile, second=hostile, name=hostile)
def test_content_never_makes_a_control_token(
    native: tokenizers.Tokenizer, first: str, second: str, name: str
) -> None:
    tokenizer = chat_tokenizer(native, TURNS)
    chat = [
        {"role": "user", "content": first, "name": name},
        {"role": "user", "content": second, "name": name},
    ]
    harmless = [{"role": "user", "content": "the fox", "name": "the"}] * 2
    control = tokenizer.encode("<s><|im_start|><|im_end|><|end|>", add_special_tokens=False)

    ids = tokenizer.encode_chat(chat)
    assert [i for i in ids if i in control] == [
        i for i in tokenizer.encode_chat(harmless) if i in control
    ]
    # Nothing is lost either: the tokens spell the template's text, except for the space that
    # <|end|> absorbs.
    assert tokenizer.chat_template is not None
    rendered = tokenizer.chat_template.render(chat)
    spelled = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert "".join(spelled.split()) == "".join(rendered.split())


def test_typed_control_tokens_are_plain_text(tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "say <|im_end|> twice<|im_end|>"}]
    ids = tokenizer.encode_chat(chat)
    end = tokenizer.eos_token_ids[0]
    assert ids.count(end) == 1
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == (
        "<|im_start|>user\nsay <|im_end|> twice<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )


def test_roles_may_be_built_into_control_tokens(native: tokenizers.Tokenizer) -> None:
    backend = tokenizers.Tokenizer.from_str(native.to_str())
    backend.add_special_tokens([AddedToken("<|user|>"), AddedToken("<|tool|>")])
    turns = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer(TokenizerSource(backend, None, (), ChatTemplate(turns, {})))
    ids = tokenizer.encode_chat([{"role": "user", "content": "<|tool|>the"}])
    assert tokenizer.token_text(ids[0]) == "<|user|>"
    assert backend.token_to_id("<|tool|>") not in ids

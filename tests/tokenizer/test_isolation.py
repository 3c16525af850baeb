"""Strangers' templates and regular expressions, in processes that the system ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.runs.waiting import wait_until

from appliance.errors import ChatTemplateError, ModelError, RequestError
from appliance.tokenizer import ChatTemplate, Tokenizer, isolation, known_parts, pre_tokenizers
from appliance.tokenizer.isolation import IsolatedTemplate, TemplateLimitError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}>{% endif %}"
)
# Single steps, which the sandbox does not count, that take minutes and gigabytes.
LONG = "{% for i in range(90000) %}{% set x = ('a' * 60000) | replace('a', 'aa') %}{% endfor %}"
LARGE = "{{ 'a' | center(10**10) }}"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit processor time, which a busy machine does not change."""
    monkeypatch.setattr(isolation, "CPU_SECONDS", 0.6)
    monkeypatch.setattr(isolation, "ENCODE_SECONDS", 0.2)  # starting has a limit of its own


@pytest.fixture
def isolated() -> Iterator[Callable[[str], IsolatedTemplate]]:
    made = []

    def make(source: str) -> IsolatedTemplate:
        made.append(IsolatedTemplate(ChatTemplate(source, {"bos_token": "<s>"})))
        return made[-1]

    yield make
    for template in made:
        template.close()


def test_a_chat_reads_as_it_does_in_this_process(
    isolated: Callable[[str], IsolatedTemplate],
) -> None:
    here, there = ChatTemplate(CHATML, {}), isolated(CHATML)
    tool = {"type": "function", "function": {"name": "é\ud800", "parameters": {"a": [1, None]}}}
    for messages in (HELLO, [{"role": "user", "content": "\N{SNOWMAN}\0\ud800" * 50_000}]):
        for options in ({}, {"tools": [tool]}, {"add_generation_prompt": False}):
            assert there.render(messages, **options) == here.render(messages, **options)
    assert there.workers.started == 1, "it is kept"


def test_a_template_that_refuses_a_chat_is_no_breach(
    isolated: Callable[[str], IsolatedTemplate],
) -> None:
    template = isolated("{{ raise_exception('roles must alternate') }}")
    template.try_out()
    for _ in range(2):
        with pytest.raises(ChatTemplateError, match="roles must alternate"):
            template.render(HELLO)
    assert template.workers.started == 1, "it is kept"


@pytest.mark.parametrize("source", [LONG, LARGE], ids=["long", "large"])
def test_a_template_that_uses_up_its_limits_is_refused(
    source: str, isolated: Callable[[str], IsolatedTemplate]
) -> None:
    with pytest.raises(ChatTemplateError, match=r"needs more than 0\.6 s or 1024 MiB"):
        isolated(source).try_out()


def test_one_chat_that_breaks_the_limits_costs_one_process(
    isolated: Callable[[str], IsolatedTemplate],
) -> None:
    bomb = "{% if 'bomb' in messages[0].content %}" + LONG + "{% endif %}"
    template = isolated(bomb + CHATML)
    template.try_out()
    expected = ChatTemplate(CHATML, {}).render(HELLO)
    for number in range(2):
        assert template.render(HELLO) == expected
        with pytest.raises(TemplateLimitError):
            template.render([{"role": "user", "content": "a bomb"}])
        assert template.workers.started == 1 + number
    assert template.render(HELLO) == expected


def test_several_threads_share_some_processes(
    isolated: Callable[[str], IsolatedTemplate],
) -> None:
    template = isolated(CHATML)
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda _: template.render(HELLO), range(64)))
    assert set(texts) == {ChatTemplate(CHATML, {}).render(HELLO)}
    assert 1 <= template.workers.started <= isolation.MOST_WORKERS


def test_closing_ends_processes_at_work() -> None:
    template = IsolatedTemplate(ChatTemplate(LONG, {}))
    caught: list[Exception] = []

    def render() -> None:
        try:
            template.render(HELLO)
        except ChatTemplateError as error:
            caught.append(error)

    thread = threading.Thread(target=render)
    thread.start()
    wait_until(lambda: template.workers.started)
    template.close()
    thread.join()
    assert len(caught) == 1


def with_rule(folder: Path, pattern: str, *, place: str = "pre_tokenizer") -> Path:
    """Give a tokenizer one more rule, in the form of tokenizer.json."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    rule = {"pattern": {"Regex": pattern}}
    if place == "pre_tokenizer":
        split = {"type": "Split", **rule, "behavior": "Isolated", "invert": False}
        both = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}
        content["pre_tokenizer"] = both
    else:
        content[place] = {"type": "Replace", **rule, "content": "x"}
    file.write_text(json.dumps(content))
    return folder


UNKNOWN = r"q[a-z]|\d\d"
# For each place in a run of letters it tries every way to divide the letters after it among three
# groups, and no digit comes: a few thousand letters take minutes.
HOSTILE = r"[a-z]*[b-y]*[a-w]*\d"


def test_rules_of_a_stranger_give_the_same_tokens_elsewhere(
    tmp_path: Path, make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_rule(make_folder(tmp_path / "model"), UNKNOWN)
    there = Tokenizer.from_path(folder)
    assert there.is_isolated
    monkeypatch.setattr(pre_tokenizers, "KNOWN_PATTERNS", frozenset({UNKNOWN}))
    here = Tokenizer.from_path(folder)
    assert not here.is_isolated
    texts = ["the quick fox 12345", "", "quiz<|im_end|> qa", "\N{SNOWMAN}\0 \u3042" * 1000]
    for text in texts:
        for special in (True, False):
            ids = [
                tokenizer.encode(text, add_special_tokens=special, allow_special=special)
                for tokenizer in (here, there)
            ]
            assert ids[0] == ids[1]
    assert here.encode_chat(HELLO) == there.encode_chat(HELLO)
    assert here.vocab_size == there.vocab_size


def replacing(text: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": text}, "content": content}


DOUBLING = [replacing("c", "cc")] * 40
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TWICE = [{"Sequence": {"id": "A", "type_id": 0}}] * 2
# None of these has an expression, and a text of a few letters takes hours, gigabytes, or both.
HOSTILE_PARTS: dict[str, tuple[str, Any]] = {
    "doubling": ("normalizer", {"type": "Sequence", "normalizers": DOUBLING}),
    "doubling in nested sequences": (
        "normalizer",
        {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": DOUBLING}]},
    ),
    "steps under a foreign name too": (
        "normalizer",
        {"type": "Sequence", "decoders": [], "normalizers": DOUBLING},
    ),
    "a long prefix": ("normalizer", {"type": "Prepend", "prepend": "c" * 10**6}),
    "a long replacement": ("normalizer", replacing("c", "d" * 10**6)),
    "many steps": ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 10**4}),
    "bytes of bytes": ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [BYTES] * 40}),
    "a text many times": (
        "post_processor",
        {"type": "TemplateProcessing", "single": TWICE, "pair": TWICE, "special_tokens": {}},
    ),
    "an unknown type": ("pre_tokenizer", {"type": "Next"}),
    "a long end of words": ("model", {"end_of_word_suffix": "d" * 10**6}),
    "a setting of another type": ("model", {"max_input_chars_per_word": 1e9}),
    "a doubling decoder": (
        "decoder",
        {"type": "Sequence", "decoders": [BYTES, *DOUBLING]},
    ),
}


def with_part(folder: Path, place: str, part: Any) -> Path:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content[place] = {**content[place], **part} if place == "model" else part
    file.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", HOSTILE_PARTS)
def test_a_part_with_unusual_values_is_unknown(
    name: str, tmp_path: Path, make_folder: Callable[..., Path]
) -> None:
    folder = with_part(make_folder(tmp_path / "model"), *HOSTILE_PARTS[name])
    assert known_parts.unknown_parts((folder / "tokenizer.json").read_bytes())


@pytest.mark.parametrize("name", ["doubling", "doubling in nested sequences"])
def test_a_text_that_grows_without_end_is_stopped(
    name: str, tmp_path: Path, make_folder: Callable[..., Path]
) -> None:
    tokenizer = Tokenizer.from_path(with_part(make_folder(tmp_path / "m"), *HOSTILE_PARTS[name]))
    assert tokenizer.is_isolated
    with pytest.raises(RequestError, match="takes too long"):
        tokenizer.encode("c", add_special_tokens=False)
    assert tokenizer.encode("the", add_special_tokens=False)


def test_an_unknown_decoder_is_never_run(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    folder = make_folder(tmp_path / "model")
    plain = Tokenizer.from_path(folder)
    tokenizer = Tokenizer.from_path(with_part(folder, *HOSTILE_PARTS["a doubling decoder"]))
    ids = tokenizer.encode("the cat<|im_end|>", add_special_tokens=False)
    for control in (True, False):
        assert tokenizer.decode(ids, with_control=control) == plain.decode(
            ids, with_control=control
        )


@pytest.mark.parametrize("place", ["pre_tokenizer", "normalizer"])
def test_a_rule_that_takes_without_end_is_stopped(
    place: str, tmp_path: Path, make_folder: Callable[..., Path]
) -> None:
    tokenizer = Tokenizer.from_path(
        with_rule(make_folder(tmp_path / "model"), HOSTILE, place=place)
    )
    for _ in range(2):
        with pytest.raises(RequestError, match="takes too long"):
            tokenizer.encode("c" * 5000, add_special_tokens=False)
        assert tokenizer.encode("the", add_special_tokens=False)


def test_a_rule_that_cannot_even_be_read_refuses_the_model(
    tmp_path: Path, make_folder: Callable[..., Path]
) -> None:
    folder = with_rule(make_folder(tmp_path / "model"), r"(not closed")
    with pytest.raises(ModelError, match=r"tokenizer\.json is damaged, or takes too much"):
        Tokenizer.from_path(folder)


def test_a_rule_for_answers_refuses_the_model(
    tmp_path: Path, make_folder: Callable[..., Path]
) -> None:
    folder = make_folder(tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    rule = {"type": "Replace", "pattern": {"Regex": HOSTILE}, "content": "x"}
    content["decoder"] = {"type": "Sequence", "decoders": [content["decoder"], rule]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match="decoder has a regular expression"):
        Tokenizer.from_path(folder)


def test_a_panic_of_the_library_is_an_error_of_this_text(
    tmp_path: Path, make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A panic is not an Exception, and would pass all handlers of exceptions."""
    monkeypatch.setattr(pre_tokenizers, "KNOWN_PATTERNS", frozenset({"(a+)+$"}))
    tokenizer = Tokenizer.from_path(with_rule(make_folder(tmp_path / "model"), "(a+)+$"))
    assert not tokenizer.is_isolated
    with pytest.raises(RequestError, match="fails on this text"):
        tokenizer.encode("a" * 60 + "b", add_special_tokens=False)
    assert tokenizer.encode("the", add_special_tokens=False)


def test_rules_of_models_in_use_are_known(make_folder: Callable[..., Path], tmp_path: Path) -> None:
    for pattern in pre_tokenizers.KNOWN_PATTERNS:
        folder = with_rule(make_folder(tmp_path / "model"), pattern)
        assert not Tokenizer.from_path(folder).is_isolated
        found = known_parts.unknown_parts((folder / "tokenizer.json").read_bytes())
        assert found == []


def test_a_template_of_a_script_is_isolated_too(
    tmp_path: Path, make_folder: Callable[..., Path]
) -> None:
    tokenizer = Tokenizer.from_path(make_folder(tmp_path / "model"))
    tokenizer.chat_template = ChatTemplate(LARGE, {})
    tokenizer.isolate_template()
    with pytest.raises(TemplateLimitError):
        tokenizer.encode_chat(HELLO)


def test_a_template_that_takes_long_to_compile_is_refused() -> None:
    ChatTemplate("{{ 1" + " ~ 1" * 3000 + " }}", {})
    with pytest.raises(ChatTemplateError, match="marks and words"):
        ChatTemplate("{{ 1" + "~1" * 30_000 + " }}", {})

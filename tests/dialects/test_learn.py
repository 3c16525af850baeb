"""Dialects are learnt from templates modelled on the families that use them."""

# ruff: noqa: E501, RUF001 - texts as models and templates have them

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from appliance.dialects import Dialect, learn_dialect
from appliance.dialects.turns import prepare, short_id
from appliance.tokenizer import ChatTemplate

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)
LISTED = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"


def with_calls(call: str, *, before: str = "", listed: str = LISTED, after: str = "") -> str:
    """A template that lists tools and writes calls, one by one."""
    return (
        f"{listed}{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}"
        f"{{% if m.tool_calls %}}{before}{{% for c in m.tool_calls %}}{call}{{% endfor %}}{{% endif %}}"
        f"<|im_end|>\n{{% endfor %}}{after}"
    )


HERMES = with_calls(
    """<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>"""
)
TEMPLATES = {
    "hermes": HERMES,
    "llama": with_calls(
        """{{ '{"name": "' + c.function.name + '", ' }}"parameters": {{ c.function.arguments | tojson }}}"""
    ),
    "mistral (list)": with_calls(
        """{{ {"name": c.function.name, "arguments": c.function.arguments, "id": c.id} | tojson }}""",
        before="{% if m.tool_calls[0].id | length != 9 %}{{ raise_exception('9') }}{% endif %}[TOOL_CALLS] [",
    ),
    "mistral": with_calls(
        "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
    ),
    "qwen coder": with_calls(
        "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}"
        "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    ),
    "glm": with_calls(
        "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}"
        "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>"
    ),
    "gemma 4": with_calls(
        "<|tool_call>call:{{ c.function.name }}{{ '{' }}{% for k, v in c.function.arguments | dictsort %}"
        """{{ k }}:<|"|>{{ v }}<|"|>{% endfor %}}<tool_call|>"""
    ),
    "function gemma": with_calls(
        "<start_function_call>call:{{ c.function.name }}{{ '{' }}{% for k, v in c.function.arguments | "
        "dictsort %}{{ k }}:<escape>{{ v }}<escape>{% endfor %}}<end_function_call>"
    ),
    "deepseek": with_calls(
        "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments"
        " + '<｜tool▁call▁end｜>' }}",
        before="<｜tool▁calls▁begin｜>",
    ),
    "deepseek (fenced)": with_calls(
        "{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n'"
        " + c.function.arguments + '\n```<｜tool▁call▁end｜>' }}",
        before="<｜tool▁calls▁begin｜>",
    ),
    "harmony": with_calls(
        "<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
        "{{ c.function.arguments | tojson }}<|call|>"
    ),
}
WANT_TEXT = {"deepseek", "deepseek (fenced)"}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Now.", "parameters": {"type": "object"}},
}


def learn(source: str) -> Dialect:
    return learn_dialect(renderer(source), source)


def renderer(source: str) -> Any:
    template = ChatTemplate(source, {})

    def render(
        messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> str:
        return template.render(messages, tools=tools)

    return render


def conversation(call_id: str = "call_0") -> list[dict[str, Any]]:
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    return [
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call_id, "name": "weather", "content": "No."},
    ]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_follows_from_the_template(name: str) -> None:
    dialect = learn(TEMPLATES[name])
    assert dialect.form.name == name
    assert (dialect.lists_tools, dialect.writes_calls, dialect.takes_system) == (True, True, True)
    assert dialect.text_arguments == (name in WANT_TEXT)
    turns, tools = prepare(dialect, conversation(), [TOOL])
    text = renderer(TEMPLATES[name])(turns, tools)
    assert "Now." in text
    assert "Oslo" in text
    assert '\\"city' not in text, "arguments are JSON once"


def test_a_template_without_tools_gets_a_stated_form() -> None:
    dialect = learn(PLAIN)
    assert (dialect.form.name, dialect.lists_tools, dialect.writes_calls) == (
        "hermes",
        False,
        False,
    )
    turns, tools = prepare(dialect, conversation(), [TOOL])
    assert tools is None
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "user"]
    assert '"description": "Now."' in turns[0]["content"]
    assert "<tool_call>" in turns[0]["content"]
    assert turns[2]["content"] == dialect.form.write("weather", '{"city": "Oslo"}')
    assert turns[3]["content"] == "<tool_response>\nNo.\n</tool_response>"


def test_results_that_follow_one_another_are_one_turn() -> None:
    first, call, result = conversation()
    turns, _ = prepare(learn(PLAIN), [first, call, result, {**result, "content": "Yes."}], None)
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]
    assert "No." in turns[2]["content"]
    assert "Yes." in turns[2]["content"]


def test_a_template_that_writes_calls_but_lists_no_tools_is_helped() -> None:
    dialect = learn(TEMPLATES["deepseek"].removeprefix(LISTED))
    assert (dialect.lists_tools, dialect.writes_calls) == (False, True)
    turns, tools = prepare(
        dialect, [{"role": "system", "content": "Be kind."}, *conversation()], [TOOL]
    )
    assert tools is None
    assert turns[0]["content"].startswith("Be kind.\n\n")
    assert "<｜tool▁sep｜>" in turns[0]["content"]
    assert turns[2]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'


def test_a_template_without_a_system_message_is_told_by_the_user() -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + PLAIN
    dialect = learn(source)
    assert not dialect.takes_system
    turns, _ = prepare(dialect, conversation(), [TOOL])
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]
    assert turns[0]["content"].endswith("\n\nRain?")
    assert conversation()[0]["content"] == "Rain?"


def test_ids_are_as_short_as_the_form_needs_and_agree() -> None:
    dialect = learn(TEMPLATES["mistral (list)"])
    turns, _ = prepare(dialect, conversation("call_0123456789"), None)
    call_id = turns[1]["tool_calls"][0]["id"]
    assert len(call_id) == 9
    assert call_id.isalnum()
    assert turns[2]["tool_call_id"] == call_id
    assert short_id("abcdefgh9") == "abcdefgh9"
    assert short_id("call_1") != short_id("call_2")


def test_arguments_that_are_no_object_stay_what_the_model_wrote() -> None:
    turns = conversation()
    turns[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Os'
    prepared, _ = prepare(learn(HERMES), turns, None)
    assert prepared[1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Os'


@pytest.mark.parametrize(
    ("source", "marks"),
    [
        (PLAIN, None),
        (PLAIN + "{{ '<think>\n' if thinking }}{# cut at </think> #}", ("<think>", "</think>")),
        (PLAIN + "{# [THINK] [/THINK] #}", ("[THINK]", "[/THINK]")),
        (PLAIN + "{# <|channel>thought <channel|> #}", ("<|channel>thought", "<channel|>")),
        (TEMPLATES["harmony"] + "{# </think> #}", None),
    ],
)
def test_thoughts_are_found_in_the_template(source: str, marks: tuple[str, str] | None) -> None:
    dialect = learn(source)
    assert dialect.thought_marks == marks
    assert dialect.splits_any == (marks is not None or dialect.form.framed)
    if marks:
        assert dialect.begins_thinking(f"assistant\n{marks[0]}\n")
        assert not dialect.begins_thinking(f"{marks[0]}\n\n{marks[1]}\n\n")

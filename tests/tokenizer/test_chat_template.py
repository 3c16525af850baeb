from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from appliance.errors import ChatTemplateError
from appliance.tokenizer import ChatTemplate, Tokenizer
from appliance.tokenizer.sandbox import BUDGET
from appliance.tokenizer.source import TokenizerSource

VARIABLES = {"bos_token": "<s>", "eos_token": "<|im_end|>"}

# Modelled on several families, with the features of Jinja that these share.
TEMPLATES = {
    "chatml with a default system message": """
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "turns that alternate, with trimmed content": """
{{ bos_token }}
{%- set offset = 1 if messages[0].role == 'system' else 0 %}
{%- for message in messages[offset:] %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate user/assistant') }}
    {%- endif %}
    {%- if loop.first and offset %}{% set lead = messages[0].content ~ '\\n\\n' %}
    {%- else %}{% set lead = '' %}{% endif %}
    {{- '<turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\\n'
        ~ lead ~ message.content | trim ~ '<end>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}""",
    "tools as json": """
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' if not loop.last }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last='', count=0) %}
{%- for message in messages %}
    {%- set ns.count = ns.count + 1 %}
    {%- if message.content is string and message.content.startswith('<answer>') %}
        {%- continue %}
    {%- endif %}
    {{- '[' ~ loop.index ~ '/' ~ loop.length ~ ' ' ~ message['role'] | upper ~ ']' }}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}{{ call.function | tojson(indent=2) }}{% endfor %}
    {%- elif message.content is none %}none
    {%- else %}{{ message.content.split('</think>')[-1].lstrip('\\n') }}{%- endif %}
    {%- generation %}{{ eos_token }}{% endgeneration %}
    {%- if ns.count > 100 %}{% break %}{% endif %}
{%- endfor %}""",
    "macros and selections": """
{%- macro show(m) %}{{ m.role }}:{{ m.content if m.content else '-' }};{% endmacro %}
{%- for m in messages | selectattr('role', 'equalto', 'user') %}{{ show(m) }}{% endfor %}
    {% if true %}
kept line
    {% endif %}
{{ messages | map(attribute='role') | join(',') }} {{ messages | length }} {{ unknown }}
{%- for key, value in messages[0].items() %}{{ key }}{% endfor %}""",
}

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Be brief & <clear>."},
        {"role": "user", "content": "  hi \n\n 日本 🙂 \"quoted\" 'single' "},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nhello"},
        {"role": "user", "content": "ends with <"},
    ],
    [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "id": "1",
                    "function": {"name": "weather", "arguments": {"city": "Zürich", "n": 1.5}},
                }
            ],
        },
        {"role": "user", "content": ""},
    ],
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Look <here> & there",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_equals_transformers(
    native: tokenizers.Tokenizer,
    name: str,
    chat: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
) -> None:
    """Text and ids equal `apply_chat_template`'s, for chats without control tokens."""
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=native, chat_template=TEMPLATES[name], **VARIABLES
    )
    template = ChatTemplate(TEMPLATES[name], VARIABLES)
    ours = Tokenizer(
        TokenizerSource(tokenizers.Tokenizer.from_str(native.to_str()), None, (), template)
    )
    for add in (True, False):
        options: dict[str, Any] = {"tools": tools, "add_generation_prompt": add}
        assert template.render(chat, **options) == theirs.apply_chat_template(
            chat, tokenize=False, **options
        )
        assert (
            ours.encode_chat(chat, **options)
            == theirs.apply_chat_template(chat, tokenize=True, **options)["input_ids"]
        )


def test_strftime_now() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}", {})
    assert template.render([]) in {str(datetime.now().year), str(datetime.now().year + 1)}


def render(source: str, **message: Any) -> str:
    return ChatTemplate(source, {}).render([{"role": "user", "content": "hello"} | message])


def test_what_a_template_says_about_the_messages_is_passed_on() -> None:
    with pytest.raises(ChatTemplateError, match="Only user and assistant roles are supported!"):
        render("{{ raise_exception('Only user and\nassistant roles are supported!') }}")


def test_wrong_types_are_a_template_error() -> None:
    with pytest.raises(ChatTemplateError, match="does not accept these messages"):
        render("{{ 'a' + messages[0].content }}", content=None)


@pytest.mark.parametrize(
    "source",
    ["{% for %}", "{{", "{% if x %}", "{{ " + "(" * 6000 + ")" * 6000 + " }}", "{% break %}",
     "{% if x %}" * 3000 + "{% endif %}" * 3000],
)  # fmt: skip
def test_invalid_templates_are_refused_when_compiled(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="the model's chat template"):
        ChatTemplate(source, {})


def test_oversized_template() -> None:
    with pytest.raises(ChatTemplateError, match="65537 bytes, more than 65536"):
        ChatTemplate("x" * 65537, {})


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ ('' | attr('for' ~ 'mat'))('{0.__class__}', 1) }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ '{0.__class__}' | format(1) }}{{ '%s'.__mod__(1) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='system') }}",
    "{{ messages[0].clear() }}",
    "{% set x = messages[0].pop('role') %}",
    "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
    "{{ [].__iter__.__self__ }}{{ (1).__add__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_escapes_are_stopped(source: str) -> None:
    message = {"role": "user", "content": "hello"}
    try:
        text = ChatTemplate(source, {}).render([message])
    except ChatTemplateError:
        text = ""
    assert not any(word in text for word in ("class", "globals", "module", "function", "root:"))
    assert message == {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", "steps"),
        ("{% for i in range(10000000) %}{% endfor %}", "Range too big"),
        ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
         "steps"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'a' * 10**9 }}", "characters"),
        ("{{ [0] * 10**9 }}", "characters"),
        ("{{ 3 ** 1000000000 }}", "exponent"),
        ("{% set n = namespace(i=3) %}"
         "{% for i in range(40) %}{% set n.i = n.i * n.i %}{% endfor %}", "number"),
        ("{% set n = namespace(s='a') %}"
         "{% for i in range(40) %}{% set n.s = n.s + n.s %}{% endfor %}", "characters"),
        ("{% set n = namespace(s='a') %}"
         "{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "characters"),
        ("{% for i in range(90000) %}xxxxxxxxxxxxxxxx{% endfor %}", "characters"),
    ],
)  # fmt: skip
def test_bombs_are_stopped_in_the_process(source: str, reason: str) -> None:
    with pytest.raises(ChatTemplateError, match=reason):
        render(source)


@pytest.mark.parametrize("name", ["__budget", "budget", "the budget", "the_budget"])
def test_a_template_cannot_reach_its_budget(name: str) -> None:
    assert name != BUDGET or not name.isidentifier()
    with pytest.raises(ChatTemplateError):
        render("{{ " + name + ".spend(-1000000) }}")


def test_deep_messages_are_refused() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ChatTemplateError, match="nested more than 64 deep"):
        render("{{ messages }}", content=deep)


def test_long_chats_fit() -> None:
    chat = [{"role": "user", "content": "word " * 400}] * 1000
    template = ChatTemplate(TEMPLATES["chatml with a default system message"], VARIABLES)
    assert template.render(chat).count("word") == 400_000


def test_json_filter_writes_plain_text() -> None:
    content = {"a": "<é>", "b": [1, None, True]}
    assert render("{{ messages[0].content | tojson }}", content=content) == json.dumps(
        content, ensure_ascii=False
    )

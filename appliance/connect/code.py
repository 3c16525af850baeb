"""Set-up of your own code: curl, Python, JavaScript."""

from __future__ import annotations

import json
import shlex

from appliance.connect.recipe import Connection, Recipe, SetupStep, as_literal

_QUESTION = "Hello!"
_LIMIT = 1000  # tokens of the answer: a small model may find no end by itself


def _curl(to: Connection) -> tuple[SetupStep, ...]:
    question = {"role": "user", "content": _QUESTION}
    body = {"model": to.model, "messages": [question], "max_completion_tokens": _LIMIT}
    key = [f"-H {shlex.quote(f'Authorization: Bearer {to.key}')}"] if to.key else []
    lines = [
        f"curl {shlex.quote(f'{to.api}/chat/completions')}",
        *key,
        "-H 'Content-Type: application/json'",
        f"-d {shlex.quote(json.dumps(body, ensure_ascii=False))}",
    ]
    return (SetupStep("In a terminal:", " \\\n  ".join(lines), "bash"),)


def _python(to: Connection) -> tuple[SetupStep, ...]:
    code = f"""\
from openai import OpenAI

client = OpenAI(base_url={as_literal(to.api)}, api_key={as_literal(to.key_to_send)})
answer = client.chat.completions.create(
    model={as_literal(to.model)},
    messages=[{{"role": "user", "content": {as_literal(_QUESTION)}}}],
    max_completion_tokens={_LIMIT},
)
print(answer.choices[0].message.content)"""
    return _python_steps("openai", code)


def _javascript(to: Connection) -> tuple[SetupStep, ...]:
    code = f"""\
import OpenAI from "openai";

const client = new OpenAI({{
  baseURL: {as_literal(to.api)},
  apiKey: {as_literal(to.key_to_send)},
}});
const answer = await client.chat.completions.create({{
  model: {as_literal(to.model)},
  messages: [{{ role: "user", content: {as_literal(_QUESTION)} }}],
  max_completion_tokens: {_LIMIT},
}});
console.log(answer.choices[0].message.content);"""
    step = SetupStep("In a file that ends with .mjs:", code, "javascript", "chat.mjs")
    return SetupStep("Once:", "npm install openai", "bash"), step


def _anthropic(to: Connection) -> tuple[SetupStep, ...]:
    code = f"""\
from anthropic import Anthropic

client = Anthropic(base_url={as_literal(to.url)}, api_key={as_literal(to.key_to_send)})
answer = client.messages.create(
    model={as_literal(to.model)},
    max_tokens={_LIMIT},
    messages=[{{"role": "user", "content": {as_literal(_QUESTION)}}}],
)
print(answer.content[0].text)"""
    return _python_steps("anthropic", code)


def _python_steps(package: str, code: str) -> tuple[SetupStep, ...]:
    step = SetupStep("Then, in a file such as chat.py:", code, "python", "chat.py")
    return SetupStep("Once:", f"pip install {package}", "bash"), step


COMMANDS = {
    "curl": Recipe("curl", _curl),
    "python": Recipe("OpenAI's Python client", _python),
    "javascript": Recipe("OpenAI's JavaScript client", _javascript),
    "anthropic": Recipe("Anthropic's Python client", _anthropic),
}

"""Set-up of clients: your own code, chat programs, coding agents and home automation."""

from __future__ import annotations

import json
import secrets
import shlex
from functools import cache

from appliance.connect.recipe import (
    Connection,
    Recipe,
    SetupStep,
    as_json,
    as_literal,
    with_variables,
)

_KEY_VARIABLE = "APPLIANCE_API_KEY"
_EXAMPLE_CONTEXT = 32_768  # tokens; if the server's is unknown
_AGENT_CONTEXT, _HOME_CONTEXT = 32768, 8192  # tokens

_QUESTION = "What is the capital of Japan?"
_LIMIT = 1000  # tokens of the answer: a small model may find no end by itself


def _open_webui(to: Connection) -> tuple[SetupStep, ...]:
    variables = {
        "OPENAI_API_BASE_URL": to.api,
        "OPENAI_API_KEY": to.key_to_send,
        "ENABLE_OLLAMA_API": "False",
    }
    docker = [
        "docker run --detach --name open-webui --network host --env PORT=3000",
        *(f"--env {shlex.quote(f'{name}={value}')}" for name, value in variables.items()),
        "--volume open-webui:/app/backend/data ghcr.io/open-webui/open-webui:main",
    ]
    return (
        SetupStep(
            "With docker, on this machine; then open http://127.0.0.1:3000:",
            " \\\n  ".join(docker),
            "bash",
        ),
        SetupStep(
            "Or without: pip install open-webui, in an environment of its own, and:",
            with_variables("open-webui serve --port 3000", **variables),
            "bash",
        ),
    )


def _opencode(to: Connection) -> tuple[SetupStep, ...]:
    options = {"baseURL": to.api} | ({"apiKey": to.key} if to.key else {})
    context = to.context_length
    limits = {"limit": {"context": context, "output": context // 4}} if context else {}
    config = {
        "provider": {
            "home": {
                "npm": "@ai-sdk/openai-compatible",
                "options": options,
                "models": {to.model: limits},
            }
        },
        "model": f"home/{to.model}",
    }
    return (_file_step(as_json(config), "json", "opencode.json", "In the project's folder"),)


def _codex(to: Connection) -> tuple[SetupStep, ...]:
    lines = [
        f"model = {as_literal(to.model)}",
        'model_provider = "home"',
        *([f"model_context_window = {to.context_length}"] if to.context_length else []),
        "",
        "[model_providers.home]",
        'name = "home"',
        f"base_url = {as_literal(to.api)}",
        'wire_api = "responses"',
        *([f'env_key = "{_KEY_VARIABLE}"'] if to.key else []),
    ]
    steps = [_file_step("\n".join(lines), "toml", "~/.codex/config.toml")]
    if to.key:
        steps.append(SetupStep("Then:", with_variables("codex", **{_KEY_VARIABLE: to.key}), "bash"))
    return tuple(steps)


def _claude_code(to: Connection) -> tuple[SetupStep, ...]:
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_SMALL_FAST_MODEL")
    variables = {"ANTHROPIC_BASE_URL": to.url, "ANTHROPIC_AUTH_TOKEN": to.key_to_send}
    variables |= dict.fromkeys(models, to.model)
    return (SetupStep("In a terminal:", with_variables("claude", **variables), "bash"),)


def _aider(to: Connection) -> tuple[SetupStep, ...]:
    name = f"openai/{to.model}"
    variables = {"OPENAI_API_BASE": to.api, "OPENAI_API_KEY": to.key_to_send}
    command = with_variables(f"aider --model {shlex.quote(name)}", **variables)
    context = to.context_length or _EXAMPLE_CONTEXT
    limits = {"max_input_tokens": context, "max_output_tokens": context // 4}
    limits |= {"max_tokens": context // 4}
    about = {name: {**limits, "litellm_provider": "openai", "mode": "chat"}}
    return (
        _file_step(as_json(about), "json", "~/.aider.model.metadata.json"),
        SetupStep("In the project's folder:", command, "bash"),
    )


def _continue(to: Connection) -> tuple[SetupStep, ...]:
    lines = [
        "name: home",
        "version: 1.0.0",
        "schema: v1",
        "models:",
        f"  - name: {as_literal(to.model)}",
        "    provider: openai",
        f"    model: {as_literal(to.model)}",
        f"    apiBase: {as_literal(to.api)}",
        f"    apiKey: {as_literal(to.key_to_send)}",
        "    roles: [chat, edit, apply]",
    ]
    if to.context_length:
        lines += ["    defaultCompletionOptions:", f"      contextLength: {to.context_length}"]
    return (_file_step("\n".join(lines), "yaml", "~/.continue/config.yaml"),)


def _llm(to: Connection) -> tuple[SetupStep, ...]:
    lines = [
        "- model_id: home",
        f"  model_name: {as_literal(to.model)}",
        f"  api_base: {as_literal(to.api)}",
        "  api_key_name: home",
        "  supports_schema: true",
        "  supports_tools: true",
    ]
    file = "extra-openai-models.yaml"
    where = 'In the folder that `dirname "$(llm logs path)"` names'
    return (
        _file_step("\n".join(lines), "yaml", file, where),
        SetupStep("Once:", f"llm keys set home --value {shlex.quote(to.key_to_send)}", "bash"),
        SetupStep("Then:", f"llm -m home {shlex.quote(_QUESTION)}", "bash"),
    )


@cache
def _new_key() -> str:
    """Return a key for LiteLLM's proxy, which does not start without one."""
    return f"sk-{secrets.token_hex(16)}"


def _litellm(to: Connection) -> tuple[SetupStep, ...]:
    lines = [
        "model_list:",
        "  - model_name: home",
        "    litellm_params:",
        f"      model: {as_literal(f'openai/{to.model}')}",
        f"      api_base: {as_literal(to.api)}",
        f"      api_key: {as_literal(to.key_to_send)}",
        "general_settings:",
        f"  master_key: {as_literal(_new_key())}",
    ]
    return (
        _file_step("\n".join(lines), "yaml", "litellm.yaml"),
        SetupStep(
            "Then; the proxy's clients send its master_key:",
            "litellm --config litellm.yaml",
            "bash",
        ),
    )


def _home_assistant(to: Connection) -> tuple[SetupStep, ...]:
    key = f", and as API key {to.key}" if to.key else ""
    return (
        SetupStep(
            "In Home Assistant: Settings, Devices & services, Add integration, Ollama. Give as URL"
            f" {to.url}{key}; as model choose {to.model}:latest."
        ),
        SetupStep(
            "Assist sends every exposed entity with each question: give the server a context of"
            f" {_HOME_CONTEXT:,} tokens or more (--max-model-len), and expose few."
        ),
    )


def _file_step(code: str, language: str, file: str, where: str = "") -> SetupStep:
    return SetupStep(f"{where}, in {file}:" if where else f"In {file}:", code, language, file)


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


RECIPES = {
    "open-webui": Recipe("Open WebUI", _open_webui),
    "opencode": Recipe("opencode", _opencode, least_context=_AGENT_CONTEXT),
    "codex": Recipe("codex", _codex, least_context=_AGENT_CONTEXT),
    "claude-code": Recipe("Claude Code", _claude_code, least_context=_AGENT_CONTEXT),
    "aider": Recipe("aider", _aider, least_context=_AGENT_CONTEXT),
    "continue": Recipe("Continue", _continue, least_context=_AGENT_CONTEXT),
    "llm": Recipe("llm", _llm),
    "home-assistant": Recipe(
        "Home Assistant", _home_assistant, is_elsewhere=True, least_context=_HOME_CONTEXT
    ),
    "litellm": Recipe("LiteLLM proxy", _litellm),
    "curl": Recipe("curl", _curl),
    "python": Recipe("OpenAI's Python client", _python),
    "javascript": Recipe("OpenAI's JavaScript client", _javascript),
    "anthropic": Recipe("Anthropic's Python client", _anthropic),
}

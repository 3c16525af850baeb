"""Tries a chat template in a child process whose CPU time and memory are limited.

The sandbox bounds what a template can do step by step; this finds the ones that ask for gigabytes
in a single call. It takes about as long as starting Python, so the server does it while the engine
loads.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

from appliance.errors import ChatTemplateError
from appliance.runtime import child_environment
from appliance.tokenizer.chat_template import ChatTemplate

CPU_SECONDS = 2
MEMORY_BYTES = 1 << 30
WALL_SECONDS = 20  # generous: the machine may be busy loading the model

_USER = {"role": "user", "content": "What is the weather in Paris?"}
_ANSWER = {"role": "assistant", "content": "I do not know."}
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Current weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
_CHATS: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]] | None], ...] = (
    ([_USER], None),
    ([{"role": "system", "content": "Be brief."}, _USER, _ANSWER, _USER], None),
    ([_USER], [_TOOL]),
)


def probe(template: ChatTemplate) -> None:
    """Render three short chats in a child process.

    A template may refuse a chat; it may not exhaust its time or memory.

    Raises:
        ChatTemplateError: it did.
    """
    arguments = {
        "source": template.source,
        "tool_source": template.tool_source,
        "variables": template.variables,
    }
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            input=json.dumps(arguments).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
            timeout=WALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        failed = True
    else:
        failed = child.returncode != 0
    if failed:
        raise ChatTemplateError(
            f"the model's chat template needs more than {CPU_SECONDS} s or "
            f"{MEMORY_BYTES >> 20} MiB for a short chat; replace it"
        )


def main() -> None:
    """The child: a refusal ends it normally, a breach ends it by signal or MemoryError."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    arguments = json.load(sys.stdin)
    template = ChatTemplate(
        arguments["source"], arguments["variables"], tool_source=arguments["tool_source"]
    )
    for messages, tools in _CHATS:
        try:
            template.render(messages, tools=tools)
        except ChatTemplateError as error:
            if isinstance(error.__cause__, MemoryError):
                raise


if __name__ == "__main__":
    main()

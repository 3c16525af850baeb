"""Reads the packaged texts, which are this project's own: openings and held-out passages.

Models answer the openings to make calibration text. The passages are for evaluation alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.dialects.turns import prepare

if TYPE_CHECKING:
    from appliance.quant.text.documents import Message
    from appliance.tokenizer import Tokenizer

FOLDER = Path(__file__).with_name("samples")
BETWEEN = "\n%%\n"
CALL_ID = "call00001"  # the shortest form that every template takes


@dataclass(frozen=True, slots=True)
class ToolTask:
    """A question that calls for a tool.

    Attributes:
        tools: definitions in OpenAI's form.
        name: of the right tool.
        arguments: of a right call.
        result: of that call; "" if the chat ends with the call.
    """

    tools: tuple[Message, ...]
    question: str
    name: str
    arguments: dict[str, Any]
    result: str = ""

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """JSON Schema of the arguments of each tool."""
        return {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}

    def prompt(self, tokenizer: Tokenizer) -> list[int]:
        """Encode the tools and the question, up to the answer.

        Raises:
            ChatTemplateError: the model has no chat template, or it refuses the question.
        """
        return self._encoded(tokenizer, [self._asked()], opens=True)

    def called(self, tokenizer: Tokenizer) -> list[int]:
        """Encode the tools, the question and the right call; raises as `prompt` does."""
        return self._encoded(tokenizer, [self._asked(), self._call()], opens=False)

    def answered(self, tokenizer: Tokenizer) -> list[int]:
        """Encode the tools, the question, the call and its result, up to the answer."""
        result = {
            "role": "tool",
            "tool_call_id": CALL_ID,
            "name": self.name,
            "content": self.result,
        }
        return self._encoded(tokenizer, [self._asked(), self._call(), result], opens=True)

    def _asked(self) -> Message:
        return {"role": "user", "content": self.question}

    def _call(self) -> Message:
        function = {"name": self.name, "arguments": json.dumps(self.arguments)}
        call = {"id": CALL_ID, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    def _encoded(self, tokenizer: Tokenizer, turns: list[Message], *, opens: bool) -> list[int]:
        prepared, listed = prepare(tokenizer.dialect, turns, self.tools)
        options = {"enable_thinking": False}  # some templates know it, the others ignore it
        return tokenizer.encode_chat(
            prepared, tools=listed, add_generation_prompt=opens, options=options
        )


def openings(kind: str) -> list[str]:
    """List questions for a model to answer: of kind "chat", "code" or "languages"."""
    return list(_read("openings.json")[kind])


def tool_openings() -> list[ToolTask]:
    """List questions with tools to calibrate with, with calls and results."""
    return [_task(entry) for entry in _read("openings.json")["tools"]]


def tool_tasks() -> list[ToolTask]:
    """List the held-out questions with tools."""
    return [_task(entry) for entry in _read("calls.json")]


def passages(kind: str) -> list[str]:
    """List held-out passages: of kind "prose", "code" or "languages"."""
    return (FOLDER / f"{kind}.txt").read_text(encoding="utf-8").rstrip("\n").split(BETWEEN)


def chats() -> list[list[Message]]:
    """List held-out chats, each ending with an answer."""
    return [
        [{"role": role, "content": content} for role, content in chat]
        for chat in _read("chat.json")
    ]


def _read(name: str) -> Any:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def _task(entry: dict[str, Any]) -> ToolTask:
    name, arguments = entry["call"]
    tools = tuple(_tool(name, *described) for name, described in entry["tools"].items())
    return ToolTask(tools, entry["user"], name, arguments, entry.get("result", ""))


def _tool(name: str, description: str, parameters: dict[str, list[str]]) -> Message:
    properties: dict[str, dict[str, Any]] = {
        parameter: {"type": kind, "description": words}
        for parameter, (kind, words) in parameters.items()
    }
    for described in properties.values():
        if described["type"] == "array":
            described["items"] = {"type": "string"}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}

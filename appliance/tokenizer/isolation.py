"""Runs chat templates and encoders in processes with limits, see `isolated_worker`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.errors import ChatTemplateError, ModelError, RequestError
from appliance.isolated_worker import Handler, Packet, WorkerEndedError, Workers

if TYPE_CHECKING:
    from appliance.tokenizer.chat_template import ChatTemplate

CPU_SECONDS = 5.0  # per chat
MEMORY_BYTES = 1 << 30
MOST_WORKERS = 3  # at once; as many as the server has threads for texts

ENCODE_SECONDS = 5.0  # base limit for a request
CHARACTERS_PER_SECOND = 100_000  # one CPU second more for each; ten times the usual need
ENCODE_MEMORY_BYTES = 4 << 30

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


class IsolatedTemplate:
    """Renders a chat template in separate processes.

    The sandbox bounds the number of steps; this also bounds a single step that takes gigabytes or
    minutes, such as a filter on a long text.
    """

    def __init__(self, template: ChatTemplate) -> None:
        setup = {
            "source": template.source,
            "variables": template.variables,
            "tool_source": template.tool_source,
        }
        self.workers = Workers(
            template_task,
            setup,
            cpu_seconds=CPU_SECONDS,
            memory_bytes=MEMORY_BYTES,
            most=MOST_WORKERS,
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a chat as one text; arguments as in `ChatTemplate.render`.

        Raises:
            ChatTemplateError: the template refuses the messages, fails, or takes too much.
        """
        request = {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "options": options,
        }
        try:
            answer = self.workers.ask(request, cpu_seconds=CPU_SECONDS).content
        except WorkerEndedError as error:
            raise TemplateLimitError(
                f"the model's chat template needs more than {CPU_SECONDS:g} s or "
                f"{MEMORY_BYTES >> 20} MiB for this chat; send less, or replace the template"
            ) from error
        if "refused" in answer:
            raise ChatTemplateError(answer["refused"])
        text: str = answer["text"]
        return text

    def try_out(self) -> None:
        """Render three short chats; refusing them is fine, exceeding the limits is not.

        Raises:
            ChatTemplateError: it exceeded them.
        """
        for messages, tools in _CHATS:
            try:
                self.render(messages, tools=tools)
            except TemplateLimitError:
                raise
            except ChatTemplateError:
                continue

    def rest(self) -> None:
        """End idle processes; the next chat starts a new one."""
        self.workers.rest()

    def close(self) -> None:
        """End the processes; the next chat starts a new one."""
        self.workers.close()


class TemplateLimitError(ChatTemplateError):
    """A chat template exceeded its time or memory."""


class IsolatedEncoder:
    """Encodes texts in separate processes, for a tokenizer.json with unknown parts.

    Args:
        separator: a text that becomes a token by itself, see `Tokenizer`.

    Raises:
        ModelError: reading it exceeds the limits.
    """

    def __init__(self, folder: Path, separator: str) -> None:
        self.separator = separator
        self.workers = Workers(
            encoder_task,
            {"folder": str(folder.resolve()), "separator": separator},
            cpu_seconds=60.0,  # the largest ones take a few
            memory_bytes=ENCODE_MEMORY_BYTES,
            most=MOST_WORKERS,
        )
        try:
            self._ask([""], add_special_tokens=False)
        except WorkerEndedError as error:
            raise ModelError(
                f"{folder / 'tokenizer.json'} is damaged, or takes too much time or memory; use "
                "another model"
            ) from error

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of each text.

        Raises:
            RequestError: it takes too long, or the tokenizer fails.
        """
        try:
            return self._ask(texts, add_special_tokens=add_special_tokens)
        except WorkerEndedError as error:
            raise RequestError(
                "this model's tokenizer fails on this text, or takes too long; send another text"
            ) from error

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a pair, and 1 for each that is a control token.

        Raises:
            RequestError: it takes too long, or the tokenizer fails.
        """
        try:
            pair = {"pair": [first, second]}
            ids, control = self.workers.ask(pair, cpu_seconds=ENCODE_SECONDS).content
        except WorkerEndedError as error:
            raise RequestError("this model's tokenizer fails on pairs of texts") from error
        return ids, control

    def rest(self) -> None:
        """End an idle process; the next text starts a new one."""
        self.workers.rest()

    def close(self) -> None:
        """End the process; the next text starts a new one."""
        self.workers.close()

    def _ask(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        seconds = ENCODE_SECONDS + sum(map(len, texts)) / CHARACTERS_PER_SECOND
        request = {"texts": list(texts), "add_special_tokens": add_special_tokens}
        found: list[list[int]] = self.workers.ask(request, cpu_seconds=seconds).content
        return found


# ---- in the process ----


def template_task(**arguments: Any) -> Handler:
    """Make the handler that renders chats with one template.

    Args:
        arguments: of a `ChatTemplate`.
    """
    from appliance.tokenizer.chat_template import ChatTemplate

    template = ChatTemplate(**arguments)

    def render(request: Packet) -> Packet:
        options = request.content
        try:
            return Packet({"text": template.render(options.pop("messages"), **options)})
        except ChatTemplateError as error:
            if isinstance(error.__cause__, MemoryError):
                raise
            return Packet({"refused": str(error)})

    return render


def encoder_task(folder: str, separator: str) -> Handler:
    """Make the handler that encodes texts with the tokenizer of a folder."""
    from appliance.tokenizer.from_folder import read_folder
    from appliance.tokenizer.source import with_separator

    backend = with_separator(read_folder(Path(folder)).backend, separator)

    def encode(request: Packet) -> Packet:
        asked = request.content
        if "pair" in asked:
            both = backend.encode(*asked["pair"])
            return Packet([both.ids, both.special_tokens_mask])
        special = asked["add_special_tokens"]
        found = backend.encode_batch_fast(asked["texts"], add_special_tokens=special)
        return Packet([encoding.ids for encoding in found])

    return encode

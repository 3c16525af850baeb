"""A model's chat template: formats messages as in its training."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from jinja2 import Template, TemplateSyntaxError

from appliance.errors import ChatTemplateError, RequestError
from appliance.tokenizer.sandbox import BUDGET, Budget, TemplateEnvironment

logger = logging.getLogger(__name__)

MAX_TEMPLATE_BYTES = 64 * 1024
MAX_TEMPLATE_TOKENS = 16 * 1024  # of Jinja: the longest in use have 3,200; a second to compile
# A rendered chat may have this many times its input's length, plus a fixed allowance.
MAX_GROWTH = 8
GROWTH_ALLOWANCE = 64 * 1024
MAX_NESTING = 64  # of messages and tools


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja text by Hugging Face's conventions.
        variables: texts for the template, such as bos_token and eos_token.
        tool_source: the template for chats with tools, if the model has a separate one.

    Raises:
        ChatTemplateError: it is too large or invalid Jinja.
    """

    def __init__(
        self, source: str, variables: Mapping[str, str], *, tool_source: str | None = None
    ) -> None:
        self.source = source
        self.tool_source = tool_source
        self.variables = dict(variables)
        self._template = _compile(source)
        self._tool_template = self._template if tool_source is None else _compile(tool_source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a chat as one text.

        Args:
            messages: dicts with `role` and `content`, and other keys that the template reads.
            tools: tool definitions that the model may use.
            add_generation_prompt: end with the beginning of the assistant's turn.
            options: more template variables; the arguments above override them.

        Raises:
            ChatTemplateError: the template refuses the messages, fails, or takes too long.
        """
        try:
            length = _text_length(messages) + _text_length(tools) + _text_length(options)
            budget = Budget(max_chars=MAX_GROWTH * length + GROWTH_ALLOWANCE)
            template = self._tool_template if tools else self._template
            pieces, total = [], 0
            for piece in template.generate(
                {
                    **(options or {}),
                    **self.variables,
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                    BUDGET: budget,
                }
            ):
                total += len(piece)
                budget.check_length(total)
                pieces.append(piece)
        except Exception as error:
            # Templates can raise any Python exception.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ChatTemplateError(
                f"the model's chat template does not accept these messages: {reason}"
            ) from error
        return "".join(pieces)


def marked_end(message: dict[str, Any], field: str) -> str:
    """Add an unguessable mark to the end of a message's text, and return the mark.

    A space after it shows whether the template strips the text.
    """
    mark = f"Y{secrets.token_hex(8)}y"
    content = message[field]
    if isinstance(content, list):  # of parts
        text = {"type": "text", "text": f"{content[-1].get('text', '')}{mark} "}
        message[field] = [*(content[:-1] if "text" in content[-1] else content), text]
    else:
        message[field] = f"{content}{mark} "
    return mark


def text_before(mark: str, text: str) -> str:
    """Return a rendered chat up to a mark, stripped as the template strips the message.

    The rule of transformers' `continue_final_message`.

    Raises:
        RequestError: the template left the marked text out.
    """
    before, found, after = text.rpartition(mark)
    if not found:
        raise RequestError(
            "the model's chat template leaves out the text that is to be continued; end with a "
            "turn of the user",
            param="messages",
        )
    return before if after.startswith(" ") else before.rstrip()


def check_nesting(value: Any, param: str, nesting: int = 0) -> None:
    """Raise RequestError if messages or tools nest too deeply to walk safely."""
    if nesting > MAX_NESTING:
        raise RequestError(
            f"the {param} are nested more than {MAX_NESTING} deep; send flatter ones", param=param
        )
    if isinstance(value, Mapping):
        for item in value.values():
            check_nesting(item, param, nesting + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            check_nesting(item, param, nesting + 1)


def _compile(source: str) -> Template:
    size = len(source.encode(errors="surrogatepass"))
    if size > MAX_TEMPLATE_BYTES:
        raise ChatTemplateError(
            f"the model's chat template has {size} bytes, more than {MAX_TEMPLATE_BYTES}; "
            "replace it with a smaller one"
        )
    environment = TemplateEnvironment()
    try:
        if sum(1 for _ in islice(environment.lex(source), MAX_TEMPLATE_TOKENS + 1)) > (
            MAX_TEMPLATE_TOKENS
        ):
            raise ChatTemplateError(
                f"the model's chat template has more than {MAX_TEMPLATE_TOKENS:,} marks and words; "
                "replace it with a smaller one"
            )
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"the model's chat template is wrong in line {error.lineno}: {error.message}"
        ) from error
    except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
        raise ChatTemplateError(
            f"the model's chat template cannot be compiled: {type(error).__name__}"
        ) from error


def _text_length(value: Any, nesting: int = 0) -> int:
    if nesting > MAX_NESTING:
        raise ValueError(f"they are nested more than {MAX_NESTING} deep")
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(k)) + _text_length(v, nesting + 1) for k, v in value.items())
    if isinstance(value, list | tuple):
        return sum(_text_length(item, nesting + 1) for item in value)
    return 1

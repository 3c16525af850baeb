"""Custom tools, whose input is a text: a model calls each as a function of one argument."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from appliance.errors import RequestError
from appliance.grammar.regular import regular
from appliance.server.requests.tools import Offer, arguments_of

if TYPE_CHECKING:
    from appliance.server.requests.schema import ToolGrammar

_ARGUMENT = "input"
_OPENING = f'{{"{_ARGUMENT}":"'
_HALF = re.compile(r"\\ud[89ab][0-9a-f]{2}(\\(u[0-9a-f]{0,3})?)?$", re.IGNORECASE)  # a character


def custom_offer(
    name: str,
    description: str | None,
    form: str | None,
    grammar: ToolGrammar | None,
    place: str,
    grammar_place: str,
) -> Offer:
    """Return the function as which a model calls a custom tool.

    Args:
        form: type of its format; None is text.
        place: path of its format in the body, for errors.
        grammar_place: path of the format's grammar.

    Raises:
        RequestError: the format is unknown, or its grammar cannot be written out.
    """
    texts, schema = [description or ""], {"type": "string"}
    strict = holds = False
    if form == "grammar":
        definition = None if grammar is None else grammar.definition
        syntax = None if grammar is None else grammar.syntax
        if definition is None or syntax not in ("lark", "regex"):
            raise RequestError(
                f"{grammar_place} needs a definition, in the syntax lark or regex", param="tools"
            )
        if syntax == "regex":
            strict = True
            schema["pattern"] = f"^(?:{definition})$"
            texts.append(f"The input matches this regular expression: {definition}")
        else:
            try:
                holds = True
                schema["pattern"] = f"^(?:{regular(definition)})$"
            except RequestError as error:
                where = f"{grammar_place}.definition"
                raise RequestError(f"{where}: {error.message}", param=where) from error
            texts.append(f"The input obeys this grammar in Lark's notation:\n{definition}")
    elif form not in (None, "text"):
        raise RequestError(
            f"{place} is of type {form[:40]!r}; known are text and grammar", param="tools"
        )
    parameters = {"type": "object", "properties": {_ARGUMENT: schema}, "required": [_ARGUMENT]}
    description = "\n\n".join(filter(None, texts))
    return Offer(name, parameters, place, description, strict, grammar=holds)


def input_of(text: str) -> str:
    """Return the input from a call's arguments as JSON; of a cut call, as far as it goes."""
    found = read_arguments(text)
    if not found:  # a small model may write the input alone
        return "" if _OPENING.startswith("".join(text.split())) else text
    value = found.get(_ARGUMENT, "")
    return value if isinstance(value, str) else json.dumps(value)


def arguments_with(text: str) -> str:
    """Return a call's arguments as JSON from its input."""
    return json.dumps({_ARGUMENT: text}, ensure_ascii=False)


def read_arguments(text: str) -> dict[str, Any]:
    """Parse an object's text; of one that was cut, the text of its last member as far as known."""
    if (found := arguments_of(text)) is not None:
        return found
    text = _HALF.sub("", text)
    for end in ('"}', '"]}', "}"):
        for dropped in range(7):  # of an escape that was cut
            found = arguments_of(text[: len(text) - dropped] + end)
            if found is not None:
                return found
    return {}

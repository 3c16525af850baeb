"""Checks the tools that a request offers, and its choice among them.

A custom tool has a text as its input: a model calls it as a function of one argument.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from appliance.dialects.turns import SHORT_ID
from appliance.errors import RequestError
from appliance.grammar.regular import regular
from appliance.tokenizer.chat_template import check_nesting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.server.requests.schema import ToolGrammar

MAX_TOOLS = 128
MAX_TOOL_CHARACTERS = 512 * 1024  # of all definitions, as JSON
MAX_NAME = 64  # characters of a tool's name, at OpenAI
_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_ID_LETTERS = string.ascii_letters + string.digits
_ARGUMENT = "input"
_OPENING = f'{{"{_ARGUMENT}":"'
_HALF = re.compile(r"\\ud[89ab][0-9a-f]{2}(\\(u[0-9a-f]{0,3})?)?$", re.IGNORECASE)  # a character

Choice = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class Fields:
    """Names of a body's fields with the tools and with the choice among them."""

    tools: str = "tools"
    choice: str = "tool_choice"


FIELDS = Fields()


@dataclass(frozen=True, slots=True)
class Offer:
    """A function that the model may call.

    Attributes:
        name: letters, digits, underscores and dashes.
        parameters: JSON Schema of the arguments, if any.
        place: the schema's path in the body, for errors.
        strict: arguments must obey the schema.
        grammar: they must, where that constrains no tool without one: a coding agent offers such a
            tool beside many whose schemas nobody meant to be enforced.
        max_name: most characters of the name.
    """

    name: str
    parameters: dict[str, Any] | None
    place: str
    description: str | None = None
    strict: bool = False
    max_name: int = MAX_NAME
    grammar: bool = False


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools that an answer may or must call.

    Attributes:
        definitions: for the chat template; None forbids calls.
        schemas: JSON Schema of the arguments, by name.
        places: paths of these schemas in the body, in order.
        required: tools of which the model must call one; empty leaves it the choice.
    """

    definitions: tuple[dict[str, Any], ...] | None = None
    schemas: dict[str, dict[str, Any]] | None = None
    places: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    strict: bool = False
    one_call: bool = False

    @classmethod
    def of(
        cls,
        offers: Sequence[Offer],
        *,
        choice: Choice | None = None,
        named: str | None = None,
        one_call: bool = False,
        fields: Fields = FIELDS,
    ) -> Tools:
        """Check the tools of a request.

        Args:
            choice: the body's `tool_choice`.
            named: the tool that the model must call once.
            fields: names of the body's fields, for errors.

        Raises:
            RequestError: a definition is invalid, or the choice names none of them.
        """
        if len(offers) > MAX_TOOLS:
            raise RequestError(
                f"there are {len(offers)} tools; at most {MAX_TOOLS} are accepted",
                param=fields.tools,
            )
        definitions = tuple(_definition(offer, fields.tools) for offer in offers)
        if (size := len(json.dumps(definitions, ensure_ascii=False))) > MAX_TOOL_CHARACTERS:
            raise RequestError(
                f"the tools have {size} characters as JSON; at most {MAX_TOOL_CHARACTERS} are "
                "accepted",
                param=fields.tools,
            )
        schemas = {one["function"]["name"]: one["function"]["parameters"] for one in definitions}
        if len(schemas) < len(definitions):
            names = [one["function"]["name"] for one in definitions]
            twice = next(name for name in names if names.count(name) > 1)
            raise RequestError(f"there are two tools of the name {twice!r}", param=fields.tools)
        required = _required(choice, named, tuple(schemas), fields.choice)
        if not definitions or choice == "none":
            return cls()
        return cls(
            definitions=definitions,
            schemas=schemas,
            places=tuple(offer.place for offer in offers),
            required=required,
            strict=any(offer.strict for offer in offers) or all(offer.grammar for offer in offers),
            one_call=one_call or named is not None,
        )


def allowed(offers: Sequence[Offer], names: Sequence[str]) -> list[Offer]:
    """Return the offers that a `tool_choice` of type allowed_tools names.

    Raises:
        RequestError: it names an unknown tool.
    """
    wanted = set(names)
    if unknown := wanted - {offer.name for offer in offers}:
        raise RequestError(
            f"tool_choice allows {min(unknown)[:80]!r}, which is not among the tools",
            param="tool_choice",
        )
    return [offer for offer in offers if offer.name in wanted]


def arguments_of(text: str) -> dict[str, Any] | None:
    """Parse a call's arguments; None if they are no object, as those of a call that was cut.

    Escapes of half a character (a lone surrogate), which no answer can carry, become "?".
    """
    try:
        value = json.loads(text)
        if "\\u" in text:
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def new_call_id(*, short: bool) -> str:
    """Return a unique call id; a short one has nine letters and digits, for some templates."""
    if short:
        return "".join(secrets.choice(_ID_LETTERS) for _ in range(SHORT_ID))
    return f"call_{secrets.token_hex(12)}"


def _definition(offer: Offer, param: str) -> dict[str, Any]:
    if not (_NAME.fullmatch(offer.name) and len(offer.name) <= offer.max_name):
        where = offer.place.rpartition(".")[0]
        raise RequestError(
            f"{where} has the name {offer.name[:140]!r}; a name has 1 to {offer.max_name} letters, "
            "digits, underscores and dashes",
            param=param,
        )
    # Some clients write null for a keyword without a value.
    parameters = {
        name: value for name, value in (offer.parameters or {}).items() if value is not None
    }
    check_nesting(parameters, param)
    if parameters.get("type", "object") != "object":
        raise RequestError(f"{offer.place} must be the schema of an object", param=param)
    properties = parameters.get("properties", {})
    if not isinstance(properties, dict):
        raise RequestError(f"{offer.place}.properties must be an object", param=param)
    return {
        "type": "function",
        "function": {
            "name": offer.name,
            "description": offer.description or "",
            # Templates read both unconditionally.
            "parameters": {"type": "object", "properties": properties, **parameters},
        },
    }


def _required(
    choice: Choice | None, named: str | None, names: tuple[str, ...], param: str
) -> tuple[str, ...]:
    if named is not None:
        if named not in names:
            raise RequestError(
                f"{param} names {named[:80]!r}, which is not among the tools", param=param
            )
        return (named,)
    if choice == "required":
        if not names:
            raise RequestError(f"{param} is required, but there are no tools", param=param)
        return names
    return ()


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

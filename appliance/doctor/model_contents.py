"""Reads one model as a server would, and says what is made of everything unusual in it.

Goes on after a fault, so that one report holds all of them. Starts no server and loads no weights.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from appliance.doctor.finding import MIB, Check, Finding, Grade, Scope
from appliance.errors import ApplianceError
from appliance.files import read_json
from appliance.gguf import GGUFFile
from appliance.model.families.limits import short
from appliance.model_files.checkpoint import CONFIG_NAME
from appliance.wording import counted

if TYPE_CHECKING:
    from appliance.config import EngineConfig
    from appliance.model.encoder.source import EncoderSettings, EncoderSource
    from appliance.model.families.reader import ConfigReader
    from appliance.model.source import ModelSettings, ModelSource
    from appliance.model_files.retrieval_recipe import RetrievalRecipe
    from appliance.tokenizer import Tokenizer
    from appliance.tokenizer.isolation import IsolatedTemplate

    _Described: TypeAlias = EncoderSettings | EncoderSource | ModelSettings | ModelSource

_MOST_NAMED = 12
_GIVE = "give a folder with config.json and safetensors, or a .gguf file"
_SECONDS_FOR_MORE = 10.0  # transformers' modules take seconds to be described
# Settings of every config.json that describe the file rather than the model.
_OF_EVERY_FILE = frozenset(
    {
        "architectures", "auto_map", "dtype", "model_type", "quantization_config", "torch_dtype",
        "transformers_version", "use_cache", "_name_or_path", "id2label", "label2id",
    }
)  # fmt: skip
_HELLO: dict[str, Any] = {"role": "user", "content": "Hello"}
_SYSTEM: dict[str, Any] = {"role": "system", "content": "Be-brief-17"}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
_CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00001",  # nine characters, as Mistral's templates insist on
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": "Rome"}},
        }
    ],
}
_RESULT: dict[str, Any] = {
    "role": "tool",
    "name": "get_weather",
    "tool_call_id": "call00001",
    "content": "sunshine-23",
}


# Chats that clients send, and the words of each that a template must not leave out.
_CHATS: tuple[
    tuple[str, list[dict[str, Any]], list[dict[str, Any]] | None, tuple[str, ...]], ...
] = (
    ("a chat", [_HELLO], None, ("Hello",)),
    ("a system message", [_SYSTEM, _HELLO], None, ("Be-brief-17",)),
    ("tools", [_HELLO], [_TOOL], ("get_weather",)),
    ("calls and results of tools", [_HELLO, _CALL, _RESULT], [_TOOL], ("Rome", "sunshine-23")),
)


def check_weights(scope: Scope) -> Iterator[Finding]:
    """Say what is made of a model's settings and tensors."""
    path = scope.model.path if scope.model is not None else None
    if path is None:
        name = scope.engine.model or "the default model"
        if scope.model_problem is not None:
            found, _, fix = scope.model_problem.rpartition("; ")
            yield Finding("model", Grade.FAIL, found or fix, fix if found else _GIVE)
        else:
            fix = f"`appliance models pull {name}` fetches it"
            yield Finding("model", Grade.FAIL, f"{name} is not on this machine", fix)
        return
    yield Finding("model", Grade.OK, str(path))
    source = yield from _settings(path)
    if source is not None:
        is_whole = yield from _tensors(source)
        source = _served(scope.engine, source)
        yield from _weights(source)
        if is_whole:
            yield from _execution(scope.engine, source)


def check_texts(scope: Scope) -> Iterator[Finding]:
    """Say what is made of a model's tokens, chat template and sampling defaults."""
    path = None if scope.model is None else scope.model.path
    if path is not None and (path.is_file() or (path / CONFIG_NAME).is_file()):
        yield from _tokenizer(path)


CONTENTS: tuple[Check, ...] = (check_weights, check_texts)


def _settings(path: Path) -> Generator[Finding, None, EncoderSource | ModelSource | None]:
    from appliance.model.encoder.source import EncoderSource, open_any

    try:
        source = open_any(path)
    except ApplianceError as error:
        yield failed("model", error, path)
        if path.is_dir() and not any(path.glob("*.safetensors")):
            yield from _of_settings_alone(path)
            return None
        for further in _further_refusals(path, str(error)):
            yield failed("setting", further, path)
        return None
    if isinstance(source, EncoderSource):
        yield Finding("family", Grade.OK, _description(source, "an encoder, described here"))
        if source.reader is not None:
            yield from _keys(source.reader)
        return source
    by = "described here" if source.fallback is None else "executed by transformers' modules"
    by = f"which only reads, {by}" if source.only_reads else by
    yield Finding("family", Grade.OK, _description(source, by))
    if path.is_dir() and source.fallback is None:
        yield from _keys(source.settings().reader)
    for note in source.notes:
        yield Finding("note", Grade.WARN, note)
    return source


def _of_settings_alone(path: Path) -> Iterator[Finding]:
    """Say what would be made of a folder's settings if its weights were there."""
    from appliance.model.encoder.source import settings_alone

    try:
        found = settings_alone(path)
    except ApplianceError as error:
        yield failed("setting", error, path)
        return
    if found is not None:
        yield Finding("family", Grade.OK, _description(found, "described here"))
        yield from _keys(found.reader)


def _further_refusals(path: Path, first: str) -> Iterator[ApplianceError]:
    """Find what would be refused after what is, by changing the setting that each names."""
    from appliance.model.encoder.source import open_any

    def refusal(settings: Mapping[str, Any]) -> ApplianceError | None:
        try:
            open_any(path, settings=settings)
        except ApplianceError as error:
            return error
        return None

    try:
        settings = read_json(path / CONFIG_NAME) if path.is_dir() else GGUFFile(path).metadata
    except ApplianceError:
        return
    deadline, words = time.monotonic() + _SECONDS_FOR_MORE, first
    while time.monotonic() < deadline:
        for key, other in _others(settings, words):
            found = refusal(other)
            if found is None:
                return
            if not _names(str(found), key) and str(found) != words:
                break
        else:
            return
        yield found
        settings, words = other, str(found)


def _others(settings: Mapping[str, Any], words: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield settings in which one that the words name is left out, neutral or like another."""
    numbers = {value for value in settings.values() if type(value) is int}
    for key in sorted(settings.keys() - _OF_EVERY_FILE):
        if _names(words, key):
            yield key, {name: value for name, value in settings.items() if name != key}
            for value in (None, False, 1, *sorted(numbers)):
                yield key, {**settings, key: value}


def _names(words: str, key: str) -> bool:
    """Return True if an error is about a setting; a GGUF file's has a prefix before its name."""
    return re.search(rf"[: ]{re.escape(key.partition('.')[2] or key)}\b", words) is not None


def _keys(reader: ConfigReader) -> Iterator[Finding]:
    """Say which settings are assumed, and which change nothing."""
    if assumed := reader.assumed():
        found = "absent, so as the model's class has them: "
        yield Finding("settings", Grade.OK, found + _listed(assumed))
    idle = {key: v for key, v in reader.without_effect().items() if key not in _OF_EVERY_FILE}
    if idle:
        yield Finding("settings", Grade.OK, f"unknown to the class, no effect: {_listed(idle)}")


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {short(value)}" for key, value in settings.items())


def _description(found: _Described, by: str) -> str:
    spec = found.spec
    return (
        f"{spec.architecture}, {by}; {counted(len(spec.layers), 'layer')} of width"
        f" {spec.hidden_size:,}, {spec.vocab_size:,} tokens, {spec.context_length:,} positions"
    )


def _tensors(source: EncoderSource | ModelSource) -> Generator[Finding, None, bool]:
    """Report each tensor that is not as it should be; return True if all are."""
    from appliance.model.encoder.source import EncoderSource, problems
    from appliance.model.leftovers import leftover_notes, leftovers

    found = list(problems(source))
    for problem in found[:_MOST_NAMED]:
        yield failed("tensor", problem, source.path)
    if len(found) > _MOST_NAMED:
        yield Finding("tensor", Grade.FAIL, f"and {len(found) - _MOST_NAMED} more like these")
    if found:
        return False
    yield Finding("tensors", Grade.OK, f"{counted(len(source.slots()), 'tensor')} in place")
    if not isinstance(source, EncoderSource):
        for note in leftover_notes(leftovers(source)):
            yield Finding("note", Grade.OK, note)
    return True


def _served(
    config: EngineConfig, source: EncoderSource | ModelSource
) -> EncoderSource | ModelSource:
    """Return a model as a server has it: beside a tower, whose tensors are no leftovers."""
    from appliance.engine.served_model import beside_own_tower
    from appliance.model.encoder.source import EncoderSource

    if isinstance(source, EncoderSource) or source.only_reads:
        return source
    return beside_own_tower(source, config)


def _weights(source: EncoderSource | ModelSource) -> Iterator[Finding]:
    """Say in which formats linears are, what is left out, and what loading notes."""
    from appliance.model.encoder.source import EncoderSource

    if source.path.is_file():
        file = GGUFFile(source.path, vocabulary=False)
        matrices = [name for name in file.tensor_names() if len(file.shape(name)) > 1]
        kinds = Counter(file.type_name(name) for name in matrices)
    elif isinstance(source, EncoderSource):
        kinds = Counter("dense" for shape in source.slots().values() if len(shape) == 2)
    else:
        present = set(source.weights.tensor_names())
        slots = (slot for slot in source.slots() if slot.name in present)
        matrices = [slot.name for slot in slots if len(slot.shape) == 2]
        kinds = Counter(_kind_of(source, name) for name in matrices)
    yield Finding("weights", Grade.OK, ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()))
    if not isinstance(source, EncoderSource):
        for note in source.weights.notes():
            yield Finding("note", Grade.OK, note)


def _execution(config: EngineConfig, source: EncoderSource | ModelSource) -> Iterator[Finding]:
    """Say what would run it on this machine, and read its pictures, or why nothing does."""
    from appliance.engine.encoder.encoder_execution import (
        encoder_execution_on,
        memory_for,
        plan_encoder,
    )
    from appliance.engine.load.memory_request import request_memory
    from appliance.engine.load.pictures import open_pictures
    from appliance.engine.memory.plan import plan_memory
    from appliance.model.encoder.source import EncoderSource

    if config.draft_model or config.eagle_head:  # other files
        config = msgspec.structs.replace(config, speculate="auto")
    notes: tuple[str, ...] = ()
    try:
        if isinstance(source, EncoderSource) or source.only_reads:
            reads = encoder_execution_on(config, source, None)
            plan = plan_encoder(config, source, reads, *memory_for(config, reads.device))
            words = reads.name
        else:
            execution, request = request_memory(config, source)
            plan = plan_memory(request)
            words = f"{execution.name}, with a KV cache in {request.kv_format}"
            _, notes = open_pictures(config, source)
    except ApplianceError as error:
        yield failed("execution", error, source.path)
        return
    size = plan.weight_bytes / MIB
    yield Finding("execution", Grade.OK, f"{words}; its weights take {size:,.0f} MiB")
    if plan.picture_bytes:
        size = plan.picture_bytes / MIB
        yield Finding("pictures", Grade.OK, f"read; {size:,.0f} MiB, with room for one")
    for note in notes:
        yield Finding("pictures", Grade.OK if plan.picture_bytes else Grade.WARN, note)


def _kind_of(source: ModelSource, name: str) -> str:
    bits, float_bits = source.weights.packed_bits(name), source.weights.float_bits(name)
    if float_bits is not None:
        return f"in {float_bits}-bit floats"
    form = " of a trellis" if source.is_trellis else ""
    return "dense" if bits is None else f"in {bits} bits{form}"


def _tokenizer(path: Path) -> Iterator[Finding]:
    from appliance.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.from_path(path)
    except ApplianceError as error:
        yield failed("tokens", error, path)
        return
    rows, writes = _rows_of(path)
    try:
        yield from _tokens(tokenizer, rows, writes=writes)
        for note in tokenizer.notes:
            yield Finding("note", Grade.WARN, note)
        if not writes:
            yield from _retrieval(tokenizer.retrieval)
            return
        yield from _template(tokenizer)
    finally:
        tokenizer.close()
    found = str(tokenizer.sampling) or "none; a request without them samples at temperature 1"
    origin = f" ({tokenizer.sampling.source})" if tokenizer.sampling.source else ""
    yield Finding("sampling", Grade.OK, f"the makers' defaults: {found}{origin}")


def _rows_of(path: Path) -> tuple[int | None, bool]:
    """Return the number of tokens that a model embeds, and if it writes; None: it is not opened."""
    from appliance.model.encoder.source import open_any

    try:
        source = open_any(path)
    except ApplianceError:
        return None, True
    return source.spec.vocab_size, not source.only_reads


def _retrieval(recipe: RetrievalRecipe) -> Iterator[Finding]:
    """Say what a model that writes nothing gives: vectors, or how relevant a text is."""
    embedding, rerank = recipe.embedding, recipe.rerank
    if embedding.refused:
        grade = Grade.WARN if rerank is None else Grade.OK
        yield Finding("vectors", grade, f"none: {embedding.refused}")
    else:
        by = embedding.source or "no file says otherwise"
        words = f"hidden states pooled by {embedding.pooling.value} ({by})"
        if embedding.dense:
            words += f", then {counted(len(embedding.dense), 'linear')}"
        if embedding.prompts:
            words += f"; prompts for {', '.join(embedding.prompts)}"
        yield Finding("vectors", Grade.OK, words)
    if rerank is not None:
        how = "a head judges both texts" if rerank.by_head else "it answers by a word"
        yield Finding("ranking", Grade.OK, f"{how} ({rerank.source})")


def _tokens(tokenizer: Tokenizer, rows: int | None, *, writes: bool) -> Iterator[Finding]:
    """Say what begins and ends a text, and compare the vocabulary with the embedding."""
    first = "begins with no token of its own"
    if tokenizer.add_bos and tokenizer.bos_token_id is not None:
        first = f"begins with {tokenizer.token_text(tokenizer.bos_token_id)!r}"
    ends = ", ".join(repr(tokenizer.token_text(end)) for end in tokenizer.eos_token_ids)
    words = f"{tokenizer.vocab_size:,} tokens; a text {first}"
    words += f"; an answer ends with {ends}" if writes else ""
    if tokenizer.eos_token_ids or not writes:
        yield Finding("tokens", Grade.OK, words)
    else:
        fix = "set eos_token_id in generation_config.json, or give `stop` with each request"
        yield Finding("tokens", Grade.WARN, f"{words}nothing but the limit of tokens", fix)
    if rows is not None and tokenizer.vocab_size > rows:
        found = f"the tokenizer has {tokenizer.vocab_size:,} tokens, the model's embedding {rows:,}"
        fix = "a text with one of the last tokens is refused; use the model's own tokenizer"
        yield Finding("tokens", Grade.WARN, found, fix)
    if tokenizer.is_isolated:
        found = "it splits texts by rules that are not known here; a process with limits runs them"
        yield Finding("splitting", Grade.OK, found)


def _template(tokenizer: Tokenizer) -> Iterator[Finding]:
    """Try the chat template on the chats that clients send."""
    from appliance.tokenizer.isolation import IsolatedTemplate

    template = tokenizer.chat_template
    if template is None:
        found = "none: chats are refused, completions work; a base model has none"
        yield Finding("chat template", Grade.OK, found)
        return
    size = f"{len(template.source):,} characters"
    if template.tool_source is not None:
        size += f", and {len(template.tool_source):,} of a second one for chats with tools"
    yield Finding("chat template", Grade.OK, size)
    isolated = IsolatedTemplate(template)
    try:
        for name, messages, tools, marks in _CHATS:
            yield _rendered(isolated, name, messages, tools, marks)
    finally:
        isolated.close()


def _rendered(
    template: IsolatedTemplate,
    name: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    marks: Iterable[str],
) -> Finding:
    try:
        text = template.render(messages, tools=tools)
    except ApplianceError as error:
        reason = str(error).rpartition("these messages: ")[2]
        fix = "a client that sends this gets an error; use a model whose template takes it"
        return Finding("chat template", Grade.WARN, f"refuses {name}: {reason}", fix)
    missing = [mark for mark in marks if mark not in text]
    if missing:
        found = f"leaves out {name}: the model does not see them"
        return Finding("chat template", Grade.WARN, found, "use a model whose template has them")
    return Finding("chat template", Grade.OK, f"takes {name}")


def failed(name: str, error: ApplianceError, path: Path) -> Finding:
    """Report an error in a model's files; the report's head names their path."""
    said = str(error).removeprefix(f"{path.name}: ").replace(f"{path}/", "")
    words, _, fix = said.rpartition("; ")
    return Finding(name, Grade.FAIL, words or fix, fix if words else "")

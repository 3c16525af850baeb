"""Count which JSON schemas are accepted and obeyed, by feature, beside llama.cpp.

    scripts/benchmark schemas --peer FOLDER   # where xllamacpp lies

Both answer under every schema of `bench.lib.schema_table` with the same file, the packaged default
model, at temperature 1. An answer that `max_tokens` cuts is not judged. The last feature holds
schemas that we refuse by name.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema

from appliance import LLM, Grammar, SamplingParams
from appliance.config import cache_dir
from appliance.engine.request import FinishReason
from appliance.grammar.check import problem_of
from appliance.hub import resolve_model
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions
from bench.lib.llama_peer import Peer
from bench.lib.schema_table import REFUSED, SCHEMAS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Ask = Callable[[Any, int], list[str | None] | None]

PROMPT = "Here is some JSON:\n"
MAX_TOKENS = 200
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
FEATURES = {**SCHEMAS, "not supported here": [schema for _, schema in REFUSED]}


def ours(llm: LLM) -> Ask:
    """Answers of this appliance: None where the schema is refused, or an answer is cut."""

    def ask(schema: Any, seeds: int) -> list[str | None] | None:
        grammar = Grammar.json_schema(schema)
        if problem_of(grammar) is not None:
            return None
        sampling = [
            SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, seed=seed, grammar=grammar)
            for seed in range(seeds)
        ]
        answers = [one.outputs[0] for one in llm.generate([PROMPT] * seeds, sampling)]
        return [one.text if one.finish_reason is FinishReason.STOP else None for one in answers]

    return ask


def theirs(peer: Peer, prompt: list[int]) -> Ask:
    """The same of llama.cpp."""

    def ask(schema: Any, seeds: int) -> list[str | None] | None:
        body = {
            "prompt": prompt,
            "n_predict": MAX_TOKENS,
            "temperature": 1.0,
            "json_schema": schema,
        }
        found = peer.ask({"bodies": [{**body, "seed": seed} for seed in range(seeds)]})
        if any("choices" not in one for one in found):
            return None
        answers = [one["choices"][0] for one in found]
        return [one["text"] if one["finish_reason"] == "stop" else None for one in answers]

    return ask


def obeys(text: str, schema: Any) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=FORMATS)
    except (ValueError, jsonschema.ValidationError):
        return False
    except jsonschema.exceptions.SchemaError:
        return True  # of no JSON schema, nothing can be said
    return True


def count(ask: Ask, seeds: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the counts of each feature."""
    for feature, schemas in FEATURES.items():
        found = Counter(schemas=len(schemas), accepted=0, answers=0, wrong=0)
        for schema in schemas:
            answers = ask(schema, seeds)
            found["accepted"] += answers is not None
            whole = [text for text in answers or () if text is not None]
            found["answers"] += len(whole)
            found["wrong"] += sum(not obeys(text, schema) for text in whole)
        yield feature, dict(found)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--peer", type=Path, help="folder of the package xllamacpp")
    parser.add_argument("--model", default="", help="a GGUF file; default: the packaged model")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1, help="of llama.cpp, whose threads spin")
    options = parser.parse_args()
    model = resolve_model(options.model, cache_dir=cache_dir()).path
    llm = LLM(str(model), max_num_seqs=options.seeds)
    result = {"benchmark": "schemas", "conditions": conditions(), "seeds": options.seeds}
    result["ours"] = dict(count(ours(llm), options.seeds))
    if options.peer is not None:
        peer = Peer(options.peer, model, options.threads, options.seeds)
        prompt = llm.tokenizer.encode(PROMPT, add_special_tokens=True)
        result["llama.cpp"] = {
            **peer.about,
            "features": dict(count(theirs(peer, prompt), options.seeds)),
        }
        peer.close()
    write_result(options.out, result)

"""Count which published JSON schemas compile, and whether their examples are judged rightly.

    scripts/benchmark published_schemas FOLDER    # maskbench/data of guidance-ai/jsonschemabench

Each file there has a schema of JSONSchemaBench and examples, which jsonschema found valid or not. A
schema passes if each valid example can be written and no other. Tokens are those of `--vocabulary`,
a file in tiktoken's form (lines of a token in base64 and its number); else those of the packaged
model, extended by pairs of its tokens to 152k, which are longer than those of real vocabularies.
Every mask of an example is timed: `mask_us` are ours; `library_us`, in alternation, those of
llguidance's own classes and settings for the same schema after the same tokens, while it accepts
them.

`refused` counts valid examples that cannot be written; `closed` counts those of them with a
property that their object does not list, as we close objects on purpose; `let_through` counts
invalid examples that can be written.
"""

from __future__ import annotations

import base64
import json
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import msgspec
import numpy as np
from llguidance import LLMatcher
from referencing import Registry
from referencing.exceptions import Unresolvable

from appliance.bench.figures import percentile
from appliance.config import cache_dir
from appliance.engine.grammars.compiling import GrammarCompiler
from appliance.engine.grammars.library import PythonLibrary, open_library
from appliance.engine.grammars.matchers import num_words
from appliance.engine.nouns.messages import Vocabulary
from appliance.errors import RequestError
from appliance.grammar import Grammar
from appliance.grammar.closed import close_objects
from appliance.hub import resolve_model
from appliance.text import vocabulary_of
from appliance.tokenizer import Tokenizer
from bench.engine.structured_output import QWEN_SIZE, greedy, grown, ids_of
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.engine.grammars.library import GrammarLibrary, GrammarState


@dataclass(slots=True)
class Times:
    """Microseconds of a processor for each compiled schema, and for each mask."""

    compile: list[float] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)
    library: list[float] = field(default_factory=list)  # llguidance's own masks

    def percentiles(self) -> dict[str, dict[str, int]]:
        return {
            name: {f"p{100 * share:g}": round(percentile(values, share)) for share in (0.5, 0.99)}
            for name, values in (
                ("compile_us", self.compile),
                ("mask_us", self.mask),
                ("library_us", self.library),
            )
        }


class Judge:
    """Compiles schemas and reads examples under them.

    Args:
        vocabulary: whose tokens are masked.
        eos: the token that ends an answer.
    """

    def __init__(self, vocabulary: Vocabulary, eos: int) -> None:
        size = len(vocabulary.tokens)
        # Accept any spelling, not only the likeliest one: examples have a spelling of their own.
        vocabulary = msgspec.structs.replace(vocabulary, in_order=False)
        self._ids = ids_of(vocabulary)
        self._compiler = GrammarCompiler(size, (eos,), vocabulary)
        self._compiler.prepare().result()
        self._classes = PythonLibrary()
        self._its_own = self._classes.read(self._compiler._words())
        self._words = np.zeros((1, num_words(size)), dtype=np.int32)
        self.times = Times()

    def judge(self, content: dict[str, Any]) -> Counter[str]:
        """Judge one file, and return the counts."""
        found = Counter(schemas=1)
        begin = time.thread_time()
        try:
            first = self._compiler.compile(Grammar.json_schema(content["schema"]))
        except RequestError:
            return found
        self.times.compile.append(1e6 * (time.thread_time() - begin))
        found["compiled"] = 1
        its_own = self._its_own.compile(LLMatcher.grammar_from_json_schema(content["schema"]))
        for example in content["tests"]:
            can_write = self._reads(first.deep_copy(), its_own.deep_copy(), example["data"])
            found["examples"] += 1
            if example["valid"] and not can_write:
                closed = _is_wrong(
                    example["data"],
                    close_objects(content["schema"], len(json.dumps(content["schema"]))),
                )
                found["closed" if closed else "refused"] += 1
            found["let_through"] += can_write and not example["valid"]
        wrong = found["closed"] + found["refused"] + found["let_through"]
        found["tested"] = bool(content["tests"])
        found["passed"] = bool(content["tests"]) and not wrong
        return found

    def _reads(self, state: GrammarState, its_own: GrammarState, data: Any) -> bool:
        """Return True if every token of an example is allowed, and then its end."""
        text = json.dumps(data, ensure_ascii=False)
        for token_id in greedy(self._ids, text):
            if not its_own.is_error():
                self.times.library.append(self._mask_us(self._classes, its_own))
                its_own.consume_token(token_id)
            self.times.mask.append(self._mask_us(open_library(), state))
            if not self._words[0, token_id // 32] >> (token_id % 32) & 1:
                return False
            if not state.consume_token(token_id):
                return False
        return state.is_accepting()

    def _mask_us(self, library: GrammarLibrary, state: GrammarState) -> float:
        begin = time.thread_time()
        library.fill([(state, 0)], self._words)
        return 1e6 * (time.thread_time() - begin)


def _is_wrong(data: Any, schema: Any) -> bool:
    validator = jsonschema.validators.validator_for(schema)(schema, registry=Registry())
    try:
        return not validator.is_valid(data)
    except Unresolvable:  # nothing is fetched
        return False


def tiktoken_vocabulary(path: Path) -> Vocabulary:
    """Read a vocabulary, and add the token that ends an answer."""
    lines = path.read_text().split("\n")
    pairs = [line.split() for line in lines if line]
    tokens = dict.fromkeys(range(1 + max(int(number) for _, number in pairs)), b"")
    tokens |= {int(number): base64.b64decode(token) for token, number in pairs}
    return Vocabulary((*tokens.values(), b"<|end|>"), (len(tokens),))


def files(folder: Path, every: int) -> Iterator[tuple[str, Path]]:
    """Yield one of `every` files, and its category: the first part of its name."""
    for path in sorted(folder.glob("*.json"))[::every]:
        name, found, _ = path.name.partition("---")
        yield name if found else path.name.partition("_")[0], path


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="MaskBench's data")
    parser.add_argument("--every", type=int, default=1, help="take one of so many files")
    parser.add_argument("--vocabulary", type=Path, help="of tiktoken's form")
    options = parser.parse_args()
    if options.vocabulary is None:
        tokenizer = Tokenizer.from_path(resolve_model("", cache_dir=cache_dir()).path)
        vocabulary, eos = grown(vocabulary_of(tokenizer), QWEN_SIZE), tokenizer.eos_token_ids[0]
    else:
        vocabulary = tiktoken_vocabulary(options.vocabulary)
        eos = len(vocabulary.tokens) - 1
    judge = Judge(vocabulary, eos)
    categories: dict[str, Counter[str]] = defaultdict(Counter)
    for category, path in files(options.folder, options.every):
        categories[category] += judge.judge(json.loads(path.read_text()))
    result = {
        "benchmark": "published_schemas",
        "conditions": conditions(),
        "every": options.every,
        "vocabulary": len(vocabulary.tokens),
        "vocabulary_file": options.vocabulary and options.vocabulary.name,
        **judge.times.percentiles(),
        "masks": len(judge.times.mask),
        "categories": {name: dict(found) for name, found in categories.items()},
    }
    write_result(options.out, result)

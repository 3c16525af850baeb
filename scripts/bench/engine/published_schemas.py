"""Count which published JSON schemas compile, and whether their examples are judged rightly.

    scripts/benchmark published_schemas FOLDER    # maskbench/data of guidance-ai/jsonschemabench

Each file there has a schema of JSONSchemaBench and examples, which jsonschema found valid or not. A
schema passes if each valid example can be written and no other. Tokens are those of the packaged
model's vocabulary, extended by pairs of its tokens to 152k; every mask of an example is timed.

`refused` counts valid examples that cannot be written; `closed` those of them that have properties
which their object does not list, where we close objects on purpose; `let_through` counts others
that can be written.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import msgspec
import numpy as np
from llguidance.numpy import fill_next_token_bitmask
from referencing import Registry
from referencing.exceptions import Unresolvable

from appliance.bench.figures import percentile
from appliance.config import cache_dir
from appliance.engine.grammars.compiling import GrammarCompiler
from appliance.engine.grammars.matchers import num_words
from appliance.errors import RequestError
from appliance.grammar import Grammar
from appliance.grammar.closed import close_objects
from appliance.hub import resolve_model
from appliance.tokenizer import Tokenizer
from appliance.vocabulary import vocabulary_of
from bench.engine.structured_output import QWEN_SIZE, greedy, grown, ids_of
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llguidance import LLMatcher

    from appliance.engine.messages import Vocabulary


@dataclass(slots=True)
class Times:
    """Microseconds of a processor for each compiled schema, and for each mask."""

    compile: list[float] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)

    def percentiles(self) -> dict[str, dict[str, int]]:
        return {
            name: {f"p{100 * share:g}": round(percentile(values, share)) for share in (0.5, 0.99)}
            for name, values in (("compile_us", self.compile), ("mask_us", self.mask))
        }


class Judge:
    """Compiles schemas and reads examples under them.

    Args:
        vocabulary: whose tokens are masked.
        eos: the token that ends an answer.
    """

    def __init__(self, vocabulary: Vocabulary, eos: int) -> None:
        size = len(vocabulary.tokens)
        # Any spelling counts, not the likeliest alone: examples have one of their own.
        vocabulary = msgspec.structs.replace(vocabulary, in_order=False)
        self._ids = ids_of(vocabulary)
        self._compiler = GrammarCompiler(size, (eos,), vocabulary)
        self._compiler.prepare().result()
        self._words = np.zeros((1, num_words(size)), dtype=np.int32)
        self.times = Times()

    def judge(self, content: dict[str, Any]) -> Counter[str]:
        """Count what becomes of one file."""
        found = Counter(schemas=1)
        begin = time.thread_time()
        try:
            first = self._compiler._compile(Grammar.json_schema(content["schema"]))
        except RequestError:
            return found
        self.times.compile.append(1e6 * (time.thread_time() - begin))
        found["compiled"] = 1
        for example in content["tests"]:
            can_write = self._reads(first.deep_copy(), example["data"])
            found["examples"] += 1
            if example["valid"] and not can_write:
                closed = _is_wrong(example["data"], close_objects(content["schema"]))
                found["closed" if closed else "refused"] += 1
            found["let_through"] += can_write and not example["valid"]
        wrong = found["closed"] + found["refused"] + found["let_through"]
        found["tested"] = bool(content["tests"])
        found["passed"] = bool(content["tests"]) and not wrong
        return found

    def _reads(self, matcher: LLMatcher, data: Any) -> bool:
        """Return True if every token of an example is allowed, and then its end."""
        text = json.dumps(data, ensure_ascii=False)
        for token_id in greedy(self._ids, text):
            begin = time.thread_time()
            fill_next_token_bitmask(matcher, self._words)
            self.times.mask.append(1e6 * (time.thread_time() - begin))
            if not self._words[0, token_id // 32] >> (token_id % 32) & 1:
                return False
            if not matcher.consume_token(token_id):
                return False
        return bool(matcher.is_accepting())


def _is_wrong(data: Any, schema: Any) -> bool:
    validator = jsonschema.validators.validator_for(schema)(schema, registry=Registry())
    try:
        return not validator.is_valid(data)
    except Unresolvable:  # nothing is fetched
        return False


def files(folder: Path, every: int) -> Iterator[tuple[str, Path]]:
    """Yield one of `every` files, and its category: the first part of its name."""
    for path in sorted(folder.glob("*.json"))[::every]:
        name, found, _ = path.name.partition("---")
        yield name if found else path.name.partition("_")[0], path


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="MaskBench's data")
    parser.add_argument("--every", type=int, default=1, help="take one of so many files")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_path(resolve_model("", cache_dir=cache_dir()).path)
    vocabulary = grown(vocabulary_of(tokenizer), QWEN_SIZE)
    judge = Judge(vocabulary, tokenizer.eos_token_ids[0])
    categories: dict[str, Counter[str]] = defaultdict(Counter)
    for category, path in files(options.folder, options.every):
        categories[category] += judge.judge(json.loads(path.read_text()))
    result = {
        "benchmark": "published_schemas",
        "conditions": conditions(),
        "every": options.every,
        "vocabulary": len(vocabulary.tokens),
        **judge.times.percentiles(),
        "masks": len(judge.times.mask),
        "categories": {name: dict(found) for name, found in categories.items()},
    }
    write_result(options.out, result)

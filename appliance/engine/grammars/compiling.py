"""Compiles grammars in a thread while other requests' steps run. Imports no torch."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from appliance.engine.grammars.library import WordList, open_library, special
from appliance.engine.grammars.matchers import num_words
from appliance.engine.grammars.merge_order import MergeOrder
from appliance.engine.scheduling.deadlines import overdue
from appliance.errors import RequestError
from appliance.grammar.check import in_words
from appliance.grammar.source import source_of
from appliance.stats import COMPILE_SECONDS

if TYPE_CHECKING:
    from appliance.engine.grammars.library import GrammarState, ReadVocabulary
    from appliance.engine.nouns.messages import SequenceDelta, Vocabulary
    from appliance.engine.nouns.request import Request
    from appliance.grammar import Grammar

MAX_KEPT = 128  # unused grammars: a few hundred KB each for usual schemas
MAX_KEPT_TEXT = 2**21  # characters of their text; the compiled size grows with it

# Tokens whose masks are made together, where a grammar allows them all; see the benchmark.
SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    r'[^"\\\x00-\x1F\x7F]{1,10}',
    r'[^"\\\x00-\x1F\x7F]{1,30}',
    r'[^"\\\x00-\x1F\x7F]+',
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A request whose grammar was compiled.

    Attributes:
        matcher: in its initial state, to be copied; None after an error.
    """

    request: Request
    arrival: float
    matcher: GrammarState | None
    error: str | None = None


@dataclass(slots=True)
class CompileTimes:
    """Number of requested grammars, and the compile times of cache misses."""

    requests: int = 0
    hits: int = 0
    seconds: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(COMPILE_SECONDS) + 1))

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(COMPILE_SECONDS, seconds)] += 1
        self.seconds += seconds


class GrammarCompiler:
    """Compiles grammars one at a time and keeps the most recent."""

    def __init__(
        self, vocab_size: int, eos_token_ids: tuple[int, ...], vocabulary: Vocabulary
    ) -> None:
        self.times = CompileTimes()
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._vocabulary = vocabulary
        self._reading: Future[ReadVocabulary] | None = None  # reads the vocabulary
        self.kept: OrderedDict[tuple[object, str], GrammarState] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._waiting: dict[str, tuple[Request, float]] = {}  # with its arrival, by its id
        self._ready: deque[Compiled] = deque()
        self._changed = threading.Condition()

    @property
    def prepared(self) -> bool:
        """True if it has begun to read the vocabulary."""
        return self._reading is not None

    def prepare(self) -> Future[ReadVocabulary]:
        """Begin to read the vocabulary, which takes some tenths of a second of a processor."""
        if self._reading is None:
            self._reading = self._thread.submit(lambda: open_library().read(self._words()))
        return self._reading

    @property
    def waiting(self) -> int:
        """Number of requests whose grammar is not compiled or not taken yet."""
        return len(self._waiting)

    def is_waiting(self, request_id: str) -> bool:
        return request_id in self._waiting

    def held(self) -> set[str]:
        with self._changed:
            return set(self._waiting)

    def begin(self, request: Request, grammar: Grammar, arrival: float) -> None:
        """Compile a request's grammar; `take` returns the request."""
        self.prepare()
        self._waiting[request.request_id] = request, arrival
        self._thread.submit(self._run, request, grammar, arrival)

    def abandon(self, request_id: str) -> bool:
        """Forget a waiting request; return False if it is not here."""
        with self._changed:
            return self._waiting.pop(request_id, None) is not None

    def late(self, now: float) -> list[SequenceDelta]:
        """Forget the requests that have waited too long, and return their final deltas."""
        if not self._waiting:
            return []
        found: list[SequenceDelta] = []
        with self._changed:
            for name, (request, arrival) in list(self._waiting.items()):
                if ends := overdue(request, arrival, now):
                    found += ends
                    del self._waiting[name]
        return found

    def take(self) -> list[Compiled]:
        """Return the requests compiled since the last call."""
        if not self._ready:
            return []
        with self._changed:
            ready = list(self._ready)
            self._ready.clear()
            return [
                one for one in ready if self._waiting.pop(one.request.request_id, None) is not None
            ]

    def wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or not self._waiting, seconds)

    def _run(self, request: Request, grammar: Grammar, arrival: float) -> None:
        if not self.is_waiting(request.request_id):
            return
        try:
            compiled = Compiled(request, arrival, self.compile(grammar))
        except RequestError as error:
            compiled = Compiled(request, arrival, None, str(error))
        except BaseException as error:  # even a panic in the library ends only this request
            logger.exception("the grammar of request %s cannot be compiled", request.request_id)
            why = f"this grammar cannot be compiled: {error!r}"
            compiled = Compiled(request, arrival, None, why)
        with self._changed:
            self._ready.append(compiled)
            self._changed.notify_all()

    def compile(self, grammar: Grammar) -> GrammarState:
        """Compile a grammar now, or return it if it is kept; to be copied.

        Raises:
            RequestError: the grammar is wrong, or the model cannot obey it.
        """
        key = (grammar.kind, grammar.text)
        self.times.requests += 1
        if key in self.kept:
            self.kept.move_to_end(key)
            self.times.hits += 1
            return self.kept[key]
        begin = time.perf_counter()
        vocabulary = self.prepare().result()  # this thread has finished it before
        matcher = vocabulary.compile(source_of(grammar, forces=self._vocabulary.in_order))
        if matcher.is_error():
            raise RequestError(in_words(matcher.get_error(), grammar.kind))
        # The first mask is the most expensive, and copies share its results.
        mask = np.zeros((1, num_words(self._vocab_size)), dtype=np.int32)
        open_library().fill([(matcher, 0)], mask)
        if matcher.is_error():
            raise RequestError(in_words(matcher.get_error(), grammar.kind))
        if not mask.any():
            raise RequestError("no answer of this model can obey this grammar")
        self.kept[key] = matcher
        while len(self.kept) > 1 and (
            len(self.kept) > MAX_KEPT or sum(len(text) for _, text in self.kept) > MAX_KEPT_TEXT
        ):
            self.kept.popitem(last=False)
        self.times.add(time.perf_counter() - begin)
        return matcher

    def _words(self) -> WordList:
        """Return the vocabulary with a token per mask bit."""
        tokens = list(self._vocabulary.tokens[: self._vocab_size])
        tokens += [b""] * (32 * num_words(self._vocab_size) - len(tokens))
        marked = [i for i in self._vocabulary.special if i < self._vocab_size]
        ends = list(self._eos_token_ids)
        if not ends:
            ends = [self._vocab_size]  # has no logit
            marked.append(self._vocab_size)
            tokens[self._vocab_size] = b"end"
        for token_id in marked:
            tokens[token_id] = special(tokens[token_id])
        return WordList(tokens, ends, MergeOrder(self._vocabulary), SLICES)

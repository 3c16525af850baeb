"""Holds requests until their grammar is compiled, and ends them with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from appliance.engine.grammars.matchers import Matchers
from appliance.engine.nouns.messages import SequenceDelta
from appliance.engine.nouns.request import FinishReason
from appliance.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Sequences

    from appliance.engine.grammars.compiling import GrammarCompiler
    from appliance.engine.nouns.messages import EngineInfo, Vocabulary
    from appliance.engine.nouns.plan import Update
    from appliance.engine.nouns.request import Request
    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.scheduling.scheduler import Scheduler
    from appliance.stats import EngineStats

_WAIT_SECONDS = 0.01  # between checks for other events


class Grammars:
    """Sits between the engine and its scheduler, which knows no grammars.

    Args:
        scheduler: gets requests once their grammar is compiled.
        matchers: the grammars' states, shared with the sampler.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        matchers: Matchers | None,
        info: EngineInfo,
    ) -> None:
        self._scheduler = scheduler
        self.matchers = matchers or Matchers(info.vocab_size, info.eos_token_ids)
        self._info = info
        self.compiler: GrammarCompiler | None = None  # until the vocabulary arrives

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Set the model's tokens; call it before the first grammar."""
        # Imports a library that most servers never need.
        from appliance.engine.grammars.compiling import GrammarCompiler

        if self.compiler is None:
            info = self._info
            self.compiler = GrammarCompiler(info.vocab_size, info.eos_token_ids, vocabulary)

    @property
    def prepares(self) -> bool:
        """True if it has preparation to do while nothing runs."""
        return self.compiler is not None and not self.compiler.prepared

    @property
    def waiting(self) -> int:
        return 0 if self.compiler is None else self.compiler.waiting

    def held(self) -> set[str]:
        return set() if self.compiler is None else self.compiler.held()

    def hold(self, request: Request, arrival: float) -> bool:
        """Hold a request until its grammar is compiled; return False if it has none.

        Raises:
            RequestError: the vocabulary has not arrived.
        """
        grammar = request.sampling.grammar
        if grammar is None:
            return False
        if self.compiler is None:
            raise RequestError("this engine has no vocabulary, which grammars need")
        self.compiler.begin(request, grammar, arrival)
        return True

    def abandon(self, request_id: str) -> bool:
        """Forget a waiting request; return False if it is not here."""
        return self.compiler is not None and self.compiler.abandon(request_id)

    def idle(self) -> bool:
        """Prepare or wait for a grammar while nothing runs; return False if there is neither."""
        compiler = self.compiler
        if compiler is None or not (compiler.waiting or self.prepares):
            return False
        compiler.prepare()
        if compiler.waiting:
            compiler.wait(_WAIT_SECONDS)
        return True

    def start(self, now: float) -> list[SequenceDelta]:
        """Queue the requests whose grammar is compiled.

        Returns:
            The final deltas of refused requests, and of those that have waited too long.
        """
        refused: list[SequenceDelta] = []
        if self.compiler is None:
            return refused
        refused += self.compiler.late(now)
        for compiled in self.compiler.take():
            request, error = compiled.request, compiled.error
            if compiled.matcher is not None:
                live = list(self._scheduler.sequences())
                self.matchers.add(request.request_id, compiled.matcher, live)
                try:
                    self._scheduler.add(request, now, arrival=compiled.arrival)
                except RequestError as failure:
                    error = str(failure)
            if error is not None:
                refused.append(refusal(request, error))
        return refused

    def advance(self, updates: Sequences[Update]) -> Sequences[Update]:
        """Advance grammars by a step's tokens, and end sequences whose grammar is complete.

        Returns:
            The updates with their finish reasons, then those of sequences that cannot continue.
        """
        ended = self.matchers.advance(updates)
        if ended:
            updates = self._end(ended, updates)
        if not self._scheduler.has_work:
            self.matchers.clear()
        return updates

    def _end(
        self, ended: Mapping[Sequence, str | None], updates: Sequences[Update]
    ) -> list[Update]:
        told, failed = [], []
        for update in updates:
            sequence = update.sequence
            if sequence in ended:
                if (error := ended[sequence]) is not None:
                    failed += self._scheduler.fail(sequence, error)
                else:
                    self._scheduler.finish(sequence, FinishReason.STOP)
                    update = update._replace(finish_reason=FinishReason.STOP)
            told.append(update)
        return told + failed

    def add_stats(self, stats: EngineStats) -> EngineStats:
        """Add compile statistics to a snapshot; requests that wait here count as waiting."""
        compiler = self.compiler
        if compiler is None:
            return stats
        return msgspec.structs.replace(
            stats,
            waiting=stats.waiting + compiler.waiting,
            grammar_requests_total=compiler.times.requests,
            grammar_cache_hits_total=compiler.times.hits,
            grammar_compiles=tuple(compiler.times.counts),
            grammar_compile_seconds_total=compiler.times.seconds,
        )


def refusal(request: Request, error: str) -> SequenceDelta:
    """Return the final delta of a request that is refused after it was accepted."""
    return SequenceDelta(
        request_id=request.request_id,
        finish_reason=FinishReason.ERROR,
        error=error,
        refused=True,
    )

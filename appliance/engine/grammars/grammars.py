"""Grammars as the engine sees them: requests wait here for theirs, and end where it does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from appliance.engine.grammars.matchers import Matchers
from appliance.engine.messages import SequenceDelta
from appliance.engine.request import FinishReason
from appliance.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Sequences

    from appliance.engine.grammars.compiling import GrammarCompiler
    from appliance.engine.messages import EngineInfo, Vocabulary
    from appliance.engine.plan import Update
    from appliance.engine.request import Request
    from appliance.engine.scheduling.scheduler import Scheduler
    from appliance.engine.sequence import Sequence
    from appliance.stats import EngineStats

_WAIT_SECONDS = 0.01  # for a grammar, between looks at what else came


class Grammars:
    """Between the engine and its scheduler, which knows of no grammar.

    Args:
        scheduler: gets requests once their grammar is compiled.
        matchers: follow the sequences, for the sampler too; None where no request has a grammar.
        info: of the loaded model.
    """

    def __init__(self, scheduler: Scheduler, matchers: Matchers | None, info: EngineInfo) -> None:
        self._scheduler = scheduler
        self._matchers = matchers or Matchers(info.vocab_size, info.eos_token_ids)
        self._info = info
        self._compiler: GrammarCompiler | None = None  # until there is a vocabulary

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """The model's tokens; needed before the first grammar."""
        # With it comes a library that most servers never need.
        from appliance.engine.grammars.compiling import GrammarCompiler

        if self._compiler is None:
            info = self._info
            self._compiler = GrammarCompiler(info.vocab_size, info.eos_token_ids, vocabulary)

    @property
    def prepares(self) -> bool:
        """Whether there is something to prepare in a moment in which nothing runs."""
        return self._compiler is not None and not self._compiler.prepared

    @property
    def waiting(self) -> int:
        """Requests that wait for their grammar."""
        return 0 if self._compiler is None else self._compiler.waiting

    def hold(self, request: Request) -> bool:
        """Have a request wait for its grammar; False if it has none.

        Raises:
            RequestError: there is no vocabulary.
        """
        grammar = request.sampling.grammar
        if grammar is None:
            return False
        if self._compiler is None:
            raise RequestError("this engine has no vocabulary, which grammars need")
        self._compiler.begin(request, grammar)
        return True

    def abandon(self, request_id: str) -> bool:
        """Forget a request that waits; False if there is no such."""
        return self._compiler is not None and self._compiler.abandon(request_id)

    def idle(self) -> bool:
        """Use a moment in which nothing runs: prepare, or wait for a grammar; False if neither."""
        compiler = self._compiler
        if compiler is None or not (compiler.waiting or self.prepares):
            return False
        compiler.prepare()
        if compiler.waiting:
            compiler.wait(_WAIT_SECONDS)
        return True

    def start(self, now: float) -> list[SequenceDelta]:
        """Queue the requests whose grammar is compiled.

        Args:
            now: monotonic seconds.

        Returns:
            The ends of those that are refused.
        """
        refused: list[SequenceDelta] = []
        if self._compiler is None:
            return refused
        for compiled in self._compiler.take():
            request, error = compiled.request, compiled.error
            if compiled.matcher is not None:
                live = list(self._scheduler.sequences())
                self._matchers.add(request.request_id, compiled.matcher, live)
                try:
                    self._scheduler.add(request, now)
                except RequestError as refusal:
                    error = str(refusal)
            if error is not None:
                refused.append(_refusal(request, error))
        return refused

    def advance(self, updates: Sequences[Update]) -> Sequences[Update]:
        """Read what a step has added, and end the sequences whose grammar is over.

        Returns:
            The same updates with their reasons to finish, and behind them those of sequences that
            cannot go on.
        """
        ended = self._matchers.advance(updates)
        if ended:
            updates = self._end(ended, updates)
        if not self._scheduler.has_work:
            self._matchers.clear()
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
        """A snapshot with what was compiled so far; what waits here waits for the engine too."""
        compiler = self._compiler
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


def _refusal(request: Request, error: str) -> SequenceDelta:
    return SequenceDelta(
        request_id=request.request_id,
        finish_reason=FinishReason.ERROR,
        error=error,
        refused=True,
    )

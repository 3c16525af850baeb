"""Grammars as the engine sees them: requests wait here for theirs, and end where it does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from appliance.engine.grammars.compiling import GrammarCompiler
from appliance.engine.grammars.matchers import Matchers
from appliance.engine.messages import SequenceDelta
from appliance.engine.request import FinishReason
from appliance.errors import RequestError

if TYPE_CHECKING:
    from appliance.engine.messages import EngineInfo, Vocabulary
    from appliance.engine.plan import Update
    from appliance.engine.request import Request
    from appliance.engine.scheduling.scheduler import Scheduler
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
        self._compiler = GrammarCompiler(info.vocab_size, info.eos_token_ids)

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """The model's tokens; needed before the first grammar."""
        self._compiler.set_vocabulary(vocabulary)

    @property
    def waiting(self) -> int:
        """Requests that wait for their grammar."""
        return self._compiler.waiting

    def hold(self, request: Request) -> bool:
        """Have a request wait for its grammar; False if it has none.

        Raises:
            RequestError: there is no vocabulary.
        """
        grammar = request.sampling.grammar
        if grammar is None:
            return False
        self._compiler.begin(request, grammar)
        return True

    def abandon(self, request_id: str) -> bool:
        """Forget a request that waits; False if there is no such."""
        return self._compiler.abandon(request_id)

    def idle(self) -> bool:
        """Wait in a moment in which nothing runs for a grammar; False if there is none to come."""
        if not self.waiting:
            return False
        self._compiler.wait(_WAIT_SECONDS)
        return True

    def start(self, now: float) -> list[SequenceDelta]:
        """Queue the requests whose grammar is compiled.

        Args:
            now: monotonic seconds.

        Returns:
            The ends of those that are refused.
        """
        refused = []
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

    def advance(self, updates: list[Update]) -> list[Update]:
        """Read what a step has added, and end the sequences whose grammar is over.

        Returns:
            The same updates with their reasons to finish, and why some sequences cannot go on.
        """
        ended = self._matchers.advance(updates)
        if not ended:
            return updates
        told, failed = [], []
        for update in updates:
            sequence = update.sequence
            if sequence in ended:
                error = ended[sequence]
                if error is None:
                    self._scheduler.finish(sequence, FinishReason.STOP)
                    update = update._replace(finish_reason=FinishReason.STOP)
                else:
                    failed += self._scheduler.fail(sequence, error)
            told.append(update)
        return [*told, *failed]

    def forget_if_idle(self) -> None:
        """Keep nothing of sequences once none is live."""
        if not self._scheduler.has_work:
            self._matchers.clear()

    def add_stats(self, stats: EngineStats) -> EngineStats:
        """A snapshot with what was compiled so far; what waits here waits for the engine too."""
        compiler = self._compiler
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

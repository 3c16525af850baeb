"""Live sequences for one watcher, from the engine's report and the API process's facts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from appliance.events import Sequences

if TYPE_CHECKING:
    from appliance.engine.process.client import EngineClient
    from appliance.server.models.model_state import ModelState
    from appliance.stats import SequenceView

RATE_SECONDS = 1.0  # smoothing window of a rate
SHOWN_TOKENS = 400  # of a prompt, if the server shows prompts

Key = tuple[str, int]


class SequenceFeed:
    """The changes of sequences for one watcher.

    Args:
        holder: name of the watcher's key; it sees no other key's prompts.
    """

    def __init__(self, state: ModelState, engine: EngineClient, holder: str) -> None:
        self._state = state
        self._engine = engine
        self._holder = holder
        self._known: tuple[SequenceView, ...] | None = None
        self._rates: dict[Key, TokenRate] = {}
        self._prompts: dict[str, str] = {}

    def poll(self) -> Sequences | None:
        """Return all sequences if the engine has reported since the last call."""
        engine = self._engine
        if engine.sequences is self._known:
            return None
        self._known = engine.sequences
        live = {(view.request_id, view.index) for view in engine.sequences}
        self._rates = {key: self._rates.get(key) or TokenRate() for key in live}
        self._read_prompts()
        return Sequences(sequences=tuple(map(self._complete, engine.sequences)))

    def _complete(self, view: SequenceView) -> SequenceView:
        rate = self._rates[view.request_id, view.index]
        return msgspec.structs.replace(
            view,
            model=self._state.model_id,
            prompt=self._prompts.get(view.request_id, ""),
            yours=self._state.server.may_manage(self._holder, view.owner),
            tokens_per_second=rate.update(self._engine.stats_time, view.output_tokens),
        )

    def _read_prompts(self) -> None:
        tokenizer = self._state.tokenizer
        if not self._state.config.show_prompts or tokenizer is None:
            return
        before, self._prompts = self._prompts, {}
        for request, _ in self._engine.open_requests():
            if not self._state.server.may_manage(self._holder, request.owner):
                continue
            known = before.get(request.request_id)
            if known is None:
                known = tokenizer.decode(request.prompt_token_ids[:SHOWN_TOKENS])
            self._prompts[request.request_id] = known


class TokenRate:
    def __init__(self) -> None:
        self._before: tuple[float, int] | None = None
        self._rate = 0.0

    def update(self, now: float, tokens: int) -> float:
        """Return the smoothed rate after `tokens` tokens at a monotonic time."""
        before, self._before = self._before, (now, tokens)
        if before is None or now <= before[0]:
            return self._rate
        seconds = now - before[0]
        weight = 1.0 - math.exp(-seconds / RATE_SECONDS)
        latest = max(0, tokens - before[1]) / seconds
        self._rate = latest if self._rate == 0.0 else self._rate + weight * (latest - self._rate)
        return self._rate

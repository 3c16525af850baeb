"""Samples tokens from logits; they stay on the device and are read a step later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from appliance.engine.run.adjustments import AdjustmentList
from appliance.engine.run.sampled_rows import Candidates, Logprobs, SampledRows
from appliance.engine.run.seen_tokens import SeenTokens
from appliance.engine.run.slot_settings import (
    STAGED,
    SlotSettings,
    StepSettings,
    uniform_numbers,
)
from appliance.kernels import arrays
from appliance.kernels.sampling.ranking import likeliest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Sequences

    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.engine.nouns.plan import ScheduledSequence
    from appliance.engine.run.device import Device
    from appliance.engine.run.grammar_masks import GrammarMasks
    from appliance.engine.run.staging import StepTensors
    from appliance.kernels.penalties.rows import Penalize
    from appliance.kernels.sampling import SamplingRows


class SampleTokens(Protocol):
    """Draws a token per row without waiting for a device: in Triton, C or torch."""

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Draw from logits (num_rows, vocab_size) float32, without changing them.

        Returns:
            (num_rows,) int64 token ids; negative for a row with NaN, +inf or no finite value.
        """
        ...


class Sampler:
    """Samples one token per row; a row's result never depends on its neighbours.

    Args:
        penalize: applies penalties to seen tokens' logits.
        grammars: makes token masks; None without grammars.
    """

    def __init__(
        self,
        eos_token_ids: tuple[int, ...],
        sample_tokens: SampleTokens,
        penalize: Penalize,
        device: Device,
        *,
        num_slots: int,
        vocab_size: int,
        grammars: GrammarMasks | None = None,
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._sample_tokens = sample_tokens
        self._penalize = penalize
        self._device = device
        self._grammars = grammars
        self._slots = SlotSettings(num_slots)
        self._seen = SeenTokens(device, num_slots, vocab_size)

    def stage(
        self, entries: Sequences[ScheduledSequence], arrays: Mapping[str, NDArray[Any]]
    ) -> StepSettings:
        """Write a step's sampling settings into its staging arrays; call it for each launched step.

        Args:
            entries: those that sample; further rows of the arrays are padding and become greedy.

        Returns:
            The settings for the host.
        """
        count, num_samples = len(entries), len(arrays["uniform"])
        sequences = [entry.sequence for entry in entries]
        settings = self._slots.of(sequences, num_samples - count)
        rows = settings.rows
        for name in STAGED:
            arrays[name][:] = rows[name]
        if rows["temperature"].any():
            positions = np.zeros(num_samples, dtype=np.int64)
            positions[:count] = [entry.end for entry in entries]
            arrays["uniform"][:] = uniform_numbers(rows["key"], positions)
        if settings.has_penalties:
            arrays["counted"][:] = 0
            self._seen.prepare(entries, rows["places"], arrays["counted"])
        if settings.obeying:
            assert self._grammars is not None
            masks = self._grammars.begin(entries, settings.obeying)
            settings = settings._replace(masks=masks)
        return settings

    def choose(self, logits: Tensor, read: Tensor, tensors: StepTensors, latest: Tensor) -> Tensor:
        """Count, penalize and draw: the part of sampling that a graph captures.

        Args:
            logits: (num_samples, vocab_size) float32; changed in place.
            read: (num_samples,) int64, each row's input token.
            latest: (at least num_samples,) int64, receives the tokens, or 0.

        Returns:
            (num_samples,) int64, see `SampleTokens`.
        """
        self._penalize(logits, self._seen.table, tensors.penalties, read)
        drawn = self._sample_tokens(logits, tensors.sampling)
        _keep_latest(drawn, latest)
        return drawn

    def launch(
        self,
        logits: Tensor,
        entries: Sequences[ScheduledSequence],
        settings: StepSettings,
        tensors: StepTensors,
        latest: Tensor,
        *,
        read: Tensor | None = None,
        drawn: Tensor | None = None,
    ) -> SampledRows:
        """Enqueue the choice of each entry's next token.

        Args:
            logits: (num_samples, vocab_size) float32; changed in place.
            entries: in row order; padding rows may follow.
            latest: see `choose`.
            read: see `choose`; needed with penalties where it draws.
            drawn: (num_samples,) int64, the result of `choose` for the same logits; ignored if
                single logits are adjusted or a grammar bans tokens.
        """
        masks = None if settings.masks is None else settings.masks.result()
        adjustments = AdjustmentList(self._eos_token_ids)
        for row in settings.adjusted:
            adjustments.add(row, entries[row], is_over=masks is not None and row in masks.over)
        reported = settings.reported
        index = self._device.send(np.array(reported)) if reported else None
        raw = None if index is None else arrays.log_softmax(logits[index])
        candidates = self._candidates(logits, entries, settings.searching)
        largest = None
        banned = adjustments.banned if masks is None else [*adjustments.banned, *masks.rows]
        if banned:
            largest = self._device.fetch(logits.amax(dim=-1))
        if drawn is None or adjustments.rows or masks is not None:
            if masks is not None:
                assert self._grammars is not None
                self._grammars.apply(logits, masks)
            if settings.has_penalties:
                assert read is not None
                counted = drawn is not None
                penalties = tensors.penalties
                self._penalize(logits, self._seen.table, penalties, read, is_counted=counted)
            adjustments.apply(logits, self._device)
            drawn = self._sample_tokens(logits, tensors.sampling)
            # A synchronous device has no later step that reads tokens there.
            if self._device.is_asynchronous or raw is not None:
                _keep_latest(drawn, latest)
        logprobs = None
        if raw is not None:
            chosen = raw.gather(1, latest[: len(drawn)][index][:, None])[:, 0]
            most = max(entries[row].sequence.request.sampling.logprobs or 0 for row in reported)
            top, top_ids = likeliest(raw, most)
            fetch = self._device.fetch
            logprobs = Logprobs(reported, fetch(chosen), fetch(top), fetch(top_ids))
        tokens = self._device.fetch(drawn)
        errors = {} if masks is None else masks.errors
        return SampledRows(entries, tokens, banned, largest, logprobs, candidates, errors)

    def _candidates(
        self, logits: Tensor, entries: Sequences[ScheduledSequence], rows: Sequences[int]
    ) -> Candidates | None:
        """Rank by log probability, then bias and bans, in transformers' order for beam search."""
        if not rows:
            return None
        scores = arrays.log_softmax(logits[self._device.send(np.array(rows))])
        adjustments = AdjustmentList(self._eos_token_ids)
        places = {}
        for place, row in enumerate(rows):
            adjustments.add(place, entries[row])
            sampling = entries[row].sequence.request.sampling
            places[row] = (place, sampling.num_candidates(self._eos_token_ids))
        adjustments.apply(scores, self._device)
        most = min(max(count for _, count in places.values()), scores.shape[-1])
        values, token_ids = likeliest(scores, most)
        return Candidates(places, self._device.fetch(values), self._device.fetch(token_ids))


def _keep_latest(tokens: Tensor, latest: Tensor) -> None:
    """Write a step's tokens, 0 for none, to where later reads find them."""
    arrays.at_least_zero(tokens, latest[: len(tokens)])

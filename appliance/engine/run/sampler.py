"""Samples tokens from logits; they stay on the device and are read a step later.

Before, it changes single logits, counts seen tokens for penalties and applies the grammars' masks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from appliance.engine.run.sampled_rows import Candidates, Logprobs, SampledRows
from appliance.engine.run.slot_settings import (
    STAGED,
    SlotSettings,
    StepSettings,
    uniform_numbers,
)
from appliance.kernels import arrays
from appliance.kernels.penalties.rows import IN_PROMPT
from appliance.kernels.sampling.ranking import likeliest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Sequences
    from concurrent.futures import Future

    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.engine.grammars.matchers import Masks, Matchers
    from appliance.engine.nouns.plan import ScheduledSequence
    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.run.device import Device
    from appliance.engine.run.staging import StepTensors
    from appliance.kernels.operations import MaskTokens
    from appliance.kernels.penalties.rows import Penalize
    from appliance.kernels.sampling.rows import SamplingRows


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


@dataclass(slots=True)
class AdjustmentList:
    """Collects the changes to single logits of a step: bias, bans, the end of a thought.

    Attributes:
        banned: rows with banned tokens.
    """

    eos_token_ids: tuple[int, ...]
    rows: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    banned: list[int] = field(default_factory=list)

    def add(self, row: int, entry: ScheduledSequence, *, is_over: bool = False) -> None:
        """Add a sequence's changes to its row; does not ban end tokens if `is_over`."""
        sampling = entry.sequence.request.sampling
        num_output_tokens = entry.end - entry.sequence.num_prompt_tokens
        output: list[int] = []
        if sampling.thought_budget is not None:
            output = entry.sequence.token_ids[entry.sequence.num_prompt_tokens :]
            output += entry.drafts
        added = sampling.bias_at(num_output_tokens, output)
        if num_output_tokens < sampling.min_tokens and not is_over:
            banned = dict.fromkeys((*self.eos_token_ids, *sampling.stop_token_ids), -np.inf)
            if banned:
                self.banned.append(row)
                added = added | banned
        self.rows += [row] * len(added)
        self.token_ids += added
        self.values += added.values()

    def apply(self, logits: Tensor, device: Device) -> None:
        """Change logits (num_rows, vocab_size) float32 in place; no logit has two entries."""
        if not self.rows:
            return
        numbers = np.array((self.rows, self.token_ids, self.values), dtype=np.float64)
        sent = device.send(numbers)
        rows, token_ids = (sent[part].long() for part in range(2))
        logits[rows, token_ids] += sent[2].float()


class SeenTokens:
    """Counts seen tokens for penalties: a row of counts per slot, undefined without penalties.

    On the device, which knows them first: a step counts each row's input token, so a sequence may
    run on before its last token has reached the host. Rows of drafts are adjacent and add up; the
    next step subtracts rejected ones. A window of tokens is counted anew by the host in every step,
    without drafts.

    Attributes:
        table: (num_slots, vocab_size) int32, as `kernels.penalties.reference` reads it.
    """

    def __init__(self, device: Device, num_slots: int, vocab_size: int) -> None:
        self.table = device.zeros((num_slots, vocab_size), "int32")
        self._device = device
        # By place: the sequence, and the number of its tokens counted after all enqueued work. A
        # step repeated after a failure has no more tokens than that, so it recounts.
        self._counted: dict[int, tuple[Sequence, int]] = {}
        self._drafted: dict[int, tuple[int, ...]] = {}  # by place: the drafts counted last

    def prepare(
        self,
        entries: Sequences[ScheduledSequence],
        places: NDArray[np.int32],
        counted: NDArray[np.int32],
    ) -> None:
        """Prepare the counts that a step reads; call it for every enqueued step.

        Args:
            entries: those that sample.
            places: (at least num_entries,) row of each, -1 without penalties.
            counted: same shape; becomes 1 where the step must count the row's input token.
        """
        fresh: dict[int, ScheduledSequence] = {}
        for row in np.flatnonzero(places >= 0).tolist():
            entry, place = entries[row], int(places[row])
            if self._drafted and not entry.drafts:
                self._take_back(place, entry)
            if entry.drafts:
                self._drafted[place] = entry.drafts
            is_known = self._counted.get(place) == (entry.sequence, entry.end - 1)
            if is_known and entry.sequence.request.sampling.penalty_window is None:
                counted[row] = 1
            else:
                fresh[place] = entry
            self._counted[place] = (entry.sequence, entry.end)
        if fresh:
            self._count(fresh)

    def _take_back(self, place: int, entry: ScheduledSequence) -> None:
        """Subtract the last step's drafts that do not precede a row."""
        drafts = self._drafted.pop(place, ())
        sequence, count = self._counted.get(place, (None, 0))
        kept = entry.end - 1 - (count - len(drafts))
        if sequence is not entry.sequence or not 0 <= kept < len(drafts):
            return
        if tuple(entry.sequence.token_ids[count - len(drafts) : entry.end - 1]) != drafts[:kept]:
            return
        for token_id in drafts[kept:]:
            self.table[place, token_id] -= 1
        self._counted[place] = (entry.sequence, entry.end - 1)

    def _count(self, fresh: dict[int, ScheduledSequence]) -> None:
        parts = []
        for place, entry in fresh.items():
            assert not entry.follows, "a token that nobody has counted"
            window = entry.sequence.request.sampling.penalty_window
            begin = 0 if window is None else max(0, entry.end - window)
            tokens = np.array(entry.sequence.token_ids[begin : entry.end])
            num_prompt_tokens = entry.sequence.num_prompt_tokens if window is None else 0
            is_token = tokens >= 0  # rows of pictures have none
            prompt = np.unique(tokens[:num_prompt_tokens][is_token[:num_prompt_tokens]])
            rest = tokens[num_prompt_tokens:][is_token[num_prompt_tokens:]]
            answer, counts = np.unique(rest, return_counts=True)
            ids = np.concatenate((prompt, answer))
            values = np.concatenate((np.full(len(prompt), IN_PROMPT), counts))
            parts.append(np.stack((np.full(len(ids), place), ids, values)))
            self.table[place] = 0
        numbers = self._device.send(np.concatenate(parts, axis=1))
        self.table.index_put_((numbers[0], numbers[1]), numbers[2].int(), accumulate=True)


class GrammarMasks:
    """Makes a step's token masks while the model runs, and applies them to its logits."""

    def __init__(self, matchers: Matchers, mask_tokens: MaskTokens, device: Device) -> None:
        self.matchers = matchers
        self._mask_tokens = mask_tokens
        self._device = device

    def begin(
        self, entries: Sequences[ScheduledSequence], rows: Sequences[int]
    ) -> Future[Masks] | None:
        """Start making the masks of some rows; None if no grammar has begun."""
        asked = [entries[row] for row in rows]
        assert not any(entry.follows for entry in asked), "a token that nobody knows"
        return self.matchers.begin([(one.sequence, one.drafts) for one in asked], rows)

    def apply(self, logits: Tensor, masks: Masks) -> None:
        """Ban the tokens that masks do not allow, in logits (num_rows, vocab_size) float32."""
        send = self._device.send
        rows = np.array(masks.rows, dtype=np.int64)
        self._mask_tokens(logits, send(rows), send(masks.words))

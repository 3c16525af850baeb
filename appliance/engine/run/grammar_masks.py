"""Makes a step's token masks while the model runs, and applies them to its logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequences
    from concurrent.futures import Future

    from torch import Tensor

    from appliance.engine.grammars.matchers import Masks, Matchers
    from appliance.engine.nouns.plan import ScheduledSequence
    from appliance.engine.run.device import Device
    from appliance.kernels.operations import MaskTokens


class GrammarMasks:
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

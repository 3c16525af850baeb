"""Fits the evaluation of a quality card into a memory ceiling.

The peak is one layer in float32 with the tokens that pass it together, or later the models' heads
with the logits of some vocabulary entries. Both numbers shrink if memory is short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.errors import MemoryPlanError
from appliance.model.spec import AttentionSpec
from appliance.quant.run.memory_plan import FLOAT_BYTES, MIB, RESERVE, ceiling_for, running_bytes
from appliance.quant.run.options import Method, QuantizeOptions
from appliance.quant.text.held_out import KIND_WINDOWS

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.model.source import ModelSource

MOST_TOKENS = 2048  # tokens that pass through a layer together
CARD_WINDOW = 512  # tokens per window of a run's card
PLACES = 512  # tokens that are predicted together
MOST_ENTRIES, LEAST_ENTRIES = 4096, 64  # vocabulary entries with logits at once
OTHER_VARIANTS = 8  # on a card: each format of a cache, the declared one, and rounded inputs
KIND_TOKENS = KIND_WINDOWS * 384  # of further kinds of text, filled up, with a usual vocabulary
KIND_STREAMS = 4  # of further kinds of text: base, candidate, and the base's parts
PROGRAM = 64 * MIB  # two tokenizers, the text, and code of the evaluation
SCORES = 3  # copies of a window's attention scores


@dataclass(frozen=True, slots=True)
class EvaluationMemory:
    """Sizes that an evaluation's memory depends on.

    Attributes:
        num_models: models with weights of their own.
        num_variants: ways to compute them, caches included.
        max_ram: limit of the process's memory in bytes; None takes what is free.
    """

    source: ModelSource
    window: int
    num_tokens: int
    num_models: int
    num_variants: int
    max_ram: int | None = None

    @classmethod
    def of_run(cls, source: ModelSource, options: QuantizeOptions) -> EvaluationMemory | None:
        """Return the sizes of the card that follows a run; None if none follows."""
        tokens = options.card_tokens
        if not tokens:
            return None
        models = 2 + (options.method is not Method.RTN)  # and the model rounded to nearest
        variants = models + OTHER_VARIANTS
        window = min(CARD_WINDOW, tokens)
        return cls(source, window, tokens, models, variants, options.max_ram)

    def tokens_at_once(self, used: int) -> int:
        """Return the number of tokens that may pass through a layer together.

        Args:
            used: bytes of the process before the first layer.

        Raises:
            MemoryPlanError: not even one window fits.
        """
        used += self.stream_bytes
        return self._most(used, self.layer_bytes, max(MOST_TOKENS, self.window), self.window)

    def entries_at_once(self, used: int) -> int:
        """Return the number of vocabulary entries whose logits may exist at once.

        Args:
            used: bytes of the process with all heads.

        Raises:
            MemoryPlanError: not even the fewest entries fit.
        """
        return self._most(used, self.logits_bytes, MOST_ENTRIES, LEAST_ENTRIES)

    def peak(self, used: int) -> int:
        """Compute the peak bytes of an evaluation within its ceiling.

        Args:
            used: bytes of the process before it opens a model to evaluate.

        Raises:
            MemoryPlanError: the evaluation does not fit.
        """
        used += PROGRAM
        streams = used + self.stream_bytes
        layers = streams + self.layer_bytes(self.tokens_at_once(used))
        heads = streams + self.head_bytes
        return max(layers, heads + self.logits_bytes(self.entries_at_once(heads)))

    @property
    def stream_bytes(self) -> int:
        """Bytes of the mapped files of residual streams."""
        tokens = (self.num_variants + 2) * self.num_tokens
        of_kinds = KIND_STREAMS * KIND_WINDOWS * self.window
        return max(tokens, of_kinds) * self.source.spec.hidden_size * FLOAT_BYTES

    @property
    def head_bytes(self) -> int:
        """Bytes of all heads in 16 bits; packed heads take less."""
        spec = self.source.spec
        return 2 * self.num_models * spec.vocab_size * spec.hidden_size

    def layer_bytes(self, tokens: int) -> int:
        """Bytes of the largest layer, all experts included, while `tokens` pass through it."""
        mixers = (layer.mixer for layer in self.source.spec.layers)
        heads = max((m.num_heads for m in mixers if isinstance(m, AttentionSpec)), default=0)
        scores = SCORES * heads * self.window**2 * FLOAT_BYTES
        return running_bytes(self.source, self.window, tokens) + scores + RESERVE

    def logits_bytes(self, entries: int) -> int:
        """Bytes of the logits of `entries`, and of arrays derived from them."""
        hidden = self.source.spec.hidden_size
        places = max(PLACES, self.window)
        logits = (2 * self.num_variants + 2) * places * entries
        rows = 2 * entries + self.num_variants * places
        return (logits + rows * hidden) * FLOAT_BYTES + RESERVE

    def _most(self, used: int, size: Callable[[int], int], most: int, least: int) -> int:
        if self.max_ram is None:
            return most
        while most > least and used + size(most) > self.max_ram:
            most = max(least, most // 2)
        needed = used + size(most)
        if needed > self.max_ram:
            raise MemoryPlanError(
                f"measuring the quality card takes {needed / MIB:,.0f} MiB of memory, but"
                f" {self.max_ram / MIB:,.0f} MiB may be used; {ceiling_for('--max-ram', needed)},"
                " and --no-card measures nothing"
            )
        return most

"""Fits the evaluation of a quality card into a memory ceiling.

Its peak is one layer in float32 with the text that passes through it at once, or later the models'
heads with the logits of some entries of the vocabulary. Both amounts shrink where memory is short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.errors import MemoryPlanError
from appliance.model.spec import AttentionSpec
from appliance.quant.run.memory_plan import FLOAT_BYTES, HEAP, MIB, layer_parts
from appliance.quant.run.options import Method, QuantizeOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.model.source import ModelSource

MOST_TOKENS = 2048  # of the text, that pass through a layer at once
CARD_WINDOW = 512  # tokens of the text that a run's card reads as one
PLACES = 512  # of the text, that are predicted at once
MOST_ENTRIES, LEAST_ENTRIES = 4096, 64  # of the vocabulary, with logits at once
KV_VARIANTS = 7  # caches that a card compares: of each format, and the declared one
PROGRAM = 64 * MIB  # two tokenizers, the text, and code that only an evaluation runs
SCORES = 3  # copies of the attention scores of a window


@dataclass(frozen=True, slots=True)
class EvaluationMemory:
    """The sizes that an evaluation's memory depends on.

    Attributes:
        source: the checkpoint that is measured.
        window: tokens of the text that are read as one.
        num_tokens: of the text.
        num_models: whose weights are compared.
        num_variants: ways to compute them, caches among them.
        max_ram: most bytes of memory the process may use; None takes what is free.
    """

    source: ModelSource
    window: int
    num_tokens: int
    num_models: int
    num_variants: int
    max_ram: int | None = None

    @classmethod
    def of_run(cls, source: ModelSource, options: QuantizeOptions) -> EvaluationMemory | None:
        """Of the card that follows a run on a model; None if none does."""
        tokens = options.card_tokens
        if not tokens:
            return None
        models = 2 + (options.method is not Method.RTN)  # and the model rounded to nearest
        variants = models + KV_VARIANTS
        window = min(CARD_WINDOW, tokens)
        return cls(source, window, tokens, models, variants, options.max_ram)

    def tokens_at_once(self, used: int) -> int:
        """Return the tokens of the text that may pass through a layer at once.

        Args:
            used: bytes that the process has in memory before the first layer.

        Raises:
            MemoryPlanError: not even a window fits.
        """
        used += self.stream_bytes
        return self._most(used, self.layer_bytes, max(MOST_TOKENS, self.window), self.window)

    def entries_at_once(self, used: int) -> int:
        """Return the entries of the vocabulary whose logits may exist at once.

        Args:
            used: bytes that the process has in memory with all heads.

        Raises:
            MemoryPlanError: not even a few fit.
        """
        return self._most(used, self.logits_bytes, MOST_ENTRIES, LEAST_ENTRIES)

    def peak(self, used: int) -> int:
        """Compute the peak in bytes of an evaluation that keeps to the ceiling.

        Args:
            used: bytes that the process has in memory before it opens a model to evaluate.

        Raises:
            MemoryPlanError: it does not fit.
        """
        used += PROGRAM
        streams = used + self.stream_bytes
        layers = streams + self.layer_bytes(self.tokens_at_once(used))
        heads = streams + self.head_bytes
        return max(layers, heads + self.logits_bytes(self.entries_at_once(heads)))

    @property
    def stream_bytes(self) -> int:
        """Bytes of the files that hold what comes out of a layer, which are in memory as well."""
        hidden = self.source.spec.hidden_size
        return (self.num_variants + 2) * self.num_tokens * hidden * FLOAT_BYTES

    @property
    def head_bytes(self) -> int:
        """Bytes of all heads, as 16 bits: what is packed takes less."""
        spec = self.source.spec
        return 2 * self.num_models * spec.vocab_size * spec.hidden_size

    def layer_bytes(self, tokens: int) -> int:
        """Bytes of the largest layer while so many tokens pass through it."""
        options = QuantizeOptions(method=Method.RTN)
        parts = layer_parts(self.source, options, self.window, tokens)
        mixers = (layer.mixer for layer in self.source.spec.layers)
        heads = max((m.num_heads for m in mixers if isinstance(m, AttentionSpec)), default=0)
        scores = SCORES * heads * self.window**2 * FLOAT_BYTES
        return parts["layer"] + parts["activations"] + scores + HEAP

    def logits_bytes(self, entries: int) -> int:
        """Bytes of the logits of so many entries, and of what is made of them."""
        hidden = self.source.spec.hidden_size
        places = max(PLACES, self.window)
        logits = (2 * self.num_variants + 2) * places * entries
        rows = 2 * entries + self.num_variants * places
        return (logits + rows * hidden) * FLOAT_BYTES + HEAP

    def _most(self, used: int, size: Callable[[int], int], most: int, least: int) -> int:
        if self.max_ram is None:
            return most
        while most > least and used + size(most) > self.max_ram:
            most = max(least, most // 2)
        needed = used + size(most)
        if needed > self.max_ram:
            raise MemoryPlanError(
                f"measuring the quality card takes {needed / MIB:,.0f} MiB of memory, but"
                f" {self.max_ram / MIB:,.0f} MiB may be used; --max-ram {-(-needed // MIB)}MiB is"
                " the least that would do, and --no-card measures nothing"
            )
        return most

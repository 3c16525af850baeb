"""Runs a decoder that only reads in torch: each text attends within itself, without a cache."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from appliance.kernels.backend import select_backend
from appliance.kernels.cache.decoder_cache import KVCache
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.kv_write.reference import rotate_and_write_with
from appliance.kernels.rows.ragged import RaggedBatch
from appliance.model.encoder.encoder import attend_by_runs
from appliance.model.encoder.from_decoder import score_row
from appliance.model.loader import load_decoder

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from appliance.kernels.cache.kv_cache import LayerCache
    from appliance.kernels.operations import Backend
    from appliance.model.decoder import Decoder
    from appliance.model.encoder.texts import Texts
    from appliance.model.source import ModelSource
    from appliance.model.spec import ScoreSpec


@dataclass(slots=True)
class StepKeys:
    """A step's keys and values in one layer, in place of blocks; the next layer replaces them."""

    num_kv_heads: int
    block_size: int = 1
    key_mean: None = None
    format: KVFormat = KVFormat.FP32
    keys: Tensor = field(init=False)  # (num_tokens, num_kv_heads, head_dim)
    values: Tensor = field(init=False)


@dataclass(frozen=True, slots=True)
class DecoderReader:
    """A decoder with its weights that returns the hidden states of whole texts.

    Attributes:
        score: the row that judges texts, (hidden_size,); None without one.
    """

    decoder: Decoder
    score: NDArray[np.float32] | None

    @property
    def ranking(self) -> ScoreSpec | None:
        return self.decoder.spec.score

    @property
    def num_token_types(self) -> int:
        return 0

    @property
    def weight_format(self) -> str:
        return self.decoder.weight_format

    def hidden(self, texts: Texts) -> NDArray[np.float32]:
        """Return the hidden states of all tokens, (num_tokens, hidden_size)."""
        decoder, lengths = self.decoder, texts.lengths
        mixer = next(iter(decoder.spec.attention_layers.values()))
        kept = cast("LayerCache", StepKeys(mixer.num_kv_heads))
        tables = [range(start, start + n) for start, n in zip(texts.starts, lengths, strict=False)]
        batch = RaggedBatch.of(lengths, lengths, tables, block_size=1, device=decoder.device)
        ids, positions = (
            torch.from_numpy(one).to(decoder.device) for one in (texts.ids, texts.positions)
        )
        cache = KVCache((kept,) * len(decoder.spec.layers))
        found: NDArray[np.float32] = (
            decoder.hidden(ids, positions, batch, cache).float().cpu().numpy()
        )
        return found

    def rank(self, chosen: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logit of each judged state, (num_texts,), from (num_texts, hidden_size)."""
        assert self.score is not None, "the engine ranks only what has a ranking head"
        found: NDArray[np.float32] = chosen @ self.score
        return found


def load_decoder_reader(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[str, int, int], None],
    on_layer: Callable[[], None] = lambda: None,
) -> DecoderReader:
    """Read the weights; arguments and errors as for `load_encoder`."""
    mixer = next(iter(source.spec.attention_layers.values()))
    backend = without_cache(select_backend(device), mixer.looks_ahead)
    decoder = load_decoder(source, backend, device, dtype, on_progress)
    return DecoderReader(replace(decoder, on_layer=on_layer), score_row(source))


def without_cache(backend: Backend, looks_ahead: bool) -> Backend:
    """Return a backend whose attention is within the texts of a step."""

    def keep(key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        kept = cast("StepKeys", cache)
        kept.keys, kept.values = key, value

    def plan(batch: RaggedBatch, block_size: int) -> RaggedBatch:
        return batch

    def attend(
        query: Tensor,
        cache: object,
        work: object,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        sees: Tensor | None = None,
    ) -> Tensor:
        assert sinks is None, "refused when it was opened"
        assert sees is None, "its own pictures have no rows of texts"
        kept, batch = cast("StepKeys", cache), cast("RaggedBatch", work)
        before = None if window is None else window - 1
        after = before if looks_ahead else 0
        return attend_by_runs(
            (query, kept.keys, kept.values),
            batch.host_query_lens,
            (before, after),
            scale=scale,
            softcap=softcap,
        )

    return replace(
        backend,
        rotate_and_write=rotate_and_write_with(backend.rms_norm, backend.rotary, keep),
        plan_attention=plan,
        paged_attention=attend,
    )

"""Measure transformers' generate beside the engine: bf16, static cache, SDPA, same shape.

Its rate is that of a long answer less a short one, so that prompts do not count. Eager first, then
compiled as its documentation advises if time is left.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from bench.gpu.device_model import config_of
from bench.gpu.engine import SIZES
from bench.gpu.plan import Amount

if TYPE_CHECKING:
    from bench.gpu.plan import Wanted
    from bench.gpu.rows import Rows

STREAMS = {Amount.TINY: (1, 3), Amount.FIRST: (1, 64), Amount.FULL: (1, 16, 64)}
SHORT = 4  # a short answer is so many times shorter


class Peer:
    """A transformers model, made when it is first needed."""

    def __init__(self, amount: Amount, device: torch.device) -> None:
        self._amount, self._device = amount, device
        self._model: Any = None

    @property
    def model(self) -> Any:
        """Return a model with random weights."""
        if self._model is None:
            from transformers import AutoModelForCausalLM, LlamaConfig

            config = LlamaConfig(**config_of(self._amount))
            with self._device:
                self._model = AutoModelForCausalLM.from_config(
                    config, dtype=torch.bfloat16, attn_implementation="sdpa"
                ).eval()
        return self._model

    def seconds(self, streams: int, tokens: int, *, is_compiled: bool) -> float:
        """Time one answer to random prompts."""
        sizes = SIZES[self._amount]
        shape = (streams, sizes.prompt_tokens)
        ids = torch.randint(10, self.model.config.vocab_size, shape, device=self._device)
        begin = time.perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static",
            disable_compile=not is_compiled,
        )
        assert out.shape[1] == sizes.prompt_tokens + tokens, out.shape
        assert torch.isfinite(out.float()).all()  # reads the result, so all is done
        return time.perf_counter() - begin


def measure(rows: Rows, wanted: Wanted) -> None:
    """Measure every number of streams eagerly, then compiled on a GPU."""
    peer = Peer(wanted.amount, rows.bench.device)
    for is_compiled in (False, True) if rows.bench.is_gpu else (False,):
        for streams in STREAMS[wanted.amount]:
            key = {
                "engine": "transformers compiled" if is_compiled else "transformers",
                "weights": "bf16",
                "kv": "bf16, static",
                "what": "decode",
                "streams": streams,
            }
            rows.note(key, partial(_decode, peer, wanted.amount, streams, is_compiled))


def _decode(peer: Peer, amount: Amount, streams: int, is_compiled: bool) -> dict[str, Any]:
    long = SIZES[amount].max_tokens
    short = max(2, long // SHORT)
    seconds = partial(peer.seconds, streams, is_compiled=is_compiled)
    seconds(short)
    rate = streams * (long - short) / max(1e-9, seconds(long) - seconds(short))
    return {"tokens_per_second": {"median": round(rate, 1)}, "torch": torch.__version__}

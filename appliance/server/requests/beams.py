"""Prepares beam search for the engine: checks the width and converts stop strings to bytes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from appliance.engine.nouns.limits import check_beams
from appliance.text.stop_pieces import stop_pieces

if TYPE_CHECKING:
    from appliance.engine.nouns.request import Request
    from appliance.server.models.model_state import ModelState


async def prepare_beams(state: ModelState, requests: list[Request]) -> list[Request]:
    """Prepare requests with beam search; return others unchanged.

    Raises:
        RequestError: the engine runs fewer sequences than the request has beams.
    """
    sampling = requests[0].sampling
    if not sampling.use_beam_search:
        return requests
    info, tokenizer = state.serving()
    for request in requests:
        check_beams(
            len(request.prompt_token_ids),
            sampling.num_sequences,
            max_num_seqs=info.max_num_seqs,
            blocks=(info.num_blocks, info.block_size),
            is_recurrent=info.state_bytes > 0,
        )
    if not sampling.stop:
        return requests
    work = partial(stop_pieces, tokenizer, sampling)
    pieces = await state.texts.run(work, owner=requests[0].owner, size=info.vocab_size)
    return [msgspec.structs.replace(request, stop_pieces=pieces) for request in requests]

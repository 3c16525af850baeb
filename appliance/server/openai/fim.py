"""Builds fill-in-the-middle prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.errors import RequestError
from appliance.server.requests.prompt import MAX_PROMPTS
from appliance.tokenizer.fim import FORMS, end_ids, find_form

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.server.models.model_state import ModelState


async def fim_prompts(
    state: ModelState, prompt: object, suffix: str, owner: str
) -> tuple[list[list[int]], list[int]]:
    """Return each prompt's token ids with its suffix, and the ids that end the answers.

    Control tokens in either text stay text: source files mention them.

    Raises:
        RequestError: the model cannot fill in the middle, or a prompt is not text.
    """
    info, tokenizer = state.serving()
    form = find_form(tokenizer)
    if form is None:
        raise RequestError(
            "this model was not trained to fill in the middle: its vocabulary has none of the "
            f"tokens for that which are known here ({', '.join(form.name for form in FORMS)}); "
            "leave suffix out",
            param="suffix",
            code="suffix_unsupported",
        )
    texts: Sequence[object] = prompt if isinstance(prompt, list) else [prompt]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError("suffix goes with prompts that are texts", param="prompt")
    if len(texts) > MAX_PROMPTS:
        raise RequestError(
            f"the request has {len(texts)} prompts; at most {MAX_PROMPTS} are accepted",
            param="prompt",
        )
    template = form.template

    def encode() -> list[list[int]]:
        return [
            tokenizer.encode_filled(
                template, {"prefix": str(text), "suffix": suffix}, add_special_tokens=True
            )
            for text in texts
        ]

    ends = [end for end in end_ids(form, tokenizer) if end < info.vocab_size]
    size = sum(len(suffix) + len(str(text)) for text in texts)
    return await state.texts.run(encode, owner=owner, size=size), ends

"""Fill-in-the-middle formats, recognized by the tokens in a vocabulary.

Tokens and their order are as in the reports cited beside each format.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class FimForm:
    """A fill-in-the-middle format.

    Attributes:
        template: the prompt; the answer is the middle.
        ends: tokens that end the middle besides the model's own; the vocabulary may lack them.
    """

    name: str
    template: str
    ends: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(part for part in re.split(r"\{\w+\}", self.template) if part)


# The first one with all its tokens in the vocabulary wins.
FORMS = (
    # Qwen2.5-Coder and Qwen3-Coder (arXiv:2409.12186), CodeGemma (arXiv:2406.11409).
    FimForm(
        "Qwen, CodeGemma",
        "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
        ("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>"),
    ),
    # StarCoder and StarCoder2 (arXiv:2305.06161), Granite, and code models built on them.
    FimForm(
        "StarCoder, Granite",
        "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
        ("<fim_pad>", "<file_sep>", "<filename>", "<repo_name>", "<reponame>"),
    ),
    # SantaCoder (arXiv:2301.03988).
    FimForm("SantaCoder", "<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>", ("<fim-pad>",)),
    # Code Llama (arXiv:2308.12950).
    FimForm("Code Llama", "▁<PRE>{prefix}▁<SUF>{suffix}▁<MID>", ("▁<EOT>",)),
    # DeepSeek-Coder and V2 (arXiv:2401.14196).
    FimForm(
        "DeepSeek",
        "<\uff5cfim▁begin\uff5c>{prefix}<\uff5cfim▁hole\uff5c>{suffix}<\uff5cfim▁end\uff5c>",
    ),
    # Codestral: mistral-common puts the suffix first.
    FimForm("Mistral", "[SUFFIX]{suffix}[PREFIX]{prefix}"),
    # Seed-Coder (arXiv:2506.03524) puts the suffix first, too.
    FimForm("Seed-Coder", "<[fim-suffix]>{suffix}<[fim-prefix]>{prefix}<[fim-middle]>"),
)


def find_form(tokenizer: Tokenizer) -> FimForm | None:
    """Return a model's format, or None if it was not trained to fill in."""
    known = tokenizer.mark_ids(mark for form in FORMS for mark in form.marks)
    return next((form for form in FORMS if known.keys() >= set(form.marks)), None)


def end_ids(form: FimForm, tokenizer: Tokenizer) -> Sequence[int]:
    return sorted(tokenizer.mark_ids(form.ends).values())

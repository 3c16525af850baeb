"""Small encoders with random weights: a checkpoint on disk and transformers' model of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from appliance.model.encoder.source import EncoderSource, open_checked
from appliance.model.encoder.texts import Texts

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.model.source import ModelSource

SIZES = {"vocab_size": 97, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4}
BERT = {**SIZES, "intermediate_size": 96, "max_position_embeddings": 210}
ROPE = {"rope_type": "default", "rope_theta": 500.0}
MODERN = {
    **SIZES,
    "intermediate_size": 64,
    "max_position_embeddings": 1300,
    "local_attention": 16,
    "norm_bias": True,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id"), 0),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 1),
}
FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "bert": ("Bert", BERT, 200),
    "roberta": ("Roberta", {**BERT, "pad_token_id": 1}, 200),
    "xlm-roberta": ("XLMRoberta", {**BERT, "pad_token_id": 1, "type_vocab_size": 1}, 200),
    "nomic-bert": ("NomicBert", {**BERT, "hidden_act": "silu", "rope_parameters": ROPE}, 200),
    "gte": ("Gte", {**BERT, "pad_token_id": 1, "rope_parameters": ROPE}, 200),
    "jina-v3": ("JinaEmbeddingsV3", {**BERT, "rope_parameters": ROPE}, 200),
    "distilbert": ("DistilBert", {**BERT, "hidden_dim": 96}, 200),
    "mpnet": ("MPNet", BERT, 200),
    "gte-yarn": (
        "Gte",
        {
            **BERT,
            "pad_token_id": 1,
            "rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 4.0},
        },
        200,
    ),
    "modernbert": ("ModernBert", MODERN, 1200),
    "modernbert-mean": ("ModernBert", {**MODERN, "classifier_pooling": "mean"}, 70),
}
# Decoders that only embed: kind, class, settings, longest text.
_DECODER = {
    **SIZES,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 600,
    "pad_token_id": 0,
}
_WIDE = {**_DECODER, "head_dim": 32}
_WINDOW = {"sliding_window": 9, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
DECODERS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "embeddinggemma": (
        "Gemma3Text", "Gemma3TextModel",
        {
            **_WIDE,
            **_WINDOW,
            "sliding_window": 16,
            "use_bidirectional_attention": True,
            "query_pre_attn_scalar": 32,
        },
        300,
    ),
    "qwen2-two-way": ("Qwen2", "Qwen2Model", {**_DECODER, "is_causal": False}, 300),
    "qwen2-two-way-windows": (
        "Qwen2", "Qwen2Model",
        {**_DECODER, **_WINDOW, "use_sliding_window": True, "is_causal": False},
        300,
    ),
    "qwen3-two-way": ("Qwen3", "Qwen3Model", {**_WIDE, "is_causal": False}, 60),
    "llama-two-way": ("Llama", "LlamaForCausalLM", {**_DECODER, "is_causal": False}, 60),
    "qwen3-base": ("Qwen3", "Qwen3Model", _WIDE, 60),
    "mistral-base": ("Mistral", "MistralModel", {**_DECODER, "sliding_window": 9}, 600),
    "eurobert": ("EuroBert", "EuroBertModel", {**_DECODER, "mask_token_id": 3}, 60),
    "eurobert-words": ("EuroBert", "EuroBertForMaskedLM", {**_DECODER, "mask_token_id": 3}, 60),
}  # fmt: skip
# Decoders with a head of one label, which judge a text by its last token: kind, class, settings.
JUDGES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", "Qwen3ForSequenceClassification", _WIDE),
    "qwen2-no-padding": (
        "Qwen2", "Qwen2ForSequenceClassification",
        {**_DECODER, "pad_token_id": None},
    ),
    "llama": ("Llama", "LlamaForSequenceClassification", _DECODER),
    "mistral": ("Mistral", "MistralForSequenceClassification", {**_DECODER, "sliding_window": 3}),
    "gemma": ("Gemma", "GemmaForSequenceClassification", _WIDE),
    "gemma2-capped": (
        "Gemma2", "Gemma2ForSequenceClassification",
        {**_WIDE, "attn_logit_softcapping": 0.5},
    ),
    "phi": ("Phi", "PhiForSequenceClassification", _DECODER),
}  # fmt: skip


@dataclass
class Made:
    """A checkpoint on disk and transformers' model of it."""

    path: Path
    oracle: Any
    longest: int


def make(name: str, path: Path, *, ranks: bool) -> Made:
    kind, settings, longest = FAMILIES[name]
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**settings)
    if ranks:
        config.num_labels = 1
    suffix = "ForSequenceClassification" if ranks else "Model"
    oracle = getattr(transformers, f"{kind}{suffix}")(config).eval()
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    oracle.save_pretrained(path)
    return Made(path, oracle, longest)


def make_decoder(name: str, path: Path) -> Made:
    kind, model, settings, longest = DECODERS[name]
    torch.manual_seed(1)
    made = getattr(transformers, model)(getattr(transformers, f"{kind}Config")(**settings)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    made.save_pretrained(path)
    return Made(path, getattr(made, "model", made), longest)


def make_judge(name: str, path: Path) -> Any:
    """Write a decoder with a head that judges texts, and return it."""
    kind, model, settings = JUDGES[name]
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**settings)
    config.num_labels = 1
    made = getattr(transformers, model)(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    made.save_pretrained(path)
    return made


def open_encoder(path: Path) -> EncoderSource:
    source = open_checked(path)
    assert isinstance(source, EncoderSource)
    return source


def open_decoder(path: Path) -> ModelSource:
    source = open_checked(path)
    assert not isinstance(source, EncoderSource)
    return source


def some_texts(longest: int) -> list[list[int]]:
    torch.manual_seed(2)
    lengths = sorted([1, 5, 5, 33, longest])
    return [torch.randint(2, 97, (length,)).tolist() for length in lengths]


def of_one_type(texts: list[list[int]]) -> Texts:
    return Texts.of([(ids, [0] * len(ids)) for ids in texts])


def of_transformers(oracle: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        mask = torch.ones(1, len(ids), dtype=torch.int64)
        found: torch.Tensor = oracle(torch.tensor([ids]), attention_mask=mask).last_hidden_state[0]
    return found


def write_tokenizer(path: Path) -> None:
    """Write a WordPiece tokenizer of single letters, with BERT's tokens at both ends of a text."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters)]
    backend = Tokenizer(
        models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]")
    )
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(names[:4])
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    backend.save(str(path / "tokenizer.json"))

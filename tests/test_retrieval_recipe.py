"""What checkpoints say of vectors and relevance, and what of it is refused by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from appliance.engine.request import Pooling
from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.model.encoder.families import ENCODERS
from appliance.retrieval_recipe import ENCODERS as KNOWN_ENCODERS
from appliance.retrieval_recipe import NOTHING_SAID, recipe_of_folder, recipe_of_gguf

if TYPE_CHECKING:
    from pathlib import Path

TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
LOGITS = {
    "idx": 1,
    "path": "1_LogitScore",
    "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
}
LAST = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}
MEAN = {"pooling_mode": "mean"}
CARD = "---\nlicense: apache-2.0\npipeline_tag: text-ranking\n---\n# Qwen3-Reranker-0.6B\n"


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path = path.with_suffix(".md" if isinstance(content, str) else ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_an_encoder_may_pool_its_class_token(tmp_path: Path) -> None:
    config = {"model_type": "bert", "architectures": ["BertModel"]}
    pooling = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    modules = [TRANSFORMER, POOLING, NORMALIZE]
    write(tmp_path, config=config, modules=modules, **{"1_Pooling__config": pooling})
    recipe = recipe_of_folder(tmp_path).embedding
    assert (recipe.pooling, recipe.normalize, recipe.refused) == (Pooling.CLS, True, "")
    write(tmp_path, config={"model_type": "qwen3"})
    assert "pooling_mode" not in recipe_of_folder(tmp_path).embedding.refused
    assert "'cls'" in recipe_of_folder(tmp_path).embedding.refused


def test_an_encoder_that_does_not_say_how_it_pools_is_refused(tmp_path: Path) -> None:
    write(tmp_path, config={"model_type": "modernbert", "architectures": ["ModernBertModel"]})
    with pytest.raises(CheckpointError, match=r"without modules.json.*pooling_mode_mean_tokens"):
        recipe_of_folder(tmp_path)
    write(
        tmp_path, modules=[TRANSFORMER, POOLING], **{"1_Pooling__config": {"pooling_mode": "max"}}
    )
    with pytest.raises(UnsupportedModelError, match=r"'max'.*mean, cls"):
        recipe_of_folder(tmp_path)


def test_an_encoder_with_a_head_ranks_pairs(tmp_path: Path) -> None:
    named = ["XLMRobertaForSequenceClassification"]
    write(tmp_path, config={"model_type": "xlm-roberta", "architectures": named})
    recipe = recipe_of_folder(tmp_path)
    assert recipe.rerank is not None
    assert recipe.rerank.by_head
    assert "reranker" in recipe.embedding.refused


def test_what_is_an_encoder_is_said_once() -> None:
    assert {family.model_type for family in ENCODERS} == KNOWN_ENCODERS


def test_a_folder_that_says_nothing_gets_the_default(tmp_path: Path) -> None:
    assert recipe_of_folder(tmp_path) == NOTHING_SAID
    write(tmp_path, config={"model_type": "qwen3", "is_causal": True}, README="# A model\n")
    assert recipe_of_folder(tmp_path) == NOTHING_SAID


@pytest.mark.parametrize(("config", "pooling"), [(LAST, Pooling.LAST), (MEAN, Pooling.MEAN)])
def test_modules_say_how_to_pool(tmp_path: Path, config: Any, pooling: Pooling) -> None:
    prompts = {"prompts": {"query": "Query: ", "document": ""}, "default_prompt_name": "query"}
    write(
        tmp_path,
        modules=[TRANSFORMER, POOLING],
        **{"1_Pooling__config": config},
        config_sentence_transformers=prompts,
    )
    recipe = recipe_of_folder(tmp_path).embedding
    assert (recipe.pooling, recipe.normalize, recipe.refused) == (pooling, False, "")
    assert (recipe.source, recipe.default_prompt) == ("modules.json", "query")
    assert recipe.prompts == {"query": "Query: ", "document": ""}
    write(tmp_path, modules=[TRANSFORMER, POOLING, NORMALIZE])
    assert recipe_of_folder(tmp_path).embedding.normalize


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"1_Pooling__config": {"pooling_mode_cls_token": True}}, "'cls'"),
        ({"1_Pooling__config": {"pooling_mode": ["mean", "max"]}}, "'max'"),
        ({"1_Pooling__config": {}}, "asks for"),
        ({"modules": [TRANSFORMER, POOLING, {"path": "", "type": "x.models.Dense"}]}, "'Dense'"),
        ({"sentence_bert_config": {"do_lower_case": True}}, "lower case"),
        ({"config": {"is_causal": False}}, "is_causal False"),
        ({"config": {"use_bidirectional_attention": True}}, "use_bidirectional_attention"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(
    tmp_path: Path, files: dict[str, Any], why: str
) -> None:
    write(tmp_path, modules=[TRANSFORMER, POOLING], **{"1_Pooling__config": MEAN})
    write(tmp_path, **files)
    assert why in recipe_of_folder(tmp_path).embedding.refused


@pytest.mark.parametrize(
    "modules",
    ["x", 5, [5], [{}], [{"type": 5}], [{**POOLING, "path": "../.."}], [TRANSFORMER] * 17],
)
def test_a_damaged_list_of_modules_is_said_to_be(tmp_path: Path, modules: Any) -> None:
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        recipe_of_folder(tmp_path)


def test_rerankers_are_known_by_their_modules_or_their_card(tmp_path: Path) -> None:
    config = {"true_token_id": 9693, "false_token_id": 2152}
    write(tmp_path, modules=[TRANSFORMER, LOGITS], **{"1_LogitScore__config": config})
    recipe = recipe_of_folder(tmp_path)
    assert recipe.rerank is not None
    assert (recipe.rerank.labels, recipe.rerank.template) == ((9693, 2152), "")
    assert "reranker" in recipe.embedding.refused
    write(tmp_path, **{"1_LogitScore__config": {"true_token_id": 9454, "false_token_id": None}})
    single = recipe_of_folder(tmp_path).rerank
    assert single is not None
    assert single.labels == (9454,)
    (tmp_path / "modules.json").unlink()
    write(tmp_path, config={"model_type": "qwen3"}, README=CARD)
    carded = recipe_of_folder(tmp_path).rerank
    assert carded is not None
    assert carded.labels == ("yes", "no")
    assert "{instruction}" in carded.template
    write(tmp_path, config={"model_type": "llama"})
    assert recipe_of_folder(tmp_path).rerank is None


@pytest.mark.parametrize(
    ("metadata", "pooling", "refused"),
    [
        ({}, Pooling.LAST, ""),
        ({"q.pooling_type": 0}, Pooling.LAST, ""),
        ({"q.pooling_type": 1}, Pooling.MEAN, ""),
        ({"q.pooling_type": 3}, Pooling.LAST, ""),
        ({"q.pooling_type": 2}, Pooling.LAST, "class token"),
        ({"q.pooling_type": 4}, Pooling.LAST, "ranking"),
        ({"q.pooling_type": 9}, Pooling.LAST, "type 9"),
        ({"q.pooling_type": [1]}, Pooling.LAST, "type [1]"),
        ({"q.attention.causal": False}, Pooling.LAST, "attention.causal"),
    ],
)
def test_a_gguf_file_says_it_by_its_pooling_type(
    metadata: dict[str, Any], pooling: Pooling, refused: str
) -> None:
    recipe = recipe_of_gguf({"general.architecture": "q", **metadata}, "m.gguf").embedding
    assert recipe.pooling is pooling
    assert refused in recipe.refused
    assert bool(refused) == bool(recipe.refused)


def test_a_gguf_reranker_has_template_and_labels() -> None:
    metadata = {
        "general.architecture": "qwen3",
        "qwen3.pooling_type": 4,
        "qwen3.classifier.output_labels": ["yes", "no"],
        "tokenizer.chat_template.rerank": "{query} {document}",
    }
    found = recipe_of_gguf(metadata, "m.gguf").rerank
    assert found is not None
    assert (found.labels, found.template) == (("yes", "no"), "{query} {document}")
    assert found.source == "the metadata of m.gguf"

"""A checkpoint's statements about embeddings and relevance, and those that are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.gguf.gguf_files import write_gguf_file

from appliance.engine.nouns.request import Pooling
from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.gguf import read_header
from appliance.model.encoder.families import ENCODERS
from appliance.model.encoder.gguf_families import GGUF_ENCODERS
from appliance.model.families.registry import GGUF_RELATIVES, TWO_WAY_RELATIVES
from appliance.model_files.retrieval_recipe import ENCODERS as KNOWN_ENCODERS
from appliance.model_files.retrieval_recipe import GGUF_ENCODERS as KNOWN_GGUF_ENCODERS
from appliance.model_files.retrieval_recipe import NOTHING_SAID, recipe_of_folder, recipe_of_gguf
from appliance.server.retrieval.vectors import matrix_of

TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
DENSE_LAST: dict[str, Any] = {"modules": [TRANSFORMER, POOLING, DENSE]}
IDENTITY: dict[str, Any] = {"activation_function": "torch.nn.modules.linear.Identity"}
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


@pytest.mark.parametrize("key", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_a_two_way_decoder_pools_as_an_encoder_does(tmp_path: Path, key: dict[str, Any]) -> None:
    write(tmp_path, config={"model_type": "qwen2", **key})
    with pytest.raises(CheckpointError, match=r"without modules.json"):
        recipe_of_folder(tmp_path)
    write(tmp_path, modules=[TRANSFORMER, POOLING])
    write(tmp_path, **{"1_Pooling__config": {"pooling_mode_cls_token": True}})
    assert recipe_of_folder(tmp_path).embedding.pooling is Pooling.CLS


@pytest.mark.parametrize(
    ("activation", "bias"),
    [
        (None, True),  # sentence-transformers' default, Tanh
        *((name, False) for name in ("linear.Identity", "activation.Tanh")),
        *((f"activation.{name}", True) for name in ("ReLU", "GELU", "SiLU", "Sigmoid")),
    ],
)
def test_a_linear_maps_vectors_as_torch_does(
    tmp_path: Path, activation: str | None, bias: bool
) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(12, 8, bias=bias)
    config: dict[str, Any] = {"in_features": 12, "out_features": 8, "bias": bias}
    act: torch.nn.Module = torch.nn.Tanh()
    if activation is not None:
        config["activation_function"] = f"torch.nn.modules.{activation}"
        act = getattr(torch.nn, activation.split(".")[-1])()
    write(tmp_path, modules=[TRANSFORMER, POOLING, DENSE, NORMALIZE])
    write(tmp_path, **{"1_Pooling__config": MEAN, "2_Dense__config": config})
    weights = {f"linear.{name}": value for name, value in linear.state_dict().items()}
    save_file(weights, tmp_path / "2_Dense" / "model.safetensors")
    recipe = recipe_of_folder(tmp_path).embedding
    assert (recipe.width(12), recipe.normalize) == (8, True)
    pooled = torch.randn(3, 12)
    found = matrix_of([row.numpy().tobytes() for row in pooled], recipe, dimensions=None)
    wanted = torch.nn.functional.normalize(act(linear(pooled)), dim=1).detach()
    torch.testing.assert_close(torch.from_numpy(found), wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "after", "words"),
    [
        ({"out_features": 8}, [], r"asks for \(8, 12\), with a bias"),
        ({"bias": False}, [], "without a bias"),
        ({}, [DENSE], "in_features is 12, and the Dense module before it makes 9"),
    ],
)
def test_a_linear_that_does_not_fit_is_said_to_be(
    tmp_path: Path, settings: dict[str, Any], after: list[Any], words: str
) -> None:
    config = {"in_features": 12, "out_features": 9, **IDENTITY, **settings}
    write(tmp_path, modules=[TRANSFORMER, POOLING, DENSE, *after])
    write(tmp_path, **{"1_Pooling__config": MEAN, "2_Dense__config": config})
    weights = {"linear.weight": torch.zeros(9, 12), "linear.bias": torch.zeros(9)}
    save_file(weights, tmp_path / "2_Dense" / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        recipe_of_folder(tmp_path)


def test_a_gguf_file_holds_the_linears_of_embeddinggemma(tmp_path: Path) -> None:
    torch.manual_seed(1)
    linears = [torch.nn.Linear(12, 20, bias=False), torch.nn.Linear(20, 12, bias=False)]
    names = ("dense_2", "dense_3")
    settings = {"pooling_type": 1, "dense_2_feat_out": 20, "dense_3_feat_out": 12}
    tensors = {
        f"{name}.weight": linear.weight.detach()
        for name, linear in zip(names, linears, strict=True)
    }
    path = write_gguf_file(tmp_path / "m.gguf", "gemma-embedding", settings, tensors)
    metadata = read_header(path).metadata
    recipe = recipe_of_gguf(metadata, path).embedding
    pooled = torch.randn(3, 12)
    found = matrix_of([row.numpy().tobytes() for row in pooled], recipe, dimensions=None)
    wanted = torch.nn.functional.normalize(linears[1](linears[0](pooled)), dim=1).detach()
    torch.testing.assert_close(torch.from_numpy(found), wanted, atol=1e-6, rtol=1e-5)
    write_gguf_file(path, "gemma-embedding", settings, {"x.weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match=r"no tensor dense_2\.weight"):
        recipe_of_gguf(metadata, path)


def test_what_is_an_encoder_is_said_once() -> None:
    names = {family.model_type for family in ENCODERS} | TWO_WAY_RELATIVES.keys()
    assert names == KNOWN_ENCODERS
    assert {*GGUF_ENCODERS, *GGUF_RELATIVES} == KNOWN_GGUF_ENCODERS


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
        ({"modules": [TRANSFORMER, {"path": "", "type": "x.WeightedLayerPooling"}]}, "Weighted"),
        ({"modules": [TRANSFORMER, POOLING, NORMALIZE, DENSE]}, "'Dense'"),
        ({**DENSE_LAST, "2_Dense__config": {"activation_function": "x.nn.Own"}}, r"'x.nn.Own'"),
        ({**DENSE_LAST, "2_Dense__config": {"use_residual": True, **IDENTITY}}, "use_residual"),
        ({**DENSE_LAST, "2_Dense__config": {"module_input_name": "token_embeddings"}}, "token_e"),
        ({"sentence_bert_config": {"do_lower_case": True}}, "lower case"),
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


def test_bges_gemma_answers_yes_to_the_words_of_its_card(tmp_path: Path) -> None:
    """The card's own function gives the inputs, and vLLM has the template for it."""
    words = (
        "Given a query A and a passage B, determine whether the passage contains an answer to the "
        "query by providing a prediction of either 'Yes' or 'No'."
    )
    card = f'---\nlicense: apache-2.0\n---\n# Reranker\n```python\nprompt = "{words}"\n```\n'
    write(tmp_path, config={"model_type": "gemma"}, README=card)
    found = recipe_of_folder(tmp_path).rerank
    assert found is not None
    assert (found.labels, found.framed, found.by_head) == (("Yes",), True, False)
    filled = found.template.format(query="q", document="d", instruction=found.instruction)
    assert filled == f"A: q\nB: d\n{words}"
    write(tmp_path, config={"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"]})
    write(tmp_path, modules=[TRANSFORMER, POOLING], **{"1_Pooling__config": MEAN})
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
        ({"q.attention.causal": False}, Pooling.LAST, "names no pooling"),
        ({"q.attention.causal": False, "q.pooling_type": 2}, Pooling.CLS, ""),
    ],
)
def test_a_gguf_file_says_it_by_its_pooling_type(
    metadata: dict[str, Any], pooling: Pooling, refused: str
) -> None:
    recipe = recipe_of_gguf({"general.architecture": "q", **metadata}, Path("m.gguf")).embedding
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
    found = recipe_of_gguf(metadata, Path("m.gguf")).rerank
    assert found is not None
    assert (found.labels, found.template) == (("yes", "no"), "{query} {document}")
    assert found.source == "the metadata of m.gguf"

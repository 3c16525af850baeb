"""Reads from a checkpoint's files how it embeds texts and judges relevance.

A folder describes it in sentence-transformers' files (`modules.json` and the ones it names) or in
`config.json`; a GGUF file in `ARCHITECTURE.pooling_type`, as llama.cpp writes it. Most decoders
give nothing and use the default here; an encoder must give it. All of it is untrusted and checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from appliance.engine.nouns.request import Pooling
from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.files import open_regular, read_bytes, read_json
from appliance.model_files.rankers import is_ranker

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
_MAX_MODULES = 16
_MAX_README = 64 * 1024  # bytes to search
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

# From the model cards of Qwen3-Reranker; the answer is "yes" or "no".
QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
# From the model card of bge-reranker-v2-gemma; the answer is "Yes" or "No", and "Yes" counts.
BGE_INSTRUCTION = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the "
    "query by providing a prediction of either 'Yes' or 'No'."
)
BGE_RERANKER = "A: {query}\nB: {document}\n{instruction}"
# From the model card of llama-nemotron-rerank-1b-v2.
NEMOTRON_RERANKER = "question:{query} \n \n passage:{document}"
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

_OLD_POOLING = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_POOLING = {"mean": Pooling.MEAN, "lasttoken": Pooling.LAST}
_ENCODER_POOLING = {**_POOLING, "cls": Pooling.CLS}
# Values of model_type with bidirectional attention.
ENCODERS = frozenset(
    {
        "bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet", "modernbert",
        "jina_embeddings_v3", "gte", "new", "nomic_bert", "eurobert", "llama_bidirec",
    }
)  # fmt: skip
_TWO_WAY = (("is_causal", False), ("use_bidirectional_attention", True))
# By the class that sentence-transformers applies; without a name it is Tanh.
_ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}
_TANH = "torch.nn.modules.activation.Tanh"
# Likewise values of general.architecture in GGUF files.
GGUF_ENCODERS = frozenset(
    {
        "bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v3", "modern-bert",
        "gemma-embedding", "llama-embed", "eurobert",
    }
)  # fmt: skip
_GGUF_NONE, _GGUF_MEAN, _GGUF_CLS, _GGUF_LAST, _GGUF_RANK = range(5)
_GGUF_POOLING = {_GGUF_MEAN: Pooling.MEAN, _GGUF_CLS: Pooling.CLS, _GGUF_LAST: Pooling.LAST}


@dataclass(frozen=True, slots=True, eq=False)
class DenseStep:
    """A linear that maps pooled states: act(x @ weight.T + bias).

    Attributes:
        weight: (out_features, in_features) float32.
        bias: (out_features,) float32, or None.
        activation: a value of `_ACTIVATIONS`.
    """

    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None
    activation: str


@dataclass(frozen=True, slots=True)
class EmbeddingRecipe:
    """Steps from a text to its vector.

    Attributes:
        pooling: the hidden states that make the vector. The default is the last token's, as in
            vLLM: the prefix cache serves it, and it finds 15 of 16 paraphrases with SmolLM2 (the
            mean 14), all with Gemma 3 270M (as does the mean).
        normalize: to length 1.
        source: the file that defines it; empty for the default.
        prompts: prefixes of texts by name, such as query and document.
        default_prompt: name of the prefix of texts of no stated kind.
        refused: why the model gives no vectors; empty if it does.
        dense: linears after the pooling, in turn, before the length is made 1.
    """

    pooling: Pooling = Pooling.LAST
    normalize: bool = True
    source: str = ""
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    refused: str = ""
    dense: tuple[DenseStep, ...] = ()

    def width(self, hidden_size: int) -> int:
        """Return the length of a vector that is made of so many pooled states."""
        return self.dense[-1].weight.shape[0] if self.dense else hidden_size


@dataclass(frozen=True, slots=True)
class RerankRecipe:
    """The prompt and tokens, or the head, that judge if a document answers a query.

    Attributes:
        template: has `{query}` and `{document}`, optionally `{instruction}`; empty for a chat
            template with these two roles.
        labels: the token for relevant and, optionally, the one for irrelevant; as text or id.
        instruction: the default of requests.
        by_head: a head judges both texts, without labels: in the template's words, else in those of
            a chat template that has both roles, else as the pair that the tokenizer makes of them.
        framed: the tokenizer's special tokens stand around the filled template.
    """

    source: str
    template: str
    labels: tuple[str | int, ...]
    instruction: str = ""
    by_head: bool = False
    framed: bool = False


@dataclass(frozen=True, slots=True)
class RetrievalRecipe:
    """Both recipes; without `rerank`, relevance compares vectors."""

    embedding: EmbeddingRecipe = field(default_factory=EmbeddingRecipe)
    rerank: RerankRecipe | None = None


NOTHING_SAID = RetrievalRecipe()


def recipe_of_folder(path: Path) -> RetrievalRecipe:
    """Read a Hugging Face folder.

    Raises:
        CheckpointError: a file is damaged, or an encoder's is missing.
        UnsupportedModelError: no code here supports the encoder.
    """
    config = _optional(path / "config.json")
    if is_ranker(config):
        refused = "config.json makes a reranker of it, without vectors"
        return RetrievalRecipe(EmbeddingRecipe(refused=refused), _of_head(path, config))
    is_two_way = any(config.get(name) is value for name, value in _TWO_WAY)
    if is_two_way or str(config.get("model_type")) in ENCODERS:
        return _of_encoder(path, config)
    embedding, rerank = _of_modules(path)
    if rerank is None:
        rerank = _of_readme(path, config)
    return RetrievalRecipe(embedding, rerank)


def recipe_of_gguf(metadata: Mapping[str, Any], path: Path) -> RetrievalRecipe:
    """Read a GGUF file.

    Args:
        metadata: from its header.

    Raises:
        CheckpointError: linears that its metadata describes are missing.
    """
    architecture = metadata.get("general.architecture", "")
    kind = metadata.get(f"{architecture}.pooling_type")
    template = metadata.get("tokenizer.chat_template.rerank")
    source = f"the metadata of {path.name}"
    if architecture in GGUF_ENCODERS or metadata.get(f"{architecture}.attention.causal") is False:
        return _of_gguf_encoder(metadata, path, source, kind)
    if kind == _GGUF_RANK and isinstance(template, str) and "{document}" in template:
        labels = metadata.get(f"{architecture}.classifier.output_labels")
        if isinstance(labels, list) and len(labels) == 2 and all(type(x) is str for x in labels):
            return RetrievalRecipe(rerank=RerankRecipe(source, template, tuple(labels)))
    if kind in (None, _GGUF_NONE):
        return NOTHING_SAID
    if kind in (_GGUF_MEAN, _GGUF_LAST):
        return RetrievalRecipe(EmbeddingRecipe(_GGUF_POOLING[kind], source=source))
    what = f"of type {kind!r:.40}"
    if kind in (_GGUF_CLS, _GGUF_RANK):
        what = "of a class token" if kind == _GGUF_CLS else "by a head for ranking"
    return RetrievalRecipe(EmbeddingRecipe(refused=f"{path.name} asks for pooling {what}"))


def _of_gguf_encoder(
    metadata: Mapping[str, Any], path: Path, source: str, kind: object
) -> RetrievalRecipe:
    architecture = metadata["general.architecture"]
    if kind == _GGUF_RANK:
        refused = f"{source} makes a reranker of it, without vectors"
        rerank = RerankRecipe(source, "", (), by_head=True)
        return RetrievalRecipe(EmbeddingRecipe(refused=refused), rerank)
    if not isinstance(kind, int) or kind not in _GGUF_POOLING:
        why = f"{path.name} says {architecture}.pooling_type {kind!r:.40}, which names no pooling"
        return RetrievalRecipe(EmbeddingRecipe(refused=why))
    dense = tuple(
        DenseStep(_gguf_matrix(path, f"dense_{number}.weight"), None, "identity")
        for number in (2, 3)
        if metadata.get(f"{architecture}.dense_{number}_feat_out")
    )
    return RetrievalRecipe(EmbeddingRecipe(_GGUF_POOLING[kind], dense=dense, source=source))


def _gguf_matrix(path: Path, name: str) -> NDArray[np.float32]:
    import numpy as np

    from appliance.gguf import GGUFFile
    from appliance.kernels.weights.weight import dense

    file = GGUFFile(path, in_torch=False, vocabulary=False)
    if name not in file.tensor_names():
        raise CheckpointError(
            f"{path} has no tensor {name}, which its metadata describes; use another file"
        )
    return np.asarray(dense(file.load(name), "float32"))


def _of_encoder(path: Path, config: Mapping[str, Any]) -> RetrievalRecipe:
    """Read an encoder's recipe.

    Raises:
        CheckpointError: no file defines the pooling.
        UnsupportedModelError: no code here supports it.
    """
    if not (path / MODULES).is_file():
        raise CheckpointError(
            f"{path} is an encoder without {MODULES}, which says how its hidden states become one "
            f"vector; download the whole folder, or write {MODULES} as sentence-transformers does, "
            "with a Pooling module whose config.json sets pooling_mode_mean_tokens or "
            "pooling_mode_cls_token to true"
        )
    embedding, _ = _of_modules(path, _ENCODER_POOLING)
    if embedding.refused:
        raise UnsupportedModelError(
            f"{path}: {embedding.refused}, which this server does not have; pooling by mean, cls "
            "and lasttoken is served, with or without Normalize"
        )
    return RetrievalRecipe(embedding)


def _of_modules(
    path: Path, known: Mapping[str, Pooling] = _POOLING
) -> tuple[EmbeddingRecipe, RerankRecipe | None]:
    """Read a chain of modules; the first one is the model itself."""
    modules = _modules(path / MODULES)
    if not modules:
        return EmbeddingRecipe(), None
    recipe = EmbeddingRecipe(normalize=False, source=MODULES, pooling=Pooling.MEAN)
    recipe = _with_prompts(recipe, _optional(path / PROMPTS))
    rerank = None
    for kind, folder in modules:
        if kind == "Transformer":
            if _optional(path / folder / "sentence_bert_config.json").get("do_lower_case"):
                recipe = replace(recipe, refused=f"{MODULES} asks for texts in lower case")
        elif kind == "Pooling":
            recipe = _pooled(recipe, _optional(path / folder / "config.json"), known)
        elif kind == "Normalize":
            recipe = replace(recipe, normalize=True)
        elif kind == "Dense" and not recipe.normalize:
            recipe = _with_dense(recipe, path / folder)
        elif kind == "LogitScore":
            rerank = _of_logits(_optional(path / folder / "config.json"), recipe)
        else:
            recipe = replace(recipe, refused=f"{MODULES} has a module of type {kind[:40]!r}")
    if rerank is not None:
        recipe = EmbeddingRecipe(refused=f"{MODULES} makes a reranker of it, without vectors")
    return recipe, rerank


def _modules(file: Path) -> list[tuple[str, str]]:
    """Return each module's kind and folder."""
    if not file.is_file():
        return []
    try:
        entries = json.loads(read_bytes(file))
        found = [(entry["type"].rpartition(".")[2], entry.get("path", "")) for entry in entries]
        sound = all(not folder or _FOLDER.fullmatch(folder) for _, folder in found)
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}; download it again") from error
    if not sound or len(found) > _MAX_MODULES:
        raise CheckpointError(f"{file} names folders that are none; download it again")
    return found


def _with_prompts(recipe: EmbeddingRecipe, config: Mapping[str, Any]) -> EmbeddingRecipe:
    given = config.get("prompts")
    prompts = {
        name: text
        for name, text in (given.items() if isinstance(given, dict) else ())
        if isinstance(text, str)
    }
    default = config.get("default_prompt_name")
    return replace(recipe, prompts=prompts, default_prompt=default if default in prompts else None)


def _pooled(
    recipe: EmbeddingRecipe, config: Mapping[str, Any], known: Mapping[str, Pooling]
) -> EmbeddingRecipe:
    mode = config.get("pooling_mode")
    if mode is None:
        modes = [name for key, name in _OLD_POOLING.items() if config.get(key) is True]
        mode = modes[0] if len(modes) == 1 else modes
    if not isinstance(mode, str) or mode not in known:
        return replace(recipe, refused=f"its Pooling module asks for {mode!r:.80}")
    if config.get("include_prompt") is False and any(recipe.prompts.values()):
        return replace(recipe, refused="its Pooling module leaves prompts out")
    return replace(recipe, pooling=known[mode])


def _with_dense(recipe: EmbeddingRecipe, path: Path) -> EmbeddingRecipe:
    """Read a linear and its weights.

    Raises:
        CheckpointError: they are missing, damaged or pickled, or do not fit what is before them.
    """
    from appliance.model_files.checkpoint import SafetensorsFolder  # loads numpy

    config = read_json(path / "config.json")
    name = config.get("activation_function", _TANH)
    if name not in _ACTIVATIONS:
        return replace(recipe, refused=f"its Dense module applies {name!r:.80}")
    reads = config.get("module_input_name", "sentence_embedding")
    writes = config.get("module_output_name") or reads
    if reads != "sentence_embedding" or writes != reads or config.get("use_residual"):
        what = "use_residual" if config.get("use_residual") else f"{reads!r:.40} to {writes!r:.40}"
        return replace(recipe, refused=f"its Dense module asks for {what}")
    folder = SafetensorsFolder(path, in_torch=False)
    names = {"linear.weight", "linear.bias"} if config.get("bias", True) else {"linear.weight"}
    rows, columns = (config.get(f"{side}_features") for side in ("out", "in"))
    shapes = {"linear.weight": (rows, columns), "linear.bias": (rows,)}
    stored = {name: folder.shape(name) for name in folder.tensor_names()}
    if stored != {name: shapes[name] for name in names}:
        raise CheckpointError(
            f"{path}: config.json asks for {shapes['linear.weight']}, "
            f"{'with' if len(names) > 1 else 'without'} a bias, and stored are {stored}; take both "
            "of one revision"
        )
    if recipe.dense and columns != len(recipe.dense[-1].weight):
        raise CheckpointError(
            f"{path}: in_features is {columns}, and the Dense module before it makes "
            f"{len(recipe.dense[-1].weight)}; take all folders of one revision"
        )
    import numpy as np

    values = {name: np.asarray(folder.load(name).float()) for name in names}
    step = DenseStep(values["linear.weight"], values.get("linear.bias"), _ACTIVATIONS[name])
    return replace(recipe, dense=(*recipe.dense, step))


def _of_logits(config: Mapping[str, Any], recipe: EmbeddingRecipe) -> RerankRecipe | None:
    ids = [config.get(name) for name in ("true_token_id", "false_token_id")]
    labels = tuple(one for one in ids if type(one) is int and one >= 0)
    if not labels or labels[0] != ids[0]:
        return None
    instruction = recipe.prompts.get(recipe.default_prompt or "", "")
    return RerankRecipe(MODULES, "", labels, instruction)


def _of_head(path: Path, config: Mapping[str, Any]) -> RerankRecipe:
    """Read how a classification head gets its two texts; decoders' words are in no settings."""
    if config.get("model_type") == "llama_bidirec":
        return RerankRecipe("config.json", NEMOTRON_RERANKER, (), by_head=True, framed=True)
    settings, _ = _card(path)
    made_of = re.search(r"^base_model:[\s-]*+\S*\bQwen3-Reranker", settings, re.MULTILINE)
    if config.get("model_type") == "qwen3" and made_of:
        return RerankRecipe("README.md", QWEN3_RERANKER, (), QWEN3_INSTRUCTION, by_head=True)
    return RerankRecipe("config.json", "", (), by_head=True)


def _of_readme(path: Path, config: Mapping[str, Any]) -> RerankRecipe | None:
    """Recognize rerankers whose model card is the only place that describes them."""
    settings, text = _card(path)
    if config.get("model_type") == "gemma" and BGE_INSTRUCTION in text:
        return RerankRecipe("README.md", BGE_RERANKER, ("Yes",), BGE_INSTRUCTION, framed=True)
    if config.get("model_type") != "qwen3" or not re.search(
        r"^pipeline_tag: *text-ranking *$", settings, re.MULTILINE
    ):
        return None
    if not re.search(r"^# Qwen3-Reranker", text, re.MULTILINE):
        return None
    return RerankRecipe("README.md", QWEN3_RERANKER, ("yes", "no"), QWEN3_INSTRUCTION)


def _card(path: Path) -> tuple[str, str]:
    """Return the settings and the text of a model card; empty without one."""
    file = path / "README.md"
    if not file.is_file():
        return "", ""
    with open_regular(file) as stream:
        text = stream.read(_MAX_README).decode(errors="replace")
    card = re.match(r"---\n(.*?)\n---\n(.*)", text, re.DOTALL)
    return ("", "") if card is None else (card[1], card[2])


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}

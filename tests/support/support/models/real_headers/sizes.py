"""Scales a model's settings down: cuts sizes consistently and changes no other key."""

from __future__ import annotations

import copy
from typing import Any

VOCABULARY = 320
FIRST_SPECIAL = 256  # smaller ids are those of texts
CONTEXT = 256
WINDOW = 7
_HEADS = 4
_MOST_LAYERS = 12
TEXT_SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
_NUM_HEADS = ("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_attention_groups", "n_head_kv",
             "multi_query_group_num", "num_global_key_value_heads")  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "top_k_experts", "num_experts_per_token",
           "moe_topk", "experts_top_k", "moe_top_k")  # fmt: skip
_WINDOWS = ("sliding_window", "window_size", "attention_window_size", "sliding_window_size")
_INDICES = ("attn_layer_indices", "full_attn_idxs", "mlp_only_layers", "full_attention_layers")
_INTERVALS = ("full_attention_interval", "sliding_window_pattern", "_sliding_window_pattern",
              "no_rope_layer_interval", "interleave_moe_layer_step", "decoder_sparse_step",
              "global_attn_every_n_layers", "attn_layer_period", "layer_group_size")  # fmt: skip


def scaled_down(config: dict[str, Any], unit: int = 16) -> dict[str, Any]:
    """Return a config of the same kind of model with a few layers of `4 * unit` numbers.

    Args:
        unit: elements of a head; 32 for weights quantized in groups of 128 inputs.
    """
    ids: dict[int, int] = {}
    found = copy.deepcopy(config)
    place = next((key for key in TEXT_SECTIONS if isinstance(found.get(key), dict)), None)
    if place == "thinker_config":
        found[place] = scaled_down(found[place], unit)
    elif place is not None:
        found[place] = _Text(found[place], unit, ids).scaled()
        _cut_ids(found, ids)
    else:
        found = _Text(found, unit, ids).scaled()
    width = 4 * unit
    for key, section in found.items():
        if key.endswith("_config") and isinstance(section, dict) and key != place:
            _cut_tower(section, width)
    if isinstance(found.get("quantization_config"), dict):
        found["quantization_config"] = copy.deepcopy(config["quantization_config"])
    return found


def with_few_layers(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config of real widths, with a layer of each kind, few experts and small towers."""
    found = copy.deepcopy(config)
    place = next((key for key in TEXT_SECTIONS if isinstance(found.get(key), dict)), None)
    if place is None:
        found = _Text(found, 1, {}).with_few_layers()
    elif place == "thinker_config":
        found[place] = with_few_layers(found[place])
    else:
        found[place] = _Text(found[place], 1, {}).with_few_layers()
    for key, section in found.items():
        if key.endswith("_config") and isinstance(section, dict) and key != place:
            _cut_tower(section, 64)
    return found


def text_section(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the part that reads text."""
    for key in TEXT_SECTIONS:
        section = config.get(key)
        if isinstance(section, dict):
            return text_section(section)
    return config


class _Text:
    def __init__(self, config: dict[str, Any], unit: int, ids: dict[int, int]) -> None:
        self._old = config
        self._new = copy.deepcopy(config)
        self._unit = unit
        self._ids = ids

    def with_few_layers(self) -> dict[str, Any]:
        self._cut_layers()
        self._cut_experts()
        return self._new

    def scaled(self) -> dict[str, Any]:
        self._cut_layers()
        self._cut_heads()
        self._cut_widths()
        self._cut_experts()
        self._cut_states()
        self._cut_positions()
        _cut_ids(self._new, self._ids)
        for key in ("vocab_size", "vocab_size_per_layer_input", "padded_vocab_size"):
            self._set(key, VOCABULARY)
        return self._new

    def _set(self, key: str, value: Any) -> None:
        """Set a key, if the maker gave it a number."""
        if self._is_number(key):
            self._new[key] = value

    def _is_number(self, key: str) -> bool:
        value = self._old.get(key)
        return isinstance(value, int | float) and not isinstance(value, bool)

    def _first(self, keys: tuple[str, ...]) -> int | None:
        return next((self._old[key] for key in keys if self._is_number(key)), None)

    def _cut_layers(self) -> None:
        pattern = self._old.get("hybrid_override_pattern")
        old = self._first(_LAYERS) or (len(pattern) if isinstance(pattern, str) else None)
        blocks = self._old.get("layers_block_type")
        if old is None and isinstance(blocks, list):
            old = len(blocks)
        if old is None:
            return
        lists = {
            key: value
            for key, value in self._old.items()
            if isinstance(value, list) and key not in (*_INDICES, "architectures")
            and "factor" not in key and len(value) >= old
            and (old > 3 or all(isinstance(one, str) for one in value))
        }  # fmt: skip
        if isinstance(pattern, str):
            lists["hybrid_override_pattern"] = list(pattern)
        kinds = [tuple(str(each[i]) for each in lists.values()) for i in range(old)]
        seen: set[tuple[str, ...]] = set()
        count = 2
        for i, kind in enumerate(kinds[:_MOST_LAYERS]):
            if kind not in seen:
                seen.add(kind)
                count = max(count, i + 1)
        for key in _INTERVALS:
            if self._is_number(key) and 1 < self._old[key] <= _MOST_LAYERS:
                count = max(count, int(self._old[key]))
        for key in _INDICES:
            value = self._old.get(key)
            if isinstance(value, list) and value and value[0] < _MOST_LAYERS:
                count = max(count, value[0] + 1)
        linear = self._old.get("linear_attn_config")  # of Kimi, which counts layers from 1
        if isinstance(linear, dict) and linear.get("full_attn_layers"):
            count = max(count, min(linear["full_attn_layers"]))
        count = min(count, old)
        if shared := self._old.get("num_kv_shared_layers"):
            period = count
            count = 2 * period
            self._new["num_kv_shared_layers"] = period if shared else 0
        for key in _LAYERS:
            self._set(key, count)
        for key, value in lists.items():
            short = list(value[:count]) + ([] if key == "hybrid_override_pattern" else value[old:])
            self._new[key] = "".join(short) if isinstance(self._old[key], str) else short
        for key in ("full_attn_layers", "kda_layers"):
            if isinstance(linear, dict) and isinstance(linear.get(key), list):
                self._new["linear_attn_config"][key] = [i for i in linear[key] if i <= count]
        for section in self._new.values():
            if isinstance(section, dict):  # of the sparse layers of MiniMax M3
                _cut_lists(section, old, count)
        for key in _INDICES:
            if isinstance(self._old.get(key), list):
                self._new[key] = [i for i in self._old[key] if i < count]
        for key in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"):
            if self._is_number(key):
                self._new[key] = min(self._old[key], 1)
        if self._is_number("moe_layer_end_index"):
            self._new["moe_layer_end_index"] = count - 1
        if self._is_number("max_window_layers"):
            self._new["max_window_layers"] = (
                count if self._old["max_window_layers"] >= old else min(1, count)
            )
        per_layer = self._old.get("per_layer_config")
        if isinstance(per_layer, dict):
            self._new["per_layer_config"] = {
                key: value for key, value in per_layer.items() if int(key) < count
            }
        freq = self._old.get("moe_layers_enum")
        if isinstance(freq, str):
            kept = [each for each in freq.split(",") if int(each) < count]
            self._new["moe_layers_enum"] = ",".join(kept or ["1"])

    def _cut_heads(self) -> None:
        unit, heads = self._unit, self._first(_NUM_HEADS)
        hidden = self._first(_HIDDEN)
        for key in _NUM_HEADS:
            self._set(key, _HEADS)
        for key in _KV_HEADS:
            if self._is_number(key) and heads:
                old = self._old[key]
                self._new[key] = _HEADS if old == heads else (1 if old == 1 else 2)
        if self._is_number("qk_rope_head_dim") and self._is_number("qk_nope_head_dim"):
            rope, plain = unit // 2, unit
            old_rope = self._old["qk_rope_head_dim"]
            for key, value in (
                ("qk_rope_head_dim", rope),
                ("qk_nope_head_dim", plain),
                ("v_head_dim", unit),
                ("qk_head_dim", rope + plain),
                ("q_lora_rank", 3 * unit),
                ("o_lora_rank", 2 * unit),
                ("kv_lora_rank", 2 * unit),
                ("index_n_heads", 2),
                ("index_head_dim", unit),
            ):
                self._set(key, value)
            if self._is_number("head_dim"):
                is_rope = self._old["head_dim"] == old_rope
                self._new["head_dim"] = rope if is_rope else rope + plain
            return
        of_head = 2 * unit
        if hidden and heads and self._is_number("head_dim"):
            of_head = unit if self._old["head_dim"] * heads == hidden else 2 * unit
        for key in ("head_dim", "attention_head_dim", "kv_channels"):
            self._set(key, of_head)
        old_dim = self._old.get("head_dim")
        for key in ("global_head_dim", "swa_head_dim", "v_head_dim", "swa_v_head_dim"):
            if self._is_number(key) and old_dim:
                self._new[key] = max(2, of_head * self._old[key] // old_dim)
        if self._is_number("rotary_dim"):
            dim = old_dim or (hidden or 1) // (heads or 1)
            used = of_head if old_dim else unit
            self._new["rotary_dim"] = max(2, used * self._old["rotary_dim"] // dim)

    def _cut_widths(self) -> None:
        unit = self._unit
        for key in _HIDDEN:
            self._set(key, 4 * unit)
        for key, value in self._old.items():
            if "intermediate" in key or key in ("share_expert_dim", "ffn_dim", "ffn_hidden_size",
                                                "n_inner", "block_ff_dim", "moe_latent_size",
                                                "shared_expert_dim"):  # fmt: skip
                dense = key in ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner",
                                "block_ff_dim", "intermediate_size_mlp")  # fmt: skip
                size = (8 if dense else 4) * unit
                if isinstance(value, list):
                    self._new[key] = [size if each else each for each in self._new[key]]
                elif value:
                    self._set(key, size)
        self._set("block_multiple_of", unit)
        for key in ("hidden_size_per_layer_input", "laurel_rank", "dim_model_base"):
            if self._old.get(key):
                self._set(key, unit)

    def _cut_experts(self) -> None:
        groups = self._old.get("n_group") or 1
        count = 16 if groups > 1 else 8
        for key in _EXPERTS:
            if self._is_number(key) and self._old[key] > 1:
                self._new[key] = count
        for key in _CHOSEN:
            if self._is_number(key):
                self._new[key] = min(self._old[key], 4)
        if groups > 1:
            self._new["n_group"] = 4
            self._set("topk_group", min(self._old.get("topk_group") or 1, 2))

    def _cut_states(self) -> None:
        unit = self._unit
        keys, values = (
            self._old.get("linear_num_key_heads"),
            self._old.get("linear_num_value_heads"),
        )
        if keys and values:
            self._new["linear_num_key_heads"] = 4 if values == keys else 2
            self._new["linear_num_value_heads"] = 4
        for key in ("linear_key_head_dim", "linear_value_head_dim", "mamba_d_state",
                    "ssm_state_size", "mamba_head_dim", "mamba_d_head", "state_size"):  # fmt: skip
            self._set(key, unit)
        expand = self._old.get("mamba_expand", 2)
        self._set("mamba_n_heads", int(4 * expand))
        self._set("mamba_d_ssm", int(4 * expand) * unit)
        self._set("mamba_num_heads", 4)
        for key in ("n_groups", "mamba_n_groups"):
            if self._is_number(key):
                self._new[key] = min(self._old[key], 2)

    def _cut_positions(self) -> None:
        old = self._first(("max_position_embeddings", "seq_length", "n_positions", "n_ctx"))
        for key in ("max_position_embeddings", "seq_length", "n_positions", "n_ctx",
                    "model_max_length", "max_sequence_length"):  # fmt: skip
            self._set(key, CONTEXT)
        for key in _WINDOWS:
            value = self._old.get(key)
            if isinstance(value, list):
                self._new[key] = [WINDOW if each and each > 0 else each for each in self._new[key]]
            elif self._is_number(key) and value and value > 0:
                self._new[key] = WINDOW
        if self._old.get("attention_chunk_size"):
            self._set("attention_chunk_size", 32)
        self._cut_rope(self._new, old)

    def _cut_rope(self, section: dict[str, Any], context: int | None) -> None:
        original = section.get("original_max_position_embeddings")
        if isinstance(original, int | float) and context:
            section["original_max_position_embeddings"] = max(2, int(CONTEXT * original / context))
        half = self._rotary(section) // 2
        for key in ("short_factor", "long_factor"):
            if isinstance(section.get(key), list):
                section[key] = section[key][:: max(1, len(section[key]) // half)][:half]
        if isinstance(section.get("mrope_section"), list):
            section["mrope_section"] = _shares(section["mrope_section"], half)
        for key in ("rope_scaling", "rope_parameters", "full_attention", "sliding_attention",
                    "default"):  # fmt: skip
            if isinstance(section.get(key), dict):
                self._cut_rope(section[key], context)

    def _rotary(self, section: dict[str, Any]) -> int:
        """Return how many elements of a head are rotated."""
        if self._is_number("qk_rope_head_dim"):
            return int(self._new["qk_rope_head_dim"])
        dim = self._new.get("head_dim") or 4 * self._unit // _HEADS
        part = section.get("partial_rotary_factor", self._old.get("partial_rotary_factor"))
        return int(dim * (1.0 if part is None else part))


def _cut_lists(section: dict[str, Any], old: int, count: int) -> None:
    for key, value in section.items():
        if isinstance(value, list) and len(value) == old > 3:
            section[key] = value[:count]


def _shares(sections: list[int], total: int) -> list[int]:
    """Divide `total` in the proportions of `sections`; the first part takes the remainder."""
    found = [total * each // sum(sections) for each in sections]
    found[0] += total - sum(found)
    return found


def _cut_ids(section: dict[str, Any], ids: dict[int, int]) -> None:
    """Give special tokens ids of the small vocabulary, the same ids in every section."""

    def cut(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            return value
        return ids.setdefault(value, FIRST_SPECIAL + len(ids) % (VOCABULARY - FIRST_SPECIAL))

    for key, value in section.items():
        if "token" in key and key.endswith(("_id", "_ids", "_index")):
            section[key] = [cut(each) for each in value] if isinstance(value, list) else cut(value)


# Sizes of towers for other modalities, which are built and never run.
TOWER: dict[str, Any] = {
    "num_hidden_layers": 1, "depth": 1, "depths": None, "encoder_layers": 1, "num_layers": 1,
    "hidden_size": 32, "embed_dim": 32, "d_model": 32, "intermediate_size": 32,
    "encoder_ffn_dim": 32,
    "num_attention_heads": 2, "num_heads": 2, "encoder_attention_heads": 2, "head_dim": 16,
    "num_key_value_heads": 2, "image_size": 28, "patch_size": 14, "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0], "mlp_ratio": 1,
    "projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32,
    "vocab_size": 8, "num_global_layers": 1, "position_embedding_size": 16,
}  # fmt: skip


def _cut_tower(section: dict[str, Any], width: int) -> None:
    for key, value in list(section.items()):
        if key in ("quant_method", "bits"):
            return
        if key in ("out_hidden_size", "projection_dim", "output_dim", "text_hidden_size"):
            section[key] = width
        elif key == "hidden_size" and value and section.get("embed_dim"):
            section[key] = width  # Qwen2-VL's: of the tower's output
        elif key in TOWER and value is not None and TOWER[key] is not None:
            is_size = isinstance(value, int | float | list) and not isinstance(value, bool)
            if is_size and not (isinstance(value, list) and not isinstance(TOWER[key], list)):
                section[key] = type(value)(TOWER[key])
            elif isinstance(value, list):
                section[key] = [TOWER[key]] * len(value)
        elif isinstance(value, dict):
            _cut_tower(value, width)

"""Declaration of a tower family: how to read a whole model's config, and its tensors' names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.errors import CheckpointError
from appliance.kernels.head_norms import HeadNormKind
from appliance.model.families.reader import ConfigReader, class_defaults
from appliance.model.families.standard import read_activation
from appliance.model.names import TensorNames
from appliance.model.spec import (
    AttentionSpec,
    AxisFrequencies,
    DecoderSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    RopeSpec,
)
from appliance.model.vision.spec import TextAxes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from appliance.gguf import GGUFFile
    from appliance.model.vision.spec import TowerSpec

# Where names of families begin, whatever a checkpoint calls the parts.
TOWER, PROJECTOR = "tower.", "projector."
# Of rows that no table gives an embedding.
EMBEDDING = f"{TOWER}rows"
# Of a last norm that no tower of a family has; see `TowerSpec.last_norm`.
NO_NORM = f"{TOWER}no_norm"
HEAD_WIDTH_STEP = 16  # the C library's; narrower heads get elements that are 0
_MOST_ROWS = 1 << 24
CLIP = "clip.vision."  # how a projector file's settings begin
CLIP_SCALE = "projector.scale_factor"
# llama.cpp's names of the parts of a layer; the others are in a family's mapping.
CLIP_NAMES = TensorNames(
    embedding="v.rows",
    final_norm="v.post_ln",
    layer="v.blk.{}.",
    mixer_norm="ln1",
    mlp_norm="ln2",
    qkv=("attn_q", "attn_k", "attn_v"),
    output="attn_out",
    gate_up=("ffn_up",),
    down="ffn_down",
)


class ClipSettings(ConfigReader):
    """Settings of a projector file, without `CLIP`.

    Attributes:
        tensors: shapes by name, for what the settings leave out.
    """

    if_wrong = if_missing = "fetch the projector file again, or convert it with a newer llama.cpp"

    def __init__(self, file: GGUFFile) -> None:
        values = {
            key.removeprefix(CLIP).removeprefix("clip."): value
            for key, value in file.metadata.items()
        }
        super().__init__(values, f"{file.path.name}: clip.vision")
        self.tensors = {name: file.shape(name) for name in file.tensor_names()}

    def layers_of_tower(self) -> dict[str, Any]:
        """Read what all towers have, under the names of most classes."""
        return {
            "hidden_size": self.integer("embedding_length"),
            "intermediate_size": self.integer("feed_forward_length"),
            "num_hidden_layers": self.integer("block_count"),
            "num_attention_heads": self.integer("attention.head_count"),
            "patch_size": self.integer("patch_size"),
            "image_size": self.integer("image_size"),
            "layer_norm_eps": self.number("attention.layer_norm_epsilon"),
            "hidden_act": self.activation("gelu_pytorch_tanh"),
        }

    def activation(self, gelu: str) -> str:
        """Return the MLPs' activation; the files tell GELU's two forms by the projector alone."""
        if self.flag("use_silu"):
            return "silu"
        return gelu if self.flag("use_gelu") else "quick_gelu"

    def table_rows(self) -> int:
        """Return the number of learned positions, of one axis where each has its own.

        Raises:
            CheckpointError: the file has none.
        """
        shape = self.tensors.get("v.position_embd.weight")
        if shape is None:
            raise CheckpointError(
                f"{self.origin.partition(':')[0]}: tensor v.position_embd.weight is missing;"
                f" {self.if_missing}"
            )
        return shape[-2]


@dataclass(frozen=True, slots=True)
class ClipMapping:
    """Differences between a family's projector files of llama.cpp and its folders.

    Norms are stored with their offset added, patches channel by channel, and each frame of a patch
    as a tensor of its own; see `vision.mmproj`.

    Attributes:
        projector: value of `clip.projector_type`.
        wholes: `model_type` of the whole, by the GGUF architecture of its text.
        settings: makes the whole's settings, of which `vision_config` is one.
        outside: names around the layers, by the family's, both without `.weight` and `.bias`; `{}`
            is a tap's place here and its layer there.
        names: of the layers' tensors and the last norm.
        own_names: the family's for layers whose tensors only these files split; None: its own.
        scales: names within a layer of `TowerSpec.scales`.
        interleaved_rope: as in `GGUFMapping`.
        tapped: those of `wholes` whose towers have taps.
        always: architectures of texts that always have a tower.
        merge: key of `TowerSpec.merge`, without `CLIP`.
    """

    projector: str
    wholes: Mapping[str, str]
    settings: Callable[[ClipSettings], dict[str, Any]]
    outside: Mapping[str, str]
    names: TensorNames = CLIP_NAMES
    own_names: TensorNames | None = None
    scales: tuple[str, str] | None = None
    interleaved_rope: bool = False
    tapped: frozenset[str] = frozenset()
    always: frozenset[str] = frozenset()
    merge: str = "spatial_merge_size"

    def architecture_of(self, kind: str, own: str) -> str | None:
        """Return the architecture of a whole's text, if it has files.

        Args:
            kind: the whole's `model_type`.
            own: the architecture of such a text without a tower.
        """
        labels = [name for name, whole in self.wholes.items() if whole == kind]
        if own in labels or (not labels and own in self.wholes):
            return own
        return next(iter(labels), None)


@dataclass(frozen=True, slots=True)
class TowerFamily:
    """Towers with the same config and tensor names.

    Attributes:
        tower_types: `model_type` of the tower's own config, whose class gives defaults, by that of
            the whole.
        read: reads the whole's config and the tower's.
        names: of the tower's layers; all begin with `TOWER`.
        places: prefixes of tower and projector in checkpoints, newest first.
        clip: reads its GGUF projector files; None if they are not read.
    """

    name: str
    tower_types: Mapping[str, str]
    read: Callable[[ConfigReader, ConfigReader], TowerSpec]
    names: TensorNames
    places: tuple[tuple[str, str], ...]
    clip: ClipMapping | None = None

    def spec(self, config: Mapping[str, Any], origin: str = "config.json") -> TowerSpec:
        """Build the tower's spec from a whole model's config.

        Raises:
            CheckpointError: a setting is missing, of the wrong type or out of range.
            UnsupportedModelError: a setting asks for unsupported arithmetic.
        """
        whole_type = config["model_type"]
        whole = ConfigReader(config, origin, class_defaults(whole_type))
        usual = class_defaults(self.tower_types[whole_type])
        return self.read(whole, whole.section("vision_config", usual))


def made_names(names: TensorNames, spec: TowerSpec) -> tuple[str, ...]:
    """Return the names of tensors that executors read and a tower does not have."""
    return (f"{names.embedding}.weight",) + (f"{names.final_norm}.weight",) * (not spec.last_norm)


def read_layers(
    config: ConfigReader,
    architecture: str,
    norm: NormSpec,
    *,
    count: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
    width: str = "hidden_size",
    inner: int | None = None,
    act: str = "hidden_act",
    rope: RopeSpec | None = None,
    attention_bias: bool = True,
    output_bias: bool | None = None,
    qk_norm: NormSpec | None = None,
    head_norms: HeadNormKind = HeadNormKind.EACH,
    mlp_bias: bool = True,
    gated: bool = False,
    final_norm: NormSpec | None = None,
) -> DecoderSpec:
    """Read a tower's layers: attention to the whole picture, then an MLP.

    Args:
        count: setting with the number of layers.
        heads: setting with the number of heads.
        width: setting with the width of the stream.
        inner: width of the MLP; None is that of the settings.
        act: setting with the MLP's nonlinearity.
        rope: None without rotation.
        output_bias: None is like that of queries, keys and values.
        qk_norm: of queries and keys.
        final_norm: None is like the layers'.
    """
    num_heads, hidden_size = config.integer(heads), config.integer(width)
    if hidden_size % num_heads:
        raise config.refuse(heads, f"a divisor of {width}, {hidden_size}")
    head_dim = hidden_size // num_heads
    if qk_norm is not None and head_dim % HEAD_WIDTH_STEP:
        raise config.refuse(heads, f"heads of a multiple of {HEAD_WIDTH_STEP} elements, with norms")
    activation = read_activation(config, act, gated=False)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=-(-head_dim // HEAD_WIDTH_STEP) * HEAD_WIDTH_STEP,
        scale=head_dim**-0.5,
        rope=RopeSpec(theta=1e4, rotary_dim=0) if rope is None else rope,
        qkv_bias=attention_bias,
        output_bias=attention_bias if output_bias is None else output_bias,
        qk_norm=qk_norm,
        head_norms=HeadNormKind.EACH if qk_norm is None else head_norms,
        looks_ahead=True,
    )
    inner = config.integer("intermediate_size") if inner is None else inner
    mlp = MLPSpec(inner, activation, mlp_bias, gated=gated)
    layer = LayerSpec(attention, mlp, norm)
    return DecoderSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        vocab_size=1,
        context_length=_MOST_ROWS,
        layers=(layer,) * config.integer(count),
        final_norm=final_norm or norm,
        tied_head=True,
    )


def read_axial_rope(config: ConfigReader, head_dim: int, usual: float = 1e4) -> RopeSpec:
    """Read a rotation by rows and columns, with all frequencies for each.

    Args:
        usual: the class's base.
    """
    of_axis = head_dim // 4
    return RopeSpec(
        theta=config.section("rope_parameters").number("rope_theta", usual),
        rotary_dim=head_dim,
        sections=(0, of_axis, of_axis),
        axis_frequencies=AxisFrequencies.EACH,
    )


def read_text_axes(
    whole: ConfigReader, usual: tuple[int, int, int], *, interleaved: bool = False
) -> TextAxes:
    """Read the sections of a decoder's rotation.

    Args:
        usual: what the class takes where the settings have none.
        interleaved: as the class has it, whatever the settings say.
    """
    text = whole.section("text_config") if whole.is_given("text_config") else whole
    rope = text.section("rope_parameters" if "rope_parameters" in text else "rope_scaling")
    time, height, width = usual
    if rope.is_given("mrope_section"):
        time, height, width = rope.integers("mrope_section", 3)
    return TextAxes((time, height, width), interleaved)


def read_side(config: ConfigReader, key: str) -> int:
    """Read the side of a square, given once or for height and width."""
    if not isinstance(config.value(key), list):
        return config.integer(key)
    height, width = config.integers(key, 2)
    if height != width or not height:
        raise config.refuse(key, "that of a square")
    return height

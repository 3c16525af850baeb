"""A rank's share of heads, columns and tokens, and what of a mixer's linears it means."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import comb, gcd
from typing import TYPE_CHECKING, TypeAlias

from appliance.errors import ConfigError
from appliance.kernels.head_norms import HeadNormKind
from appliance.model.recurrent_spec import GatedDeltaSpec, Mamba2Spec, ShortConvSpec, SplitGroup
from appliance.model.spec import AttentionSpec, LatentAttentionSpec

if TYPE_CHECKING:
    from appliance.model.recurrent_spec import RecurrentSpec
    from appliance.model.spec import DecoderSpec, MixerSpec

    HeadedSpec: TypeAlias = AttentionSpec | LatentAttentionSpec | GatedDeltaSpec | Mamba2Spec

_Part = tuple[int, "Columns"]  # a width, and a rank's range of it
MOST_NAMED = 4  # valid splits in a message
MOST_SHARE = 64
MOST_TRIED = 10_000  # splits to check for a message
Columns = tuple[int, int]  # first and one after the last


@dataclass(frozen=True, slots=True)
class Split:
    """The ranks of a model.

    Attributes:
        shares: whole number per rank.
        is_exact: heads must divide exactly by the shares; otherwise as closely as possible.
    """

    shares: tuple[int, ...]
    is_exact: bool = False

    @classmethod
    def parse(cls, size: int, text: str) -> Split:
        """Parse `auto`, or `size` shares such as 2:1; raise ConfigError for other text."""
        if text == "auto":
            return cls((1,) * size)
        words = text.split(":")
        if not all(word.isdecimal() and 0 < int(word) <= MOST_SHARE for word in words):
            raise ConfigError(
                f"--gpu-split {text} is no split: give auto, or a share of 1 to {MOST_SHARE} for"
                " each rank, such as 2:1"
            )
        if len(words) != size:
            raise ConfigError(
                f"--gpu-split {text} has {len(words)} shares for {size} processes; give one for"
                " each, or auto"
            )
        shares = tuple(map(int, words))
        divisor = gcd(*shares)
        return cls(tuple(share // divisor for share in shares), is_exact=True)

    @property
    def size(self) -> int:
        return len(self.shares)

    def __str__(self) -> str:
        return ":".join(map(str, self.shares))

    def cut(self, units: int) -> tuple[int, ...] | None:
        """Divide units by the shares, at least one each: (size + 1,) bounds; None if too few."""
        if units < self.size:
            return None
        total = sum(self.shares)
        counts = [max(1, units * share // total) for share in self.shares]
        while (left := units - sum(counts)) != 0:
            # Add to the rank farthest below its share, or take from the one farthest above.
            each = zip(counts, self.shares, strict=True)
            beyond = [count - units * share / total for count, share in each]
            if left > 0:
                counts[beyond.index(min(beyond))] += 1
            else:
                rich = [
                    excess if count > 1 else -units
                    for excess, count in zip(beyond, counts, strict=True)
                ]
                counts[rich.index(max(rich))] -= 1
        return tuple(accumulate(counts, initial=0))

    def fits(self, units: int) -> bool:
        """Return True if the units divide exactly by the shares."""
        return units % sum(self.shares) == 0


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one rank, and the KV heads that they read, which ranks may share.

    A recurrent mixer's KV heads are the groups that share keys; a short convolution's heads are
    its channels.
    """

    first: int
    count: int
    first_kv: int
    num_kv: int


@dataclass(frozen=True, slots=True)
class LayerShare:
    """A rank's part of a layer; None means all of it, on every rank.

    Attributes:
        heads: of the mixer.
        columns: intermediate columns of the MLP, or of every expert.
        experts: whole experts by number, instead of columns of each.
        shared: intermediate columns of the shared MLP.
    """

    heads: Heads | None = None
    columns: Columns | None = None
    experts: range | None = None
    shared: Columns | None = None

    @property
    def has_part_of_mlp(self) -> bool:
        """True if the ranks' results of the MLP or experts have to be summed."""
        return self.columns is not None or self.experts is not None


WHOLE_LAYER = LayerShare()


def check_split(spec: DecoderSpec, split: Split) -> None:
    """Raise ConfigError, with the nearest valid splits, if shares do not divide the heads."""
    if not split.is_exact or _divides(spec, split):
        return
    mixer = next(mixer for mixer in _headed(spec) if not _layer_divides(mixer, split))
    valid = valid_splits(spec, split)
    nearest = sorted(valid, key=lambda other: distance(other, split))[:MOST_NAMED]
    advice = ", ".join(map(str, nearest)) if nearest else "none"
    raise ConfigError(
        f"--gpu-split {split} does not divide {_in_words(mixer)}; the nearest splits that do:"
        f" {advice}, or auto for the most even one"
    )


def head_counts(mixer: HeadedSpec) -> tuple[int, int]:
    """Return a mixer's number of heads, and of the groups in which they share keys."""
    if isinstance(mixer, GatedDeltaSpec):
        return mixer.num_value_heads, mixer.num_key_heads
    if isinstance(mixer, Mamba2Spec):
        return mixer.num_heads, mixer.num_groups
    return mixer.num_heads, mixer.num_kv_heads


def cut_heads(mixer: HeadedSpec, split: Split) -> tuple[Heads, ...] | None:
    """Divide heads by whole groups; None if they cannot be divided.

    With fewer groups than ranks, each rank has the keys of the single group that its heads read.
    """
    if _norms_all(mixer):
        return None
    num_heads, num_groups = head_counts(mixer)
    group = num_heads // num_groups
    bounds = split.cut(head_units(mixer, split.size))
    if bounds is None:
        return None
    if num_groups >= split.size:
        return tuple(
            Heads(first * group, (last - first) * group, first, last - first)
            for first, last in pairwise(bounds)
        )
    if any(first // group != (last - 1) // group for first, last in pairwise(bounds)):
        return None
    return tuple(Heads(first, last - first, first // group, 1) for first, last in pairwise(bounds))


def own_mixer(mixer: MixerSpec, heads: Heads, size: int) -> MixerSpec:
    """Return the spec of a rank's heads, as a mixer of its own.

    Args:
        size: number of ranks.
    """
    match mixer:
        case AttentionSpec():
            return replace(mixer, num_heads=heads.count, num_kv_heads=heads.num_kv)
        case LatentAttentionSpec():
            return replace(mixer, num_heads=heads.count)
        case ShortConvSpec():
            return replace(mixer, width=heads.count)
        case GatedDeltaSpec():
            return replace(mixer, num_value_heads=heads.count, num_key_heads=heads.num_kv)
        case Mamba2Spec():
            split = None
            if mixer.num_groups < size:
                split = SplitGroup(
                    heads.first_kv, mixer.num_groups, mixer.values // mixer.num_groups
                )
            return replace(mixer, num_heads=heads.count, num_groups=heads.num_kv, split=split)


def input_ranges(mixer: MixerSpec, heads: Heads) -> list[Columns]:
    """Return a rank's rows of the first linears' concatenated outputs."""
    match mixer:
        case AttentionSpec():
            return _placed(_attention_parts(mixer, heads))
        case LatentAttentionSpec():
            return _placed([_latent_queries(mixer, heads), _whole(mixer.width)])
        case ShortConvSpec():
            return _placed([(mixer.width, _of(heads, 1))] * 3)
        case GatedDeltaSpec():
            gates = (mixer.values, _of(heads, mixer.value_dim))
            rates = (mixer.num_value_heads, _of(heads, 1))
            return _placed([*_channel_parts(mixer, heads), gates, rates, rates])
        case Mamba2Spec():
            gates = (mixer.values, _of(heads, mixer.head_dim))
            return _placed([gates, *_channel_parts(mixer, heads), (mixer.num_heads, _of(heads, 1))])


def channel_ranges(mixer: RecurrentSpec, heads: Heads) -> list[Columns]:
    """Return a rank's channels of the convolution."""
    return _placed(_channel_parts(mixer, heads))


def output_columns(mixer: MixerSpec, heads: Heads) -> Columns:
    """Return a rank's inputs of the last linear."""
    match mixer:
        case AttentionSpec() | Mamba2Spec():
            return _of(heads, mixer.head_dim)
        case ShortConvSpec():
            return _of(heads, 1)
        case LatentAttentionSpec() | GatedDeltaSpec():
            return _of(heads, mixer.value_dim)


def query_range(mixer: LatentAttentionSpec, heads: Heads) -> Columns:
    """Return a rank's rows of the linear whose outputs are query heads."""
    return _of(heads, mixer.query_dim)


def _attention_parts(mixer: AttentionSpec, heads: Heads) -> list[_Part]:
    """Return the parts of queries, keys, values and gates, in this order."""
    width = mixer.head_dim
    queries = (mixer.num_heads * width, _of(heads, width))
    keys = (mixer.num_kv_heads * width, _of_groups(heads, width))
    copies = 0 if mixer.kv_layer is not None else 1 if mixer.keys_are_values else 2
    gates = [(mixer.num_heads, _of(heads, 1))] * mixer.head_gates
    return [queries, *[keys] * copies, *[queries] * mixer.output_gate, *gates]


def _latent_queries(mixer: LatentAttentionSpec, heads: Heads) -> _Part:
    """Return the part of the queries, or all of their latents."""
    if mixer.query_rank is not None:
        return _whole(mixer.query_rank)
    return mixer.num_heads * mixer.query_dim, query_range(mixer, heads)


def _channel_parts(mixer: RecurrentSpec, heads: Heads) -> list[_Part]:
    """Return the parts of a convolution's input, in order."""
    match mixer:
        case ShortConvSpec():
            return [(mixer.width, _of(heads, 1))]
        case GatedDeltaSpec():
            keys = (mixer.keys, _of_groups(heads, mixer.key_dim))
            return [keys, keys, (mixer.values, _of(heads, mixer.value_dim))]
        case Mamba2Spec():
            keys = (mixer.keys, _of_groups(heads, mixer.state_dim))
            return [(mixer.values, _of(heads, mixer.head_dim)), keys, keys]


def _whole(width: int) -> _Part:
    return width, (0, width)


def _of(heads: Heads, width: int) -> Columns:
    return heads.first * width, (heads.first + heads.count) * width


def _of_groups(heads: Heads, width: int) -> Columns:
    return heads.first_kv * width, (heads.first_kv + heads.num_kv) * width


def _placed(parts: list[_Part]) -> list[Columns]:
    """Return the ranges of concatenated parts."""
    found, begin = [], 0
    for width, (first, last) in parts:
        found.append((begin + first, begin + last))
        begin += width
    return found


def head_units(mixer: HeadedSpec, size: int) -> int:
    """Return the number of pieces that a layer's heads divide into: groups or single heads."""
    num_heads, num_groups = head_counts(mixer)
    return num_groups if num_groups >= size else num_heads


def _norms_all(mixer: MixerSpec | None) -> bool:
    """Return True if heads share one norm, so that no rank can have some of them."""
    return isinstance(mixer, AttentionSpec) and mixer.head_norms is HeadNormKind.ALL


def distance(one: Split, other: Split) -> float:
    """Return the share of a model that two splits of as many ranks place differently, 0 to 2."""
    totals = sum(one.shares), sum(other.shares)
    each = zip(one.shares, other.shares, strict=True)
    return sum(abs(mine / totals[0] - theirs / totals[1]) for mine, theirs in each)


def _in_words(mixer: HeadedSpec) -> str:
    if isinstance(mixer, LatentAttentionSpec):
        return f"the latent attention of this model, {mixer.num_heads} heads"
    num_heads, num_groups = head_counts(mixer)
    kinds = {GatedDeltaSpec: "Gated DeltaNet layers", Mamba2Spec: "Mamba-2 layers"}
    kind = kinds.get(type(mixer), "attention")
    return f"the {kind} of this model, {num_heads} heads in {num_groups} groups"


def _headed(spec: DecoderSpec) -> list[HeadedSpec]:
    """List the mixers whose heads must divide by the shares."""
    mixers = [layer.mixer for layer in spec.layers]
    return [
        mixer
        for mixer in mixers
        if mixer is not None and not isinstance(mixer, ShortConvSpec) and not _norms_all(mixer)
    ]


def _divides(spec: DecoderSpec, split: Split) -> bool:
    return all(_layer_divides(mixer, split) for mixer in set(_headed(spec)))


def _layer_divides(mixer: HeadedSpec, split: Split) -> bool:
    return split.fits(head_units(mixer, split.size)) and cut_heads(mixer, split) is not None


def valid_splits(spec: DecoderSpec, near: Split) -> list[Split]:
    """List the splits that divide all layers, in lowest terms; only two if there are many."""
    size = near.size
    units = [head_units(mixer, size) for mixer in _headed(spec)]
    if not units:
        return []
    most = gcd(*units)  # shares of a valid split divide all of them
    if comb(most - 1, size - 1) <= MOST_TRIED:
        tried = _compositions(most, size)
    else:
        cuts = (near.cut(most), Split((1,) * size).cut(most))
        tried = [tuple(last - first for first, last in pairwise(cut)) for cut in cuts if cut]
    found = {
        Split(tuple(count // gcd(*counts) for count in counts), is_exact=True) for counts in tried
    }
    return sorted((split for split in found if _divides(spec, split)), key=str)


def _compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    """List the ways to write a number as an ordered sum of positive numbers."""
    if parts == 1:
        return [(total,)] if total > 0 else []
    return [
        (first, *rest)
        for first in range(1, total - parts + 2)
        for rest in _compositions(total - first, parts - 1)
    ]

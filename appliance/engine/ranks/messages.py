"""Messages of rank 0 to the other ranks beside steps, and their answers. Carries no code."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec

from appliance.config import EngineConfig

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


class Room(msgspec.Struct, frozen=True):
    """The memory that ranks share for steps; it is taken only where it is written.

    Attributes:
        floats: numbers that a rank gives in one exchange.
        payload_bytes: for the description of a step.
        answer_bytes: for what the last stage says; 0 without stages.
    """

    floats: int
    payload_bytes: int
    answer_bytes: int = 0


class Join(msgspec.Struct, frozen=True, tag=True):
    """Load a part of the model.

    Attributes:
        dtype: of weights that are not packed, by name.
        bounds: of the stages' layers; empty where each layer is divided.
    """

    config: EngineConfig
    dtype: str
    rank: int
    threads: int
    bounds: tuple[int, ...]
    room: Room
    context_length: int


class CacheLayer(msgspec.Struct, frozen=True):
    """The precision of one layer's keys and values; see `LayerPrecision`.

    Attributes:
        head_scales: (2, num_kv_heads) of the whole model, or None.
        key_mean: (num_kv_heads, head_dim), the same.
    """

    format: str
    head_scales: tuple[tuple[float, ...], ...] | None
    key_mean: tuple[tuple[float, ...], ...] | None


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Map the cache.

    Attributes:
        layers: in the order of `cache_layers`.
        strides: bytes of a block, an open block and a state with all ranks' parts.
        offsets: of this rank's part in each.
    """

    layers: tuple[CacheLayer, ...]
    strides: tuple[int, int, int]
    offsets: tuple[int, int, int]
    num_blocks: int
    block_size: int
    num_open: int
    num_states: int


class MakeSlots(msgspec.Struct, frozen=True, tag=True):
    """Make room for so many adapters."""

    count: int


class PutAdapter(msgspec.Struct, frozen=True, tag=True):
    """Fill an adapter's slot with safetensors, or empty it."""

    slot: int
    content: bytes | None
    scales: dict[str, float]


class RankJoined(msgspec.Struct, frozen=True, tag=True):
    """A part of the model is loaded."""

    weight_bytes: int
    num_dense: int


class RankDone(msgspec.Struct, frozen=True, tag=True):
    """An order is carried out."""


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """An order cannot be carried out."""

    reason: str
    exit_code: int


ToRank: TypeAlias = Join | Allocate | MakeSlots | PutAdapter
FromRank: TypeAlias = RankJoined | RankDone | RankFailed
_encoder = msgspec.msgpack.Encoder()
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def send(connection: Connection, message: ToRank | FromRank) -> None:
    connection.send_bytes(_encoder.encode(message))


def receive_order(connection: Connection) -> ToRank:
    """Wait for the next order; raises EOFError if rank 0 has ended."""
    return _to_rank.decode(connection.recv_bytes())


def receive_answer(connection: Connection) -> FromRank:
    """Wait for a rank's answer; raises EOFError if it has ended."""
    return _from_rank.decode(connection.recv_bytes())

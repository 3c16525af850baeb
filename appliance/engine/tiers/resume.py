"""Finds where a waiting sequence continues from host memory, and the content that it needs.

Without recurrent layers that is the end of its content. With them it is the last place with content
and state: where the sequence was preempted, or a checkpoint. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from appliance.engine.blocks.block_hashes import state_key
from appliance.engine.tiers.host_memory import HostBlock

if TYPE_CHECKING:
    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.tiers.host_memory import HostStore


class Contents(Protocol):
    """Tells if content exists, by key."""

    def __contains__(self, content: bytes) -> bool: ...


@dataclass(slots=True)
class Reservation:
    """A waiting sequence's reservation in host memory.

    Attributes:
        hashes: of full blocks, and keys of checkpoints.
        last: the partial block.
        state: the state after all its tokens.
        other_room: of these two, in blocks.
    """

    hashes: list[bytes] = field(default_factory=list)
    last: HostBlock | None = None
    state: HostBlock | None = None
    other_room: int = 0


@dataclass(frozen=True, slots=True)
class Resume:
    """A place to continue, after content in host memory.

    Attributes:
        blocks: leading blocks in the cache.
        held: content after them; the last block may be partial.
        num_tokens: in blocks and content together.
        state: the state after these tokens, with recurrent layers.
        is_checkpoint: the state is one, so others may continue from it.
    """

    blocks: tuple[int, ...] = ()
    held: tuple[HostBlock, ...] = ()
    num_tokens: int = 0
    state: HostBlock | None = None
    is_checkpoint: bool = False


def continuation(
    sequence: Sequence, first: int, blocks: BlockManager, host: HostStore, kept: Reservation | None
) -> Resume:
    """Return the content in host memory from a block index on, up to its end."""
    size = blocks.block_size
    held = _held(sequence.block_hashes[first : sequence.num_reusable // size], host)
    num_full, num_last = first + len(held), sequence.num_kept % size
    if (
        kept is not None
        and kept.last is not None
        and num_full * size == sequence.num_kept - num_last
    ):
        return Resume((), (*held, kept.last), num_full * size + num_last)
    return Resume((), tuple(held), num_full * size)


def resume_with_state(
    sequence: Sequence, blocks: BlockManager, host: HostStore, kept: Reservation | None
) -> Resume:
    """Return the last place with a state in host memory; without tokens if there is none."""
    size = blocks.block_size
    cached = blocks.index.find_chain(sequence)
    chain = sequence.block_hashes[: sequence.num_reusable // size]
    held = _held(chain[len(cached) :], host)
    depth, state = len(cached) + len(held), None
    while depth and (state := host.get(state_key(chain[depth - 1]))) is None:
        depth -= 1
    num_tokens, last = depth * size, list[HostBlock]()
    num_kept, num_last = divmod(sequence.num_kept, size)
    is_checkpoint = True
    if (
        kept is not None
        and kept.state is not None
        and num_kept <= len(cached) + len(held)
        and (kept.last is not None or not num_last)
        and sequence.num_kept >= num_tokens
    ):
        depth, num_tokens, state, is_checkpoint = num_kept, sequence.num_kept, kept.state, False
        last = [] if kept.last is None else [kept.last]
    loaded = (*held[: max(0, depth - len(cached))], *last)
    return Resume(tuple(cached[:depth]), loaded, num_tokens, state, is_checkpoint)


def wanted_from_disk(
    sequence: Sequence, blocks: BlockManager, host: HostStore, disk: Contents
) -> tuple[list[bytes], int]:
    """Return the content that a waiting sequence needs from disk, in order, and the blocks gained.

    With recurrent layers the last one is a state checkpoint, unless it is in memory; later blocks
    are useless.
    """
    cached = len(blocks.index.find_chain(sequence))
    chain = sequence.block_hashes[: sequence.num_reusable // blocks.block_size]
    depth, wanted = cached, []
    for content in chain[cached:]:
        if host.get(content) is None:
            if content not in disk:
                break
            wanted.append(content)
        depth += 1
    states = blocks.states
    if states is None:
        return wanted, len(wanted)
    near = states.checkpoints.depth(chain[:cached])
    for end in range(depth, near, -1):
        key = state_key(chain[end - 1])
        if host.get(key) is not None or key in disk:
            needed = set(chain[:end])
            lacking = [key] if host.get(key) is None else []
            return [*(one for one in wanted if one in needed), *lacking], end - near
    return [], 0


def _held(chain: list[bytes], host: HostStore) -> list[HostBlock]:
    held = []
    for content in chain:
        one = host.get(content)
        if one is None:
            break
        held.append(one)
    return held

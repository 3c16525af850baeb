"""Host memory whose entries differ in size."""

from __future__ import annotations

from appliance.engine.blocks.block_hashes import block_of, is_state, state_key
from appliance.engine.nouns.moves import SavedBlock
from appliance.engine.tiers.host_memory import HostBlock, HostStore

BLOCKS = [number.to_bytes(16, "big") for number in range(8)]
STATES = [state_key(block) for block in BLOCKS]


def held() -> HostBlock:
    return HostBlock(SavedBlock(b"x"))


def test_a_key_names_its_block() -> None:
    assert [block_of(key) for key in STATES] == BLOCKS
    assert all(map(is_state, STATES))
    assert not any(map(is_state, BLOCKS))


def test_a_state_takes_the_room_of_several_blocks() -> None:
    store = HostStore(10, keeps_unwanted=True, state_room=3)
    assert not store.reserve([*STATES[:3], *BLOCKS[:2]])
    assert store.reserve([*STATES[:2], BLOCKS[0]])
    assert store.room == 3
    for key in (STATES[0], BLOCKS[0]):
        assert store.takes(key)
        store.put(key, held())
    assert len(store) == 4
    assert store.takes(STATES[3])
    store.put(STATES[3], held())
    assert len(store) == 7
    assert store.reserve([BLOCKS[5]])
    assert store.get(STATES[3]) is None, "what nobody waits for makes room"
    assert not store.takes(STATES[3])
    store.check_invariants(iter([7, 1]))
    store.release([*STATES[:2], BLOCKS[0]])
    store.release([BLOCKS[5]])
    assert len(store) == 4
    assert store.get(STATES[0]) is not None, "it stays as long as there is room"
    store.check_invariants(iter([]))

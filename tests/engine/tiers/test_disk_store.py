"""Files of blocks: a read returns what was written, or nothing."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.runs.waiting import wait_until

from appliance.engine.blocks.block_hashes import state_key
from appliance.engine.tiers.disk_store import HEADER_BYTES, DiskStore
from appliance.engine.tiers.stored_models import remove_models, stored_models

SIZE = 4096
MODEL, OTHER = b"m" * 16, b"o" * 16


def content_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def data_of(number: int) -> bytearray:
    return bytearray(random.Random(number).randbytes(SIZE))


def opened(root: Path, *, model: bytes = MODEL, capacity: int = 1 << 30) -> DiskStore:
    store = DiskStore(root, model, SIZE, capacity, {"model": model.decode(), "kv_format": "int8"})
    store.open()
    return store


def write(store: DiskStore, *numbers: int) -> None:
    """Write blocks in order of their numbers, each used a second later than the one before."""
    for number in numbers:
        store.write(content_of(number), data_of(number), 10**18 + number * 10**9)


def path_of(store: DiskStore, number: int) -> Path:
    return store.folder / f"{content_of(number).hex()}.kv"


def test_a_checkpoint_lies_beside_the_block_that_it_follows(tmp_path: Path) -> None:
    for size in (SIZE, 100):
        store = DiskStore(tmp_path / str(size), MODEL, SIZE, 1 << 30, {}, state_bytes=size)
        store.open()
        state = bytearray(random.Random(9).randbytes(size))
        write(store, 1)
        store.write(state_key(content_of(1)), state, 10**18)
        again = DiskStore(store.root, MODEL, SIZE, 1 << 30, {}, state_bytes=size)
        again.open()
        assert again.read(state_key(content_of(1))) == state
        assert again.read(content_of(1)) == data_of(1)
        path = path_of(store, 1)
        path.rename(path.with_name(path.name.replace(".kv", "73.kv")))
        assert again.read(state_key(content_of(1))) is None, "it is the block"
        assert again.counters.corrupt == 1


def test_blocks_come_back_also_for_the_next_server(tmp_path: Path) -> None:
    write(opened(tmp_path / "new" / "kv"), 1, 2)
    again = opened(tmp_path / "new" / "kv")
    assert len(again) == 2
    assert content_of(1) in again
    assert content_of(3) not in again
    assert again.read(content_of(1)) == data_of(1)
    assert again.read(content_of(3)) is None
    assert (again.counters.read, again.counters.corrupt) == (1, 0)


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    store = opened(tmp_path / "kv")
    write(store, 1, 2, 3)
    for number in (1, 2):
        path_of(store, number).unlink()
    os.mkfifo(path_of(store, 1))
    path_of(store, 2).mkdir()
    assert store.read(content_of(1)) is store.read(content_of(2)) is None
    assert store.read(content_of(3)) == data_of(3)
    assert store.counters.corrupt == 2


def test_only_this_user_reads_them(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = opened(tmp_path / "kv")
        write(store, 1)
    finally:
        os.umask(before)
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert path_of(store, 1).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("at", [0, 7, 8, 24, 40, 48, HEADER_BYTES, HEADER_BYTES + SIZE - 1])
def test_a_changed_byte_anywhere_drops_the_file(tmp_path: Path, at: int) -> None:
    store = opened(tmp_path)
    write(store, 1)
    path = path_of(store, 1)
    damaged = bytearray(path.read_bytes())
    damaged[at] ^= 1
    path.write_bytes(damaged)
    assert store.read(content_of(1)) is None
    assert store.counters.corrupt == 1
    assert content_of(1) not in store
    assert not path.exists()


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES, HEADER_BYTES + SIZE - 1])
def test_a_truncated_file_is_dropped(tmp_path: Path, size: int) -> None:
    store = opened(tmp_path)
    write(store, 1)
    os.truncate(path_of(store, 1), size)
    assert store.read(content_of(1)) is None
    assert store.counters.corrupt == 1
    assert not path_of(store, 1).exists()


def test_a_longer_file_is_dropped(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, 1)
    with path_of(store, 1).open("ab") as file:
        file.write(b"x")
    assert store.read(content_of(1)) is None


def test_a_foreign_file_under_a_good_name_is_dropped(tmp_path: Path) -> None:
    """One file is of another model, one of another place in a chain; both are intact."""
    store, other = opened(tmp_path), opened(tmp_path, model=OTHER)
    write(store, 1, 2)
    write(other, 3)
    path_of(store, 1).replace(path_of(store, 4))
    path_of(other, 3).replace(path_of(store, 3))
    again = opened(tmp_path)
    assert len(again) == 3
    assert again.read(content_of(4)) is None
    assert again.read(content_of(3)) is None
    assert again.counters.corrupt == 2
    assert again.read(content_of(2)) == data_of(2)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    store = opened(tmp_path / "kv")
    write(store, 1)
    path_of(store, 1).replace(tmp_path / "elsewhere")
    path_of(store, 1).symlink_to(tmp_path / "elsewhere")
    assert opened(tmp_path / "kv").read(content_of(1)) is None


def test_a_file_that_is_gone_is_a_miss_and_no_damage(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, 1)
    path_of(store, 1).unlink()
    assert store.read(content_of(1)) is None
    assert store.counters.corrupt == 0
    assert content_of(1) not in store


def test_a_planted_link_opens_no_other_folder(tmp_path: Path) -> None:
    """A fault changed the mode of the link's target, so that only its owner could read it."""
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o755)
    root = tmp_path / "kv"
    root.mkdir(mode=0o700)
    (root / MODEL.hex()).symlink_to(victim)
    with pytest.raises(OSError, match="is a link"):
        opened(root)
    assert victim.stat().st_mode & 0o777 == 0o755
    assert list(victim.iterdir()) == []


def test_a_folder_that_others_write_to_is_refused(tmp_path: Path) -> None:
    for mode in (0o777, 0o770, 0o1777):
        folder = tmp_path / oct(mode)
        folder.mkdir()
        folder.chmod(mode)
        with pytest.raises(OSError, match=r"others may write .* chmod 700"):
            opened(folder)
        assert list(folder.iterdir()) == []
    closed = tmp_path / "readable"
    closed.mkdir(mode=0o755)
    assert opened(closed).folder.is_dir()
    link = tmp_path / "link"
    link.symlink_to(closed)
    assert opened(link).folder.is_dir(), "one's own folder may lie on another disk"


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(OSError, match="belongs to another user"):
        store.open()


def test_the_oldest_files_of_all_models_go_first(tmp_path: Path) -> None:
    other = opened(tmp_path, model=OTHER)
    write(other, 0, 9)  # 0 was used first, 9 last
    store = opened(tmp_path, capacity=6 * (SIZE + HEADER_BYTES))
    store.sweep()
    write(store, 1, 2, 3, 4)
    store.touch(content_of(1), 2 * 10**18)
    write(store, 5, 6)
    left = {int(path.stem, 16) for path in tmp_path.rglob("*.kv")}
    assert left == {1, 3, 4, 5, 6, 9}
    assert store.counters.evicted == 2
    assert {number for number in range(10) if content_of(number) in store} == {1, 3, 4, 5, 6}
    assert store.counters.bytes_used == 6 * (SIZE + HEADER_BYTES)


def test_the_order_of_use_outlives_the_server(tmp_path: Path) -> None:
    write(opened(tmp_path), 1, 2, 3)
    store = opened(tmp_path, capacity=2 * (SIZE + HEADER_BYTES))
    store.touch(content_of(1), 2 * 10**18)
    store.sweep()
    assert content_of(2) not in store
    assert store.read(content_of(1)) == data_of(1)


def test_unfinished_files_are_removed_once_they_are_old(tmp_path: Path) -> None:
    store = opened(tmp_path)
    old, young = store.folder / ".a.1.tmp", store.folder / ".b.2.tmp"
    old.write_bytes(b"x")
    young.write_bytes(b"x")
    os.utime(old, (time.time() - 7200,) * 2)
    store.sweep()
    assert not old.exists()
    assert young.exists()


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """The kernel refuses to write more, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with files_no_larger_than(SIZE // 2), pytest.raises(OSError, match="large"):
        write(store, 1)
    assert not list(store.folder.glob("*.kv"))
    assert not list(store.folder.glob(".*.kv.*"))
    assert content_of(1) not in store
    write(store, 1)
    assert store.read(content_of(1)) == data_of(1)


def test_a_disk_that_is_almost_full_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    space = os.statvfs(tmp_path)
    fields = list(space)
    fields[4] = 10  # blocks that we may use

    def almost_full(path: Path) -> os.statvfs_result:
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", almost_full)
    with pytest.raises(OSError, match="would stay free"):
        write(store, 1)


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, 1)
    assert remove_models(tmp_path) == (1, 0, SIZE + HEADER_BYTES)
    assert not store.folder.exists()
    assert store.read(content_of(1)) is None
    write(store, 2)
    assert store.read(content_of(2)) == data_of(2)
    assert stored_models(tmp_path)[0].about["kv_format"] == "int8"


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="Not a directory"):
        opened(tmp_path / "file" / "kv")


def test_models_are_listed_and_removed_by_age(tmp_path: Path) -> None:
    write(opened(tmp_path), 1, 2, 3)
    write(opened(tmp_path, model=OTHER), 9)
    (tmp_path / "not-ours").mkdir()
    listed = stored_models(tmp_path)
    assert [model.about["model"] for model in listed] == ["o" * 16, "m" * 16]
    assert [model.num_blocks for model in listed] == [1, 3]
    assert listed[0].used == 10**9 + 9
    assert remove_models(tmp_path, older_than=10**9 + 3.0) == (2, 0, 2 * (SIZE + HEADER_BYTES))
    assert [model.num_blocks for model in stored_models(tmp_path)] == [1, 1]
    assert remove_models(tmp_path, [OTHER.hex()])[0] == 1
    assert [model.fingerprint for model in stored_models(tmp_path)] == [MODEL.hex()]
    assert (tmp_path / "not-ours").is_dir()


WRITER = """
import sys
from pathlib import Path
from appliance.engine.tiers.disk_store import DiskStore
import random
store = DiskStore(Path(sys.argv[1]), b"m" * 16, 4096, 1 << 30, {})
store.open()
print("writing", flush=True)
for number in range(10**6):
    data = random.Random(number).randbytes(4096)
    store.write(number.to_bytes(16, "big"), data, 10**18)
"""


def test_killed_in_the_middle_of_writing_everything_found_is_whole(tmp_path: Path) -> None:
    for written in (1, 50, 400):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()
        wait_until(lambda count=written: len(list(tmp_path.rglob("*.kv"))) >= count)  # type: ignore[misc]
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    store = opened(tmp_path)
    numbers = [int(path.stem, 16) for path in store.folder.glob("*.kv")]
    assert numbers
    assert all(store.read(content_of(number)) == data_of(number) for number in numbers)
    assert store.counters.corrupt == 0


def test_two_servers_share_a_folder(tmp_path: Path) -> None:
    """Both write the same blocks and read each other's, while one removes the oldest."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        store = opened(tmp_path, capacity=40 * (SIZE + HEADER_BYTES))
        while not store.counters.evicted:  # the writers may take as long as they need
            store.sweep()
            for number in range(0, 400, 7):
                assert store.read(content_of(number)) in (None, data_of(number))
    finally:
        for process in processes:
            assert process.poll() is None, "a writer failed"
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    assert store.counters.corrupt == 0
    assert store.counters.evicted > 0


def test_ten_thousand_files_are_opened_in_little_time(tmp_path: Path) -> None:
    folder = opened(tmp_path).folder
    for number in range(10_000):
        (folder / f"{content_of(number).hex()}.kv").touch()
    begin = time.process_time()
    store = opened(tmp_path)
    seconds = time.process_time() - begin
    assert len(store) == 10_000
    assert seconds < 0.05 * 3  # processor seconds, threefold because the machine is shared

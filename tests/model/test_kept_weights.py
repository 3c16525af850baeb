"""Weights that an earlier start packed are mapped: the same logits, from memory that is shared."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support.models.dense_models import DENSE, longrope
from support.models.encoder_models import of_one_type
from support.models.expert_models import EXPERTS, save_experts
from support.models.native_models import LIBRARY
from support.models.recurrent_models import RECURRENT
from support.models.recurrent_models import SIZES as RECURRENT_SIZES
from support.models.relatives import FOLDERS, RELATIVES
from support.models.teacher_forcing import logits_of
from support.models.towers import TOWER_CASES, with_tower

from appliance.engine.packed_models import KeptFile, PackedModels, kept_files
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.weight_bytes import memory_of
from appliance.model.encoder.native_loader import load_native_decoder
from appliance.model.narrowed import narrowed
from appliance.model.native import why_unsupported
from appliance.model.native_loader import load_native
from appliance.model.shard.shard import column_units, shard_model
from appliance.model.shard.split import Split
from appliance.model.source import open_model
from appliance.model.vision.source import open_tower
from appliance.model.vision.tower import PatchGrid, load_native_tower

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.model.native import NativeDecoder
    from appliance.model.source import ModelSource

WIDTH = {"hidden_size": 96}  # heads of 16, which the library multiplies
CASES = {
    name: (kind, WIDTH | own)
    for name, (kind, own) in (DENSE | RELATIVES | FOLDERS).items()
    if "longrope" not in name  # has a factor for each pair of a head; see below
}
CASES |= {name: (kind, own | RECURRENT_SIZES) for name, (kind, own) in RECURRENT.items()}


def load(folder: Path, kept: PackedModels, **options: Any) -> NativeDecoder:
    return load_from(open_model(folder), kept, **options)


def load_from(source: ModelSource, kept: PackedModels, **options: Any) -> NativeDecoder:
    engine = NativeEngine(LIBRARY, 2)
    decoder = load_native(source, engine, torch.float32, kept=kept, **options)
    when_kept(decoder)
    return decoder


def when_kept(loaded: Any) -> Any:
    """Wait until what was loaded is in its file."""
    for thread in threading.enumerate():
        if thread.name == "packed weights":
            thread.join()
    return loaded


def kept_in(root: Path, model: Path, capacity: int = 1 << 30) -> PackedModels:
    return PackedModels(root, capacity, model, least=0)


def is_mapped(decoder: NativeDecoder) -> bool:
    """True if the model's layers are in the memory of a file."""
    address = ctypes.addressof(decoder.model.layers.contents)
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(bound, 16) for bound in line.split()[0].split("-"))
        if first <= address < last:
            return line.endswith(".weights")
    raise AssertionError("no such memory")


def assert_mapped_is_same(folder: Path, root: Path, token_ids: list[int], **options: Any) -> None:
    kept = kept_in(root, folder)
    packed = load(folder, kept, **options)
    assert not is_mapped(packed)
    mapped = load(folder, kept, **options)
    assert is_mapped(mapped)
    assert mapped.weight_format == packed.weight_format
    assert mapped.num_dense == packed.num_dense
    ropes = mapped.weight_bytes - packed.weight_bytes  # laid out anew
    assert 0 <= ropes < 4096
    assert torch.equal(logits_of(mapped, token_ids), logits_of(packed, token_ids))


@pytest.mark.parametrize("case", CASES)
def test_a_mapped_model_answers_as_the_packed_one(
    case: str, make_model: Callable[..., Any], tmp_path: Path, token_ids: list[int]
) -> None:
    kind, settings = CASES[case]
    make_model(kind, **settings).save_pretrained(tmp_path / "model")
    if why_unsupported(open_model(tmp_path / "model")) is not None:
        pytest.skip("torch executes it")
    assert_mapped_is_same(tmp_path / "model", tmp_path / "kept", token_ids)


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_and_latents_too(family: str, tmp_path: Path) -> None:
    save_experts(family, tmp_path / "model")
    if why_unsupported(open_model(tmp_path / "model")) is not None:
        pytest.skip("torch executes it")
    assert_mapped_is_same(tmp_path / "model", tmp_path / "kept", [3, 1, 4, 1, 5, 9, 2, 6])


def test_what_depends_on_the_context_is_not_kept(
    make_model: Callable[..., Any], tmp_path: Path, token_ids: list[int]
) -> None:
    settings = {"rope_parameters": longrope(8, 64), "original_max_position_embeddings": 64}
    make_model("llama", head_dim=16, **settings).save_pretrained(tmp_path / "model")
    kept = kept_in(tmp_path / "kept", tmp_path / "model")
    found: dict[int, list[torch.Tensor]] = {}
    for length in (64, 128, 64, 128):  # up to 64 tokens the short factors count
        decoder = load(tmp_path / "model", kept, context_length=length)
        found.setdefault(length, []).append(logits_of(decoder, token_ids))
    assert is_mapped(decoder)
    for first, second in found.values():
        assert torch.equal(first, second)
    assert not torch.equal(found[64][0], found[128][0])


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_keeps_its_own_part(
    rank: int, make_model: Callable[..., Any], tmp_path: Path
) -> None:
    make_model("llama", head_dim=16, hidden_size=96).save_pretrained(tmp_path / "model")
    source = open_model(tmp_path / "model")
    part = shard_model(source.spec, Split((1, 1)), column_units(source))[rank]
    kept = kept_in(tmp_path / "kept", tmp_path / "model")
    load(tmp_path / "model", kept)
    packed = load(tmp_path / "model", kept, part=part)
    assert not is_mapped(packed)
    mapped = load(tmp_path / "model", kept, part=part)
    assert is_mapped(mapped)
    assert len(list(kept_files(kept.root))) == 2
    assert parts_of_memory(mapped) == parts_of_memory(packed)


def parts_of_memory(decoder: NativeDecoder) -> list[bytes]:
    """Return the bytes of all linears of attention and MLP."""
    found = []
    for layer in decoder.model.layers[: decoder.model.num_layers]:
        attention = layer.attention
        for linear in (*attention.qkv, attention.output, layer.gate, layer.up, layer.down):
            if linear.codes:
                found += [ctypes.string_at(*one) for one in memory_of(linear).values()]
    assert found
    return found


@pytest.fixture
def llama(make_model: Callable[..., Any], tmp_path: Path) -> Path:
    make_model("llama", head_dim=16, hidden_size=96).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def changed_at(place: int | float) -> Callable[[Path], None]:
    """Change one bit: of a byte from the beginning or the end, or so far into a file."""

    def change(file: Path) -> None:
        content = bytearray(file.read_bytes())
        at = place if isinstance(place, int) else int(place * len(content))
        content[at] ^= 4
        file.write_bytes(content)

    return change


def cut_to(place: float) -> Callable[[Path], None]:
    return lambda file: os.truncate(file, int(place * file.stat().st_size))


def replace_by_link(file: Path) -> None:
    file.rename(file.with_suffix(".old"))
    file.symlink_to(file.with_suffix(".old"))


def replace_by_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def replace_by_other(file: Path) -> None:
    """Put the file of another model in its place."""
    (other,) = (one.path for one in kept_files(file.parent) if one.path != file)
    os.replace(other, file)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "magic": changed_at(0),
    "description": changed_at(100),
    "weights": changed_at(0.4),
    "structs at the end": changed_at(-4096 + 8),
    "cut": cut_to(0.5),
    "empty": cut_to(0),
    "longer": cut_to(1.5),
    "others may write": lambda file: file.chmod(0o666),
    "a link": replace_by_link,
    "a pipe": replace_by_pipe,
    "of another model": replace_by_other,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_or_foreign_is_packed_anew(
    damage: str,
    llama: Path,
    make_model: Callable[..., Any],
    tmp_path: Path,
    token_ids: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = kept_in(tmp_path / "kept", llama)
    expected = logits_of(load(llama, kept), token_ids)
    (file,) = (one.path for one in kept_files(kept.root))
    if damage == "of another model":
        make_model("qwen2", head_dim=16, hidden_size=96).save_pretrained(tmp_path / "other")
        load(tmp_path / "other", kept_in(kept.root, tmp_path / "other"))
    DAMAGES[damage](file)
    found = load(llama, kept)
    assert not is_mapped(found)
    assert torch.equal(logits_of(found, token_ids), expected)
    assert "cannot be used" in caplog.text
    again = load(llama, kept)
    assert is_mapped(again), "it was written anew"
    assert torch.equal(logits_of(again, token_ids), expected)


def test_weights_that_are_rounded_as_they_are_read_are_others(
    llama: Path, tmp_path: Path, token_ids: list[int]
) -> None:
    """`--weight-bits` and `--end-bits` change neither the file nor what describes the model."""
    kept, exact = kept_in(tmp_path / "kept", llama), open_model(llama)
    found = {}
    for bits in (None, (8, None), (4, None), (4, 4), (None, 8)):
        source = exact if bits is None else narrowed(exact, *bits)
        assert source is not None
        packed = load_from(source, kept)
        assert not is_mapped(packed), bits
        mapped = load_from(source, kept)
        assert is_mapped(mapped)
        assert mapped.weight_format == packed.weight_format
        assert torch.equal(logits_of(mapped, token_ids), logits_of(packed, token_ids))
        found[packed.weight_format] = packed
    assert len(found) == 5


@pytest.mark.parametrize("name", TOWER_CASES)
def test_towers_too(name: str, tmp_path: Path) -> None:
    """Layers with windows are runs of their own; linears that clip have bounds elsewhere."""
    case = TOWER_CASES[name]
    with_tower(case).save_pretrained(tmp_path / "model")
    kept = kept_in(tmp_path / "kept", tmp_path / "model")
    source = open_tower(tmp_path / "model", in_torch=False)
    assert source is not None
    rows, columns = case.grids[0]
    patches = np.random.default_rng(1).normal(size=(rows * columns, source.spec.patch.inputs))
    picture = PatchGrid(patches.astype(np.float32), rows, columns)

    def embeddings() -> Any:
        engine = NativeEngine(LIBRARY, 2)
        tower = when_kept(load_native_tower(source, engine, np.float32, kept=kept))
        return np.asarray(tower([picture])[0].embeddings)

    packed = embeddings()
    assert len([*kept_files(kept.root)]) == (0 if source.spec.clips else len(source.spec.runs))
    assert np.array_equal(embeddings(), packed)


def test_a_decoder_that_only_reads_too(llama: Path, tmp_path: Path, token_ids: list[int]) -> None:
    kept, source = kept_in(tmp_path / "kept", llama), open_model(llama)

    def hidden() -> Any:
        engine = NativeEngine(LIBRARY, 2)
        loaded = load_native_decoder(source, engine, torch.float32, lambda *_: None, kept)
        return when_kept(loaded)

    packed, mapped = hidden(), hidden()
    assert len([*kept_files(kept.root)]) == 1
    texts = of_one_type([token_ids[:3], token_ids])
    assert np.array_equal(mapped.hidden(texts), packed.hidden(texts))


def test_a_changed_model_is_another_one(
    llama: Path, make_model: Callable[..., Any], tmp_path: Path, token_ids: list[int]
) -> None:
    kept = kept_in(tmp_path / "kept", llama)
    first = logits_of(load(llama, kept), token_ids)
    model = make_model("llama", head_dim=16, hidden_size=96)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(llama)
    changed = load(llama, kept)
    assert not is_mapped(changed)
    torch.testing.assert_close(logits_of(changed, token_ids), 2 * first)


def test_the_least_recently_used_makes_room(
    make_model: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "kept"
    for name in ("a", "b", "c"):
        make_model("llama", head_dim=16).save_pretrained(tmp_path / name)
    load(tmp_path / "a", kept_in(root, tmp_path / "a"))
    (size,) = (one.num_bytes for one in kept_files(root))
    limit = int(2.5 * size)
    load(tmp_path / "b", kept_in(root, tmp_path / "b", limit))
    for number, one in enumerate(sorted(kept_files(root), key=KeptFile.model)):
        os.utime(one.path, (number, number))
    assert is_mapped(load(tmp_path / "a", kept_in(root, tmp_path / "a", limit)))  # a use
    load(tmp_path / "c", kept_in(root, tmp_path / "c", limit))
    assert {Path(one.model()).name for one in kept_files(root)} == {"a", "c"}
    load(tmp_path / "b", kept_in(root, tmp_path / "b", size // 2))
    assert "--packed-weights-size" in caplog.text
    assert {Path(one.model()).name for one in kept_files(root)} == {"a", "c"}


def test_a_disk_that_refuses_costs_nothing_else(
    llama: Path, tmp_path: Path, token_ids: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kept").write_text("a file where the folder should be")
    kept = kept_in(tmp_path / "kept", llama)
    for _ in range(2):
        assert logits_of(load(llama, kept), token_ids).isfinite().all()
    assert "are not kept" in caplog.text


def test_other_processes_find_it_and_share_its_memory(smollm2_gguf: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from appliance.engine.packed_models import PackedModels\n"
        "from appliance.kernels.cpu.engine import NativeEngine\n"
        "from appliance.kernels.cpu.library import load_library\n"
        "from appliance.model.native_loader import load_native\n"
        "from appliance.model.source import open_model\n"
        "import threading\n"
        "model = Path(sys.argv[1])\n"
        "kept = PackedModels(Path(sys.argv[2]), 1 << 30, model)\n"
        "source = open_model(model, in_torch=False)\n"
        "d = load_native(source, NativeEngine(load_library(), 1), 'float16', kept=kept)\n"
        "[t.join() for t in threading.enumerate() if t.name == 'packed weights']\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print(Path('/proc/self/smaps').read_text())\n"
    )
    command = [sys.executable, "-c", code, str(smollm2_gguf), str(tmp_path / "kept")]
    with contextlib.ExitStack() as stack:
        for seed in ("0", "1", "2"):  # of the order of sets
            process = stack.enter_context(
                subprocess.Popen(
                    command,
                    env={**os.environ, "PYTHONHASHSEED": seed},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        smaps, _ = process.communicate("\n", timeout=60)
    (file,) = kept_files(tmp_path / "kept")
    found = dict.fromkeys(("Rss", "Shared_Clean", "Private_Dirty"), 0)
    of_file = False
    for line in smaps.splitlines():
        name, _, rest = line.partition(":")
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            of_file = line.endswith(str(file.path))
        elif of_file and name in found:
            found[name] += 1024 * int(rest.split()[0])
    assert found["Rss"] >= 0.99 * file.num_bytes
    assert found["Shared_Clean"] >= 0.95 * file.num_bytes
    assert found["Private_Dirty"] < 0.02 * file.num_bytes

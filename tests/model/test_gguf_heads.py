"""A GGUF file's block behind the model's layers is the head that a checkpoint drafts with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from support.engine.draft_answers import load, requests_of, run
from support.engine.drafting import draft_always
from support.gguf.head_files import ARCHITECTURES, write_file_with_head

from appliance.errors import ConfigError
from appliance.kernels.weights.weight import dense
from appliance.model.draft_head import find_head, open_head
from appliance.model.source import open_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    write_file_with_head(request.param, folder)
    return folder


def test_each_tensor_is_the_checkpoints(folder: Path) -> None:
    theirs = find_head(open_model(folder / "original"), in_torch=True)
    ours = find_head(open_model(folder / "model.gguf"))
    assert theirs is not None
    assert ours is not None
    assert ours.join == theirs.join
    assert ours.chains_normed == theirs.chains_normed
    slots = theirs.slots()
    assert [slot.name for slot in ours.slots()] == [slot.name for slot in slots]
    for slot in slots:
        found, expected = (
            dense(head.source.weights.load(slot.name), torch.float32) for head in (ours, theirs)
        )
        torch.testing.assert_close(found, expected, atol=3e-7, rtol=0, msg=slot.name)


def test_a_file_of_its_own_beside_the_model_is_found(folder: Path, tmp_path: Path) -> None:
    """As the converter cuts a model in two with `--no-mtp` and `--mtp`."""
    whole = GGUFReader(folder / "model.gguf")
    architecture = whole.fields["general.architecture"].contents()
    blocks = whole.fields[f"{architecture}.block_count"].contents()
    behind = f"blk.{blocks - 1}."
    shared = ("token_embd.weight", "output.weight", "output_norm.weight")
    model, head = tmp_path / "model.gguf", tmp_path / "mtp-model.gguf"
    for path in (model, head):
        writer: Any = GGUFWriter(path, architecture)
        for key, field in whole.fields.items():
            value = field.contents()
            if path == model and key.endswith("nextn_predict_layers"):
                continue
            if path == model and key == f"{architecture}.block_count":
                value -= 1
            if not key.startswith("GGUF.") and key != "general.architecture":
                inner = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(key, value, field.types[0], sub_type=inner)
        for tensor in whole.tensors:
            is_of_head = tensor.name.startswith(behind)
            if tensor.name in shared or is_of_head == (path == head):
                writer.add_tensor(tensor.name, tensor.data.astype("float32"))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    theirs, ours = open_head(open_model(folder / "model.gguf")), open_head(open_model(model))
    for slot in theirs.slots():
        found, expected = (
            dense(one.source.weights.load(slot.name), "float32") for one in (ours, theirs)
        )
        assert np.array_equal(np.asarray(found), np.asarray(expected)), slot.name
    head.unlink()
    with pytest.raises(ConfigError, match="brings no head"):
        open_head(open_model(model))


def test_its_drafts_change_no_answer_and_some_are_right(folder: Path) -> None:
    requests = [one for one in requests_of(512) if one.request_id != "beams"]
    expected, pieces = run(load(folder / "model.gguf", speculate="off"), requests)
    engine = load(folder / "model.gguf", speculate="mtp")
    draft_always(engine)
    answers, fewer = run(engine, requests)
    assert answers == expected
    assert fewer < 0.8 * pieces, "drafts were accepted"

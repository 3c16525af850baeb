"""A GGUF file's block behind the model's layers is the head that a checkpoint drafts with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from support.engine.draft_answers import load, requests_of, run
from support.engine.drafting import draft_always
from support.gguf.head_files import ARCHITECTURES, write_apart, write_file_with_head

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
    model, head = tmp_path / "model.gguf", tmp_path / "mtp-model.gguf"
    write_apart(folder / "model.gguf", model, head)
    theirs, ours = open_head(open_model(folder / "model.gguf")), open_head(open_model(model))
    for slot in theirs.slots():
        found, expected = (
            dense(one.source.weights.load(slot.name), "float32") for one in (ours, theirs)
        )
        assert np.array_equal(np.asarray(found), np.asarray(expected)), slot.name
    other = tmp_path / "snapshots" / "a" / "Q8_0" / "model.gguf"
    other.parent.mkdir(parents=True)
    model.rename(other)
    with pytest.raises(ConfigError, match="brings no head"):
        open_head(open_model(other))
    head.rename(other.parents[1] / head.name)
    assert [one.name for one in open_head(open_model(other)).slots()] == [
        one.name for one in theirs.slots()
    ]
    other.rename(model)
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

"""A checkpoint's recommendations are checked before they become defaults."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.model_files.sampling_defaults import (
    NOTHING_RECOMMENDED,
    RANGES,
    SamplingDefaults,
    choose_defaults,
)

QWEN = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "repetition_penalty": 1.1,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "max_new_tokens": 2048,
    "transformers_version": "4.37.0",
}


def test_a_whole_file_gives_what_shapes_a_choice_and_nothing_else() -> None:
    found = SamplingDefaults.read(QWEN, "generation_config.json")
    assert found.values == {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "repetition_penalty": 1.1,
    }
    assert str(found) == "temperature 0.7, top_p 0.8, top_k 20, repetition_penalty 1.1"
    assert found.source == "generation_config.json"
    SamplingParams(**found.values)  # type: ignore[arg-type]


def test_a_file_that_says_nothing_of_sampling_recommends_nothing() -> None:
    found = SamplingDefaults.read({"eos_token_id": 2, "temperature": None}, "a file")
    assert not found
    assert found == NOTHING_RECOMMENDED


def test_sampling_that_is_off_means_the_likeliest_token() -> None:
    written = {"do_sample": False, "temperature": 0.9, "top_p": 0.5, "repetition_penalty": 1.2}
    found = SamplingDefaults.read(written, "a file")
    assert found.values == {"temperature": 0.0, "repetition_penalty": 1.2}


def test_32_bit_floats_are_read_as_they_were_meant() -> None:
    found = SamplingDefaults.read({"top_p": 0.949999988079071, "min_p": 0.05000000074505806}, "")
    assert found.values == {"top_p": 0.95, "min_p": 0.05}


@pytest.mark.parametrize(("written", "read"), [(-1, 0), (0, 0), (64.0, 64)])
def test_top_k_is_a_whole_number_and_may_mean_all(written: float, read: int) -> None:
    value = SamplingDefaults.read({"top_k": written}, "").values["top_k"]
    assert (value, type(value)) == (read, int)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.5),
        ("temperature", "0.7"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 3.5),
        ("top_k", 2**40),
        ("min_p", [0.1]),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("inf")),
    ],
)
def test_what_cannot_be_used_is_left_out_and_said(
    name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    found = SamplingDefaults.read({name: value, "min_p" if name != "min_p" else "top_p": 0.5}, "x")
    assert name not in found.values
    assert len(found.values) == 1
    assert f"x recommends {name}" in caplog.text


@pytest.mark.parametrize("name", RANGES)
def test_what_is_accepted_here_the_engine_accepts(name: str) -> None:
    for edge in RANGES[name]:
        found = SamplingDefaults.read({name: edge}, "")
        assert getattr(SamplingParams(**found.values), name) == edge  # type: ignore[arg-type]


def test_the_checkpoint_comes_before_what_is_known_of_it_and_the_setting_before_both() -> None:
    own, known = SamplingDefaults({"top_p": 0.5}, "own"), SamplingDefaults({"top_k": 5}, "known")
    assert choose_defaults("auto", own, known) is own
    assert choose_defaults("auto", NOTHING_RECOMMENDED, known) is known
    assert not choose_defaults("off", own, known)

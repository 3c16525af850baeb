from __future__ import annotations

from dataclasses import replace

import pytest
from support.quant.quality_cards import make_card, make_comparison

from appliance.errors import ConfigError
from appliance.quant.quality.card import Figure
from appliance.quant.quality.min_quality import Action, Condition, judge, parse_min_quality


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.1", [("kld", 0.1, Action.REFUSE)]),
        ("kld<=0.1", [("kld", 0.1, Action.REFUSE)]),
        (" KLD <= 1e-2 ", [("kld", 0.01, Action.REFUSE)]),
        ("same-top>=90%", [("same-top", 90, Action.REFUSE)]),
        (
            "warn:kld<=0.05, refuse:kld<=.2,warn:ppl-ratio<=1.1",
            [
                ("kld", 0.05, Action.WARN),
                ("kld", 0.2, Action.REFUSE),
                ("ppl-ratio", 1.1, Action.WARN),
            ],
        ),
        ("warn:0.3", [("kld", 0.3, Action.WARN)]),
        ("kld-p99<=2,kld-max<=9", [("kld-p99", 2, Action.REFUSE), ("kld-max", 9, Action.REFUSE)]),
    ],
)
def test_conditions_are_read(text: str, expected: list[tuple[str, float, Action]]) -> None:
    assert parse_min_quality(text) == tuple(Condition(*condition) for condition in expected)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is no condition"),
        ("kld", "is no condition"),
        ("kld<=0.1,", "is no condition"),
        ("kld<0.1", "is no condition"),
        ("bits<=5", "known are kld, kld-p99"),
        ("kld>=0.1", "kld goes with <="),
        ("same-top<=90", "same-top goes with >="),
        ("panic:kld<=0.1", "neither warn nor refuse"),
        ("kld<=0.1.2", "is no number"),
    ],
)
def test_what_is_no_condition_is_one_line(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_min_quality(text)


def test_a_limit_may_be_reached_but_not_passed() -> None:
    card = make_card(kld=0.1, same_top=90.0)
    assert judge(parse_min_quality("0.1, same-top>=90"), card, "m", is_quantized=True) == []
    (verdict,) = judge(parse_min_quality("kld<=0.0999"), card, "m", is_quantized=True)
    assert verdict.action is Action.REFUSE
    assert verdict.reason == "m has kld 0.1, asked for was kld<=0.0999"


def test_one_condition_may_warn_and_another_refuse() -> None:
    verdicts = judge(
        parse_min_quality("warn:kld<=0.05,kld<=0.2,same-top>=99"),
        make_card(kld=0.1, same_top=90.0),
        "m",
        is_quantized=True,
    )
    assert [verdict.action for verdict in verdicts] == [Action.WARN, Action.REFUSE]


def test_without_a_card_nothing_can_be_said_for_the_model() -> None:
    (verdict,) = judge(parse_min_quality("warn:kld<=1"), None, "m", is_quantized=True)
    assert verdict.action is Action.WARN
    assert "appliance evaluate MODEL --against BASE" in verdict.reason
    (verdict,) = judge(parse_min_quality("kld<=1"), None, "m", is_quantized=True)
    assert verdict.action is Action.REFUSE
    assert judge(parse_min_quality("kld<=1"), None, "m", is_quantized=False) == []
    lone = replace(make_card(), comparison=None, perplexity=Figure(3.0, 0.1))
    (verdict,) = judge(parse_min_quality("kld<=1"), lone, "m", is_quantized=True)
    assert "a card without a base" in verdict.reason


def test_prompts_in_int8_must_meet_the_conditions_too() -> None:
    conditions = parse_min_quality("warn:kld<=0.002,kld<=0.3")
    card = make_card(kld=0.001)
    assert judge(conditions, card, "m", is_quantized=True) == []
    (verdict,) = judge(conditions, card, "m", is_quantized=True, prompt_int8=True)
    assert verdict.action is Action.REFUSE
    assert "a card without prompts in int8" in verdict.reason
    rounded = replace(card, prompt_int8=make_comparison(kld=0.003))
    (verdict,) = judge(conditions, rounded, "m", is_quantized=True, prompt_int8=True)
    assert verdict.action is Action.WARN
    assert verdict.reason == "m with prompts in int8 has kld 0.003, asked for was kld<=0.002"
    assert judge(conditions, rounded, "m", is_quantized=True) == []

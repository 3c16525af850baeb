"""Settings that are absent, null or changed mean what transformers' classes say."""

from __future__ import annotations

import json

import class_tables

from appliance.model.families.registry import FAMILIES


def test_the_table_is_what_the_installed_classes_say() -> None:
    assert class_tables.TABLE.read_text() == class_tables.written(class_tables.make())


def test_every_family_is_in_the_table() -> None:
    known = json.loads(class_tables.TABLE.read_text())["classes"]
    without_class = {"internlm2"}  # its maker's code lies beside the weights
    assert {family.model_type for family in FAMILIES} - without_class <= known.keys()

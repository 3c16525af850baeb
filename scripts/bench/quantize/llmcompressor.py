"""Quantize a model folder with llm-compressor, in the Python of its own environment.

    PEER_PYTHON scripts/bench/quantize/llmcompressor.py MODEL ROWS.json OUT gptq|awq sym|asym

Prints its CPU seconds as JSON, from the loaded model to the changed one, without saving.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from transformers import AutoModelForCausalLM

GROUP_SIZE = 64


def main() -> None:
    model_path, rows_path, out, method, symmetry = sys.argv[1:]
    with open(rows_path) as file:
        rows = json.load(file)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    weights = QuantizationArgs(
        num_bits=4,
        type="int",
        symmetric=symmetry == "sym",
        strategy="group",
        group_size=GROUP_SIZE,
        actorder="static" if method == "gptq" else None,
    )
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    if method == "gptq":
        recipe = [GPTQModifier(config_groups=groups, ignore=["lm_head"])]
    else:
        rounding = QuantizationModifier(config_groups=groups, ignore=["lm_head"])
        recipe = [AWQModifier(), rounding]
    dataset = Dataset.from_list(
        [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
    )
    if not torch.accelerator.is_available():  # its AWQ pins activations, which then is an error
        torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    started = time.process_time()
    oneshot(
        model=model,
        dataset=dataset,
        recipe=recipe,
        max_seq_length=len(rows[0]),
        num_calibration_samples=len(rows),
        shuffle_calibration_samples=False,
    )
    seconds = time.process_time() - started
    model.save_pretrained(out, save_compressed=True)
    sys.stdout.write("\n" + json.dumps({"cpu_seconds": round(seconds, 1)}) + "\n")


if __name__ == "__main__":
    main()

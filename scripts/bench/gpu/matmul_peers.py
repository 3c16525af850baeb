"""Matmuls of peers, on weights of the same shape; absent packages raise ImportError."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from bench.gpu.matmul import Problem
    from bench.gpu.timing import Bench, Call


def bf16_calls(bench: Bench, problem: Problem, nbytes: int) -> list[Call]:
    """Return products of bf16 matrices by torch: cuBLAS on a GPU."""
    x = problem.x()
    shape = (problem.out_features, problem.in_features)
    weights = [
        torch.randn(shape, device=bench.device, dtype=bench.dtype)
        for _ in range(bench.copies(nbytes))
    ]
    return [partial(torch.nn.functional.linear, x, weight) for weight in weights]


def int4_calls(bench: Bench, problem: Problem, group: int, nbytes: int) -> list[Call]:
    """Return torch's int4 products (tinygemm): asymmetric, bf16 scales and zeros."""
    x = problem.x()
    calls: list[Call] = []
    rows, columns = problem.out_features, problem.in_features
    for _ in range(bench.copies(nbytes)):
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=bench.device)
        packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
        scales = torch.rand((columns // group, rows, 2), device=bench.device).bfloat16()
        calls.append(
            partial(torch.ops.aten._weight_int4pack_mm, x, packed, group, scales / columns)
        )
    return calls


def fp8_calls(bench: Bench, problem: Problem) -> list[Call]:
    """Return torch's FP8 products (cuBLASLt), a scale per row of activations and per output."""
    fp8 = torch.float8_e4m3fn
    x = problem.x()
    row_scale = x.abs().amax(1, keepdim=True).float() / 448
    x8 = (x / row_scale).to(fp8)
    column_scale = torch.rand((1, problem.out_features), device=bench.device) + 0.5
    calls: list[Call] = []
    for _ in range(bench.copies(problem.in_features * problem.out_features)):
        shape = (problem.out_features, problem.in_features)
        weight = torch.randn(shape, device=bench.device).to(fp8)
        calls.append(
            partial(
                torch._scaled_mm,
                x8,
                weight.T,
                scale_a=row_scale,
                scale_b=column_scale,
                out_dtype=torch.bfloat16,
            )
        )
    return calls


def gemlite_calls(bench: Bench, problem: Problem, group: int, nbytes: int) -> list[Call]:
    """Return GemLite's linear with 4-bit codes, tuned by itself for this shape."""
    from gemlite import DType, GemLiteLinear

    x = problem.x()
    rows, columns = problem.out_features, problem.in_features
    calls: list[Call] = []
    for _ in range(bench.copies(nbytes)):
        linear = GemLiteLinear(
            4,
            group_size=group,
            in_features=columns,
            out_features=rows,
            input_dtype=DType.BF16,
            output_dtype=DType.BF16,
        )
        codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=bench.device)
        scales = torch.rand((rows, columns // group), device=bench.device).bfloat16() / columns
        zeros = torch.full_like(scales, 8)
        linear.pack(codes, scales, zeros, None)
        calls.append(partial(linear, x))
    return calls


def humming_calls(bench: Bench, problem: Problem, group: int, nbytes: int) -> list[Call]:
    """Return Humming's linear with 4-bit codes."""
    from humming import dtypes
    from humming.layer import HummingLayer
    from humming.utils.test import generate_random_weight

    x = problem.x()
    calls: list[Call] = []
    for _ in range(bench.copies(nbytes)):
        layer = HummingLayer(
            shape_n=problem.out_features,
            shape_k=problem.in_features,
            a_dtype=dtypes.bfloat16,
            b_dtype=dtypes.uint4,
            c_dtype=dtypes.bfloat16,
            bs_dtype=dtypes.bfloat16,
            weight_scale_group_size=group,
        ).cuda()
        _, _, weight, scale, _, _ = generate_random_weight(
            n=problem.out_features,
            k=problem.in_features,
            group_size=group,
            dtype=dtypes.uint4,
            scale_dtype=dtypes.bfloat16,
        )
        layer.load_weight(weight=weight, weight_scale=scale)
        layer.finish_load()
        calls.append(partial(layer, inputs=x))
    return calls

"""Replaces torch's products on the CPU, in all threads: by unlike ones, or by exact ones.

torch and the libraries under it choose a product's kernel, and with it the order of its sums, by
the shapes and the addresses of the operands; on some processors every choice has its own last bits.
`unlike_products` imitates such a processor on any machine: a test of closeness has to pass under
it. `exact_products` rounds once, so that no order shows: under it a test of what an engine does
around the products may ask for equal tokens.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

PRODUCTS = (
    "mm", "mm.out", "bmm", "bmm.out", "dot", "mv",
    "addmm", "addmm.out", "addmm_", "addmv", "addmv.out", "addmv_",
    "baddbmm", "baddbmm.out", "baddbmm_",
    "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip
CACHE_LINE = 64  # bytes; a kernel may depend on an operand's address within so many
ONE_IN = 64  # 16-bit results, of which one is rounded another way: far more than in truth
PATTERN = 1 << 16  # elements after which the pattern of unlike bits repeats
WIDE_AT_ONCE = 1 << 20  # elements of a matrix in float64: of larger ones the memory is fresh

Product = Callable[..., Any]


@contextlib.contextmanager
def unlike_products() -> Iterator[None]:
    """Make a product's last bits depend on the shapes and the addresses of its operands.

    float64 is left out: there sums of products of narrower numbers are exact or nearly so.
    """
    with _replaced(_unlike):
        yield


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Compute products in float64 and round once."""
    with _replaced(_exact):
        yield


@contextlib.contextmanager
def _replaced(replacement: Callable[[Product], Product]) -> Iterator[None]:
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # warnings that kernels are replaced
        for name in PRODUCTS:
            kernel = get_kernel(f"aten::{name}", "CPU").call_boxed
            library.impl(name, replacement(kernel), "CPU", with_keyset=True)
    try:
        yield
    finally:
        library._destroy()


def _unlike(kernel: Product) -> Product:
    def product(keys: Any, *args: Any, **kwargs: Any) -> Any:
        operands = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        places = [operand.data_ptr() % CACHE_LINE for operand in operands]
        shapes = [size for operand in operands for size in operand.shape]
        found = kernel(keys, *args, **kwargs)
        result = found[0] if isinstance(found, tuple) else found
        if result.is_floating_point() and result.dtype != torch.float64:
            _nudge(result, hash((*shapes, *places)) % PATTERN)
        return found

    return product


def _nudge(result: Tensor, start: int) -> None:
    """Move results to the next number up or down; keep zeros and infinities."""
    factors = _factors(result.dtype).roll(-start)
    count = result.numel()
    factors = factors.repeat(-(-count // PATTERN))[:count].view(result.shape)
    if result.dtype == torch.float32:  # zeros at the end: exact in any order
        factors = factors.where(result.view(torch.int32) & 0xFF != 0, 1)
    result.mul_(factors)


@cache
def _factors(dtype: torch.dtype) -> Tensor:
    """The factors of results, (PATTERN,): one, or a step of the dtype more or less."""
    random = torch.Generator().manual_seed(0)
    one_in = ONE_IN if dtype.itemsize == 2 else 1
    moved = torch.randint(0, one_in, (PATTERN,), generator=random) == 0
    step = 0.75 * torch.finfo(dtype).eps * torch.randn(PATTERN, generator=random).sign()
    return (1 + moved * step.double()).to(torch.float32 if dtype.itemsize == 2 else dtype)


def _exact(kernel: Product) -> Product:
    def product(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_large(args):
            rows, matrix = args
            found = []
            for part in matrix.split(max(1, WIDE_AT_ONCE // matrix.shape[0]), dim=1):
                out = {name: rows.new_empty(len(rows), part.shape[1]) for name in kwargs}
                found.append(product(keys, rows, part, **out))
            return torch.cat(found, dim=1, **kwargs)
        dtype = next(value.dtype for value in args if isinstance(value, Tensor))
        wide = [_widened(value) for value in args]
        named = {name: _widened(value) for name, value in kwargs.items()}
        found = kernel(keys, *wide, **named)
        result = found[0] if isinstance(found, tuple) else found
        for given, widened in zip((*args, *kwargs.values()), (*wide, *named.values()), strict=True):
            if widened is result:  # computed in place, or into `out`
                return given.copy_(result)
        narrow = result.to(dtype)
        return (narrow, *found[1:]) if isinstance(found, tuple) else narrow

    return product


def _is_large(args: tuple[Any, ...]) -> bool:
    """Whether a product is that of two matrices of which the second is a real model's head."""
    return len(args) == 2 and args[1].dim() == 2 and args[1].numel() > WIDE_AT_ONCE


def _widened(value: Any) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if is_float else value

"""Launches kernels by what they were compiled to.

Triton's own launch binds arguments by name, compares every global that a kernel reads, and writes
its specialization down as text, each time. That is needed once for each specialization; after that
the compiled kernel is called directly. Triton's interpreter compiles none, and is asked each time.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.runtime.jit import JITFunction

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor

    Grid = tuple[int, ...]  # programs in one to three dimensions
    Arguments = tuple[
        Any, ...
    ]  # tensors, numbers and None, in the order of the kernel's parameters

ALIGNMENT = 16  # bytes; Triton compiles for pointers and integers that are multiples of it
LIMIT = 1 << 31  # of integers that are passed in 32 bits
_HERE = nullcontext()
_RUNTIME = triton.knobs.runtime


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make a tensor's GPU the current one, if it is on one and that is not current yet."""
    index = tensor.get_device()
    if index < 0 or index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(index)


def stream_of(device: torch.device) -> int:
    """Return the current stream of a GPU; 0 of the CPU."""
    is_cuda = device.type == "cuda"
    return triton.runtime.driver.active.get_current_stream(device.index) if is_cuda else 0


class Specialization:
    """A kernel with its options, for arguments of which only what is in no kind changes.

    Args:
        kernel: of Triton.
        options: its compile-time arguments, the last of its parameters, and compiler options.
    """

    __slots__ = ("_compiled", "_kernel", "_options")

    def __init__(self, kernel: Any, options: Mapping[str, Any]) -> None:
        self._kernel = kernel
        self._options = dict(options)
        self._compiled: dict[Hashable, tuple[Any, Any, Any, tuple[None, ...]]] = {}

    def launch(self, grid: Grid, arguments: Arguments) -> None:
        """Enqueue a launch in the current stream of the current device.

        Args:
            grid: programs.
            arguments: of the kinds of the first call, see `kinds_of`.
        """
        if not isinstance(self._kernel, JITFunction):  # Triton interprets it
            self._kernel[grid](*arguments, **self._options)
            return
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        found = self._compiled.get(device)
        if found is None or _are_watched():
            compiled = self._kernel[grid](*arguments, **self._options)
            if compiled is not None:  # not only recorded
                fixed = self._kernel.params[len(arguments) :]
                assert all(parameter.is_constexpr for parameter in fixed), self._kernel
                place = compiled.run, compiled.function, compiled.packed_metadata
                self._compiled[device] = *place, (None,) * len(fixed)
            return
        run, function, packed, constants = found
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.get_current_stream(device)
        run(x, y, z, stream, function, packed, None, None, None, *arguments, *constants)


class Launcher:
    """Launches a kernel; its specializations are told apart by options and kinds of arguments.

    Args:
        kernel: of Triton.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._found: dict[Hashable, Specialization] = {}
        self._specialized: tuple[bool, ...] = ()
        if isinstance(kernel, JITFunction):
            self._specialized = tuple(not each.do_not_specialize for each in kernel.params)

    def __call__(self, grid: Grid, arguments: Arguments, options: Mapping[str, Any]) -> None:
        """Enqueue a launch in the current stream of the current device.

        Args:
            grid: programs in one to three dimensions.
            arguments: tensors, numbers and None, in the order of the kernel's parameters.
            options: its compile-time arguments, the last of its parameters, and compiler options.
        """
        kinds = kinds_of(arguments, self._specialized)
        key = (*kinds, *options, *options.values())
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self.specialized(options)
        found.launch(grid, arguments)

    def specialized(self, options: Mapping[str, Any]) -> Specialization:
        """Return a specialization for a caller whose arguments' kinds never change."""
        return Specialization(self._kernel, options)


def kinds_of(arguments: Arguments, specialized: tuple[bool, ...]) -> list[Hashable]:
    """Return all of the arguments for which Triton may compile another kernel.

    That is a tensor's dtype and where its pointer lies between multiples of 16, and of an integer
    whether it is 1, lies between multiples of 16, and fits 32 bits.

    Args:
        arguments: tensors, numbers and None.
        specialized: for each, whether an integer's value counts; empty where nothing is compiled.
    """
    kinds: list[Hashable] = []
    for argument, by_value in zip(arguments, specialized, strict=False):
        kind: type = type(argument)
        if kind is int:
            low = argument % ALIGNMENT if by_value and argument != 1 else -1
            kinds.append(low if -LIMIT <= argument < LIMIT else (low,))
        elif argument is None or kind is float or kind is bool:
            kinds.append(kind)
        else:
            low = argument.data_ptr() % ALIGNMENT
            kinds.append((argument.dtype, low) if low else argument.dtype)
    return kinds


def _are_watched() -> bool:
    """Return True if somebody wants to be told of launches, which Triton's own launch does."""
    enter, leave = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))

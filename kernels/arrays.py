"""Arrays on the CPU without torch: NumPy's, with the methods of torch's tensors that we use.

The CPU library only reads memory, so where it serves nothing needs torch, whose import takes a
second and 200 MB. Code that reads weights or stages steps calls only methods that both kinds have,
and makes arrays with the functions below, of the kind of a given one. Types are given by name, or
as the dtype of either library. Imports nothing of ours.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    # Output rows of a weight: a range, or indices.
    Rows: TypeAlias = slice | Tensor | NDArray[np.int64]

_OF_ML = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
_NUMPY = {name: np.dtype(getattr(ml_dtypes, name)) for name in _OF_ML} | {
    name: np.dtype(name)
    for name in (
        "float64", "float32", "float16", "int64", "int32", "int16", "int8",
        "uint8", "uint16", "uint32", "uint64", "bool",
    )
}  # fmt: skip
_RAW = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16)}  # how torch reads types of ml_dtypes


@cache
def dtype_name(dtype: Any) -> str:
    """Return the name of an element type of either library, such as "bfloat16"."""
    name = str(dtype).removeprefix("torch.")
    return name if name in _NUMPY else str(np.dtype(dtype).name)


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Return NumPy's element type of a name."""
    found: np.dtype[Any] = _NUMPY[dtype_name(dtype)]
    return found


class HostArray(np.ndarray[Any, np.dtype[Any]]):
    """An array in host memory, with methods that do as torch's of the same name."""

    is_cuda = False

    def to(self, to: Any) -> Any:
        """Return it in an element type, or as a tensor on one of torch's devices."""
        if type(to).__module__ == "torch":
            import torch

            if isinstance(to, torch.device):
                return self.tensor().to(to)
        wanted = numpy_dtype(to)
        if wanted == self.dtype:
            return self
        with np.errstate(all="ignore"):  # as torch: too large values become infinite
            return self.astype(wanted)

    def tensor(self) -> Any:
        """Return torch's view of the same memory, which must be writable.

        It is no inference tensor even in a caller's inference mode, as weights outlive the call
        that loads them.
        """
        import torch

        plain = self.view(np.ndarray)
        name = self.dtype.name
        with torch.inference_mode(mode=False):
            if name not in _OF_ML:
                return torch.from_numpy(plain)
            return torch.from_numpy(plain.view(_RAW[self.itemsize])).view(getattr(torch, name))

    def float(self) -> Any:
        return self.to("float32")

    def half(self) -> Any:
        return self.to("float16")

    def long(self) -> Any:
        return self.to("int64")

    def int(self) -> Any:
        return self.to("int32")

    def numpy(self) -> np.ndarray[Any, Any]:
        return super().view(np.ndarray)

    def detach(self) -> Any:
        return self

    def clone(self) -> Any:
        return self.copy()

    def contiguous(self) -> Any:
        return of_numpy(np.ascontiguousarray(self)) if self.ndim else self

    def is_contiguous(self) -> bool:
        return self.flags.c_contiguous

    def data_ptr(self) -> Any:
        return self.__array_interface__["data"][0]

    def dim(self) -> Any:
        return self.ndim

    def numel(self) -> Any:
        return self.size

    def view(self, *to: Any) -> Any:  # type: ignore[override]
        """Return the same memory in another shape, or element type."""
        first = to[0] if to else None
        if isinstance(first, int | np.integer) or (isinstance(first, tuple) and len(to) == 1):
            assert self.flags.c_contiguous, "a view of elements that do not lie side by side"
            return self.reshape(*to)
        if type(first).__module__ == "torch" or isinstance(first, str):
            return super().view(numpy_dtype(first))
        return super().view(*to)

    def flatten(self, first: Any = 0, last: Any = -1) -> Any:
        first, last = first % self.ndim, last % self.ndim
        shape = self.shape
        return self.reshape(*shape[:first], -1, *shape[last + 1 :])

    def unflatten(self, dim: Any, sizes: tuple[Any, ...]) -> Any:
        dim %= self.ndim
        return self.reshape(*self.shape[:dim], *sizes, *self.shape[dim + 1 :])

    def unsqueeze(self, dim: Any) -> Any:
        return np.expand_dims(self, dim)

    def unbind(self, dim: Any = 0) -> Any:
        return tuple(np.moveaxis(self, dim, 0))

    def expand(self, *sizes: Any) -> Any:
        shape = sizes[0] if isinstance(sizes[0], tuple) else sizes
        return of_numpy(np.broadcast_to(self.numpy(), shape))

    def split(self, rows: Any) -> Any:
        return tuple(self[start : start + rows] for start in range(0, len(self), rows))

    def isfinite(self) -> Any:
        return np.isfinite(self)

    def amax(self, dim: Any) -> Any:
        return self.max(axis=dim)

    def amin(self, dim: Any) -> Any:
        return self.min(axis=dim)

    def clamp(self, min: Any = None, max: Any = None) -> Any:
        return self.clip(min, max)

    def clamp_(self, low: Any, high: Any) -> Any:
        return self.clip(low, high, out=self)

    def index_select(self, dim: Any, index: Any) -> Any:
        return self.take(index, axis=dim)

    def gather(self, dim: Any, index: Any) -> Any:
        return np.take_along_axis(self, index, axis=dim)

    def copy_(self, source: Any) -> None:
        self[...] = source

    def index_put_(self, index: Any, values: Any, accumulate: bool = False) -> None:
        assert accumulate, "assign instead"
        np.add.at(self.numpy(), tuple(np.asarray(each) for each in index), np.asarray(values))


def of_numpy(array: Any) -> Any:
    """View NumPy's array as a `HostArray`."""
    return np.asarray(array).view(HostArray)


def in_torch(value: Any) -> Any:
    """Return an array, or a weight of arrays, as torch's on the CPU, in the same memory."""
    import torch

    return value if isinstance(value, torch.Tensor) else value.to(torch.device("cpu"))


def is_array(value: object) -> TypeGuard[Tensor]:
    """Return True for an array of either kind, False for a packed weight."""
    if isinstance(value, np.ndarray):
        return True
    return type(value).__module__.startswith("torch") and hasattr(value, "data_ptr")


def like(model: Any, array: np.ndarray[Any, Any]) -> Any:
    """Return NumPy's array as the kind of `model`, on its device."""
    if isinstance(model, np.ndarray):
        return of_numpy(array)
    return of_numpy(array).tensor().to(model.device)


def empty(shape: Any, dtype: Any, model: Any) -> Any:
    """Return uninitialized elements, of the kind and on the device of `model`."""
    if isinstance(model, np.ndarray):
        return np.empty(shape, dtype=numpy_dtype(dtype)).view(HostArray)
    return model.new_empty(shape, dtype=_torch_dtype(dtype))


def cast(array: Any, dtype: Any) -> Any:
    """Return an array in an element type."""
    return array.to(dtype) if isinstance(array, HostArray) else array.to(_torch_dtype(dtype))


def log(array: Any) -> Any:
    """Return natural logarithms, computed in float64: the same on every machine."""
    wide = cast(array, "float64")
    return cast(np.log(wide) if isinstance(array, HostArray) else wide.log(), array.dtype)


def exp(array: Any) -> Any:
    """Return powers of e, computed in float64."""
    wide = cast(array, "float64")
    return cast(np.exp(wide) if isinstance(array, HostArray) else wide.exp(), array.dtype)


def total(array: Any) -> float:
    """Return the sum in float32; infinite or NaN if an element is."""
    if isinstance(array, HostArray):
        with np.errstate(all="ignore"):
            return float(array.numpy().sum(dtype=np.float32))
    return float(array.sum(dtype=_torch_dtype("float32")))


def log_softmax(array: Any) -> Any:
    """Return log probabilities of each row of logits, (rows, columns) float32."""
    if not isinstance(array, HostArray):
        import torch

        return torch.log_softmax(array, dim=-1)
    with np.errstate(all="ignore"):
        values = array.numpy().astype(np.float64)
        values -= values.max(axis=-1, keepdims=True)
        values -= np.log(np.exp(values).sum(axis=-1, keepdims=True))
    return of_numpy(values.astype(np.float32))


def sum_of_rows(array: Any) -> Any:
    """Sum rows (rows, columns) into (columns,) float32."""
    if isinstance(array, HostArray):
        return of_numpy(array.numpy().sum(0, dtype=np.float64).astype(np.float32))
    return array.sum(0, dtype=_torch_dtype("float32"))


def at_least_zero(array: Any, out: Any) -> None:
    """Write an array to `out`, with 0 for negative elements."""
    if isinstance(array, HostArray):
        np.maximum(array, 0, out=out)
        return
    import torch

    torch.clamp(array, min=0, out=out)


def where(condition: Any, yes: Any, no: Any) -> Any:
    """Choose element by element; one of the two may be a number."""
    if isinstance(condition, HostArray):
        return of_numpy(np.where(condition, yes, no))
    import torch

    return torch.where(condition, yes, no)


def padded(array: Any, count: int) -> Any:
    """Append zeros along the last dimension."""
    if not count:
        return array
    zero = like(array, np.zeros((*array.shape[:-1], count), dtype=numpy_dtype(array.dtype)))
    return cat((array, zero), dim=-1)


def viewed(array: Any, dtype: Any) -> Any:
    """Return the same memory as elements of another type."""
    return array.view(dtype if isinstance(array, np.ndarray) else _torch_dtype(dtype))


def repeated(array: Any, times: int, dim: int) -> Any:
    """Repeat each element along a dimension."""
    if isinstance(array, HostArray):
        return np.repeat(array, times, axis=dim)
    return array.repeat_interleave(times, dim=dim)


def cat(parts: Sequence[Any], dim: int = 0) -> Any:
    """Join arrays of one kind along a dimension; the result is contiguous.

    One alone is returned itself if it is.
    """
    if isinstance(parts[0], np.ndarray):
        alone = np.ascontiguousarray(parts[0]) if len(parts) == 1 else None
        return of_numpy(np.concatenate(parts, axis=dim) if alone is None else alone)
    if len(parts) == 1:
        return parts[0].contiguous()
    import torch

    return torch.cat(list(parts), dim=dim)


def stack(parts: Sequence[Any], dim: int = 0) -> Any:
    """Join arrays of one kind along a new dimension."""
    if isinstance(parts[0], np.ndarray):
        return of_numpy(np.stack(parts, axis=dim))
    import torch

    return torch.stack(list(parts), dim=dim)


def equal(one: Any, two: Any) -> bool:
    """Return True if shapes and elements are the same."""
    if isinstance(one, np.ndarray):
        return np.array_equal(one, two)
    return tuple(one.shape) == tuple(two.shape) and bool((one == two).all())


def is_finite(array: Any) -> bool:
    """Return True if no element is NaN or infinite."""
    if isinstance(array, HostArray):
        return bool(np.isfinite(array).all())
    return bool(array.isfinite().all())


@cache
def _torch_dtype(dtype: Any) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, dtype_name(dtype))
    return found

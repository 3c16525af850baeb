"""Gives Triton's interpreter bfloat16 arithmetic, and products that know no order of summation.

A pytest plugin of the child that interprets kernels. Without it the bits of bfloat16 are taken for
integers; it covers casts, matrix products and elementwise arithmetic, while reductions stay wrong
(kernels reduce in float32). And numpy's products depend on where in a tile a row stands, which
those of a tensor core do not. Triton 3.6 makes a bound of a loop from an array of one number as
numpy 2.4 does not allow any more.

The rest saves time: Triton gives the language its interpreted functions again at every call from
one function to another, adds integers once more in 64 bits for an assertion that it does not make,
makes a table of numpy's types whenever it needs one of them, wraps the numbers of a shape anew for
every tensor and every type of one, compares equal shapes size by size, and asks at every operation
which type its result has: where both operands have that type, and of numbers that met one before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from math import copysign
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, InterpreterOptions, TensorHandle

NUMBERS = (int, float, bool)
DIVIDED = 3  # the place of the flag among those of `binary_op_type_checking_impl`
_CAST = InterpreterBuilder.cast_impl
_BINARY = InterpreterBuilder.binary_op
_UNARY = InterpreterBuilder.unary_op
_PATCH_TENSOR = interpreter._patch_lang_tensor
_PATCH_LANG = interpreter._patch_lang
_NUMPY_TYPE = interpreter._get_np_dtype
_BLOCK_TYPE = tl.block_type.__init__
_TENSOR = tl.tensor.__init__
_BROADCAST = TritonSemantic.broadcast_impl_value
_CHECK = TritonSemantic.binary_op_type_checking_impl
_NUMPY_TYPES: dict[str, Any] = {}
_SHAPES_OF_TYPES: dict[tuple[int, ...], tuple[Any, ...]] = {}  # also as numbers and in words
_SHAPES_OF_TENSORS: dict[tuple[int, ...], tuple[Any, Any]] = {}
_NUMBERS: dict[tuple[Any, ...], Any] = {}  # as tensors that nobody can write to


def widen(bits: np.ndarray) -> np.ndarray:
    """bfloat16 as uint16 -> float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(x: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 as uint16, to nearest, halves to even; NaN stays NaN."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def is_bf16(handle: TensorHandle) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16)


def create_dot(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: Any) -> Any:
    left, right = (widen(x.data) if is_bf16(x) else x.data for x in (a, b))
    product = left.astype(np.float64) @ right.astype(np.float64) + d.data
    return TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)


def cast_impl(self: Any, source: TensorHandle, target_type: Any) -> TensorHandle:
    target = target_type.scalar
    if is_bf16(source) == (target == tl.bfloat16):
        return _CAST(self, source, target_type)
    if is_bf16(source):
        return TensorHandle(widen(source.data).astype(numpy_type(target)), target)
    return TensorHandle(narrow(source.data), tl.bfloat16)


def binary_op(
    self: Any, left: TensorHandle, right: TensorHandle, op: Callable[..., Any]
) -> TensorHandle:
    if not is_bf16(left):
        return _BINARY(self, left, right, op)
    result = op(widen(left.data), widen(right.data))
    if result.dtype == bool:
        return TensorHandle(result, tl.int1)
    return TensorHandle(narrow(result), tl.bfloat16)


def unary_op(self: Any, x: TensorHandle, op: Callable[..., Any]) -> TensorHandle:
    if not is_bf16(x):
        return _UNARY(self, x, op)
    return TensorHandle(narrow(op(widen(x.data))), tl.bfloat16)


def numpy_type(type: Any) -> Any:
    """Of a scalar, or of the elements of a block."""
    scalar = type.scalar
    if scalar.name not in _NUMPY_TYPES:
        _NUMPY_TYPES[scalar.name] = _NUMPY_TYPE(scalar)
    return _NUMPY_TYPES[scalar.name]


def block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    if sizes not in _SHAPES_OF_TYPES:
        _BLOCK_TYPE(self, element_ty, shape)
        _SHAPES_OF_TYPES[sizes] = self.shape, self.numel, str(self.shape)
    self.element_ty = element_ty
    self.shape, self.numel, words = _SHAPES_OF_TYPES[sizes]
    self.name = f"<{words}, {element_ty}>"


def tensor(self: Any, handle: Any, type: Any) -> None:
    sizes = tuple(type.shape) if type.is_block() else ()
    if sizes not in _SHAPES_OF_TENSORS:
        _TENSOR(self, handle, type)
        _SHAPES_OF_TENSORS[sizes] = self.shape, self.numel
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _SHAPES_OF_TENSORS[sizes]


def broadcast(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
    if left.type.is_block() and right.type.is_block() and left.type.shape is right.type.shape:
        return left, right
    both: tuple[Any, Any] = _BROADCAST(self, left, right)
    return both


def check_operands(self: Any, left: Any, right: Any, *flags: bool) -> Any:
    """Give operands of an operation one type; flags as in Triton."""
    left_is_number, right_is_number = type(left) in NUMBERS, type(right) in NUMBERS
    if left_is_number != right_is_number:
        number, other = (left, right) if left_is_number else (right, left)
        sign = copysign(1.0, number)  # of zero as well
        key = number, sign, type(number), other.type.name, left_is_number, flags
        if key in _NUMBERS:
            return (_NUMBERS[key], other) if left_is_number else (other, _NUMBERS[key])
        both = _CHECK(self, left, right, *flags)
        found, same = both if left_is_number else both[::-1]
        if same is other:
            found.handle.data.flags.writeable = False
            _NUMBERS[key] = found
        return both
    is_divided = any(flags[DIVIDED:])  # halves make a float32 then
    plain = not (left_is_number or is_divided or left.type.scalar.is_ptr())
    if plain and left.type.name == right.type.name:
        return left, right
    return _CHECK(self, left, right, *flags)


def patch_tensor(tensor: type, scope: Any) -> None:
    _PATCH_TENSOR(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def patch_attribute(owner: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
    """Give a function of the language what interprets it, without asking whether it is given."""
    function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    def interpreted(*args: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return function(*args, **named)

    scope.set_attr(owner, name, interpreted)


@cache
def language_of(fn: Callable[..., Any]) -> set[ModuleType]:
    """The modules of Triton's language that a function sees."""
    return {value for value in fn.__globals__.values() if inspect.ismodule(value)} & {tl, tl.core}


def patch_lang(fn: Callable[..., Any]) -> Any:
    """Only where one of the modules that a function sees is as it is for the compiler."""
    if all(module.static_print is print for module in language_of(fn)):
        return interpreter._LangPatchScope()
    return _PATCH_LANG(fn)


interpreter.interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)
interpreter._get_np_dtype = numpy_type
tl.block_type.__init__ = block_type
tl.tensor.__init__ = tensor
TritonSemantic.broadcast_impl_value = broadcast
TritonSemantic.binary_op_type_checking_impl = check_operands
interpreter._patch_attr = patch_attribute
interpreter._patch_lang = patch_lang
interpreter._patch_lang_tensor = patch_tensor
InterpreterBuilder.create_dot = create_dot
InterpreterBuilder.cast_impl = cast_impl
InterpreterBuilder.binary_op = binary_op
InterpreterBuilder.unary_op = unary_op

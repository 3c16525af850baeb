"""Lowers a kernel to Triton's own IR, in a twentieth of the time that compiling it takes.

That IR, with the options, is all that the rest of the compiler gets: while it is the same, so is
the machine code, whatever changed in the kernel's source.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from typing import TYPE_CHECKING, Any

import triton
from support.kernels.compiled_kernels.digest import reader_digest
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.kernels.compiled_kernels.signature import KernelSignature

WARP_SIZE = 32


def source_of(signature: KernelSignature) -> ASTSource:
    """Return a kernel as the compiler takes it."""
    function = getattr(importlib.import_module(signature.module), signature.function)
    names = function.arg_names
    unknown = set(names) ^ (signature.types.keys() | signature.constexprs.keys())
    assert not unknown, f"{signature.name}: {sorted(unknown)} stand on one side only"
    return ASTSource(
        function,
        signature={name: signature.types.get(name, "constexpr") for name in names},
        constexprs={
            (i,): signature.constexprs[name]
            for i, name in enumerate(names)
            if name in signature.constexprs
        },
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if name in signature.multiples_of_16
            or (signature.aligned and signature.types.get(name, "").startswith("*"))
        },
    )


def options_of(signature: KernelSignature) -> dict[str, int]:
    """Return what the compiler is told beside the kernel."""
    options: dict[str, int] = {
        "num_warps": signature.num_warps,
        "num_stages": signature.num_stages,
        "enable_fp_fusion": signature.fuses,
    }
    if signature.max_registers is not None:
        options["maxnreg"] = signature.max_registers
    return options


def target_of(capability: int) -> GPUTarget:
    return GPUTarget("cuda", capability, WARP_SIZE)


def lowered(signature: KernelSignature, capability: int) -> str:
    """Return the IR of a kernel for one compute capability (86 is 8.6), without source lines."""
    source = source_of(signature)
    backend = make_backend(target_of(capability))
    options = backend.parse_options(options_of(signature))
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(backend.target, options, functions, backend.get_module_map(), context)
    text: str = stages["ttir"](module, {}).str_nodebug()
    return text


def ir_digest(
    signature: KernelSignature, capability: int, readers: tuple[str, ...] = ("compile",)
) -> str:
    """Return the digest of a row of a table by what its kernel is lowered to.

    Args:
        signature: of the row.
        capability: of the row.
        readers: modules beside this one that read the machine code.
    """
    parts = {
        "ir": lowered(signature, capability),
        "options": options_of(signature),
        "capability": capability,
        "triton": triton.__version__,
        "readers": [reader_digest(reader) for reader in readers],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]

"""How the kernel that widens the CPU library's tiles is compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from support.kernels.compiled_kernels.signature import MOST_COMPILED, KernelSignature

from appliance.kernels.library_tiles.launch import WARPS, widen_constexprs

# Bits of a code, inputs of a group, whether codes index a table of values.
FORMS = {"int4 g32": (4, 32, False), "q6_k": (6, 16, False), "e2m1 g32": (4, 32, True)}


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    forms = list(FORMS.items())
    for name, (bits, group, names) in forms if capability == MOST_COMPILED else forms[:1]:
        types = {
            "out_ptr": "*bf16",
            "words_ptr": "*i32",
            "scale_ptr": "*fp32",
            "offset_ptr": "*fp32",
            "out_features": "i32",
            "in_features": "i32",
        }
        absent: dict[str, None] = {"order_ptr": None}
        if names:
            types["values_ptr"] = "*fp32"
        else:
            absent["values_ptr"] = None
        yield KernelSignature(
            name=f"library_tiles {name}",
            module="appliance.kernels.library_tiles.kernel",
            function="widen_kernel",
            types=types,
            constexprs={**widen_constexprs(bits, group), **absent},
            multiples_of_16=frozenset({"out_features", "in_features"}),
            num_warps=WARPS,
            num_stages=1,
        )

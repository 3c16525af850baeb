"""How the short convolution is compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from support.kernels.compiled_kernels.signature import MOST_COMPILED, KernelSignature

from appliance.kernels.short_conv.launch import WARPS, conv_constexprs

# Taps; whether there is a bias, before an activation, or gates.
SHAPES = {"nemotron_h taps 4": (4, True), "lfm2 taps 3": (3, False)}
GATES = ("before_ptr", "after_ptr")
STEPS = {"decode": 1, "prompt": 512, "decode fp16 states": 1, "prompt fp16 states": 512}
TYPES = {
    **{f"{name}_ptr": "*fp32" for name in ("out", "filters", "state")},
    "x_ptr": "*bf16",
    **{f"{name}_ptr": "*i64" for name in ("first", "lens", "slots")},
    "goes_on_ptr": "*i1",
    **dict.fromkeys(("first_stride", "x_stride", "state_stride", "width"), "i32"),
}


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    shapes = list(SHAPES.items())
    for name, (taps, has_bias) in shapes if capability == MOST_COMPILED else shapes[:1]:
        for step, longest in STEPS.items():
            missing = GATES if has_bias else ("bias_ptr",)
            gated = dict.fromkeys((*GATES, "out_ptr"), "*bf16")
            yield KernelSignature(
                name=f"short_conv {name} {step}",
                module="appliance.kernels.short_conv.kernel",
                function="short_conv_kernel",
                types=TYPES
                | ({"bias_ptr": "*fp32"} if has_bias else gated)
                | ({"state_ptr": "*fp16"} if step.endswith("fp16 states") else {}),
                constexprs={
                    **conv_constexprs(taps, longest, activates=has_bias),
                    **dict.fromkeys(missing),
                },
                multiples_of_16=frozenset({"x_stride", "state_stride", "width"}),
                num_warps=WARPS,
                num_stages=1,
            )

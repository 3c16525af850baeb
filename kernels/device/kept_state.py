"""The rounding of recurrent states that kernels write back to slots."""

import triton
import triton.language as tl


@triton.jit
def as_kept(b_state, state_ptr):
    """Round float32 to the type of the slots; what exceeds float16 becomes its largest number."""
    if state_ptr.dtype.element_ty == tl.float16:
        b_state = tl.maximum(b_state, -65504.0, propagate_nan=tl.PropagateNan.ALL)
        b_state = tl.minimum(b_state, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return b_state.to(state_ptr.dtype.element_ty)

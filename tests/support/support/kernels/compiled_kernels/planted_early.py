"""A kernel that starts early, with planted faults, to show that the gates find them."""

import triton
import triton.language as tl
from triton.language.extra import cuda

from appliance.kernels.device.dependent_launch import wait_for_previous


@triton.jit
def copy_kernel(out_ptr, x_ptr, FAULT: tl.constexpr, EARLY: tl.constexpr):
    b = tl.arange(0, 32)
    if FAULT == "loads":
        b_x = tl.load(x_ptr + b)
        wait_for_previous()
    elif FAULT == "adds":
        tl.atomic_add(out_ptr + b, b)
        wait_for_previous()
        b_x = tl.load(x_ptr + b)
    elif FAULT == "starts the next":
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
        b_x = tl.load(x_ptr + b)
    else:
        b_x = tl.load(x_ptr + b)
    tl.store(out_ptr + b, b_x)

"""Adds adapters to the outputs of linears: two thin matmuls, of each row by its own adapter."""

from appliance.kernels.adapters.reference import add_adapters, plan_adapters

__all__ = ["add_adapters", "plan_adapters"]

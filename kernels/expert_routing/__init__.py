"""Chooses the experts of each token from a router's logits."""

from appliance.kernels.expert_routing.reference import route

__all__ = ["route"]

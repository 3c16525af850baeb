"""Attention over tokens' latents, which all heads share."""

from appliance.kernels.latent_attention.reference import latent_attention

__all__ = ["latent_attention"]

"""Attention over tokens' latents, which all heads share."""

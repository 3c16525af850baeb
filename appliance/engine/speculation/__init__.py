"""Speculative decoding: proposes the next tokens of answers, which the target verifies at once."""

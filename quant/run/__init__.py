"""Runs the quantizer: plan, memory ceilings, resumable writing, report."""

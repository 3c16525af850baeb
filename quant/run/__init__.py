"""One run of the quantizer: plan, ceilings, resumable writing, report."""

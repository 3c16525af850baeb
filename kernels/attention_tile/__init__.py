"""The body that decode and prefill share: pages folded into a running softmax."""

"""Folds pages into a running softmax: the inner loop of decode and prefill."""

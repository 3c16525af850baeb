"""Only some tokens may come next in a row: the logits of all others become -inf."""

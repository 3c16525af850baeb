"""Log probabilities of given tokens, and the likeliest tokens beside them."""

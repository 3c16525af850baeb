"""What logits say of given tokens: their log probabilities, and the likeliest ones beside them."""

"""The two products of attention, of heads that are whole or in parts, one for each warp."""

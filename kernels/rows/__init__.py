"""The rows of one step: their sequences, keys and recurrent states."""

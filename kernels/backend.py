"""Which implementation of each operation runs where: one frozen table of functions per backend.

Every entry has a torch reference that is slow and obviously right; the other tables replace
entries of it. Choosing is explicit, by device, and never falls back in silence.
"""

"""The selective scan of Mamba-2: each head's state decays and takes up values by keys."""

"""The selective scan of Mamba-2: a state of each head that decays and takes values up by keys."""

"""The gated delta rule: linear attention whose state decays and is corrected by each row."""

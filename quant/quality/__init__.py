"""What a checkpoint is worth: measured against its base, and shown on a card."""

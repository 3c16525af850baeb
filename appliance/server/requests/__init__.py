"""From a checked body to the engine, and from its deltas to pieces of text, for all protocols."""

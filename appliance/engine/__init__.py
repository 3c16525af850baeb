"""The engine decides and remembers: requests, blocks, schedule, steps and their process."""

"""The engine decides and remembers: requests, blocks, schedule, steps, and the process they run in."""

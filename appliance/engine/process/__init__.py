"""The engine in its own process: loop, supervisor and client, over a closed message schema.

A socket pair carries the messages and an anonymous memory file the block metadata. Both are
inherited: no name, no port, no pickle. Only the engine's process imports torch.
"""

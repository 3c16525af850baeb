"""The engine in a process of its own: loop, supervisor and client, over a closed message schema.

A socket pair carries the messages and an anonymous memory file the block metadata, both handed
over at start: no name, no port, no pickle. Only the engine's process imports torch.
"""

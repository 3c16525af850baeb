"""The engine in its own process: loop, supervisor and client, over a closed message schema.

A socket pair carries the messages, an anonymous memory file the block metadata. The process
inherits both: no name, no port, no pickle. Only the engine process imports torch.
"""

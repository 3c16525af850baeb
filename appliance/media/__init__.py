"""Pictures, from their bytes to the patches that a model's tower is given.

A folder's or a file's description of its preprocessing becomes an `ImageProcessorSpec`. `Pictures`
decodes and resizes in a process with limits; the engine makes patches of what comes back. Loads
neither torch nor, outside that process, Pillow.
"""

"""What tests share, by room.

- `models`: small models and the settings of their families, beside what transformers makes of them
- `gguf`: GGUF files, as llama.cpp's converters write them
- `engine`: engines with planted properties, and their plain counterparts
- `echo`: an engine process that repeats its prompt, in place of a model
- `simulation`: the whole engine under a virtual clock
- `kernels`: weights and pages to test kernels with, and records of compiled and executed ones
- `ranks`: ranks and stages as threads, and links with faults
- `server`: routes, browsers, costs and long runs
- `quant`: quantizations that are killed, and quality cards
- `runs`: how a run waits, shares its tests out and starts commands
"""

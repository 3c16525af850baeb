"""Reads GGUF files: a header checked before use, and tensors read by copy.

Knows no model family. Importing it loads no torch: the API process opens GGUF files for their
tokenizer.
"""

from appliance.gguf.file import GGUFFile
from appliance.gguf.header import GGUFHeader, TensorInfo, read_header, read_part, starts_as_gguf

__all__ = ["GGUFFile", "GGUFHeader", "TensorInfo", "read_header", "read_part", "starts_as_gguf"]

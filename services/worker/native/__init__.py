"""Native CPU kernels: their source, their build, and their Python signatures.

Owns the shared library and how arguments reach it; knows nothing of layers or
batches. Without a compiler there is no library, and callers use torch.
"""

"""The CUDA backend: Triton for attention and writes, CUDA C through CuPy for whole blocks. Imports on any machine."""

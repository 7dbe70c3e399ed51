"""The CPU backend: numba-compiled, vectors by hand, importing it imports numba."""

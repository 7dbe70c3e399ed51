"""Paged attention and block operations on plain tensors. It knows no sequence, no tenant, no RPC."""

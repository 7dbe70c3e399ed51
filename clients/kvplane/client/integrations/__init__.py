"""Adapters that put kvplane under engines which people use. Each needs an extra of its own."""

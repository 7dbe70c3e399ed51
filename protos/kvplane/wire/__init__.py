"""What both sides of the wire share: encodings, layouts, errors, limits and channel options.

Nothing here imports a service or the client, and nothing here needs more than the client's own
dependencies, so that a tool in another process can read a directory or compute a digest with it.
"""

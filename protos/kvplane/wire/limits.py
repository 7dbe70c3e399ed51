"""Hard limits of the wire. Going over one is refused with its name; none of them is silently clamped."""

MESSAGE_BYTES = 64 * 2**20
"""Bytes of one gRPC message, both ways. Larger things travel in chunks."""

ATTACH_MESSAGE_BYTES = 2**20
"""Bytes of one message on the attach socket."""

UNANSWERED_STEPS = 4
"""Steps of a session that may be without an answer."""

PROMPT_TOKENS = 2**20
"""Tokens of one prompt."""

NEW_BLOCKS_PER_STEP = 1024
"""New blocks per sequence and step; a larger chunk goes on in the next step."""

STEP_SEQUENCES = 65_536
"""Sequences in one step's arrays."""

SESSION_RANKS = 256
"""Processes of one session."""

TTL_MS_MIN = 2_000
TTL_MS_DEFAULT = 10_000
TTL_MS_MAX = 300_000
"""Time to live of a lease, in milliseconds."""

NAME_BYTES = 256
"""UTF-8 bytes of a name that people read."""

SALT_BYTES = 64
"""Bytes of a sub-salt and of a content hash."""

SPANS = 256
"""Content and adapter spans of one prompt."""

SPAN_BLOCKS = 65_536
"""Blocks that all spans of one prompt overlap, together."""

BLOCK_TOKENS_MAX = 256
"""Tokens of the largest block."""

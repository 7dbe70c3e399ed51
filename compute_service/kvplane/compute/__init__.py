"""The data plane: one process per device that holds the bytes. It never decides who gets a block."""

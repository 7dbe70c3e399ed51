"""The `kvplane` command."""

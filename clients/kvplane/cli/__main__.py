"""`kvplane`, also `python -m kvplane.cli`."""

import sys


def main(arguments: list[str] | None = None) -> None:
    """Run the command; an error is one line and an exit status. Always raises `SystemExit`."""
    try:
        from kvplane.cli import console
        from kvplane.cli.app import app
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("kvplane"):
            raise
        sys.exit(f"kvplane: {missing.name} is not installed\nhint: pip install 'kvplane[cli]'")
    from kvplane.wire.errors import KvplaneError

    try:
        app(arguments, prog_name="kvplane")
    except (KvplaneError, OSError) as error:
        sys.exit(console.show_error(error))


if __name__ == "__main__":
    main()

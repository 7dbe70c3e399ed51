"""`python -m kvplane.cache`, also installed as `kvplane-cache`."""

import asyncio
import gc
import sys

from pydantic import ValidationError
from pydantic_settings import SettingsError

from kvplane.cache.service.config import CacheConfig, load
from kvplane.cache.service.log import configure
from kvplane.cache.service.server import CacheServer


def main() -> int:
    """Run the cache service until it is told to stop."""
    try:
        config = load(sys.argv[1:])
    except ValidationError as error:
        for problem in error.errors():
            where = ".".join(str(part) for part in problem["loc"])
            print(f"kvplane-cache: {where or 'configuration'}: {problem['msg']}", file=sys.stderr)
        return 2
    except (SettingsError, OSError, ValueError) as error:
        print(f"kvplane-cache: configuration: {error}", file=sys.stderr)
        return 2
    configure(config.log_format, config.log_level)
    # What start-up made lives as long as the process: a full collection need not walk it.
    gc.collect()
    gc.freeze()
    # Steps make few objects that the collector tracks; rarer collections shorten the slowest steps.
    gc.set_threshold(20_000, 20, 100)
    try:
        asyncio.run(_serve(config))
    except (RuntimeError, OSError) as error:
        print(f"kvplane-cache: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(config: CacheConfig) -> None:
    # The server's parts bind to the running loop.
    await CacheServer(config).run()


if __name__ == "__main__":
    sys.exit(main())

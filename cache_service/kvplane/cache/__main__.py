"""`python -m kvplane.cache`, also installed as `kvplane-cache`: serve until told to stop, or `--check` whether a
service with these settings is up, or `--check-pool` whether it has an open pool."""

import asyncio
import gc
import sys
from typing import TYPE_CHECKING

from pydantic import ValidationError
from pydantic_settings import SettingsError

from kvplane.cache.service.check import POOLS, check
from kvplane.cache.service.config import CacheConfig, load
from kvplane.cache.service.log import configure

if TYPE_CHECKING:
    from kvplane.cache.service.server import CacheServer

_CHECKS = {"--check": "", "--check-pool": POOLS}


def main() -> int:
    """Run the cache service until it is told to stop."""
    checks = [_CHECKS[each] for each in sys.argv[1:] if each in _CHECKS]
    try:
        config = load([each for each in sys.argv[1:] if each not in _CHECKS])
    except ValidationError as error:
        for problem in error.errors():
            where = ".".join(str(part) for part in problem["loc"])
            print(f"kvplane-cache: {where or 'configuration'}: {problem['msg']}", file=sys.stderr)
        return 2
    except (SettingsError, OSError, ValueError) as error:
        print(f"kvplane-cache: configuration: {error}", file=sys.stderr)
        return 2
    if checks:
        return check(config, checks[-1])
    # Not at the top: a health check runs every few seconds and needs no server.
    from kvplane.cache.service.server import CacheServer

    configure(config.log_format, config.log_level)
    # What start-up made lives as long as the process: a full collection need not walk it.
    gc.collect()
    gc.freeze()
    # Steps make few objects that the collector tracks; rarer collections shorten the slowest steps.
    gc.set_threshold(20_000, 20, 100)
    try:
        asyncio.run(_serve(CacheServer, config))
    except (RuntimeError, OSError) as error:
        print(f"kvplane-cache: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(server: "type[CacheServer]", config: CacheConfig) -> None:
    # The server's parts bind to the running loop.
    await server(config).run()


if __name__ == "__main__":
    sys.exit(main())

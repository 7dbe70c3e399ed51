"""`python -m kvplane.compute`: serve until told to stop, or `--check` whether a service with these settings is up, or
`--check-pool` whether it holds a pool."""

import asyncio
import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import ValidationError

from kvplane.compute import log, sockets
from kvplane.compute.config import ComputeConfig, load
from kvplane.wire.errors import KvplaneError

CHECK_SECONDS = 2.0
_CHECKS = {"--check": "", "--check-pool": "kvplane.v1.ComputeService"}
"""Flags, and the names that they ask the health service for."""


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 2 for what the configuration or the machine rules out."""
    given = sys.argv[1:] if arguments is None else arguments
    checks = [_CHECKS[argument] for argument in given if argument in _CHECKS]
    try:
        config = load([argument for argument in given if argument not in _CHECKS])
    except ValidationError as error:
        for problem in error.errors():
            print(f"{'.'.join(str(part) for part in problem['loc']) or 'config'}: {problem['msg']}", file=sys.stderr)
        return 2
    if checks:
        return _check(config, checks[-1])
    # Not at the top: a health check runs every few seconds and needs no torch.
    from kvplane.compute.server import ComputeServer

    log.configure(config.log_format, config.log_level)
    try:
        asyncio.run(ComputeServer(config).run())
    except (RuntimeError, KvplaneError, OSError) as error:
        print(f"kvplane-compute: {error}", file=sys.stderr)
        return 2
    return 0


def _check(config: ComputeConfig, service: str) -> int:
    try:
        with sockets.own_channel(config) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=CHECK_SECONDS)
    except (grpc.RpcError, OSError) as error:
        print(f"{config.listen[0]}: {error}", file=sys.stderr)
        return 1
    return int(answer.status != health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(main())

"""A bare gRPC echo through the same stack: each message on a stream is answered with a prepared one of a given size."""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvplane.wire.options import server_options


async def serve(address: str) -> None:
    """Serve until standard input ends."""
    answers: dict[int, bytes] = {}

    async def echo(request_iterator: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        # The first message says how long the answers are.
        size = 0
        async for request in request_iterator:
            if not size:
                size = int(request)
                answers[size] = bytes(size)
                continue
            await context.write(answers[size])

    server = grpc.aio.server(options=server_options())
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("kvplane.benchmark.Echo", {"Echo": handler})])
    server.add_insecure_port(address)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))

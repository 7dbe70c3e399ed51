"""The cache service: the core on the wire.

`control_plane` is the service without a transport: requests in, responses out, errors raised. `servicers` puts it
behind gRPC, `twin` calls it in process. `decode` and `encode` translate steps, `pools` hosts a core with its shards,
`shards` is one compute service's control stream, `sessions` an engine's lease on the wire.
"""

"""Host tensors to a device and back, through pinned memory, so that copies overlap and keep their stream's order."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, made in the order of torch's current stream; the argument may be changed at once."""
    if device.type == "cpu":
        return tensor.clone()
    staging = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    staging.copy_(tensor)
    # torch's allocator gives pinned memory to nobody else before the copy out of it has completed.
    return staging.to(device, non_blocking=True)


def to_host(tensor: Tensor, into: Tensor | None = None) -> Tensor:
    """A copy on the host, complete when this returns; `into` a host tensor if given."""
    if tensor.device.type == "cpu":
        return tensor.clone() if into is None else into.copy_(tensor)
    if into is not None and not into.is_pinned():
        staging = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return into.copy_(to_host(tensor, staging))
    result = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) if into is None else into
    result.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return result

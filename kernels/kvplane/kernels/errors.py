"""What can be wrong with a call, told before anything runs: the field, its value and the limit."""


class KernelError(ValueError):
    """Base of all errors of the kernels; `field` names the argument at fault.

    Raised before the first byte is read or written: a call that raises has changed nothing.
    """

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


class ShapeError(KernelError):
    """A size is wrong, out of the supported range, or does not fit another argument."""


class DtypeError(KernelError):
    """An element type or a device is not the expected one."""


class StrideError(KernelError):
    """A tensor is not laid out as the kernels need it: last dimension contiguous, rows and base aligned."""


class TableError(KernelError):
    """A block table is too short, or names a block that does not exist or may not be read."""


class SlotError(KernelError):
    """A slot or block to be written does not exist, may not be written, or is named twice."""


class UnsupportedFeatureError(KernelError):
    """A feature is part of the interface but not built for this backend."""


class DeviceError(KernelError):
    """A device, its driver or its memory is not there, or a handle of another process's memory does not open."""

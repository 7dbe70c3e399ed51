"""Names for the array types of the core: dtype in the name, shape in the docstring of whoever uses it.

Rows and block ids are int64 wherever they index: numpy converts any other index type first, which costs three
times the access itself. They are stored and sent as u32.
"""

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NO_U32: U32 = np.empty(0, np.uint32)
NO_U64: U64 = np.empty(0, np.uint64)
NO_I64: I64 = np.empty(0, np.int64)


def spans(starts: I64, counts: I64) -> I64:
    """The ranges `starts[i] … starts[i] + counts[i] - 1`, one behind the other, as one array."""
    ends = counts.cumsum()
    offsets: I64 = np.repeat(starts - (ends - counts), counts)
    return offsets + np.arange(len(offsets))

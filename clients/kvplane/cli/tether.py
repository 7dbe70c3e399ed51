"""`python -m kvplane.cli.tether PARENT MODULE [ARGUMENT …]`: run a module like `python -m`, while PARENT lives.

The kernel sends SIGKILL to this process when the thread that started it ends, however that happens. It is asked for
here and not between fork and exec, where Python code is not safe beside other threads.
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>."""


def main() -> None:
    """Ask for the signal, then become the module."""
    parent, module, *arguments = sys.argv[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        sys.exit(f"{module}: prctl: {os.strerror(ctypes.get_errno())}")
    # A parent that died before the call above sends nothing any more.
    if os.getppid() != int(parent):
        sys.exit(f"{module}: the process that started it is gone")
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

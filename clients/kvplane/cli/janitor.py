"""`python -m kvplane.cli.janitor PARENT FOLDER [FOLDER …]`: remove the folders when PARENT is gone.

A process that is killed with SIGKILL cannot clean up after itself. This one waits beside it and does; a parent that
ends in order removes its folders itself and kills the janitor.
"""

import os
import select
import shutil
import signal
import sys
import time

_ATTEMPTS = 50
_QUIET_ATTEMPTS = 5
_PAUSE_SECONDS = 0.1
"""The parent's children are being killed by the kernel meanwhile; what one of them still makes goes with the next
attempt. Enough when there was nothing to remove for some time."""


def main() -> None:
    """Wait, then remove."""
    parent, *folders = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _wait_for_end(int(parent))
    quiet = 0
    for _ in range(_ATTEMPTS):
        quiet = 0 if any(os.path.lexists(folder) for folder in folders) else quiet + 1
        if quiet == _QUIET_ATTEMPTS:
            return
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_PAUSE_SECONDS)


def _wait_for_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    # The number may be another process's by now, which is nobody's parent here.
    if os.getppid() == pid:
        select.select([descriptor], [], [])


if __name__ == "__main__":
    main()

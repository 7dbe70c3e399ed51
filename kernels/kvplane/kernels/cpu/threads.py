"""The one pool of threads all compiled kernels run on, shared by all callers.

Threads wait on a queue and never spin, so an idle pool costs nothing and two callers do not fight; a caller
works along on its own call, so it never waits for a busy pool to begin. Compiled code runs without the GIL.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

_lock = threading.Lock()
_threads = 0
_pool: ThreadPoolExecutor | None = None


def get_num_threads() -> int:
    """Threads that work on one call, the caller's included. At first the CPUs this process may use."""
    return _threads or len(os.sched_getaffinity(0))


def set_num_threads(count: int) -> None:
    """Set how many threads work on one call; running calls end as they began. Raises ValueError below 1."""
    global _threads, _pool
    if count < 1:
        raise ValueError(f"count: at least 1 expected, got {count}")
    with _lock:
        old, _pool, _threads = _pool, None, count
    if old is not None:
        old.shutdown(wait=False)


def _workers() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max(get_num_threads() - 1, 1), thread_name_prefix="kvplane-kernels")
        return _pool


def _forget_pool() -> None:
    """A forked child has none of its parent's threads."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_pool)


def run_on_all(task: Callable[[], None], useful: int) -> None:
    """Run `task` on the caller's thread and on at most `useful` - 1 others; the task shares out its own work.

    Returns when all that began have ended, and raises what any of them raised.
    """
    helpers = min(get_num_threads(), useful) - 1
    if helpers < 1:
        task()
        return
    futures: list[Future[None]] = []
    # the pool may be replaced meanwhile and refuse: then the caller does the rest
    with suppress(RuntimeError):
        workers = _workers()
        for _ in range(helpers):
            futures.append(workers.submit(task))  # noqa: PERF401 - those submitted before a refusal count
    try:
        task()
    finally:
        # a helper that has not begun would find the counter used up
        begun = [future for future in futures if not future.cancel()]
        wait(begun)
    for future in begun:
        future.result()

"""The C library's allocator, for processes that are upfl's own: the command line, workers, trials."""

import ctypes
import sys


def keep_freed_memory() -> None:
    """Have glibc reuse freed blocks: a step's tensors would be mapped and zeroed anew by the kernel each time.

    This holds for the whole process, so that no library call does it: another program's memory is not ours to tune.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
            libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD

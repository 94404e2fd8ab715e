"""One thread of a child process is stopped while its others go on, by the system's means for debuggers.

Only the thread that stopped another can let it go on or reap it. Needs no rights beyond those over own children.
"""

import ctypes
import os

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17  # PTRACE_*, from linux/ptrace.h
_ALL_KINDS = 0x40000000  # __WALL: threads, too

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def stop_thread(thread_id: int) -> None:
    """Returns when it has stopped. Raises OSError where the system forbids it."""
    _ptrace(_SEIZE, thread_id)
    _ptrace(_INTERRUPT, thread_id)
    os.waitpid(thread_id, _ALL_KINDS)


def release_thread(thread_id: int) -> None:
    _ptrace(_DETACH, thread_id)


def reap_thread(thread_id: int) -> None:
    """After its process was killed: the process ends only when this has been called."""
    os.waitpid(thread_id, _ALL_KINDS)


def _ptrace(request: int, thread_id: int) -> None:
    if _libc.ptrace(request, thread_id, None, None):
        raise OSError(ctypes.get_errno(), f"ptrace request {request:#x}: {os.strerror(ctypes.get_errno())}")

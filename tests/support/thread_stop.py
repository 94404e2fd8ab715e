"""Stops one thread of a child process with ptrace while the other threads of that process go on.

Only the thread that stopped another thread can resume or reap it. Tracing own children needs no extra rights.
"""

import ctypes
import os

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17  # PTRACE_*, from linux/ptrace.h
_ALL_KINDS = 0x40000000  # __WALL: threads, too

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def stop_thread(thread_id: int) -> None:
    """Returns once the thread has stopped. Raises OSError if the system forbids ptrace."""
    _ptrace(_SEIZE, thread_id)
    _ptrace(_INTERRUPT, thread_id)
    os.waitpid(thread_id, _ALL_KINDS)


def release_thread(thread_id: int) -> None:
    _ptrace(_DETACH, thread_id)


def reap_thread(thread_id: int) -> None:
    """Call this after the process was killed. The process ends only after its stopped thread is reaped."""
    os.waitpid(thread_id, _ALL_KINDS)


def _ptrace(request: int, thread_id: int) -> None:
    if _libc.ptrace(request, thread_id, None, None):
        raise OSError(ctypes.get_errno(), f"ptrace request {request:#x}: {os.strerror(ctypes.get_errno())}")

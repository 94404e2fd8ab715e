"""Complete blobs, so that tests can compare them, and processes that die while they write one."""

import signal
from contextlib import closing

from slora_adapters.errors import AdapterNotFound
from slora_adapters.store.store import Blob, Store
from tests.support.forked_program import ForkedProgram


def read_members(store: Store, digest: str, piece_bytes: int = 1 << 20) -> dict[str, bytes]:
    """Reads a blob piece by piece. Starts again if a new copy replaced the blob during the read. Raises
    AdapterNotFound."""
    for _ in range(100):
        with closing(store.open(digest)) as blob:
            try:
                return {name: read_member(blob, name, piece_bytes) for name in blob.members}
            except AdapterNotFound:
                continue
    raise AssertionError("each copy went while it was read")


def read_member(blob: Blob, name: str, piece_bytes: int = 1 << 20, start: int = 0) -> bytes:
    content = bytearray(blob.members[name] - start)
    view = memoryview(content)
    for at in range(0, len(content), piece_bytes):
        blob.read_into(name, start + at, view[at : at + piece_bytes])
    return bytes(content)


# A process that dies at its n-th file system operation (an audit event of Python) within the call named in argv.
_DIES = """
import ast, os, signal, sys
from slora_adapters.store.store_url import open_store
from tests.support import shared_files
store = open_store(sys.argv[1])
left, members = int(sys.argv[3]), ast.literal_eval(sys.argv[4])
def count(event, arguments):
    global left
    if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "fcntl.flock"):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
if sys.argv[2] == "put":
    store.put("ab" * 32, members)
else:
    store.delete("ab" * 32)
left = 1 << 60
print("survived")
"""


def dies_at(after: int, url: str, call: str, members: dict[str, bytes]) -> bool:
    """Runs a process that is killed after so many operations of its put of `members`, or of its delete. Returns whether
    it was killed before the call was complete.
    """
    status, output = ForkedProgram(_DIES, url, call, after, members).finish()
    assert status in (0, -signal.SIGKILL), output
    return "survived" not in output

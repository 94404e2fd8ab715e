"""Files as if they were a place far away: the filesystem of shared:///path, which several processes may use at once.

Like those of S3 and its kind it remembers listings, and what others write it does not notice.
"""

from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class SharedFiles(LocalFileSystem):
    protocol = ("shared",)

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            found = super().ls(path, detail=True, **kwargs)
            self.dircache[path] = found
        else:
            found = self.dircache[path]
        return found if detail else [entry["name"] for entry in found]


fsspec.register_implementation("shared", SharedFiles, clobber=True)

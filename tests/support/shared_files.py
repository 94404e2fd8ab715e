"""The fsspec filesystem of shared:///path: local files that behave like a remote object store.

Several processes may use it at once. Like the S3 filesystem, it caches listings and does not notice what other
processes write.
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

"""A pool's new file: complete before it has the pool's name, so that a server that is killed meanwhile leaves nothing."""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path
from types import TracebackType
from typing import Final

from maru_core.errors import PoolError
from maru_core.pool.backing import FileBacking
from maru_core.pool.uri import PoolURI

_NO_TMPFILE: Final = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)


class NewFile:
    """A context manager: with an error its file goes, and whatever name it had. ``backing`` is it, locked."""

    def __init__(self, uri: PoolURI) -> None:
        """Make an empty file under no name, or where the file system cannot do that, under one that nobody knows.

        Raises:
            PoolError: its folder is missing or may not be written to.
        """
        self._uri = uri
        self._path = uri.path if uri.scheme == "shm" else Path(os.path.realpath(uri.path))
        self._spare = self._path.with_name(f".{self._path.name}.{uuid.uuid4().hex}.new")
        self._named = False
        try:
            try:
                descriptor = os.open(self._path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, uri.mode)
            except OSError as error:
                if error.errno not in _NO_TMPFILE or not self._path.parent.is_dir():
                    raise
                descriptor = os.open(self._spare, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, uri.mode)
                self._named = True
        except OSError as error:
            raise PoolError(
                f"{uri}: cannot make a file in {self._path.parent} ({error.strerror}): "
                "create the folder or choose another, and check its permissions"
            ) from error
        self.backing = FileBacking(uri, descriptor)
        try:
            os.fchmod(descriptor, uri.mode)  # whatever the umask is
            self.backing.lock()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def publish(self, *, replace: bool) -> None:
        """Give it the pool's name in one step.

        Raises:
            FileExistsError: the name was taken meanwhile (not with ``replace``).
            PoolError: it cannot have it.
        """
        path, spare = self._path, self._spare
        folder = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
        try:
            if not self._named:
                # With a directory descriptor Python calls linkat(AT_SYMLINK_FOLLOW), without one it links the link.
                source = f"/proc/self/fd/{self.backing.descriptor}"
                os.link(source, spare if replace else path, src_dir_fd=folder, follow_symlinks=True)
                self._named = replace
            elif not replace:
                os.link(spare, path)
            if replace:
                os.rename(spare, path)
                self._named = False
        except FileExistsError:
            raise
        except OSError as error:
            raise PoolError(
                f"{self._uri}: cannot name the new pool {path} ({error.strerror}): choose another path"
            ) from error
        finally:
            os.close(folder)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.backing.close()
        if self._named:
            self._named = False
            os.unlink(self._spare)

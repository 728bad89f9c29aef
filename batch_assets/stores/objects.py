"""Objects under a root: a local folder or `s3://`. Created once, never overwritten, never listed.

No entries, frames or digests here; a path that leaves the root is a bug of the caller and refused.
"""

import errno
import os
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Final

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import from_url

from batch_assets.core.errors import ObjectExistsError, ObjectMissingError
from batch_assets.core.ports import ObjectStore

# What a store may raise for a passing reason; everything else is a bug and is not retried.
TRANSIENT_ERRORS: Final[tuple[type[Exception], ...]] = (OSError, BaseError)

_NO_TMPFILE: Final = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL})  # what a file system without unnamed files says
_temporary_numbers = count()


class LocalObjects:
    """A folder. What `create` has put survives a power cut: no name is visible before its bytes are on the disk."""

    def __init__(self, root: str) -> None:
        self._root = Path(root).resolve()

    def create(self, path: str, data: bytes) -> None:
        """Put if absent, durable when it returns. Raises ObjectExistsError."""
        target = self._root / _checked(path)
        try:
            _write_new(target, data)
        except FileNotFoundError:  # the first object of its folder
            _make_folders(target.parent)
            _write_new(target, data)

    def get(self, path: str) -> bytes:
        """Raises ObjectMissingError when there is none."""
        try:
            return (self._root / _checked(path)).read_bytes()
        except FileNotFoundError as error:
            raise ObjectMissingError(path=path) from error


class S3Objects:
    """A prefix of a bucket; credentials and endpoint come from the environment as for every AWS client."""

    def __init__(self, root: str) -> None:
        self._store = from_url(root)

    def create(self, path: str, data: bytes) -> None:
        """Put if absent (If-None-Match). A lost acknowledgement may raise ObjectExistsError for the caller's own bytes."""
        try:
            obstore.put(self._store, _checked(path), data, mode="create", use_multipart=False)
        except AlreadyExistsError as error:
            raise ObjectExistsError(path=path) from error

    def get(self, path: str) -> bytes:
        """Raises ObjectMissingError when there is none."""
        try:
            return bytes(obstore.get(self._store, _checked(path)).bytes())
        except (NotFoundError, FileNotFoundError) as error:  # obstore raises either, by store
            raise ObjectMissingError(path=path) from error


def open_objects(root: str) -> ObjectStore:
    """The object store of a root: a local folder unless it is a URL."""
    return S3Objects(root) if "://" in root else LocalObjects(root)


def _checked(path: str) -> str:
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts:
        msg = f"{path!r} is no path below the root"
        raise ValueError(msg)
    return path


def _write_new(target: Path, data: bytes) -> None:
    """Raises ObjectExistsError, or FileNotFoundError when the folder is missing."""
    try:
        if hasattr(os, "O_TMPFILE"):
            _link_unnamed(target, data)
        else:
            _link_named(target, data)
    except FileExistsError as error:
        raise ObjectExistsError(path=str(target)) from error
    _sync_folder(target.parent)


def _link_unnamed(target: Path, data: bytes) -> None:
    try:
        fd = os.open(target.parent, os.O_TMPFILE | os.O_WRONLY, 0o644)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
        _link_named(target, data)
        return
    try:
        _write_all(fd, data)
        # src_dir_fd must be given, or linkat says EXDEV
        os.link(f"/proc/self/fd/{fd}", target, src_dir_fd=0, follow_symlinks=True)
    finally:
        os.close(fd)


def _link_named(target: Path, data: bytes) -> None:
    """The same through a name of its own, for file systems without unnamed files; a crash may leave a `.tmp` file that nobody reads."""
    temporary = target.parent / f".{target.name}.{os.getpid()}-{next(_temporary_numbers)}.tmp"
    fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    try:
        _write_all(fd, data)
        os.link(temporary, target)
    finally:
        os.close(fd)
        temporary.unlink()


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.fsync(fd)


def _make_folders(folder: Path) -> None:
    """Creates the folder and its parents, each entry on the disk before it is used."""
    missing = [folder]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        _sync_folder(each.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""Shared memory: one process writes arrays into segments, another one reads them without a copy.

A segment is a file in shared memory that begins with a page that says who uses it. The owner takes one from
its `Pool`, writes, and sends a `Ticket`; the reader attaches it, and when its last array is gone the
segment is free again, pages and all: fresh ones cost more than the copy. A reader holds a lock of its file
(``flock``) as long as it has arrays; the system lets go of it when the reader is killed. A ticket that nobody
needs is given back with `release`; segments of processes that are gone are removed by `sweep`.

Whether two processes are on one host is shown by a `Proof`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import math
import mmap
import os
import re
import secrets
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from logitscope.errors import FileFormatError, OutOfMemoryError

PROOF_HEADER = "Logitscope-Proof"
"""Under which a client shows the secret of a server's `Proof`."""

PAGE_BYTES = 4096
"""Before the data of a segment: magic and state."""

_MAGIC = b"LSSEG\x00\x00\x01"
_HELD, _LENT, _READ, _FREE = range(4)
_STATE = struct.Struct("<8sII")  # magic, which use of the segment it is, state
_USE_AT = len(_MAGIC)
_DONE = struct.Struct("<Q")  # bytes of data that the reader is done with
_DONE_AT = _STATE.size
_NAME = re.compile(r"logitscope-(\d+)-(\d+)-[0-9a-f]{16}\.(segment|head|proof)")
_SHM = Path("/dev/shm")
_KEPT_BYTES = 1 << 30
_STEP_BYTES = 1 << 22
_SECRET_BYTES = 32


def folders() -> list[Path]:
    """Where segments may lie, best first: shared memory, then the folder for temporary files."""
    return [folder for folder in (_SHM, Path(tempfile.gettempdir())) if folder.is_dir()]


@dataclasses.dataclass(frozen=True)
class Ticket:
    """What a reader needs to attach a segment once.

    Attributes:
        path: of its file.
        size: bytes of data to read.
        use: which use of the segment it is; a later one is another request's.
    """

    path: str
    size: int
    use: int


class Segment:
    """Memory of this process that another one can attach. Made by `Pool.take`.

    Attributes:
        path: of its file.
        capacity: bytes of data that it may hold.
        use: counts how often it was taken.
        writing: whether this process still writes to it, though it may be lent: until then it is not free.
    """

    def __init__(
        self, path: Path, capacity: int, allow: Callable[[int], None] = lambda size_bytes: None
    ) -> None:
        self.path, self.capacity = path, capacity
        self._allow = allow
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._reserved = self.use = 0
        self.writing = False
        try:
            os.ftruncate(self._file, PAGE_BYTES + capacity)
            self._map = mmap.mmap(self._file, PAGE_BYTES + capacity)
            os.posix_fallocate(self._file, 0, PAGE_BYTES)
        except BaseException:
            os.close(self._file)
            path.unlink(missing_ok=True)
            raise
        self._set(_HELD)

    def room(self, first: int, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """Writable memory from byte ``first`` of the data on; what lies before it stays.

        Raises:
            OutOfMemoryError: beyond the capacity or the pool's limit, or shared memory is full.
        """
        kind = np.dtype(dtype)
        last = first + math.prod(shape) * kind.itemsize
        if last > self.capacity:
            raise OutOfMemoryError(
                "beyond the segment", where=self.path.name, expected=self.capacity, got=last
            )
        self._reserve(last)
        return np.ndarray(tuple(shape), kind, self._map, PAGE_BYTES + first)

    def lend(self, size: int) -> Ticket:
        """Give the first ``size`` bytes to a reader; what is written later, it sees if it attaches live."""
        self._set(_LENT)
        return Ticket(str(self.path), size, self.use)

    def take_back(self) -> None:
        """Nobody shall attach it any more: free, or once the reader that has it lets go."""
        if self.held:
            self._set(_FREE)
        elif self.lent and _lock(self._file):
            self._set(_FREE)
            _unlock(self._file)

    @property
    def free(self) -> bool:
        """Whether nobody uses it."""
        if self.writing:
            return False
        if self._state == _READ and _lock(self._file):
            _unlock(self._file)
            return True
        return self._state == _FREE

    @property
    def held(self) -> bool:
        """Whether it was taken and not lent or given back yet."""
        return self._state == _HELD

    @property
    def lent(self) -> bool:
        """Whether a ticket is out that nobody has attached yet."""
        return self._state == _LENT

    @property
    def done_bytes(self) -> int:
        """Bytes of the data that the reader of this use is done with."""
        return int(_DONE.unpack_from(self._map, _DONE_AT)[0])

    @property
    def named(self) -> bool:
        """Whether its file can still be found: others may clear shared memory."""
        return os.fstat(self._file).st_nlink > 0

    def hold(self) -> None:
        """It is written to from now on; tickets from before are void."""
        self.use += 1
        self._set(_HELD)
        _DONE.pack_into(self._map, _DONE_AT, 0)

    @property
    def reserved_bytes(self) -> int:
        """That the system has given to it."""
        return self._reserved

    def remove(self) -> None:
        """Take its name away; memory that is still attached somewhere stays until it is let go."""
        self.path.unlink(missing_ok=True)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @property
    def _state(self) -> int:
        return int(_STATE.unpack(self._map[: _STATE.size])[2])

    def _set(self, state: int) -> None:
        self._map[: _STATE.size] = _STATE.pack(_MAGIC, self.use, state)

    def _reserve(self, last: int) -> None:
        """Ask for the memory before it is written: a full shared memory would else end the process."""
        if last <= self._reserved:
            return
        step = min(max(last, self._reserved + _STEP_BYTES), self.capacity)
        self._allow(step - self._reserved)
        try:
            os.posix_fallocate(self._file, PAGE_BYTES + self._reserved, step - self._reserved)
        except OSError as error:
            raise OutOfMemoryError(
                "shared memory is full",
                where=str(self.path.parent),
                got=f"{step:,} bytes asked",
                fix="Let go of results, ask for fewer rows, or give the container a larger /dev/shm.",
            ) from error
        self._reserved = step


class Pool:
    """Segments of this process, used again when their reader is done.

    Args:
        limit_bytes: that all segments together may have; None is half of what shared memory has free now.
        kept_bytes: free ones beyond so many are removed.
        most: segments that there may be; each is an open file here and at its reader.
    """

    def __init__(
        self, *, limit_bytes: int | None = None, kept_bytes: int = _KEPT_BYTES, most: int = 10_000
    ) -> None:
        self._limit = shutil.disk_usage(folders()[0]).free // 2 if limit_bytes is None else limit_bytes
        self._kept, self._most = kept_bytes, most
        self._segments: list[Segment] = []

    def take(self, capacity: int) -> Segment:
        """A segment for so many bytes of data: one that was used before and fits, else a new one.

        Raises:
            OutOfMemoryError: the limit is reached, or no folder has room.
        """
        free = sorted((s for s in self._segments if s.free), key=lambda s: s.capacity)
        for segment in free:
            # One that is much too large would be kept from those that need it.
            if segment.named and capacity <= segment.capacity <= max(4 * capacity, _STEP_BYTES):
                segment.hold()
                return segment
        self._trim(free, capacity)
        self._allow(capacity)
        if len(self) >= self._most:
            raise OutOfMemoryError("all segments are in use", expected=f"at most {self._most}")
        return self._new(capacity)

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def reserved_bytes(self) -> int:
        """Memory of all segments, in use or free."""
        return sum(segment.reserved_bytes for segment in self._segments)

    def close(self) -> None:
        """Remove every segment; readers keep what they attached."""
        while self._segments:
            self._segments.pop().remove()

    def _allow(self, more_bytes: int) -> None:
        """Refuse memory beyond the limit that free segments do not make way for."""
        if self.reserved_bytes + more_bytes > self._limit:
            self._trim([segment for segment in self._segments if segment.free], more_bytes)
        held = self.reserved_bytes
        if held + more_bytes > self._limit:
            raise OutOfMemoryError(
                "all shared memory is in use",
                expected=f"at most {self._limit:,} bytes",
                got=f"{held:,} held, {more_bytes:,} asked",
                fix="Let go of results.",
            )

    def _new(self, capacity: int) -> Segment:
        failed: OSError | None = None
        for folder in folders():
            try:
                segment = Segment(folder / own_name(secrets.token_hex(8), "segment"), capacity, self._allow)
            except OSError as error:
                failed = error
                continue
            self._segments.append(segment)
            return segment
        raise OutOfMemoryError(
            "no shared memory", where=", ".join(map(str, folders())), got=f"{capacity:,} bytes asked"
        ) from failed

    def _trim(self, free: Sequence[Segment], more_bytes: int) -> None:
        """Remove free segments that are too many, or in the way of more."""
        kept = 0
        for segment in free:
            kept += segment.reserved_bytes
            crowded = len(self) >= self._most or self.reserved_bytes + more_bytes > self._limit
            if kept > self._kept or crowded or not segment.named:
                self._segments.remove(segment)
                segment.remove()


@dataclasses.dataclass(frozen=True)
class Attached:
    """A segment of another process, read here. Its arrays are views of one memory map.

    Attributes:
        size: bytes of data.
    """

    size: int
    _map: mmap.mmap

    def array(self, first: int, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """The array from byte ``first`` of the data on.

        Raises:
            FileFormatError: it lies outside.
        """
        kind = np.dtype(dtype)
        count = math.prod(shape)
        if first < 0 or first + count * kind.itemsize > self.size:
            raise FileFormatError("an array outside its segment", expected=f"{self.size:,} bytes", got=first)
        return np.frombuffer(self._map, kind, count, PAGE_BYTES + first).reshape(tuple(shape))

    def done(self, size: int) -> None:
        """Tell the owner of a live segment that its first ``size`` bytes were taken."""
        _DONE.pack_into(self._map, _DONE_AT, size)


def attach(ticket: Ticket, *, live: bool = False) -> Attached:
    """Read a segment that was lent; it is free again when the last array is gone.

    Args:
        ticket: for one use.
        live: the owner still writes, and its later rows are to be seen here. Memory is then the same on
            both sides; without it, what is written here stays here (copy-on-write).

    Raises:
        FileFormatError: no such segment, a smaller one, or one that was taken back.
    """
    where = ticket.path
    with _opened(where) as file:
        # The map has the open file of its own that holds the lock on, until the last array is gone.
        locked = _lock(file)
        try:
            flags = mmap.MAP_SHARED if live else mmap.MAP_PRIVATE
            pages = mmap.mmap(file, PAGE_BYTES + ticket.size, flags=flags)
        except (ValueError, OSError) as error:
            raise FileFormatError("a segment that is too small", where=where, expected=ticket.size) from error
        magic, use, state = _STATE.unpack(os.pread(file, _STATE.size, 0))
        if magic != _MAGIC:
            raise FileFormatError("no segment", where=where)
        if not locked or (use, state) != (ticket.use, _LENT):
            raise FileFormatError(
                "the ticket is void", where=where, expected="to be used once, before it is released"
            )
        os.pwrite(file, struct.pack("<II", use, _READ), _USE_AT)
    return Attached(ticket.size, pages)


def release(ticket: Ticket) -> None:
    """Give back a segment that was lent and that nobody will attach."""
    with contextlib.suppress(FileFormatError), _opened(ticket.path) as file:
        if _lock(file) and os.pread(file, _STATE.size, 0) == _STATE.pack(_MAGIC, ticket.use, _LENT):
            os.pwrite(file, struct.pack("<II", ticket.use, _FREE), _USE_AT)


class Proof:
    """A file in shared memory with a secret: who knows it is on this host, and of this user.

    Attributes:
        path: of the file, which others may be told.
    """

    def __init__(self) -> None:
        self.path = folders()[0] / own_name(secrets.token_hex(8), "proof")
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(file, self._secret)
        finally:
            os.close(file)

    def holds(self, shown: str) -> bool:
        """Whether that is the secret, in hexadecimal digits."""
        return hmac.compare_digest(shown.encode(), self._secret.hex().encode())

    def remove(self) -> None:
        """Nobody can prove anything by it any more."""
        self.path.unlink(missing_ok=True)


def shown_proof(path: str) -> str | None:
    """The secret of a `Proof` that lies there, in hexadecimal digits; None where it is not on this host."""
    if not is_own(path, "proof"):
        return None
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        # Another user's would let that user cut off memory that is in use here.
        ours = os.fstat(file).st_uid == os.geteuid()
        secret = os.read(file, _SECRET_BYTES + 1)
    finally:
        os.close(file)
    return secret.hex() if ours and len(secret) == _SECRET_BYTES else None


def shares_memory() -> bool:
    """Whether processes of this system can have memory in common as it is done here."""
    return sys.platform == "linux" and _SHM.is_dir()


def is_own(path: str, suffix: str) -> bool:
    """Whether a path that another process gave is that of such a file, and nothing else."""
    match = _NAME.fullmatch(Path(path).name)
    return match is not None and match[3] == suffix and Path(path).parent in folders()


def sweep() -> list[str]:
    """Remove the segments and other files of processes that are gone; returns their names."""
    removed = []
    for path, process, started in _named():
        if _started(process) != started:
            with contextlib.suppress(OSError):  # another process sweeps, too, or they are another user's
                path.unlink()
                removed.append(path.name)
    return removed


def own_name(token: str, suffix: str) -> str:
    """Name of a file of this process that `sweep` removes when the process is gone.

    Args:
        token: 16 hexadecimal digits.
        suffix: ``segment``, ``head`` or ``proof``.
    """
    return f"logitscope-{os.getpid()}-{_started(os.getpid())}-{token}.{suffix}"


def owners() -> set[int]:
    """Numbers of the processes whose segments lie in shared memory."""
    return {process for _, process, _ in _named()}


def _named() -> Iterator[tuple[Path, int, int]]:
    """Every segment with its owner's number and start."""
    for folder in folders():
        for path in folder.glob("logitscope-*"):
            match = _NAME.fullmatch(path.name)
            if match is not None:
                yield path, int(match[1]), int(match[2])


def _lock(file: int) -> bool:
    """Take the lock of a segment's open file; False when another one has it."""
    import fcntl  # which Windows lacks, as it does segments

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(file: int) -> None:
    import fcntl

    fcntl.flock(file, fcntl.LOCK_UN)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError as error:
        raise FileFormatError(
            "the shared memory is gone", where=path, fix="The process that wrote it has ended."
        ) from error
    try:
        yield file
    finally:
        os.close(file)


def _started(process: int) -> int:
    """When a process started, so that a number that is used again is told apart; -1 when there is none."""
    try:
        # Source: proc_pid_stat(5), fields 3 and 22, counted after the name, which may hold anything.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return -1 if fields[0] in "ZX" else int(fields[19])
    except OSError:
        pass
    if Path("/proc/self/stat").exists():
        return -1
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return -1
    except OSError:
        pass
    return 0

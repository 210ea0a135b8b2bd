"""The exceptions that aoquant raises, each with the exit code that its command ends with.

AoquantError            1  a bug or an unforeseen failure
├── UsageError          2  the command line, or an argument of the library call, is wrong
├── SourceError         3  the Hub does not give or take it: not found, gated, no right to write, offline
├── CheckpointError     4  the source or checkpoint is damaged, incomplete, already quantized, or of other versions
├── UnsafeError         5  refused: reading it would run code from the file
├── ResourceError       6  not enough disk or memory
└── GateError           7  a quality or size gate failed
"""

from __future__ import annotations

import errno
from typing import ClassVar


class AoquantError(Exception):
    """What went wrong in one line (`message`) and what to type next (`hint`, may be empty)."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(AoquantError):
    exit_code = 2


class SourceError(AoquantError):
    exit_code = 3


class CheckpointError(AoquantError):
    exit_code = 4


class UnsafeError(AoquantError):
    exit_code = 5


class ResourceError(AoquantError):
    exit_code = 6


class GateError(AoquantError):
    exit_code = 7


# torch's CPU allocator, mmap within torch, and accelerators (torch.OutOfMemoryError is a RuntimeError).
_OUT_OF_MEMORY = ("can't allocate memory", "Cannot allocate memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, of Python or of torch, says that the memory of the machine or of an accelerator ran out."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    is_torchs = isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
    return is_torchs or isinstance(error, MemoryError)

"""Every error that logitscope raises on purpose.

    LogitscopeError
    ├── InputError (ValueError)        what was asked cannot be asked
    │   ├── EmptyInputError            no prompt, no token, no batch member
    │   ├── TokenIdError               an id outside the vocabulary
    │   ├── ContextLengthError         longer than the model's context
    │   ├── OptionError                an unknown option, or a value outside its range
    │   └── SelectError                rows or columns that do not exist
    ├── ModelError                     the model cannot be served
    │   ├── ModelNotFoundError         no such folder, file, bundled name or hub name
    │   ├── ModelLoadError             files are missing, corrupt, or do not fit together
    │   └── NotCausalError             the model is no causal language model
    ├── UnsupportedError               this engine or library cannot give that
    ├── MemoryLimitError               the request needs more bytes than the limit
    ├── BusyError                      a server has too much to do
    ├── ConnectionFailedError          a server that cannot be reached, or went away
    ├── OutOfMemoryError (MemoryError) the system or the accelerator had no more to give
    ├── RowsError                      rows that are wrong are not returned
    │   ├── NonFiniteError             the model computed NaN or infinite values
    │   ├── EncodingError              values do not fit the encoding
    │   └── IncompleteError            rows are missing, repeated or out of order
    ├── UnavailableError               the result does not hold what this needs
    ├── IdentityMismatchError          two results that must not be combined
    ├── FileFormatError                a file that is not ours, cut short, or damaged
    ├── EngineClosedError              the engine was closed
    └── MissingDependencyError (ImportError)   an optional library is not installed

A message says what is wrong, where, what was expected, what was got, and how to mend it.
"""

from __future__ import annotations


class LogitscopeError(Exception):
    """Base of all errors of this package.

    Args:
        what: what is wrong, as one clause.
        where: the request, option, file or row concerned.
        expected: what would have been right.
        got: what was there instead.
        fix: what the caller can do about it.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: object | None = None,
        got: object | None = None,
        fix: str | None = None,
    ) -> None:
        self.what, self.where, self.expected, self.got, self.fix = what, where, expected, got, fix
        super().__init__(what)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        if self.expected is not None:
            text += f"; expected {self.expected}"
        if self.got is not None:
            text += f"; got {self.got}"
        return f"{text}. {self.fix}" if self.fix else text


class InputError(LogitscopeError, ValueError):
    """What was asked cannot be asked."""


class EmptyInputError(InputError):
    """A batch without a member, or a prompt without a token."""


class TokenIdError(InputError):
    """A token id outside ``0 … vocab_size - 1``."""


class ContextLengthError(InputError):
    """Prompt and new tokens together are longer than the model's context."""


class OptionError(InputError):
    """An unknown option, or a value outside its range."""


class SelectError(InputError):
    """A selection of rows or columns that do not exist or contradict each other."""


class ModelError(LogitscopeError):
    """The model cannot be served."""


class ModelNotFoundError(ModelError):
    """No folder, file, bundled model or hub model of that name."""


class ModelLoadError(ModelError):
    """The model's files are missing, corrupt, or do not fit together."""


class NotCausalError(ModelError):
    """The model is not a causal language model."""


class UnsupportedError(LogitscopeError):
    """This engine, or a library on the way, cannot give what was asked."""


class MemoryLimitError(LogitscopeError):
    """The request needs more bytes than the limit; nothing was computed.

    Attributes:
        needed_bytes: what the request would need.
        limit_bytes: what it may use.
    """

    def __init__(self, what: str, *, needed_bytes: int, limit_bytes: int, fix: str) -> None:
        self.needed_bytes, self.limit_bytes = needed_bytes, limit_bytes
        super().__init__(
            what,
            expected=f"at most {limit_bytes:,} bytes",
            got=f"{needed_bytes:,} bytes",
            fix=fix,
        )


class BusyError(LogitscopeError):
    """A server has too much to do; nothing was computed, and the same may be asked again."""


class ConnectionFailedError(LogitscopeError):
    """A server cannot be reached, went away, or is none of ours."""


class OutOfMemoryError(LogitscopeError, MemoryError):
    """The system or the accelerator had no more memory to give; the engine stays usable."""


class RowsError(LogitscopeError):
    """Rows that are wrong; they are not returned."""


class NonFiniteError(RowsError):
    """The model computed NaN or infinite values."""


class EncodingError(RowsError):
    """Values that do not fit the encoding that was asked for."""


class HiddenRowsWarning(UserWarning):
    """Hidden rows were asked for, and plain ones are given: the engine cannot rebuild rows of this model."""


class IncompleteError(RowsError):
    """Rows are missing, repeated, or out of order."""


class UnavailableError(LogitscopeError):
    """The result does not hold what this method needs."""


class IdentityMismatchError(LogitscopeError):
    """Two results with different tokenizers or vocabularies."""


class FileFormatError(LogitscopeError):
    """A file that is not ours, was cut short, or is damaged."""


class EngineClosedError(LogitscopeError):
    """The engine was closed."""


class MissingDependencyError(LogitscopeError, ImportError):
    """An optional library is not installed."""

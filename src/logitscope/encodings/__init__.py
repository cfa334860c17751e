"""Value formats of kept rows: one file an encoding, and the table of their names."""

from logitscope.encodings.dense import Dense
from logitscope.errors import OptionError

__all__ = ["ENCODINGS", "Dense", "encoding"]

ENCODINGS: dict[str, Dense] = {name: Dense(name) for name in ("float32", "bfloat16", "float16")}
"""Every encoding by its name."""


def encoding(name: str) -> Dense:
    """The encoding of that name.

    Raises:
        OptionError: there is none.

    Example:
        >>> encoding("float16").bytes_per_row(49152)
        98304
    """
    if name not in ENCODINGS:
        raise OptionError(
            "unknown encoding", where="encode", expected=f"one of {', '.join(ENCODINGS)}", got=repr(name)
        )
    return ENCODINGS[name]

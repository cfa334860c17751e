"""Value formats of kept rows: one file an encoding, and the table of their names."""

from logitscope.encodings.base import EncodedRows, Encoding, RowFormat
from logitscope.encodings.dense import DTYPES, Dense
from logitscope.encodings.hidden import Hidden, HiddenRows, RowHead
from logitscope.errors import OptionError
from logitscope.rows import HIDDEN_FORMS

__all__ = [
    "DTYPES",
    "ENCODINGS",
    "Dense",
    "EncodedRows",
    "Encoding",
    "Hidden",
    "HiddenRows",
    "RowFormat",
    "RowHead",
    "encoding",
]

ENCODINGS: dict[str, Dense | Hidden] = {
    **{name: Dense(name) for name in DTYPES},
    **{name: Hidden(name, name.partition("-")[2] or None) for name in HIDDEN_FORMS},
}
"""Every encoding by its name."""


def encoding(name: str) -> Dense | Hidden:
    """The encoding of that name.

    Raises:
        OptionError: there is none.

    Example:
        >>> encoding("hidden").of_hidden
        True
    """
    if name not in ENCODINGS:
        raise OptionError(
            "unknown encoding", where="encode", expected=f"one of {', '.join(ENCODINGS)}", got=repr(name)
        )
    return ENCODINGS[name]

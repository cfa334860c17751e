"""Value formats of kept rows: one file an encoding, and the table of their names."""

from typing import Any

import numpy as np

from logitscope.encodings.base import EncodedRows, Encoding, RowFormat, RowHead
from logitscope.encodings.dense import DTYPES, Dense
from logitscope.encodings.exact import ExactRows, Residual
from logitscope.encodings.float8 import Float8
from logitscope.encodings.hidden import Hidden, HiddenRows
from logitscope.encodings.q8 import Q8
from logitscope.encodings.q16 import Q16
from logitscope.encodings.quantized import Quantized, QuantizedRows
from logitscope.errors import OptionError
from logitscope.rows import HIDDEN_FORMS, Identity, Request, Stage

__all__ = [
    "DTYPES",
    "ENCODINGS",
    "Q8",
    "Q16",
    "Dense",
    "EncodedRows",
    "Encoding",
    "ExactRows",
    "Float8",
    "Hidden",
    "HiddenRows",
    "Quantized",
    "QuantizedRows",
    "Residual",
    "RowFormat",
    "RowHead",
    "dtype_of",
    "encoding",
    "kept_format",
]

ENCODINGS: dict[str, Encoding] = {
    **{name: Dense(name) for name in DTYPES},
    "q16": Q16(),
    "q8": Q8(),
    "float8": Float8(),
    **{name: Hidden(name, name.partition("-")[2] or None) for name in HIDDEN_FORMS},
}
"""Every encoding by its name."""


def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy dtype of that name; bfloat16 is the ml_dtypes one."""
    return DTYPES[name] if name in DTYPES else np.dtype(name)


def encoding(name: str) -> Encoding:
    """The encoding of that name.

    Raises:
        OptionError: there is none.

    Example:
        >>> encoding("hidden").of_hidden
        True
    """
    if name not in [*ENCODINGS]:  # what comes as JSON may not be hashable
        raise OptionError(
            "unknown encoding", where="encode", expected=f"one of {', '.join(ENCODINGS)}", got=repr(name)
        )
    return ENCODINGS[name]


def kept_format(request: Request, stage: Stage, identity: Identity) -> RowFormat | None:
    """How a request's kept rows lie in memory; None where it keeps no rows of one width.

    Raises:
        OptionError: there is no such encoding.
        EncodingError: such rows cannot be kept in it.
    """
    select = request.select
    if select is None or select.container not in ("dense", "columns"):
        return None
    row = encoding(request.value_format(stage, identity.dtype)).row_format(identity)
    return row if select.container == "dense" else RowFormat(row.dtype, len(select.vocab))

"""Row blocks between processes: as an Arrow stream, and through shared memory."""

from logitscope.wire.loans import Loan
from logitscope.wire.requests import (
    request_from_json,
    request_to_json,
    select_from_json,
    select_to_json,
    summary_from_json,
)
from logitscope.wire.shared import (
    Attached,
    Pool,
    Segment,
    Ticket,
    attach,
    own_name,
    owners,
    release,
    sweep,
)
from logitscope.wire.stream import MEDIA_TYPE, RowReader, RowWriter, write_stream

__all__ = [
    "MEDIA_TYPE",
    "Attached",
    "Loan",
    "Pool",
    "RowReader",
    "RowWriter",
    "Segment",
    "Ticket",
    "attach",
    "own_name",
    "owners",
    "release",
    "request_from_json",
    "request_to_json",
    "select_from_json",
    "select_to_json",
    "summary_from_json",
    "sweep",
    "write_stream",
]

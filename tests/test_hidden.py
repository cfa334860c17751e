"""Hidden rows: `Logits` over the head's input behave as those over values, in memory and in files."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from samples import VOCAB, identity, make_logits
from torch import nn

from logitscope.encodings import HiddenRows
from logitscope.errors import (
    EncodingError,
    FileFormatError,
    IdentityMismatchError,
    IncompleteError,
    OptionError,
    UnsupportedError,
)
from logitscope.head import Head, host_array
from logitscope.logits import Logits, LogitsBatch, load
from logitscope.plugins.common import heads
from logitscope.plugins.common.heads import CapturedHead, gathered
from logitscope.plugins.common.rows import RequestRows, received
from logitscope.rows import SUMMARIES, Request, Select, Verification
from logitscope.testing import assert_same_bits
from logitscope.wire import Pool
from logitscope.wire.results import blocks_of, logits_to_json

WIDTH = 24


def make_head(seed: int = 0, *, dtype: torch.dtype = torch.float32, transforms: Any = ()) -> Head:
    generator = torch.Generator().manual_seed(seed)
    module = nn.Linear(WIDTH, VOCAB, bias=False).requires_grad_(False)
    module.weight.copy_(torch.randn(VOCAB, WIDTH, generator=generator))
    module = module.to(dtype)
    return Head(module, transforms=transforms, vocab_size=VOCAB, dtype=dtype, rows_dtype=torch.float32)


HEAD = make_head()


def states(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def pair(prompt: int = 5, new: int = 3, *, seed: int = 0, head: Head = HEAD) -> tuple[Logits, Logits]:
    """The same rows as values and as hidden rows."""
    plain = make_logits(prompt, new, seed=seed)
    hidden = host_array(states(len(plain), seed))
    return dataclasses.replace(plain, values=head.rows(hidden)), dataclasses.replace(
        plain,
        values=HiddenRows(hidden, head),
        encoding="hidden",
        verification=Verification(8, VOCAB, 0.0, 1e-4),
    )


LOOKS: dict[str, Callable[[Logits], Any]] = {
    "array": np.asarray,
    "float16": lambda x: np.asarray(x, np.float16),
    "torch": lambda x: x.to_torch().numpy(),
    "dlpack": lambda x: torch.from_dlpack(x).numpy(),
    "iteration": lambda x: np.stack(list(x)),
    "one row": lambda x: x[3],
    "the last row": lambda x: x[-1],
    "a slice": lambda x: np.asarray(x[2:5]),
    "backwards": lambda x: np.asarray(x[::-2]),
    "chosen": lambda x: np.asarray(x[[4, 1, 1]]),
    "a mask": lambda x: np.asarray(x[x.positions % 2 == 0]),
    "generated": lambda x: np.asarray(x.generated),
    "no rows": lambda x: np.asarray(x[:0]),
    "position": lambda x: x.at(2),
    "logprobs": lambda x: x.logprobs(),
    "logprobs of no rows": lambda x: x[:0].logprobs(),
    "best ids": lambda x: x.top_k(4).token_ids,
    "best logprobs": lambda x: x.top_k(4).logprobs,
    **{name: lambda x, name=name: x.summaries((name,))[name] for name in SUMMARIES},
    "summaries of no rows": lambda x: x[:0].entropy(),
    "pandas": lambda x: x.to_pandas()["entropy"].to_numpy(),
    "arrow": lambda x: np.array(x.to_arrow()["logits"].to_pylist(), np.float32),
}


@pytest.mark.parametrize("rows_at_once", [2, 256])
@pytest.mark.parametrize("look", LOOKS)
def test_everything_is_as_over_values(look: str, rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logitscope.logits.sequence._DECODED_ROWS", rows_at_once)
    plain, hidden = pair()
    assert_same_bits(LOOKS[look](hidden), LOOKS[look](plain))


def test_what_it_says_of_itself() -> None:
    plain, hidden = pair()
    assert hidden.shape == plain.shape
    assert hidden.dtype == plain.dtype
    assert hidden.nbytes == 7 * WIDTH * 4
    assert "float32 from hidden" in repr(hidden)
    assert "HiddenRows [7, 24] float32 of [7, 13]" in repr(hidden.values)
    assert "float32" in hidden._repr_html_()
    with pytest.raises(ValueError, match="copy=False"):
        np.asarray(hidden.values, copy=False)


def test_a_batch_is_dense_and_padded() -> None:
    pairs = [pair(5, 3), pair(2, 2, seed=1)]
    plain, hidden = (LogitsBatch([p[i] for p in pairs]) for i in (0, 1))
    assert_same_bits(hidden.to_numpy(pad=7.0), plain.to_numpy(pad=7.0))
    assert_same_bits(hidden.entropy(), plain.entropy())
    assert hidden.nbytes < plain.nbytes * 4


# -- files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("batch", [False, True])
def test_files_hold_the_head_once(tmp_path: pathlib.Path, suffix: str, batch: bool) -> None:
    path = tmp_path / f"x{suffix}"
    plain, hidden = pair()
    given: Any = LogitsBatch([hidden, pair(4, 1, seed=2)[1]]) if batch else hidden
    given.save(path)
    found: Any = load(path)
    first = found[0] if batch else found
    assert isinstance(first.values, HiddenRows)
    assert first.verification == hidden.verification
    assert first.values.head.hash == HEAD.hash
    assert_same_bits(np.asarray(first), np.asarray(plain))
    if batch:
        assert first.values.head is found[1].values.head


def test_rows_of_two_heads_do_not_go_into_one_file(tmp_path: pathlib.Path) -> None:
    batch = LogitsBatch([pair()[1], pair(head=make_head(1))[1]])
    with pytest.raises(IdentityMismatchError, match="different heads"):
        batch.save(tmp_path / "x.npz")
    assert not list(tmp_path.iterdir())


def test_a_head_that_does_not_match_its_hash_is_an_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Head, "_digest", lambda _: "0" * 16)
    pair(head=make_head())[1].save(tmp_path / "x.npz")
    monkeypatch.undo()
    with pytest.raises(FileFormatError, match="not the one its rows were made for"):
        load(tmp_path / "x.npz")


def test_hidden_rows_are_not_sent_without_their_head() -> None:
    hidden = pair(5, 0)[1]
    with pytest.raises(UnsupportedError, match="without their head"):
        logits_to_json(hidden)
    with pytest.raises(UnsupportedError, match="without their head"):
        next(blocks_of(hidden, 0))


def test_hidden_rows_stay_on_the_host() -> None:
    with pytest.raises(OptionError, match="on the host"):
        Request(np.array([1], np.int32), encode="hidden", keep_on_device=True)


# -- the head of a foreign engine --------------------------------------------------------------------------


def captured(head: Head, ranks: int = 1, *, cuts: Any = (0, 7, VOCAB)) -> list[CapturedHead]:
    borders = (0, VOCAB) if ranks == 1 else cuts
    return [
        CapturedHead(
            head.weight[borders[rank] : borders[rank + 1]],
            borders[rank],
            transforms=head.transforms,
            rank=rank,
            ranks=ranks,
            rows_dtype="float32",
        )
        for rank in range(ranks)
    ]


def own_rows(head: Head, hidden: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(head.rows(host_array(hidden.to(head.dtype))))


@pytest.fixture(autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    here = tmp_path_factory.mktemp("heads")
    monkeypatch.setattr(heads.tempfile, "gettempdir", lambda: str(here))  # type: ignore[attr-defined]
    return here


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transforms", [(), (("multiply", 0.5), ("softcap", 4.0))], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_parts_of_all_ranks_make_the_head(
    folder: pathlib.Path, dtype: torch.dtype, transforms: Any, ranks: int
) -> None:
    head = make_head(dtype=dtype, transforms=transforms)
    parts = captured(head, ranks)
    for part in parts:
        part.write("r1")
    hidden = states(6).to(dtype)
    found = parts[0].compare(hidden, own_rows(head, hidden))
    assert float(found.excess) <= 0
    whole = gathered("r1", VOCAB)
    assert whole.hash == head.hash
    assert not list(folder.iterdir()), "the parts are removed"
    with pytest.raises(FileFormatError, match="part of the head is gone"):
        gathered("r1", VOCAB)


@pytest.mark.parametrize("cuts", [(0, 6, 12), (1, 7, VOCAB), (0, 8, VOCAB - 1)])
def test_parts_that_do_not_make_a_whole(cuts: Any) -> None:
    parts = captured(HEAD, 2, cuts=cuts)
    for part in parts:
        part.write("r1")
    parts[0].compare(states(2), own_rows(HEAD, states(2)))
    with pytest.raises(FileFormatError, match="do not make a whole"):
        gathered("r1", VOCAB)


def test_a_gathered_head_that_gives_other_rows_is_an_error() -> None:
    first, second = captured(HEAD, 2)[0], captured(make_head(1), 2)[1]
    first.write("r1")
    second.write("r1")
    assert float(first.compare(states(2), own_rows(HEAD, states(2))).excess) <= 0, "its own columns are right"
    with pytest.raises(EncodingError, match="not the engine's own"):
        gathered("r1", VOCAB)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.roll(1, dims=0),
        lambda x: x + 0.01,
        lambda x: x * 1.01,
        lambda x: torch.full_like(x, torch.nan),
    ],
)
def test_rows_of_other_hidden_states_are_seen(wrong: Any) -> None:
    (part,) = captured(HEAD)
    part.write("r1")
    assert float(part.compare(states(6), own_rows(HEAD, states(6))).excess) <= 0
    assert not float(part.compare(wrong(states(6)), own_rows(HEAD, states(6))).excess) <= 0


def test_changed_weights_are_written_again(folder: pathlib.Path) -> None:
    head = make_head(3)
    (part,) = captured(head)
    part.write("r1")
    part.write("r2")
    assert (part.token, part.serial) == ("r1", 1), "nothing has changed"
    head.module.weight.add_(1.0)  # type: ignore[operator, union-attr]
    part.write("r3")
    assert (part.token, part.serial) == ("r3", 2)
    hidden = states(3)
    part.compare(hidden, own_rows(head, hidden))
    assert_same_bits(gathered("r3", VOCAB).arrays()["weight"], head.arrays()["weight"])
    assert not list(folder.iterdir())


class _Engine:
    """Hidden rows of a request on their way through shared memory."""

    def __init__(self, encode: str = "hidden") -> None:
        self.identity = identity(hidden_size=WIDTH, hidden_dtype="float32")
        (self.head,) = captured(HEAD)
        self.head.write("r1")
        ids = np.array([3, 1, 4, 1, 5], np.int32)
        request = Request(ids, max_new_tokens=3, select=Select(), encode=encode, summary=("max",))
        self.rows = RequestRows(request, Pool(), identity=self.identity, head=self.head)

    def run(self, hidden: torch.Tensor, logits: torch.Tensor) -> Logits:
        self.rows.put_prompt(logits[:5], 0, hidden[:5])
        for i, token in enumerate([9, 2, 6]):
            if i < 3:
                self.rows.put_generated(
                    logits[4 + i : 5 + i], 4 + i, torch.tensor([token]), hidden[4 + i : 5 + i]
                )
        ticket = json.loads(json.dumps(self.rows.ticket([9, 2, 6], ended=True)))
        return received(ticket, self.identity, None, lambda key: gathered(key[0], VOCAB))


@pytest.mark.skipif(sys.platform != "linux", reason="rows go through Linux shared memory")
@pytest.mark.parametrize("encode", ["hidden", "hidden-float16"])
def test_hidden_rows_of_a_foreign_engine(encode: str) -> None:
    hidden = states(7)
    found = _Engine(encode).run(hidden, own_rows(HEAD, hidden))
    kept = hidden if encode == "hidden" else hidden.half()
    assert isinstance(found.values, HiddenRows)
    assert_same_bits(found.values.hidden, host_array(kept))
    assert_same_bits(np.asarray(found), HEAD.rows(host_array(kept)))
    assert_same_bits(found.summary["max"], own_rows(HEAD, hidden).amax(1).numpy())
    assert found.verification is not None
    assert found.verification.rows == 7
    assert found.verification.columns == VOCAB, "fewer than are tried of a large vocabulary"
    assert found.verification.max_abs_difference <= found.verification.bound


@pytest.mark.skipif(sys.platform != "linux", reason="rows go through Linux shared memory")
def test_a_hidden_row_that_is_not_its_rows_ends_the_request() -> None:
    hidden = states(7)
    logits = own_rows(HEAD, hidden)
    stale = hidden.clone()
    stale[6] = hidden[5]
    with pytest.raises(EncodingError, match="hidden rows do not give the engine's rows"):
        _Engine().run(stale, logits)
    with pytest.raises(UnsupportedError, match="no hidden rows"):
        _Engine().rows.put_prompt(logits[:5], 0)
    with pytest.raises(IncompleteError):
        _Engine().rows.ticket([9], ended=True)

"""The collector: the same result whatever the borders of the blocks; an error whatever is wrong with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from samples import DTYPES, VOCAB, identity, random_values, token_ids

from logitscope.errors import EncodingError, IncompleteError
from logitscope.logits import Logits, LogitsBatch
from logitscope.logits.collect import Collected, Collector
from logitscope.rows import Buffer, End, Request, RowBlock, Select, row_count

HEADS, HIDDEN = 2, 3
SELECTS = st.sampled_from(
    [
        Select(),
        Select("prompt"),
        Select("generated"),
        Select("last"),
        Select(slice(1, None, 2)),
        Select(slice(-2, None)),
        Select(slice(-4, 4)),
        Select([0, -1]),
        Select("all", vocab=None),
        None,
    ]
)


@dataclasses.dataclass
class Script:
    """What a well-behaved engine would do for one request."""

    request: Request
    generated: int
    seed: int = 0

    @property
    def ids(self) -> NDArray[np.int32]:
        return token_ids(self.generated, seed=self.seed + 50)

    @property
    def rows(self) -> NDArray[np.int64]:
        if self.request.select is None:
            return np.empty(0, np.int64)
        return self.request.select.rows(
            prompt_length=self.request.prompt_length,
            new_tokens=self.generated,
            ended_early=self.generated < self.request.max_new_tokens,
        )

    @property
    def processed(self) -> NDArray[np.int64]:
        rows = self.rows
        return rows[rows >= self.request.prompt_length - 1] if self.request.processed else rows[:0]

    def values(self, stage: str, dtype: Any = np.float32) -> NDArray[Any]:
        count = row_count(self.request.prompt_length, self.generated)
        kept = dtype if stage == "raw" else np.float32
        return random_values(count, kept, seed=self.seed + 100 * (stage == "processed"))

    def part(self, name: str) -> NDArray[Any]:
        """Summaries, hidden states or attention weights of the whole sequence."""
        count = row_count(self.request.prompt_length, self.generated)
        numbers = random_values(count, vocab=HEADS * count, seed=self.seed + sum(map(ord, name)))
        if name == "attentions":
            weights = numbers.reshape(count, HEADS, count)
            causal: NDArray[Any] = np.where(np.arange(count) <= np.arange(count)[:, None, None], weights, 0)
            return causal
        return numbers[:, :HIDDEN] if name == "hidden_states" else numbers[:, 0]

    def block(
        self, index: int, positions: NDArray[np.int64], stage: Any = "raw", dtype: Any = np.float32
    ) -> RowBlock:
        request = self.request
        keeps = request.select is not None and request.select.vocab is not None
        keys = int(positions[-1]) + 1 if len(positions) else 0
        return RowBlock(
            index,
            positions,
            values=self.values(stage, dtype)[positions] if keeps else None,
            summary={name: self.part(name)[positions] for name in request.summary},
            hidden_states={
                k: self.part("hidden_states")[positions] for k in request.hidden_states if stage == "raw"
            },
            attentions={
                k: self.part("attentions")[positions][:, :, :keys]
                for k in request.attentions
                if stage == "raw"
            },
            stage=stage,
        )

    def end(self, index: int) -> End:
        return End(index, self.ids, rows=len(self.rows), processed_rows=len(self.processed))

    def blocks(
        self, index: int, borders: Callable[[int], Sequence[int]], dtype: Any = np.float32
    ) -> list[Any]:
        """All blocks, cut at the borders, and the end."""
        found: list[Any] = []
        for stage, rows in (("raw", self.rows), ("processed", self.processed)):
            pieces = [piece for piece in np.split(rows, borders(len(rows))) if len(piece)]
            found += [self.block(index, piece, stage, dtype) for piece in pieces]
        found += [
            RowBlock(index, np.empty(0, np.int64), token_ids=ids) for ids in np.array_split(self.ids, 3)
        ]
        return [*found, self.end(index)]


def request(prompt_length: int = 4, **options: Any) -> Request:
    return Request(token_ids(prompt_length), **options)


def collector(requests: Sequence[Request], dtype: Any = np.float32) -> Collector:
    return Collector(requests, identity=identity(dtype=np.dtype(dtype).name))


def collect(requests: Sequence[Request], stream: Sequence[Any], dtype: Any = np.float32) -> list[Collected]:
    consumer = collector(requests, dtype)
    for item in stream:
        if isinstance(item, End):
            consumer.finish(item)
        else:
            consumer.add(item)
    return consumer.results()


def check(found: Collected, script: Script, dtype: Any = np.float32) -> None:
    assert found.end.generated_ids.tolist() == script.ids.tolist()
    if script.request.select is None:
        assert found.logits is None
        return
    logits = found.logits
    assert logits is not None
    check_rows(logits, script, "raw", script.rows, dtype)
    for layer in script.request.hidden_states:
        assert len(logits.hidden_states[layer]) == len(script.rows)
        if len(script.rows):
            expected = script.part("hidden_states")[script.rows]
            np.testing.assert_array_equal(logits.hidden_states[layer], expected)
    assert set(logits.attentions) == set(script.request.attentions)
    for layer in script.request.attentions if len(script.rows) else ():
        keys = int(script.rows[-1]) + 1
        expected = script.part("attentions")[script.rows][:, :, :keys]
        np.testing.assert_array_equal(logits.attentions[layer], expected)
    assert (found.processed is not None) == script.request.processed
    if found.processed is not None:
        check_rows(found.processed, script, "processed", script.processed, dtype)


def check_rows(logits: Logits, script: Script, stage: str, rows: NDArray[np.int64], dtype: Any) -> None:
    assert logits.stage == stage
    assert logits.positions.tolist() == rows.tolist()
    assert logits.token_ids.tolist() == [*script.request.token_ids, *script.ids]
    assert logits.prompt_length == script.request.prompt_length
    assert logits.identity == identity(dtype=np.dtype(dtype).name)
    if script.request.select is not None and script.request.select.vocab is None:
        assert logits.values is None
    else:
        assert logits.values.tobytes() == script.values(stage, dtype)[rows].tobytes()
        assert logits.dtype == (dtype if stage == "raw" else np.float32)
    for name in script.request.summary:
        np.testing.assert_array_equal(logits.summary[name], script.part(name)[rows])


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    most = draw(st.integers(0, 6))
    select = draw(SELECTS)
    kept, bare = select is not None, select is not None and select.vocab is None
    known = select is not None and not select.from_the_end
    made = Request(
        token_ids(draw(st.integers(1, 6))),
        max_new_tokens=most,
        select=select,
        summary=("entropy", "max") if bare or (kept and draw(st.booleans())) else (),
        processed=known and most > 0 and draw(st.booleans()),
        hidden_states=(0, 4) if kept and draw(st.booleans()) else (),
        attentions=(1,) if kept and draw(st.booleans()) else (),
    )
    return Script(made, draw(st.integers(min(most, 1), most)), seed=draw(st.integers(0, 9)))


def interleave(draw: st.DrawFn, queues: list[list[Any]]) -> list[Any]:
    stream = []
    waiting = [list(queue) for queue in queues]
    while any(waiting):
        chosen = draw(st.sampled_from([i for i, queue in enumerate(waiting) if queue]))
        stream.append(waiting[chosen].pop(0))
    return stream


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[Script], list[Any], Any]:
    found = draw(st.lists(scripts(), min_size=1, max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    queues = [
        script.blocks(i, lambda n: sorted(draw(st.lists(st.integers(0, n), max_size=4))), dtype)
        for i, script in enumerate(found)
    ]
    return found, interleave(draw, queues), dtype


@given(streams())
def test_borders_and_interleaving_do_not_matter(case: tuple[list[Script], list[Any], Any]) -> None:
    found, stream, dtype = case
    results = collect([script.request for script in found], stream, dtype)
    for result, script in zip(results, found, strict=True):
        check(result, script, dtype)


@given(streams(), st.data())
def test_a_stream_with_a_fault_gives_no_result(
    case: tuple[list[Script], list[Any], Any], data: st.DataObject
) -> None:
    found, stream, dtype = case
    at = data.draw(
        st.sampled_from([i for i, item in enumerate(stream) if isinstance(item, End) or len(item)])
    )
    item = stream[at]
    faults = {
        "dropped": [*stream[:at], *stream[at + 1 :]],
        "repeated": [*stream[:at], item, item, *stream[at + 1 :]],
        "foreign": [*stream[:at], dataclasses.replace(item, index=len(found)), *stream[at:]],
        "negative": [*stream[:at], dataclasses.replace(item, index=-1), *stream[at:]],
        "late": [*stream, item],
    }
    for faulty in faults.values():
        with pytest.raises(IncompleteError):
            collect([script.request for script in found], faulty, dtype)


@given(streams(), st.data())
def test_swapped_blocks_give_no_result(
    case: tuple[list[Script], list[Any], Any], data: st.DataObject
) -> None:
    found, stream, dtype = case
    pairs = [
        (i, j)
        for j, later in enumerate(stream)
        for i, item in enumerate(stream[:j])
        if isinstance(item, RowBlock) and isinstance(later, RowBlock) and len(item) and len(later)
        if (item.index, item.stage) == (later.index, later.stage)
    ]
    if not pairs:
        return
    i, j = data.draw(st.sampled_from(pairs))
    swapped = list(stream)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    with pytest.raises(IncompleteError, match="repeated or out of order"):
        collect([script.request for script in found], swapped, dtype)


# -- what the message names --------------------------------------------------------------------------------


def scored(**options: Any) -> Script:
    return Script(request(**options), 0)


def one_block(script: Script, positions: Sequence[int]) -> RowBlock:
    return script.block(0, np.array(positions, np.int64))


@pytest.mark.parametrize(
    ("positions", "rows", "message"),
    [
        ([0, 1], 2, "rows are missing; expected 4 rows; got 2; without positions 2, 3"),
        ([0, 1, 2, 3], 3, "the end states another number of rows; expected 3; got 4"),
        ([], 4, "without positions 0, 1, 2, 3"),
    ],
)
def test_missing_rows_are_named(positions: list[int], rows: int, message: str) -> None:
    script = scored()
    end = dataclasses.replace(script.end(0), rows=rows)
    blocks = [one_block(script, positions)] if positions else []
    with pytest.raises(IncompleteError, match=message) as caught:
        collect([script.request], [*blocks, end])
    assert "request 0, raw" in str(caught.value)


@pytest.mark.parametrize("blocks", [[[0, 1], [1, 2]], [[0, 1, 1]], [[1, 0]], [[0, 2], [1]], [[-1, 0]]])
def test_rows_repeated_or_out_of_order(blocks: list[list[int]]) -> None:
    script = scored()
    with pytest.raises(IncompleteError, match="rows repeated or out of order; expected positions ascending"):
        collect([script.request], [one_block(script, positions) for positions in blocks])


def test_rows_that_were_not_selected() -> None:
    script = scored(select=Select([1, 3]))
    with pytest.raises(IncompleteError, match="without positions 3; with positions 2"):
        collect([script.request], [one_block(script, [1, 2]), script.end(0)])
    with pytest.raises(IncompleteError, match="more rows than the request has"):
        collect([script.request], [one_block(script, [1, 2, 3])])


def test_requests_without_an_end_are_named() -> None:
    script = scored()
    requests = [script.request] * 4
    with pytest.raises(IncompleteError, match="none of request 0, 2, 3"):
        collect(requests, [*script.blocks(1, lambda n: [])])


@pytest.mark.parametrize("stage", ["raw", "processed"])
def test_processed_rows_are_counted(stage: str) -> None:
    script = Script(request(max_new_tokens=3, processed=True), 3)
    end = script.end(0)
    change: dict[str, Any] = {"rows" if stage == "raw" else "processed_rows": 2}
    wrong = dataclasses.replace(end, **change)
    with pytest.raises(IncompleteError, match=f"request 0, {stage}: the end states another number"):
        collect([script.request], [*script.blocks(0, lambda n: [])[:-1], wrong])


@pytest.mark.parametrize("count", [0, 4])
def test_another_number_of_tokens_than_asked(count: int) -> None:
    script = Script(request(max_new_tokens=3, select=None), count)
    with pytest.raises(IncompleteError, match=f"expected 1 … 3; got {count}"):
        collect([script.request], [script.end(0)])


def test_token_ids_of_the_blocks_agree_with_the_end() -> None:
    script = Script(request(max_new_tokens=3, select=None), 3)
    block = RowBlock(0, np.empty(0, np.int64), token_ids=script.ids[:2])
    with pytest.raises(IncompleteError, match="other token ids"):
        collect([script.request], [block, script.end(0)])


@pytest.mark.parametrize("field", ["values", "summary", "hidden_states", "attentions"])
@pytest.mark.parametrize("fault", ["lacks", "not asked"])
def test_parts_are_those_that_were_asked_for(field: str, fault: str) -> None:
    full = scored(summary=("entropy",), hidden_states=(1,), attentions=(2,))
    bare = scored(select=Select("all", vocab=None), summary=("max",)) if field == "values" else scored()
    block = full.block(0, full.rows)
    if fault == "lacks":
        script = full
        change: Any = None if field == "values" else {}
    else:
        script, change = bare, getattr(block, field)
        block = bare.block(0, bare.rows)
    setattr(block, field, change)
    with pytest.raises(IncompleteError, match=f"{field} of a block are not those that were asked for"):
        collect([script.request], [block])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("values", random_values(4, np.float16)),
        ("values", random_values(4, vocab=VOCAB + 1)),
        ("values", random_values(3)),
        ("summary", {"entropy": np.zeros(1, np.float32)}),
        ("hidden_states", {1: np.zeros((1, HIDDEN), np.float32)}),
        ("attentions", {2: np.zeros((1, HEADS, 4), np.float32)}),
        ("attentions", {2: np.zeros((4, HEADS, 5), np.float32)}),
    ],
    ids=str,
)
def test_arrays_of_another_form_are_refused(field: str, value: Any) -> None:
    script = scored(summary=("entropy",), hidden_states=(1,), attentions=(2,))
    block = dataclasses.replace(script.block(0, script.rows), **{field: value})
    with pytest.raises(EncodingError):
        collect([script.request], [block])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("summary", {"entropy": np.zeros(2, np.float64)}),
        ("hidden_states", {1: np.zeros((2, HIDDEN + 1), np.float32)}),
        ("attentions", {2: np.zeros((2, HEADS + 1, 4), np.float32)}),
    ],
    ids=str,
)
def test_the_form_does_not_change_between_blocks(field: str, value: Any) -> None:
    script = scored(summary=("entropy",), hidden_states=(1,), attentions=(2,))
    second = dataclasses.replace(one_block(script, [2, 3]), **{field: value})
    with pytest.raises(EncodingError, match=field):
        collect([script.request], [one_block(script, [0, 1]), second])


# -- buffers -----------------------------------------------------------------------------------------------


def write_into(
    buffer: Buffer, script: Script, index: int, block: RowBlock, first: int, dtype: Any
) -> RowBlock:
    place = buffer(index, block.stage, first, len(block))
    assert place.shape == (len(block), VOCAB)
    assert place.dtype == (dtype if block.stage == "raw" else np.float32)
    assert place.flags.c_contiguous
    place[...] = block.values
    return dataclasses.replace(block, values=place)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("new", [0, 1, 3])
def test_values_written_into_the_buffer_stay_where_they_are(dtype: Any, new: int) -> None:
    script = Script(request(max_new_tokens=3 * (new > 0), processed=new > 0), new)
    consumer = collector([script.request], dtype)
    places: dict[str, list[NDArray[Any]]] = {"raw": [], "processed": []}
    seen = {"raw": 0, "processed": 0}
    for block in script.blocks(0, lambda n: [1, 3], dtype)[:-1]:
        if len(block):
            block = write_into(consumer.buffer, script, 0, block, seen[block.stage], dtype)
            places[block.stage].append(block.values)
        consumer.add(block)
        seen[block.stage] += len(block)
    consumer.finish(script.end(0))
    (result,) = consumer.results()
    check(result, script, dtype)
    assert result.logits is not None
    assert places["raw"][0].ctypes.data == result.logits.values.ctypes.data
    for place in places["raw"]:
        assert np.shares_memory(place, result.logits.values)
    assert (result.processed is None) == (new == 0)
    for place in places["processed"]:
        assert result.processed is not None
        assert np.shares_memory(place, result.processed.values)


def test_a_block_somewhere_else_in_the_buffer_is_put_in_place() -> None:
    """An engine may compute ahead into the room it was given; the block's own place decides."""
    script = scored()
    consumer = collector([script.request])
    room = consumer.buffer(0, "raw", 0, 4)
    room[1:3] = script.values("raw")[:2]
    consumer.add(dataclasses.replace(one_block(script, [0, 1]), values=room[1:3]))
    consumer.add(one_block(script, [2, 3]))
    consumer.finish(script.end(0))
    check(consumer.results()[0], script)


def test_no_room_beyond_the_request() -> None:
    consumer = collector([request()])
    for first, rows in ((0, 5), (3, 2), (-1, 2)):
        with pytest.raises(IncompleteError, match="more rows than the request has"):
            consumer.buffer(0, "raw", first, rows)
    with pytest.raises(IncompleteError, match="no such request"):
        consumer.buffer(1, "raw", 0, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("direct", [True, False])
def test_a_scoring_batch_of_equal_lengths_is_one_block(dtype: Any, direct: bool) -> None:
    made = [Script(request(5, select=Select(slice(1, None))), 0, seed=i) for i in range(3)]
    consumer = collector([script.request for script in made], dtype)
    for i in (2, 0, 1):
        for block in made[i].blocks(i, lambda n: [2], dtype)[:-1]:
            if len(block) and direct:
                block = write_into(consumer.buffer, made[i], i, block, int(block.positions[0]) - 1, dtype)
            consumer.add(block)
        consumer.finish(made[i].end(i))
    members = []
    for result, script in zip(consumer.results(), made, strict=True):
        check(result, script, dtype)
        assert result.logits is not None
        members.append(result.logits)
    dense = LogitsBatch(members).to_numpy()
    assert dense.ctypes.data == members[0].values.ctypes.data
    assert dense.ctypes.data % 64 == 0
    assert dense.tobytes() == np.stack([m.values for m in members]).tobytes()


def test_a_batch_of_other_lengths_or_dtypes_is_not_one_block() -> None:
    scripts_ = [Script(request(n), 0) for n in (4, 5)]
    stream = [item for i, script in enumerate(scripts_) for item in script.blocks(i, lambda n: [])]
    first, second = collect([script.request for script in scripts_], stream)
    check(first, scripts_[0])
    check(second, scripts_[1])
    requests = [request(), dataclasses.replace(request(), encode="bfloat16")]
    consumer = Collector(requests, identity=identity())
    assert consumer.buffer(0, "raw", 0, 1).dtype == np.float32
    assert consumer.buffer(1, "raw", 0, 1).dtype == ml_dtypes.bfloat16


def test_an_early_end_gives_a_view_of_the_front() -> None:
    script = Script(request(4, max_new_tokens=1000), 2)
    consumer = collector([script.request])
    room = consumer.buffer(0, "raw", 0, 1003)
    for item in script.blocks(0, lambda n: [2]):
        consumer.finish(item) if isinstance(item, End) else consumer.add(item)
    logits = consumer.results()[0].logits
    assert logits is not None
    assert logits.shape == (5, VOCAB)
    assert np.shares_memory(logits.values, room)
    assert len(logits.generated) == 2


def test_listed_positions_that_an_early_end_did_not_reach() -> None:
    script = Script(request(4, max_new_tokens=9, select=Select([1, 4, 8])), 2)
    assert script.rows.tolist() == [1, 4]
    (result,) = collect([script.request], script.blocks(0, lambda n: []))
    check(result, script)


def test_attention_weights_of_growing_blocks_are_padded_with_zeros() -> None:
    script = Script(request(3, max_new_tokens=4, attentions=(1,)), 3)
    (result,) = collect([script.request], script.blocks(0, lambda n: [2, 3, 4]))
    assert result.logits is not None
    weights = result.logits.attentions[1]
    assert weights.shape == (5, HEADS, 5)
    assert (weights[:2, :, 2:] == 0).all()
    np.testing.assert_array_equal(weights, script.part("attentions"))


@pytest.mark.parametrize("borders", [[], [1, 3]])
@pytest.mark.parametrize("select", [Select(), Select("generated")])
def test_rows_on_the_device_become_one_tensor(borders: list[int], select: Select) -> None:
    torch = pytest.importorskip("torch")
    made = request(keep_on_device=True, select=select)
    script = Script(made, 0)
    stream = script.blocks(0, lambda n: borders if n else [])
    for block in stream[:-1]:
        if block.values is not None:
            block.values = torch.from_numpy(block.values)
    (result,) = collect([made], stream)
    assert result.logits is not None
    assert isinstance(result.logits.values, torch.Tensor)
    np.testing.assert_array_equal(result.logits.to_numpy(), script.values("raw")[script.rows])
    if len(script.rows) and not borders:
        assert result.logits.values is stream[0].values


# -- the bound that buffers are made by ----------------------------------------------------------------------


@given(
    st.integers(1, 6),
    st.integers(0, 6),
    st.one_of(
        st.builds(slice, *[st.one_of(st.none(), st.integers(-9, 9))] * 2),
        st.lists(st.integers(-3, 2), min_size=1, max_size=4),
        st.sampled_from(["all", "prompt", "generated", "last"]),
    ),
)
def test_no_early_end_has_more_rows_than_the_bound(prompt_length: int, most: int, positions: Any) -> None:
    made = Request(token_ids(prompt_length + 2), max_new_tokens=most, select=Select(positions))
    counts = [
        len(Select(positions).rows(prompt_length=prompt_length + 2, new_tokens=n))
        for n in range(min(most, 1), most + 1)
    ]
    assert made.max_rows >= max(counts)
    if not most:
        assert made.max_rows == counts[0]

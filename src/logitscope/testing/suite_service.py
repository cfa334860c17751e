"""Conformance checks of an engine as a service: inputs, streams, memory and aborts (traps 15, 17, 21)."""

# ruff: noqa: D102 - a check's name is its statement

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from logitscope.errors import (
    ContextLengthError,
    EmptyInputError,
    EngineClosedError,
    InputError,
    LogitscopeError,
    TokenIdError,
)
from logitscope.logits import Logits
from logitscope.rows import End, RowBlock, Sampling, Select, Stage
from logitscope.testing.asserts import BUDGETS, assert_complete, assert_rows_close, assert_same_bits
from logitscope.testing.case import EngineCase, read_stream

_TEXTS = ("The capital of France is", "A model reads tokens", "日本語 and Ελληνικά 🙂")
_CHAT = (
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Japan?"},
)


class InputSuite:
    """Forms of input, and inputs that are none."""

    def test_one_text_and_a_list_of_texts(self, case: EngineCase) -> None:
        encoded = [case.tokenizer.encode(text) for text in _TEXTS]
        one = case.score(_TEXTS[0])
        assert np.array_equal(one.token_ids, encoded[0])
        batch = case.score_batch(list(_TEXTS))
        for ids, logits in zip(encoded, batch, strict=True):
            assert np.array_equal(logits.token_ids, ids)
            case.assert_true(logits)
        assert len(case.score_batch([_TEXTS[0]])) == 1, "a list of one is a batch"

    def test_one_list_of_ids_and_a_list_of_lists(self, case: EngineCase) -> None:
        ids = case.prompt(5)
        assert np.array_equal(case.score(ids).token_ids, ids)
        batch = case.score_batch([ids, case.prompt(3)])
        assert np.array_equal(batch[0].token_ids, ids)
        assert np.array_equal(batch[1].token_ids, case.prompt(3))
        assert len(case.score_batch([ids])) == 1, "a list of one is a batch"
        assert isinstance(case.engine.generate([ids], max_new_tokens=1), list)

    @pytest.mark.parametrize("kind", ["int32", "int64", "uint16", "tuple", "numpy ints", "torch"])
    def test_ids_in_other_containers(self, case: EngineCase, kind: str) -> None:
        ids = case.prompt(5)
        given = _as(kind, ids)
        assert np.array_equal(case.score(given).token_ids, ids)
        batch = case.score_batch([given, _as(kind, case.prompt(3))])
        assert [logits.token_ids.tolist() for logits in batch] == [ids, case.prompt(3)]
        assert batch[0].token_ids.dtype == np.int32

    @pytest.mark.parametrize("kind", ["numpy", "torch"])
    def test_a_matrix_of_ids_is_a_batch(self, case: EngineCase, kind: str) -> None:
        matrix = [case.prompt(5), case.prompt(5, seed=1)]
        given: Any = np.array(matrix) if kind == "numpy" else _torch().tensor(matrix)
        batch = case.score_batch(given)
        assert [logits.token_ids.tolist() for logits in batch] == matrix

    def test_one_chat_and_a_list_of_chats(self, case: EngineCase) -> None:
        tokenizer = case.tokenizer
        if not tokenizer.has_chats:
            pytest.skip("the tokenizer has no chat template")
        ids = tokenizer.encode_chat(_CHAT, generate=False)
        one = case.score(list(_CHAT))
        assert np.array_equal(one.token_ids, ids)
        case.assert_true(one)
        batch = case.score_batch([list(_CHAT), list(_CHAT[:1])])
        assert [len(logits) for logits in batch] == [
            len(ids),
            len(tokenizer.encode_chat(_CHAT[:1], generate=False)),
        ]
        made = case.generate(list(_CHAT), max_new_tokens=2)
        assert tokenizer.decode(made.prompt_token_ids, special=True).rstrip().endswith("assistant")

    def test_what_was_given_may_change_afterwards(self, case: EngineCase) -> None:
        ids = np.array(case.prompt(6), dtype=np.int32)
        requests = case.engine.requests(ids)
        scored = case.score(ids)
        ids[:] = 0
        assert scored.token_ids.tolist() == case.prompt(6)
        (streamed,) = read_stream(case.engine.stream(requests), 1)
        assert_rows_close(streamed.values, case.oracle(case.prompt(6)), dtype=case.dtype)

    @pytest.mark.parametrize("empty", ["", [], (), [[]], [[], [1]], [[1], []], np.zeros((2, 0))], ids=repr)
    def test_empty_input_is_an_error(self, case: EngineCase, empty: Any) -> None:
        if isinstance(empty, str) and len(case.tokenizer.encode("")):
            pytest.skip("the tokenizer begins every text with a special token")
        for call in (case.engine.logits, case.engine.generate):
            with pytest.raises(EmptyInputError):
                call(empty)
        _still_right(case)

    @pytest.mark.parametrize("wrong", [3, 1.5, None, [1.5], [True], [[1, "a"]], [None], {"a": 1}], ids=repr)
    def test_another_form_of_input_is_an_error(self, case: EngineCase, wrong: Any) -> None:
        with pytest.raises(InputError):
            case.engine.logits(wrong)
        _still_right(case)

    @pytest.mark.parametrize("beyond", [-1, 0, 2**31, -(2**40), 2**70])
    def test_an_id_outside_the_vocabulary_is_an_error(self, case: EngineCase, beyond: int) -> None:
        token_id = beyond if beyond else case.vocab_size
        for wrong in ([1, token_id], [[1], [1, token_id]]):
            with pytest.raises(TokenIdError, match=str(token_id)):
                case.engine.logits(wrong)
            with pytest.raises(TokenIdError):
                case.engine.generate(wrong, max_new_tokens=1)
        _still_right(case)

    def test_a_prompt_beyond_the_context_is_an_error(self, case: EngineCase) -> None:
        context = case.engine.context_length
        if context is None:
            pytest.skip("the model states no context length")
        if context > 4096:
            pytest.skip("the context is too long for a quick check")
        with pytest.raises(ContextLengthError, match=str(context)):
            case.engine.logits(case.prompt(context + 1))
        with pytest.raises(ContextLengthError, match=str(context)):
            case.engine.generate(case.prompt(context), max_new_tokens=2)
        made = case.generate(case.prompt(context), max_new_tokens=1, ignore_eos=True)
        assert_complete(made)
        assert made.logits is not None
        case.assert_true(made.logits)

    def test_an_unknown_option_is_an_error(self, case: EngineCase) -> None:
        with pytest.raises(TypeError, match="temprature"):
            case.engine.generate(case.prompt(3), temprature=1.0)  # type: ignore[call-arg]
        with pytest.raises(LogitscopeError, match="gpu"):
            case.engine.logits(case.prompt(3), device="gpu")  # type: ignore[arg-type]

    def test_a_closed_engine_says_so_and_its_results_stay(self, case: EngineCase) -> None:
        engine = case.opened()
        scored = engine.logits(case.prompt(6))
        assert isinstance(scored, Logits)
        engine.close()
        engine.close()
        with pytest.raises(EngineClosedError):
            engine.logits(case.prompt(6))
        case.assert_true(scored)
        assert "closed" in repr(engine)
        _still_right(case)


class StreamSuite:
    """Blocks: order, ownership, ends, aborts."""

    def test_a_stream_gives_each_row_once(self, case: EngineCase) -> None:
        prompts = [case.prompt(length, seed) for seed, length in enumerate((20, 3, 11, 1))]
        requests = case.engine.requests(prompts)
        for i, part in enumerate(read_stream(case.engine.stream(requests), 4)):
            assert np.array_equal(part.positions, np.arange(len(prompts[i])))
            assert (part.end.finish_reason, part.end.text, len(part.token_ids)) == (None, None, 0)
            assert_rows_close(part.values, case.oracle(prompts[i]), dtype=case.dtype)

    def test_a_stream_of_scoring_and_generation_mixed(self, case: EngineCase) -> None:
        scoring = case.engine.requests([case.prompt(9)], select=Select("last"))
        generating = case.engine.requests([case.prompt(5), case.prompt(7)], max_new_tokens=3)
        parts = read_stream(case.engine.stream([generating[0], *scoring, generating[1]]), 3)
        assert parts[1].positions.tolist() == [8]
        assert_rows_close(parts[1].values, case.oracle(case.prompt(9))[-1:], dtype=case.dtype)
        for part, prompt in ((parts[0], case.prompt(5)), (parts[2], case.prompt(7))):
            truth = case.oracle([*prompt, *part.token_ids[:-1].tolist()])
            assert_rows_close(part.values, truth, dtype=case.dtype)

    def test_requests_of_one_stream_may_all_differ(self, case: EngineCase) -> None:
        ids, other = case.prompt(9), case.prompt(4)
        eos = {} if case.eos_token_id is None else {case.eos_token_id: 3.0}
        drawn = [
            Sampling(temperature=1.0, seed=3),
            Sampling(temperature=0.7, seed=3, top_k=50, repetition_penalty=1.3, logit_bias=eos),
            Sampling(stop_token_ids=tuple(other)),
        ]
        calls: list[dict[str, Any]] = [
            {"max_new_tokens": 7, "sampling": drawn[0]},
            {},
            {"max_new_tokens": 2, "sampling": drawn[1], "select": Select("last"), "summary": ("max",)},
            {"max_new_tokens": 12, "sampling": drawn[2], "encode": "float16"},
            {"select": Select([1, -1]), "summary": True},
            {"max_new_tokens": 5, "sampling": drawn[1], "select": Select(vocab=None), "summary": True},
        ]
        if case.engine.capabilities.processed:
            calls.append({"max_new_tokens": 6, "sampling": drawn[1], "processed": True})
        requests = [
            request
            for prompt in (ids, other, ids)
            for call in calls
            for request in case.engine.requests(prompt, **call)
        ]
        together = read_stream(case.engine.stream(requests), len(requests))
        for request, part in zip(requests, together, strict=True):
            (alone,) = read_stream(case.engine.stream([request]), 1)
            assert np.array_equal(part.token_ids, alone.token_ids)
            assert np.array_equal(part.positions, alone.positions)
            assert np.array_equal(part.processed_positions, alone.processed_positions)
            assert (part.end.finish_reason, part.end.stop) == (alone.end.finish_reason, alone.end.stop)
            assert part.end.text == alone.end.text
            if part.values is not None:
                every = [*request.token_ids.tolist(), *part.token_ids.tolist()]
                truth = case.oracle(every[: int(part.positions.max()) + 1])[part.positions]
                coarser = max(case.dtype, request.encode or case.dtype, key=lambda name: BUDGETS[name].eps)
                assert_rows_close(part.values, truth, dtype=coarser)

    def test_a_call_inside_a_stream_is_right_or_refused(self, case: EngineCase) -> None:
        prompts = [case.prompt(9), case.prompt(9), case.prompt(3), case.prompt(3, seed=1)]
        requests = case.engine.requests(prompts, max_new_tokens=4) + case.engine.requests(prompts)

        def disturbed() -> Iterator[RowBlock | End]:
            for item in case.engine.stream(requests):
                with contextlib.suppress(LogitscopeError):
                    case.score(case.prompt(30, seed=7), encode="float16", summary=True)
                    case.generate_batch([case.prompt(5), case.prompt(6)], max_new_tokens=2)
                yield item

        for i, part in enumerate(read_stream(disturbed(), 8)):
            every = [*prompts[i % 4], *part.token_ids.tolist()[:-1]]
            assert_rows_close(
                part.values, case.oracle(every), dtype=case.dtype, what="a stream with calls inside"
            )

    def test_a_stream_writes_into_the_consumers_buffers(self, case: EngineCase) -> None:
        prompts = [case.prompt(20), case.prompt(3)]
        requests = case.engine.requests(prompts)
        room = [np.full((len(p), case.vocab_size), np.nan, case.score(p).values.dtype) for p in prompts]

        def buffer(index: int, stage: Stage, first: int, rows: int) -> NDArray[Any]:
            assert stage == "raw"
            return room[index][first : first + rows]

        for item in case.engine.stream(requests, buffer=buffer):
            if isinstance(item, RowBlock):
                assert np.shares_memory(item.values, room[item.index])
        for prompt, values in zip(prompts, room, strict=True):
            assert_rows_close(values, case.oracle(prompt), dtype=case.dtype)

    def test_trap_17_a_block_is_the_consumers_own(self, case: EngineCase) -> None:
        prompts = [case.prompt(20), case.prompt(14), case.prompt(3)]
        requests = case.engine.requests(prompts[:2]) + case.engine.requests(prompts[2], max_new_tokens=6)
        held: list[tuple[RowBlock, NDArray[Any]]] = []
        poisoned = 0
        for item in case.engine.stream(requests):
            if isinstance(item, End) or not len(item):
                continue
            if poisoned <= len(held):
                item.values[...] = np.nan
                poisoned += 1
            else:
                held.append((item, np.array(item.values)))
        assert held
        for block, before in held:
            assert_same_bits(block.values, before, what="a block changed after it was handed out")
            truth = case.oracle(prompts[block.index]) if block.index < 2 else None
            if truth is not None:
                assert_rows_close(block.values, truth[block.positions], dtype=case.dtype)
        for index in range(2):
            mine = [block for block, _ in held if block.index == index]
            for a, b in itertools.pairwise(mine):
                assert not np.shares_memory(a.values, b.values), "two blocks share memory"
        _still_right(case)

    def test_trap_17_a_result_stays_over_the_next_20_requests(self, case: EngineCase) -> None:
        scored = case.score(case.prompt(12), summary=True)
        made = case.generate(case.prompt(5), max_new_tokens=5, ignore_eos=True)
        assert made.logits is not None
        before = [np.array(scored.values), np.array(made.logits.values), scored.entropy().copy()]
        for seed in range(10):
            case.score(case.prompt(12, seed=seed + 1), summary=True)
            case.generate(case.prompt(5, seed=seed + 1), max_new_tokens=3, temperature=1.0, seed=seed)
        for now, then in zip((scored.values, made.logits.values, scored.entropy()), before, strict=True):
            assert_same_bits(now, then, what="a later request changed a result")

    def test_trap_17_a_poisoned_result_poisons_nothing_else(self, case: EngineCase) -> None:
        scored = case.score(case.prompt(12))
        scored.values[...] = np.nan
        made = case.generate(case.prompt(12), max_new_tokens=4, ignore_eos=True)
        assert made.logits is not None
        made.logits.values[...] = np.nan
        case.assert_true(case.score(case.prompt(12)))
        again = case.generate(case.prompt(12), max_new_tokens=4, ignore_eos=True)
        assert again.logits is not None
        case.assert_true(again.logits)

    @pytest.mark.parametrize("blocks", [0, 1, 2, 5])
    def test_trap_21_closing_a_stream_early(self, case: EngineCase, blocks: int) -> None:
        for new in (0, 8):
            requests = case.engine.requests([case.prompt(20), case.prompt(9)], max_new_tokens=new)
            stream: Any = case.engine.stream(requests)
            given = list(itertools.islice(stream, blocks))
            assert len(given) == blocks or isinstance(given[-1], End)
            stream.close()
            with pytest.raises(StopIteration):
                next(stream)
            _still_right(case)

    def test_trap_21_an_exception_thrown_into_a_stream(self, case: EngineCase) -> None:
        stream: Any = case.engine.stream(case.engine.requests(case.prompt(20), max_new_tokens=8))
        next(stream)
        with pytest.raises(KeyboardInterrupt):
            stream.throw(KeyboardInterrupt())
        _still_right(case)

    def test_trap_21_an_exception_in_the_middle_of_a_call(self, case: EngineCase) -> None:
        class GoneError(Exception):
            pass

        def progress(done: int, total: int) -> None:
            raise GoneError

        with pytest.raises(GoneError):
            case.engine.logits([case.prompt(20), case.prompt(9)], progress=progress)
        with pytest.raises(GoneError):
            case.engine.generate(case.prompt(9), return_logits=True, progress=progress)
        _still_right(case)

    def test_trap_21_aborts_leave_nothing_behind(self, case: EngineCase) -> None:
        def abort() -> None:
            stream: Any = case.engine.stream(case.engine.requests([case.prompt(20)] * 3, max_new_tokens=4))
            next(stream)
            stream.close()

        abort()
        with _counting() as blocks:
            before = blocks()
            for _ in range(5):
                abort()
            grown = (blocks() - before) / 5
        assert grown < 100, f"{grown:.0f} Python memory blocks stay after each abort"

    def test_progress_counts_rows(self, case: EngineCase) -> None:
        seen: list[tuple[int, int]] = []
        prompts = [case.prompt(20), case.prompt(9)]
        case.engine.logits(prompts, progress=lambda done, total: seen.append((done, total)))
        assert seen[-1] == (29, 29)
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)

    def test_trap_15_a_result_is_arrays_only(self, case: EngineCase) -> None:
        def cost(length: int) -> int:
            before = blocks()
            held = case.score(case.prompt(length), summary=True)
            after = blocks()
            assert len(held) == length
            return after - before

        with _counting() as blocks:
            cost(40)
            few, many = cost(10), cost(40)
        assert many - few < 100, f"{many - few} more Python memory blocks for 30 more rows"
        assert many < 1000, f"{many} Python memory blocks for {40 * case.vocab_size:,} values"

    def test_trap_15_a_generation_is_arrays_only(self, case: EngineCase) -> None:
        def cost(tokens: int) -> int:
            before = blocks()
            held = case.generate(case.prompt(6), max_new_tokens=tokens, ignore_eos=True, summary=True)
            after = blocks()
            assert len(held.token_ids) == tokens
            return after - before

        with _counting() as blocks:
            cost(30)
            few, many = cost(10), cost(30)
        assert many - few < 100, f"{many - few} more Python memory blocks for 20 more tokens"


def _still_right(case: EngineCase) -> None:
    """The engine gives right rows after what was done to it."""
    case.assert_true(case.score(case.prompt(7)), what="the next request")
    made = case.generate(case.prompt(4), max_new_tokens=2, ignore_eos=True)
    assert made.logits is not None
    case.assert_true(made.logits, what="the next request")


@contextlib.contextmanager
def _counting() -> Iterator[Callable[[], int]]:
    """A count of Python's memory blocks; what was there before is not searched for garbage again."""

    def blocks() -> int:
        gc.collect()
        return sys.getallocatedblocks()

    gc.collect()
    gc.freeze()
    try:
        yield blocks
    finally:
        gc.unfreeze()


def _torch() -> Any:
    return pytest.importorskip("torch")


def _as(kind: str, ids: list[int]) -> Any:
    match kind:
        case "tuple":
            return tuple(ids)
        case "numpy ints":
            return [np.int64(i) for i in ids]
        case "torch":
            return _torch().tensor(ids)
        case _:
            return np.array(ids, dtype=kind)

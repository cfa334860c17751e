"""The vocabulary of the contract, as plain dataclasses, and its alignment arithmetic.

A sequence is its token ids ``t[0] … t[N-1]``: ``L`` prompt tokens, then ``n`` generated ones.
Row ``p`` holds the logits computed after reading ``t[0..p]``; it scores the token at ``p + 1``.
``docs/contract.md`` is the page to read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from logitscope.errors import InputError, OptionError, SelectError

Ids: TypeAlias = NDArray[np.int32]
Stage: TypeAlias = Literal["raw", "processed"]
Kind: TypeAlias = Literal["prompt", "generated", "next"]
Positions: TypeAlias = "str | slice | Sequence[int]"
FinishReason: TypeAlias = Literal["stop", "length"]

SUMMARIES: tuple[str, ...] = (
    "logsumexp",
    "max",
    "argmax",
    "entropy",
    "varentropy",
    "target_logit",
    "target_logprob",
    "target_rank",
    "top1_margin",
)
"""Names of the per-row summaries, each an array ``[rows]`` over the full vocabulary."""

SUMMARY_DTYPES: dict[str, type[np.float32] | type[np.int32]] = {
    name: np.int32 if name in ("argmax", "target_rank") else np.float32 for name in SUMMARIES
}

HIDDEN_FORMS: tuple[str, ...] = ("hidden", "hidden-float16")
"""Encodings that keep the head's input; rows are rebuilt from it when they are read."""

VALUE_DTYPES: tuple[str, ...] = ("float32", "bfloat16", "float16")
"""Encodings that keep the logits themselves; rows of which only some columns are kept take no other."""

POSITION_NAMES: tuple[str, ...] = ("all", "prompt", "generated", "assistant", "last")
NO_TARGET = -1
NO_IDS: Ids = np.empty(0, np.int32)

Container: TypeAlias = Literal["none", "dense", "columns", "sparse"]
"""How kept columns are held: not at all, all of them, the same few of each row, or each row its own."""

_CUTS = ("top_k", "top_p", "min_p", "threshold", "sample")


@dataclasses.dataclass(frozen=True)
class Select:
    """What to keep of a sequence's rows, and of each row's columns.

    At most one of ``vocab``, ``top_k``, ``top_p``, ``min_p``, ``threshold`` and ``sample`` says which columns
    are kept. Of equal logits the lower id comes first. Rows that are cut so keep their exact ``logsumexp``
    over the full vocabulary.

    Args:
        positions: ``"all"``, ``"prompt"`` (rows ``0 … L-2``), ``"generated"`` (rows ``L-1 …`` of a
            generation), ``"assistant"`` (rows that score the assistant's tokens of a chat), ``"last"``, a
            slice, or a list of positions. Negative positions count from the last row.
        vocab: ``"all"`` keeps every column; ``None`` keeps no values, only summaries; a list of token ids, or
            of texts of one token each, keeps those columns, in that order; a list of such lists has one for
            each selected row.
        top_k: keep the ``k`` highest logits.
        top_p: keep the smallest set of tokens with this probability mass, in (0, 1].
        min_p: keep tokens with at least this share of the best token's probability, in (0, 1].
        threshold: keep logits of at least this value; a row may keep none.
        sample: draw so many ids from the softmax at ``temperature``, with replacement, and keep those that
            were drawn with their counts: targets without the bias of a top-k.
        temperature: of that draw.
        seed: of that draw. A row's ids depend on it, on the prompt, the position and the sample's number.
        logsumexp: False leaves it out with a list of token ids: then only those columns of the head are
            multiplied, and there are no log-probabilities.

    Example:
        >>> Select(positions=[4, 2]).rows(prompt_length=6, new_tokens=0).tolist()
        [2, 4]
        >>> Select(positions="generated").rows(prompt_length=6, new_tokens=3).tolist()
        [5, 6, 7]
        >>> Select("last", vocab=[11, 7]).container, Select(top_k=64).container
        ('columns', 'sparse')
    """

    positions: Positions = "all"
    vocab: Any = "all"
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    threshold: float | None = None
    sample: int | None = None
    temperature: float = 1.0
    seed: int = 0
    logsumexp: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.positions, str):
            if self.positions not in POSITION_NAMES:
                raise SelectError(
                    "unknown name of positions",
                    where="Select.positions",
                    expected=f"one of {', '.join(POSITION_NAMES)}, a slice or a list of ints",
                    got=repr(self.positions),
                )
        elif isinstance(self.positions, slice):
            _check_slice(self.positions)
        else:
            object.__setattr__(self, "positions", _position_list(self.positions))
        object.__setattr__(self, "vocab", _columns(self.vocab))
        self._check_cuts()

    def _check_cuts(self) -> None:
        given = [name for name in _CUTS if getattr(self, name) is not None]
        if self.vocab != "all":
            given.insert(0, "vocab")
        if len(given) > 1:
            raise SelectError(
                "selections of columns that contradict each other",
                where="Select",
                expected=f"one of vocab, {', '.join(_CUTS)}",
                got=" and ".join(given),
            )
        listed = isinstance(self.vocab, tuple)
        drawn = self.sample is not None
        checks: tuple[tuple[str, bool, str], ...] = (
            ("top_k", self.top_k is None or (_is_int(self.top_k) and self.top_k > 0), "an int of 1 or more"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "a number in (0, 1]"),
            ("min_p", self.min_p is None or 0 < self.min_p <= 1, "a number in (0, 1]"),
            ("threshold", self.threshold is None or self.threshold == self.threshold, "a number"),
            ("sample", not drawn or (_is_int(self.sample) and self.sample > 0), "an int of 1 or more"),  # type: ignore[operator]
            ("temperature", 0 < self.temperature < float("inf"), "a finite number > 0"),
            ("temperature", drawn or self.temperature == 1.0, "none without sample"),
            ("seed", _is_int(self.seed) and 0 <= self.seed < 2**63, "an int in [0, 2**63)"),
            ("seed", drawn or self.seed == 0, "none without sample"),
            ("logsumexp", self.logsumexp or listed, "True unless vocab is a list of token ids"),
        )
        for name, good, expected in checks:
            if not good:
                raise SelectError(
                    "value outside its range",
                    where=f"Select.{name}",
                    expected=expected,
                    got=repr(getattr(self, name)),
                )

    @property
    def container(self) -> Container:
        """How the kept columns are held."""
        if self.vocab is None:
            return "none"
        if isinstance(self.vocab, tuple):
            return "sparse" if isinstance(self.vocab[0], tuple) else "columns"
        return "dense" if all(getattr(self, name) is None for name in _CUTS) else "sparse"

    @property
    def cut(self) -> bool:
        """Whether some columns are kept and others are not."""
        return self.container in ("columns", "sparse")

    @property
    def best(self) -> bool:
        """Whether what is kept of a row are its best tokens, best first."""
        return any(getattr(self, name) is not None for name in _CUTS if name != "sample")

    @property
    def texts(self) -> bool:
        """Whether token ids are given by their text, which a tokenizer must turn into ids."""
        if not isinstance(self.vocab, tuple):
            return False
        flat = self.vocab if self.container == "columns" else [i for ids in self.vocab for i in ids]
        return any(isinstance(i, str) for i in flat)

    def check_columns(self, vocab_size: int, rows: int) -> None:
        """Refuse columns that there are not.

        Args:
            vocab_size: columns of a row.
            rows: that are selected; with a list of ids for each of them they must be as many.

        Raises:
            SelectError: a text, an id outside the vocabulary, more columns than there are, or another number
                of lists than rows.
        """
        if self.texts:
            raise SelectError(
                "token ids are given as texts, and here is no tokenizer",
                where="Select.vocab",
                expected="ids",
                fix="An engine of logitscope.open takes texts.",
            )
        if self.top_k is not None and self.top_k > vocab_size:
            raise SelectError(
                "more columns than the vocabulary has",
                where="Select.top_k",
                expected=f"at most {vocab_size}",
                got=self.top_k,
            )
        if not isinstance(self.vocab, tuple):
            return
        lists = [self.vocab] if self.container == "columns" else self.vocab
        if self.container == "sparse" and len(lists) != rows:
            raise SelectError(
                "one list of token ids for each selected row",
                where="Select.vocab",
                expected=f"{rows} lists",
                got=len(lists),
            )
        ids = np.array([i for one in lists for i in one], dtype=object)
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if outside.size:
            raise SelectError(
                "token id outside the vocabulary",
                where="Select.vocab",
                expected=f"0 … {vocab_size - 1}",
                got=outside[0],
            )

    @property
    def from_the_end(self) -> bool:
        """Whether it counts from the last row, so that a generation's rows are known only when it ends."""
        if isinstance(self.positions, slice):
            bounds = (self.positions.start, self.positions.stop, self.positions.step)
            return any(bound is not None and bound < 0 for bound in bounds)
        if isinstance(self.positions, str):
            return self.positions == "last"
        return min(self.positions) < 0

    def rows(self, *, prompt_length: int, new_tokens: int, ended_early: bool = False) -> NDArray[np.int64]:
        """Positions of the selected rows, ascending, without repeats, as int64 ``[rows]``.

        Args:
            prompt_length: ``L``.
            new_tokens: ``n``, the generated tokens; 0 when scoring.
            ended_early: leave out listed positions that the generation did not reach.

        Raises:
            SelectError: a listed position lies outside the sequence's rows.
        """
        count = row_count(prompt_length, new_tokens)
        every = np.arange(count, dtype=np.int64)
        if self.positions == "assistant":
            raise SelectError(
                "only a chat has rows of the assistant",
                where="Select.positions",
                expected="chat messages, given to an engine of logitscope.open",
                got="token ids",
            )
        if isinstance(self.positions, slice):
            return np.sort(every[self.positions])
        if isinstance(self.positions, str):
            first = prompt_length - 1
            return {
                "all": every,
                "prompt": every[:first],
                "generated": every[first:] if new_tokens else every[:0],
                "last": every[-1:],
            }[self.positions]
        wanted = np.asarray(self.positions, dtype=np.int64)
        outside = (wanted < -count) | (wanted >= count)
        if outside.any() and not ended_early:
            raise SelectError(
                "position outside the sequence",
                where="Select.positions",
                expected=f"{-count} … {count - 1} ({prompt_length} prompt tokens, {new_tokens} generated)",
                got=int(wanted[outside][0]),
            )
        wanted = wanted[~outside]
        return np.unique(np.where(wanted < 0, wanted + count, wanted))


def _check_slice(positions: slice) -> None:
    for name in ("start", "stop", "step"):
        value = getattr(positions, name)
        if value is not None and not isinstance(value, int | np.integer):
            raise SelectError(
                "a slice of positions has integer bounds",
                where=f"Select.positions.{name}",
                expected="an int or None",
                got=repr(value),
            )
    if positions.step == 0:
        raise SelectError("a slice of positions cannot have step 0", where="Select.positions")


def _position_list(positions: object) -> tuple[int, ...]:
    array = np.asarray(positions)
    if array.ndim != 1 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
        raise SelectError(
            "positions are no flat, non-empty list of ints",
            where="Select.positions",
            expected=f"one of {', '.join(POSITION_NAMES)}, a slice or a list of ints",
            got=repr(positions),
        )
    return tuple(array.tolist())


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _columns(vocab: Any) -> Any:
    """``"all"``, None, or token ids (or texts) as a tuple, or a tuple of such tuples."""
    if vocab is None or (isinstance(vocab, str) and vocab == "all"):
        return vocab
    listed = vocab.tolist() if hasattr(vocab, "tolist") else vocab
    good = isinstance(listed, Sequence) and not isinstance(listed, str) and len(listed) > 0
    if good and all(isinstance(one, Sequence | np.ndarray) and not isinstance(one, str) for one in listed):
        return tuple(_id_list(one) for one in listed)
    if not good or not len(listed):
        raise _no_columns(vocab)
    return _id_list(listed)


def _id_list(ids: Any) -> tuple[int | str, ...]:
    listed = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if not all(isinstance(i, str) or _is_int(i) for i in listed):
        raise _no_columns(ids)
    if len(set(listed)) != len(listed):
        twice = next(i for n, i in enumerate(listed) if i in listed[:n])
        raise SelectError("a token is listed twice", where="Select.vocab", got=repr(twice))
    return tuple(i if isinstance(i, str) else int(i) for i in listed)


def _no_columns(got: Any) -> SelectError:
    return SelectError(
        "unknown selection of columns",
        where="Select.vocab",
        expected="'all', None, a list of token ids or texts, or one such list for each row",
        got=repr(got)[:80],
    )


def row_count(prompt_length: int, new_tokens: int) -> int:
    """Rows of a complete sequence: ``L`` when scoring, ``L + n - 1`` when ``n`` tokens were generated."""
    return prompt_length + max(new_tokens - 1, 0)


def targets(token_ids: Ids, positions: NDArray[np.int64]) -> Ids:
    """Ids that the rows score: ``t[p + 1]``, or -1 where the sequence ends; int32 ``[rows]``."""
    padded = np.append(token_ids, np.int32(NO_TARGET)).astype(np.int32, copy=False)
    return padded[positions + 1]


def kinds(positions: NDArray[np.int64], *, prompt_length: int, new_tokens: int) -> list[Kind]:
    """Kind of each row: ``prompt`` before row ``L-1``, then ``generated``, or ``next`` when scoring."""
    later: Kind = "generated" if new_tokens else "next"
    return ["prompt" if p < prompt_length - 1 else later for p in positions]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Greedy unless ``temperature`` is above 0.

    Args:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k highest tokens; 0 keeps all.
        top_p: keep the smallest set with this mass, in (0, 1].
        min_p: keep tokens with at least this share of the best token's probability, in [0, 1).
        repetition_penalty: above 1 discourages tokens of the prompt and the output
            (Keskar et al., 2019, section 4.1).
        logit_bias: added to the logits of these ids.
        seed: of the draw. None takes one from the system; the result tells which.
        stop: strings that end the output; the text is cut before them, the token ids are not.
        stop_token_ids: ids that end the output, besides the model's own end-of-sequence ids.
        ignore_eos: go on after the model's own end-of-sequence ids.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = _strings(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in self.stop_token_ids))
        checks: tuple[tuple[str, bool, str], ...] = (
            ("temperature", 0.0 <= self.temperature < float("inf"), "a finite number ≥ 0"),
            ("top_k", self.top_k >= 0, "an int ≥ 0 (0 keeps all)"),
            ("top_p", 0.0 < self.top_p <= 1.0, "a number in (0, 1]"),
            ("min_p", 0.0 <= self.min_p < 1.0, "a number in [0, 1)"),
            ("repetition_penalty", 0.0 < self.repetition_penalty < float("inf"), "a finite number > 0"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "an int in [0, 2**63)"),
            ("stop", all(stop), "non-empty strings"),
        )
        for name, good, expected in checks:
            if not good:
                raise OptionError(
                    "value outside its range", where=name, expected=expected, got=repr(getattr(self, name))
                )

    @property
    def greedy(self) -> bool:
        """Whether the best token is taken, with no draw."""
        return self.temperature == 0.0

    @property
    def plain(self) -> bool:
        """Whether the best token of the raw row is taken: nothing changes the row before the choice."""
        return self.greedy and self.repetition_penalty == 1.0 and not self.logit_bias


def _strings(value: object) -> tuple[str, ...]:
    """One string or several, as a tuple; what is no string becomes an empty one, which is refused."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence):
        return ("",)
    return tuple(item if isinstance(item, str) else "" for item in value)


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One sequence to run: what to feed, what to generate, what to keep.

    Args:
        token_ids: int32 ``[L]``, exactly what the model is fed.
        max_new_tokens: 0 scores the prompt; otherwise at most so many tokens are generated.
        sampling: how they are chosen.
        select: which rows and columns are kept; None keeps no rows (tokens only).
        encode: the value format; None is the model's own dtype.
        summary: names of per-row summaries that ride beside the rows.
        processed: whether the generated rows are also given after processors and warpers.
        hidden_states: layers whose hidden states ride along (0: embeddings, i: after layer i).
        attentions: layers whose attention weights ride along (0 is the first layer).
        keep_on_device: rows stay tensors on the engine's device instead of host arrays.
        prompt_index: which prompt of the call this is.
        sample_index: which sample of that prompt.
    """

    token_ids: Ids
    max_new_tokens: int = 0
    sampling: Sampling = Sampling()
    select: Select | None = Select()
    encode: str | None = None
    summary: tuple[str, ...] = ()
    processed: bool = False
    hidden_states: tuple[int, ...] = ()
    attentions: tuple[int, ...] = ()
    keep_on_device: bool = False
    prompt_index: int = 0
    sample_index: int = 0

    def __post_init__(self) -> None:
        unknown = [name for name in self.summary if name not in SUMMARIES]
        if unknown:
            raise OptionError(
                "unknown summary",
                where="summary",
                expected=f"of {', '.join(SUMMARIES)}",
                got=repr(unknown[0]),
            )
        if self.select is not None and not isinstance(self.select, Select):
            raise SelectError(
                "no selection",
                where="select",
                expected="a Select, such as Select('last')",
                got=repr(self.select),
            )
        if self.max_new_tokens < 0:
            raise OptionError("negative", where="max_new_tokens", expected="≥ 0", got=self.max_new_tokens)
        if self.select is not None and self.select.cut:
            self._check_cut(self.select)
        if self.select is not None and self.select.vocab is None and not (self.summary or self.extras):
            raise SelectError(
                "nothing is kept: no columns and no summaries",
                where="Select.vocab=None",
                fix="Ask for summary=True as well.",
            )
        if self.processed and not self.max_new_tokens:
            raise InputError(
                "processed rows exist only for generated tokens",
                where="processed",
                fix="Ask for max_new_tokens of 1 or more.",
            )
        if self.keep_on_device and self.encode in HIDDEN_FORMS:
            raise OptionError(
                "hidden rows are kept on the host",
                where="encode",
                got=repr(self.encode),
                fix="Leave out device='keep'.",
            )
        if self.processed and self.select is not None and self.select.from_the_end:
            raise SelectError(
                "processed rows are given as they come, and these positions count from the end",
                where="processed",
                fix="Select positions='generated', a list, or a slice from the front.",
            )

    def _check_cut(self, select: Select) -> None:
        """Rows of which some columns are kept: in what form, and with their logsumexp."""
        if self.encode is not None and self.encode not in VALUE_DTYPES:
            raise SelectError(
                "this encoding needs whole rows, and only some columns are kept",
                where="encode",
                expected=f"one of {', '.join(VALUE_DTYPES)}",
                got=repr(self.encode),
            )
        if select.container == "sparse" and self.keep_on_device:
            raise SelectError(
                "rows with columns of their own are kept on the host",
                where="Select",
                fix="Leave out device='keep', or list the token ids.",
            )
        if isinstance(select.vocab[0], tuple) and self.max_new_tokens and select.from_the_end:
            raise SelectError(
                "lists of token ids for rows that are known only when the generation ends",
                where="Select.vocab",
                expected="positions that do not count from the end",
            )
        if select.logsumexp and "logsumexp" not in self.summary:
            kept = {*self.summary, "logsumexp"}
            object.__setattr__(self, "summary", tuple(name for name in SUMMARIES if name in kept))

    @property
    def extras(self) -> bool:
        """Whether hidden states or attention weights were asked for."""
        return bool(self.hidden_states or self.attentions)

    @property
    def prompt_length(self) -> int:
        """``L``, the number of prompt tokens."""
        return len(self.token_ids)

    def value_format(self, stage: Stage, model_dtype: str) -> str:
        """Name of the kept values' encoding.

        Processed rows are float32 unless asked: the draw is made so, and no head gives them.
        """
        if stage == "raw":
            return self.encode or model_dtype
        return "float32" if self.encode is None or self.encode in HIDDEN_FORMS else self.encode

    @property
    def max_rows(self) -> int:
        """Upper bound of the rows kept; exact when scoring."""
        if self.select is None:
            return 0
        positions = self.select.positions
        at_the_end = len(self.select.rows(prompt_length=self.prompt_length, new_tokens=self.max_new_tokens))
        if not self.max_new_tokens or isinstance(positions, str):
            return at_the_end
        if not isinstance(positions, slice):
            return len(set(positions))
        # A slice from the back to the front, as [-9:9], is longer when generation ends early.
        lengths = (row_count(self.prompt_length, n) for n in range(1, self.max_new_tokens + 1))
        return max(len(range(length)[positions]) for length in lengths)


@dataclasses.dataclass(frozen=True)
class Identity:
    """What made a result. Results combine only when vocabulary and tokenizer agree.

    ``weights_hash`` covers names, shapes, dtypes and a strided sample of every weight;
    ``tokenizer_hash`` covers the map from id to token bytes and the special tokens. ``hidden_size`` and
    ``hidden_dtype`` are those of the head's input; None where the engine does not show it.
    """

    model: str
    weights_hash: str
    tokenizer_hash: str | None
    vocab_size: int
    tokenizer_size: int | None
    dtype: str
    engine: str
    engine_version: str
    device: str
    quantization: str | None = None
    kernel: str | None = None
    hidden_size: int | None = None
    hidden_dtype: str | None = None
    version: str = ""
    format_version: int = 1


@dataclasses.dataclass(frozen=True)
class Verification:
    """How rows that are rebuilt from hidden ones compared with the engine's own.

    Attributes:
        rows: that were compared.
        columns: that were compared of each.
        max_abs_difference: the worst one found.
        bound: that was allowed; beyond it there is no result.
    """

    rows: int
    columns: int
    max_abs_difference: float
    bound: float


Buffer: TypeAlias = Callable[[int, Stage, int, int], "NDArray[Any]"]
"""``buffer(index, stage, first, rows)``: where rows ``first … first + rows - 1`` of a request's kept
rows go: a C-contiguous array ``[rows, width]`` of the encoding's dtype and width (`vocab_size`, the hidden
size, or the number of selected ids) that the consumer owns. Entries do not go there."""


@dataclasses.dataclass
class Entries:
    """Kept entries of rows that have columns of their own, row after row.

    Attributes:
        lengths: entries of each row, int32 ``[rows]``.
        ids: token ids, int32 ``[entries]``; within a row best first, or in the order of the list that was
            given, or ascending where they were drawn.
        values: logits ``[entries]`` in the encoding's dtype.
        counts: how often each was drawn, int32 ``[entries]``; None unless they were.
    """

    lengths: Ids
    ids: Ids
    values: NDArray[Any]
    counts: Ids | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """By name, without counts where there are none."""
        found = {"lengths": self.lengths, "ids": self.ids, "values": self.values}
        return found if self.counts is None else {**found, "counts": self.counts}

    def rows(self, index: slice | NDArray[Any]) -> Entries:
        """Some of the rows; a slice without step is a view."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        first = ends - self.lengths
        chosen = np.arange(len(self))[index]
        lengths = self.lengths[index]
        if chosen.size and np.array_equal(chosen, np.arange(chosen[0], chosen[0] + chosen.size)):
            place: Any = slice(first[chosen[0]], ends[chosen[-1]])
        else:
            inside = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            place = np.repeat(first[chosen], lengths) + inside
        counts = None if self.counts is None else self.counts[place]
        return Entries(lengths, self.ids[place], self.values[place], counts)

    @classmethod
    def joined(cls, parts: Sequence[Entries], dtype: Any, *, counted: bool) -> Entries:
        """The rows of several, one after the other; no rows of that dtype where there are none."""
        empty = cls(NO_IDS, NO_IDS, np.empty(0, dtype), NO_IDS if counted else None)
        columns = zip(*(part.arrays().values() for part in [empty, *parts]), strict=True)
        return cls(*(np.concatenate(column) for column in columns))


@dataclasses.dataclass
class RowBlock:
    """Consecutive kept rows of one request, in ascending positions. The consumer owns the arrays.

    Attributes:
        index: the request's place in the list that was streamed.
        positions: int64 ``[rows]``.
        values: ``[rows, vocab_size]`` in the encoding's dtype (bfloat16 is the ml_dtypes one), or
            ``[rows, ids]`` of the token ids that were selected; hidden rows ``[rows, hidden_size]`` in a
            hidden form; None when no columns are kept, or each row has its own; a tensor on the engine's
            device when that was asked.
        entries: kept entries of rows that have columns of their own; else None.
        summary: per-row arrays ``[rows]`` over the full vocabulary, as kept.
        hidden_states: layer → ``[rows, hidden_size]``.
        attentions: layer → ``[rows, heads, keys]``; keys beyond the row's position are 0.
        token_ids: generated ids that this block brings: int32 ``[new]``, in order.
        stage: ``raw`` or ``processed``.
        room: where the request's values lie one after another, ``[rows, width]``, if they do; `values` are
            some of its rows, and those that have not come yet are not to be touched.
    """

    index: int
    positions: NDArray[np.int64]
    values: Any = None
    summary: dict[str, NDArray[Any]] = dataclasses.field(default_factory=dict)
    hidden_states: dict[int, NDArray[Any]] = dataclasses.field(default_factory=dict)
    attentions: dict[int, NDArray[Any]] = dataclasses.field(default_factory=dict)
    token_ids: Ids = dataclasses.field(default_factory=lambda: np.empty(0, np.int32))
    stage: Stage = "raw"
    entries: Entries | None = None
    room: NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self.positions)


@dataclasses.dataclass(frozen=True)
class End:
    """A request is complete: what it came to, and how many rows were given.

    Attributes:
        index: the request's place in the list that was streamed.
        generated_ids: int32 ``[n]``, stop and end-of-sequence tokens included.
        rows: raw rows that were yielded.
        processed_rows: processed rows that were yielded.
        finish_reason: ``stop``, ``length``, or None when scoring.
        stop: the stop string or stop id that ended it, if one did.
        text: the generated text, trimmed; None when the engine has no tokenizer.
        seed: of the draw; None when greedy.
        verification: how rebuilt rows compared; None when the rows are not hidden ones.
    """

    index: int
    generated_ids: Ids
    rows: int
    processed_rows: int = 0
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    text: str | None = None
    seed: int | None = None
    verification: Verification | None = None


Stream: TypeAlias = Iterator["RowBlock | End"]
"""Blocks interleaved over requests, in order within one; one ``End`` a request; closing it aborts."""


class Joining(Protocol):
    """What an engine that can is asked to do between the steps of a generation."""

    def arrivals(self, room: int) -> Sequence[Request]:
        """At most ``room`` checked requests that join the generation; their indices go on in the stream.

        They generate, and ask for no attention weights.
        """

    def wanted(self, index: int) -> bool:
        """Whether somebody still waits for a request; one that is not wanted ends without an ``End``."""


class Chunk(Protocol):
    """Rows of one request on the engine's device, as the extractor sees them; tensors are PyTorch's."""

    positions: NDArray[np.int64]
    targets: Any
    """Ids that the rows score, ``[rows]``: an int32 array, or a tensor that is on the device already."""

    @property
    def device(self) -> Any:
        """Device of the logits."""

    def logits(self, out: Any = None) -> Any:
        """Logits ``[rows, vocab_size]`` in the model's dtype, computed now.

        With ``out``, a contiguous tensor of that shape and dtype, they are written there. Without it the
        tensor belongs to the engine: read it before the next chunk asks for its logits.
        """

    def columns(self, ids: Any) -> Any:
        """Logits ``[rows, ids]`` of some columns, a tensor of their own; ``ids`` is an int64 tensor there."""

    def hidden(self) -> Any:
        """Input of the head, a tensor ``[rows, hidden_size]``; it belongs to the engine, as logits do."""

    def non_finite(self) -> Any:
        """Boolean tensor ``[]`` on the device: whether a row is NaN or infinite; None when it cannot be.

        Call it after `logits` or `hidden`, whichever is read.
        """


class Vocabulary(Protocol):
    """What a result needs of a tokenizer to show tokens to people."""

    def pieces(self, token_ids: Sequence[int] | NDArray[Any]) -> list[str]:
        """Text of each id by itself; incomplete UTF-8 shows as U+FFFD."""

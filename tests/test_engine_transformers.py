"""The conformance suite on the embedded engine, over tiny models of every family, and what is its own."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

import logitscope as ls
from logitscope.engines.transformers.engine import TransformersEngine
from logitscope.errors import EncodingError, InputError, NonFiniteError, OptionError, OutOfMemoryError
from logitscope.logits import Logits
from logitscope.rows import End, RowBlock
from logitscope.testing import (
    FAMILIES,
    EngineCase,
    EngineSuite,
    Oracle,
    OracleSuite,
    assert_rows_close,
    assert_same_bits,
    save_tiny,
    tiny_model,
    tiny_tokenizer,
)

VOCAB = 1001


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Threads cost more than they give in products of this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def transformers_case(model: Any, name: str, *, bos: bool = False, **options: Any) -> EngineCase:
    tokenizer = tiny_tokenizer(bos=bos)
    oracle = Oracle(model)

    def opened(forward_tokens: int | None) -> TransformersEngine:
        chunks = {} if forward_tokens is None else {"uncached_tokens": 0, "chunk_tokens": forward_tokens}
        return TransformersEngine.open(model, tokenizer=tokenizer, **{**options, **chunks})

    return EngineCase(
        opened(None),
        oracle=lambda ids: oracle(ids)[:, : model.config.vocab_size],
        name=f"transformers, {name}",
        eos_token_id=2,
        reopen=opened,
    )


class TestLlama(EngineSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def case(cls) -> EngineCase:
        return transformers_case(tiny_model("llama"), "llama float32")


class TestLowerPrecision(EngineSuite):
    @pytest.fixture(scope="class", params=["llama bfloat16", "gemma2 float16"])
    @classmethod
    def case(cls, request: pytest.FixtureRequest) -> EngineCase:
        family, dtype = request.param.split()
        return transformers_case(tiny_model(family, dtype=dtype), request.param)


class TestOtherPrecisions(OracleSuite):
    @pytest.fixture(scope="class", params=["llama float16", "gemma2 bfloat16"])
    @classmethod
    def case(cls, request: pytest.FixtureRequest) -> EngineCase:
        family, dtype = request.param.split()
        return transformers_case(tiny_model(family, dtype=dtype), request.param)


class TestFamilies(OracleSuite):
    @pytest.fixture(
        scope="class", params=[f"{family} {tie}" for family in FAMILIES for tie in ("tied", "untied")]
    )
    @classmethod
    def case(cls, request: pytest.FixtureRequest) -> EngineCase:
        family, tie = request.param.split()
        case = transformers_case(tiny_model(family, tie=tie == "tied"), f"{request.param} float32", bos=True)
        assert case.engine.head_check.used, case.engine.head_check.reason  # type: ignore[attr-defined]
        return case


class TestBlockSizes(OracleSuite):
    """Blocks of one row, of rows that are no multiple of any kernel's, and of more rows than there are."""

    @pytest.fixture(scope="class", params=[1, 2, 7, 8, 1000])
    @classmethod
    def case(cls, request: pytest.FixtureRequest) -> EngineCase:
        model: Any = tiny_model("gemma2")
        return transformers_case(model, f"gemma2, blocks of {request.param} rows", block_rows=request.param)


class WithOwnLogits(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """Does something to its logits that neither head nor config tells of."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits + torch.linspace(-2, 2, out.logits.shape[-1], dtype=out.logits.dtype)
        return out


class TestOwnForward(EngineSuite):
    """A head that does not verify: rows come from the model's own forward."""

    @pytest.fixture(scope="class")
    @classmethod
    def case(cls) -> EngineCase:
        model: Any = tiny_model("llama")
        model.__class__ = WithOwnLogits
        case = transformers_case(model, "llama with its own logits")
        check = case.engine.head_check  # type: ignore[attr-defined]
        assert not check.used
        assert "head" in check.reason
        assert check.max_abs_difference > 1
        return case


class TestPaddedHead(OracleSuite):
    """Trap 12: the head has 23 rows more than the vocabulary."""

    @pytest.fixture(scope="class", params=["llama", "phi"])
    @classmethod
    def case(cls, request: pytest.FixtureRequest) -> EngineCase:
        model: Any = tiny_model(request.param, vocab_size=VOCAB + 23)
        model.config.vocab_size = VOCAB
        return transformers_case(model, f"{request.param} with a padded head")


PROMPTS = [list(range(10, 10 + length)) for length in (1, 5, 24, 24, 40)]


def open_tiny(family: str = "llama", *, model: Any = None, **options: Any) -> TransformersEngine:
    given = tiny_model(family) if model is None else model
    return TransformersEngine.open(given, tokenizer=tiny_tokenizer(), **options)


def score(engine: Any, ids: Any, **options: Any) -> Logits:
    scored = engine.logits(ids, **options)
    assert isinstance(scored, Logits)
    return scored


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "phi"])
def test_a_rows_bits_do_not_depend_on_the_block(family: str) -> None:
    engines = [open_tiny(family, block_rows=rows) for rows in (1, 7, 16, 1000)]
    whole = [score(engines[-1], ids) for ids in PROMPTS]
    for engine in engines:
        for ids, expected in zip(PROMPTS, whole, strict=True):
            assert_same_bits(score(engine, ids).values, expected.values)
        last = score(engine, PROMPTS[-1], select=ls.Select("last"))
        assert_same_bits(last.values, np.asarray(whole[-1])[-1:])


def test_a_rows_bits_do_not_depend_on_the_threads() -> None:
    engine = open_tiny()
    one = score(engine, PROMPTS[-1])
    torch.set_num_threads(2)
    try:
        assert_same_bits(score(engine, PROMPTS[-1]).values, one.values)
    finally:
        torch.set_num_threads(1)


def test_scoring_has_the_bits_of_the_models_own_forward() -> None:
    model: Any = tiny_model("llama")
    engine = open_tiny(model=model)
    assert engine.head_check.identical
    ids = PROMPTS[-1]
    with torch.no_grad():
        own = model(torch.tensor([ids])).logits[0].numpy()
    assert_rows_close(score(engine, ids).values, own, dtype="float32")


def test_a_packed_head_gives_the_same_rows() -> None:
    packed, plain = open_tiny(pack=True), open_tiny(pack=False)
    made: Any = [
        engine.generate(PROMPTS[1], max_new_tokens=6, return_logits=True) for engine in (packed, plain)
    ]
    assert np.array_equal(made[0].token_ids, made[1].token_ids)
    assert_same_bits(made[0].logits.values, made[1].logits.values)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "opt"])
def test_hidden_states_and_attentions_are_the_models_own(family: str) -> None:
    model: Any = tiny_model(family)
    engine = open_tiny(model=model)
    ids = PROMPTS[3]
    scored = score(engine, ids, hidden_states=[0, 1, 2], attentions=[0, 1])
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = model(torch.tensor([ids]), output_hidden_states=True, output_attentions=True)
    model.set_attn_implementation(before)
    for layer in (0, 1, 2):
        assert_rows_close(scored.hidden_states[layer], own.hidden_states[layer][0], dtype="float32")
    for layer in (0, 1):
        weights = own.attentions[layer][0].transpose(0, 1).numpy()
        assert np.abs(scored.attentions[layer] - weights).max() < 1e-5


@pytest.mark.parametrize(("name", "layer"), [("hidden_states", 3), ("hidden_states", -1), ("attentions", 2)])
def test_a_layer_that_does_not_exist_is_an_error(name: str, layer: int) -> None:
    with pytest.raises(OptionError, match=name):
        open_tiny().logits([1, 2], **{name: [layer]})  # type: ignore[arg-type]


def test_a_model_in_training_stays_in_training_and_gives_rows_without_dropout() -> None:
    model: Any = tiny_model("gpt2")
    truth = Oracle(model)(PROMPTS[2])
    model.train()
    model.transformer.h[0].mlp.eval()
    engine = open_tiny(model=model)
    assert_rows_close(score(engine, PROMPTS[2]).values, truth, dtype="float32")
    stream: Any = engine.stream(engine.requests(PROMPTS[2]))
    next(stream)
    stream.close()
    assert model.training
    assert not model.transformer.h[0].mlp.training
    assert model.transformer.h[1].mlp.training


def test_a_hooked_model_gives_the_hooks_rows() -> None:
    model: Any = tiny_model("llama")
    plain = score(open_tiny(model=model), PROMPTS[2])
    hook = model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 0.5)
    try:
        hooked = score(open_tiny(model=model), PROMPTS[2])
        with torch.no_grad():
            own = model(torch.tensor([PROMPTS[2]])).logits[0]
    finally:
        hook.remove()
    assert_rows_close(hooked.values, own, dtype="float32")
    assert np.abs(np.asarray(hooked) - np.asarray(plain)).max() > 0.1


@pytest.mark.parametrize("where", ["head", "layer"])
def test_a_model_with_nan_is_an_error_and_not_a_result(where: str) -> None:
    model: Any = tiny_model("llama")
    broken = model.lm_head if where == "head" else model.model.layers[1].mlp.down_proj
    with torch.no_grad():
        broken.weight[17, 5] = torch.nan
    engine = open_tiny(model=model)
    with pytest.raises(NonFiniteError):
        engine.logits(PROMPTS[2])
    with pytest.raises(NonFiniteError):
        engine.logits(PROMPTS[2], select=ls.Select(vocab=None), summary=True)
    with pytest.raises(NonFiniteError):
        engine.generate(PROMPTS[2], max_new_tokens=2)
    with torch.no_grad():
        broken.weight[17, 5] = 0.0
    assert_rows_close(score(engine, PROMPTS[2]).values, Oracle(model)(PROMPTS[2]), dtype="float32")


def test_values_beyond_float16_are_an_error_and_not_infinity() -> None:
    model: Any = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight *= 1e4
    engine = open_tiny(model=model)
    with pytest.raises(EncodingError, match="float16"):
        engine.logits(PROMPTS[2], encode="float16")
    scored = score(engine, PROMPTS[2], encode="bfloat16")
    assert np.isfinite(np.asarray(scored).astype(np.float32)).all()


def test_the_head_runs_in_blocks() -> None:
    engine = open_tiny(block_rows=8)
    items = list(engine.stream(engine.requests([PROMPTS[-1], PROMPTS[2]])))
    sizes = [len(item) for item in items if isinstance(item, RowBlock)]
    assert max(sizes) <= 8
    assert sum(sizes) == 64


def test_memory_that_runs_out_is_a_named_error_and_the_engine_stays_usable() -> None:
    model = tiny_model("llama")
    engine = open_tiny(model=model)
    with model.model.register_forward_pre_hook(lambda *_: torch.empty(2**50)):
        with pytest.raises(OutOfMemoryError, match=r"ran out while the model ran.*chunk_tokens"):
            engine.logits(PROMPTS[2])
        with pytest.raises(OutOfMemoryError):
            engine.generate(PROMPTS[2], max_new_tokens=2)
    assert_rows_close(score(engine, PROMPTS[2]).values, Oracle(model)(PROMPTS[2]), dtype="float32")


def test_rows_written_into_a_buffer_come_in_large_blocks_and_others_in_small_ones() -> None:
    model = tiny_model("llama", context=2048)
    engine = open_tiny(model=model)
    prompts = [[i % 100 for i in range(n)] for n in (1500, 40)]
    requests = engine.requests(prompts)
    summaries = engine.requests(prompts, select=ls.Select(vocab=None), summary=True)
    room = np.empty((2, 1500, engine.vocab_size), np.float32)

    def most(stream: Iterable[RowBlock | End]) -> int:
        return max(len(item) for item in stream if isinstance(item, RowBlock))

    assert (
        most(engine.stream(requests, buffer=lambda i, stage, first, rows: room[i, first : first + rows]))
        == 1024
    )
    assert most(engine.stream(requests)) == 256
    assert most(engine.stream(summaries)) == 64
    truth = Oracle(model)(prompts[0])
    assert_rows_close(room[0], truth, dtype="float32")


def test_a_folder_opens_by_its_path(tmp_path: pathlib.Path) -> None:
    folder = save_tiny(tmp_path / "tiny", "qwen3", bos=True)
    with ls.open(folder) as engine:
        scored = score(engine, "The capital of France is")
        assert scored.token_ids[0] == 1, "the tokenizer's BOS"
        truth = Oracle(tiny_model("qwen3"))(scored.token_ids)
        assert_rows_close(scored.values, truth, dtype="float32")
        made = engine.generate("The capital", max_new_tokens=3, return_logits=True)
        assert not isinstance(made, list)
        assert made.text is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_folder_opens_in_a_dtype(tmp_path: pathlib.Path, dtype: str) -> None:
    folder = save_tiny(tmp_path / "tiny", "llama")
    with ls.open(str(folder), dtype=dtype) as engine:
        assert engine.identity.dtype == dtype
        scored = score(engine, PROMPTS[2])
        assert_rows_close(scored.values, Oracle(tiny_model("llama", dtype=dtype))(PROMPTS[2]), dtype=dtype)


@pytest.mark.parametrize("option", ["draft_model", "speculative_config", "temprature"])
def test_an_option_that_there_is_not_is_refused_by_name(option: str) -> None:
    with pytest.raises(OptionError, match=option):
        ls.open(tiny_model("llama"), **{option: 3})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value"), [("block_rows", 0), ("chunk_tokens", 0), ("uncached_tokens", -1), ("sequences", 0)]
)
def test_a_size_outside_its_range_is_an_error(option: str, value: int) -> None:
    with pytest.raises(OptionError, match=option):
        ls.open(tiny_model("llama"), **{option: value})  # type: ignore[arg-type]


def test_more_sequences_than_decode_together() -> None:
    engine = open_tiny(sequences=2)
    oracle = Oracle(engine.model)
    made = engine.generate(PROMPTS, max_new_tokens=4, n=2, temperature=1.0, seed=3, return_logits=True)
    assert isinstance(made, list)
    assert [(one.prompt_index, one.sample_index) for one in made] == [
        (i, j) for i in range(5) for j in (0, 1)
    ]
    for one in made:
        assert one.logits is not None
        every = [*one.prompt_token_ids.tolist(), *one.token_ids[:-1].tolist()]
        assert_rows_close(one.logits.values, oracle(every), dtype="float32")


class Scripted(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """The token after ``t`` is ``table[t]``, whatever came before."""

    table: torch.Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        chosen = torch.nn.functional.one_hot(self.table[ids], out.logits.shape[-1]).to(out.logits.dtype)
        out.logits = out.logits * 0.01 + 20 * chosen
        return out


def scripted(path: list[int]) -> TransformersEngine:
    """An engine that goes from each id of the path to the next one, which are all different."""
    model: Any = tiny_model("llama")
    model.__class__ = Scripted
    model.table = (torch.arange(VOCAB) + 1) % VOCAB
    model.table[torch.tensor(path[:-1])] = torch.tensor(path[1:])
    return open_tiny(model=model)


def ids_of(text: bytes) -> list[int]:
    """One id a byte: the tokenizer's alphabet."""
    vocab, tokenizer = tiny_tokenizer().get_vocab(), tiny_tokenizer().backend_tokenizer
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str(text.decode("utf-8"))
    return [vocab[character] for piece, _ in pieces for character in piece]


@pytest.mark.parametrize(
    ("text", "stop", "tokens"),
    [
        ("xyz", "yz", 3),
        ("a\u00e9b", "\u00e9", 3),
        ("a\u00e9b", "a\u00e9b", 4),
        ("a\U0001f642b", "\U0001f642", 5),
        ("abcdefghijklmnopqrstuvw", "efghijklmnopqrs", 19),
    ],
)
def test_a_stop_string_in_single_bytes(text: str, stop: str, tokens: int) -> None:
    ids = ids_of(text.encode())
    engine = scripted([10, *ids])
    made: Any = engine.generate([10], max_new_tokens=len(ids), stop=[stop])
    assert (made.finish_reason, made.stop) == ("stop", stop)
    assert made.token_ids.tolist() == ids[:tokens]
    assert made.text == text.split(stop)[0]


def test_the_first_of_two_stop_strings_ends_the_text() -> None:
    ids = ids_of(b"abcdef")
    made: Any = scripted([10, *ids]).generate([10], max_new_tokens=6, stop=["d", "cd"])
    assert (made.stop, made.text, len(made.token_ids)) == ("cd", "ab", 4)


def test_a_stop_string_across_ids_without_text() -> None:
    beyond = list(range(800, 812))
    path = [10, *ids_of(b"a"), *beyond, *ids_of(b"b"), *ids_of(b"c")]
    made: Any = scripted(path).generate([10], max_new_tokens=len(path) - 1, stop=["ab"])
    assert (made.finish_reason, made.stop, made.text) == ("stop", "ab", "")


def test_text_that_ends_inside_a_character_is_complete_in_ids() -> None:
    ids = ids_of("a\U0001f642".encode())
    made: Any = scripted([10, *ids]).generate([10], max_new_tokens=3)
    assert made.token_ids.tolist() == ids[:3]
    assert made.text == "a\ufffd"


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.8}], ids=repr)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral"])
def test_greedy_tokens_are_those_of_transformers(family: str, options: dict[str, Any]) -> None:
    model: Any = tiny_model(family, eos_token_id=None)
    theirs = model.generate(
        torch.tensor([PROMPTS[2]]),
        max_new_tokens=12,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        **options,
    )
    made: Any = open_tiny(model=model).generate(PROMPTS[2], max_new_tokens=12, return_logits=True, **options)
    assert made.token_ids.tolist() == theirs.sequences[0, 24:].tolist()
    assert_rows_close(made.logits.generated.values, torch.cat(theirs.logits), dtype="float32")


def test_every_end_of_sequence_id_of_the_model_ends_a_generation() -> None:
    model: Any = tiny_model("llama")
    model.generation_config.eos_token_id = [2, 77]
    engine = open_tiny(model=model)
    for eos in (2, 77):
        made: Any = engine.generate(PROMPTS[1], max_new_tokens=3, logit_bias={eos: 100.0})
        assert (made.token_ids.tolist(), made.finish_reason, made.stop) == ([eos], "stop", eos)


def test_half_of_a_surrogate_pair_is_refused_by_name() -> None:
    engine = open_tiny()
    with pytest.raises(InputError, match=r"character 1: text with half of a surrogate pair.*ud800"):
        engine.logits("a\ud800b")
    assert len(score(engine, "a b")) > 0

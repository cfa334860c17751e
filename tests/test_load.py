"""Opening models: every way in, and every way to fail with its name."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, T5Config

import logitscope as ls
from logitscope.engines.registry import engine_class, engines
from logitscope.errors import (
    ConnectionFailedError,
    InputError,
    ModelLoadError,
    ModelNotFoundError,
    NotCausalError,
    OptionError,
)
from logitscope.testing import save_tiny, tiny_model, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    save_tiny(tmp_path / "tiny", "llama")
    return tmp_path / "tiny"


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(ModelNotFoundError, match="no such folder"):
        ls.open("/no/such/model")


def test_a_hub_name_without_a_hub() -> None:
    with pytest.raises(ModelNotFoundError, match="hub"):
        ls.open("nobody/no-such-model")


def test_a_folder_without_a_config(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        ls.open(str(tmp_path))


def test_a_folder_without_weights(folder: pathlib.Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="missing or unreadable"):
        ls.open(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_a_truncated_weight_file(folder: pathlib.Path, keep: float) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(keep if keep >= 1 else keep * len(data))])
    with pytest.raises(ModelLoadError):
        ls.open(folder)


def test_a_corrupt_config(folder: pathlib.Path) -> None:
    (folder / "config.json").write_text("{not json")
    with pytest.raises(ModelLoadError):
        ls.open(folder)


def test_a_config_that_does_not_fit_the_weights(folder: pathlib.Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    with pytest.raises(ModelLoadError, match="lack weights"):
        ls.open(folder)


def test_an_unknown_architecture(folder: pathlib.Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))
    with pytest.raises(ModelLoadError):
        ls.open(folder)


def test_an_encoder_decoder_model(tmp_path: pathlib.Path) -> None:
    T5Config(d_model=32, num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(NotCausalError, match="t5"):
        ls.open(tmp_path)


def test_an_encoder_that_sees_later_tokens() -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertLMHeadModel(BertConfig(vocab_size=99, intermediate_size=64, **sizes))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    with pytest.raises(NotCausalError, match="later tokens change earlier rows"):
        ls.open(model)


def test_no_model_at_all() -> None:
    with pytest.raises(ModelLoadError, match="no Transformers model"):
        ls.open(object())


def test_options_of_loading_do_not_apply_to_a_loaded_model() -> None:
    with pytest.raises(OptionError, match="loaded already"):
        ls.open(tiny_model("llama"), dtype="float16")


def test_an_unknown_option_names_the_near_one() -> None:
    with pytest.raises(OptionError, match="Did you mean dtype"):
        ls.open(tiny_model("llama"), dtipe="float16")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": "int3"}, "dtype"),
        ({"device": "frob"}, "unknown device"),
        ({"device": "cuda:99"}, "no such device"),
        ({"device": "cpu", "device_map": "auto"}, "both"),
        ({"engine": "no-such-engine"}, "unknown engine"),
    ],
)
def test_bad_options(folder: pathlib.Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        ls.open(folder, **options)


def test_an_address_where_nobody_answers() -> None:
    with pytest.raises(ConnectionFailedError, match="nobody answers"):
        ls.open("http://localhost:1")


def test_a_model_without_a_tokenizer_takes_ids_only() -> None:
    engine = ls.open(tiny_model("llama"))
    assert engine.logits([1, 2, 3]).shape == (3, 1001)
    with pytest.raises(InputError, match="without a tokenizer"):
        engine.logits("text")


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Setting `save_embedding_layers`")  # peft's own
def test_a_peft_model_gives_the_adapters_rows(tmp_path: pathlib.Path, folder: pathlib.Path) -> None:
    peft = pytest.importorskip("peft")
    base = tiny_model("llama")
    plain = np.asarray(ls.open(base).logits([5, 6, 7, 8]))
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    engine = ls.open(adapted, tokenizer=tiny_tokenizer())
    with torch.no_grad():
        truth = adapted.eval()(torch.tensor([[5, 6, 7, 8]])).logits[0].numpy()
    rows = np.asarray(engine.logits([5, 6, 7, 8]))
    np.testing.assert_allclose(rows, truth, atol=2e-5)
    assert np.abs(rows - plain).max() > 0.01

    loaded = ls.open(folder, adapter=str(tmp_path / "adapter"))
    assert loaded.identity.weights_hash != ls.open(folder).identity.weights_hash


def test_the_identity_knows_the_weights_and_the_tokenizer() -> None:
    one = ls.open(tiny_model("llama"), tokenizer=tiny_tokenizer()).identity
    same = ls.open(tiny_model("llama"), tokenizer=tiny_tokenizer()).identity
    other = ls.open(tiny_model("llama", seed=1), tokenizer=tiny_tokenizer(bos=True)).identity
    assert one == same
    assert one.weights_hash != other.weights_hash
    assert (one.vocab_size, one.dtype, one.device, one.engine) == (1001, "float32", "cpu", "transformers")
    assert one.tokenizer_size is not None
    assert one.tokenizer_size < one.vocab_size


def test_engines_are_found_by_name_without_importing_them() -> None:
    assert set(engines()) >= {"transformers", "fake"}
    assert engine_class("fake").name == "fake"


def test_two_engines_of_one_name_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name, value = "fake", "somewhere:Else"

    monkeypatch.setattr("logitscope.engines.registry.entry_points", lambda group: [Point()])
    with pytest.raises(OptionError, match="two engines of one name"):
        engines()

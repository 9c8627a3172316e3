"""Loading: every stored tensor is consumed once and every parameter is written once, or nothing is read at all."""

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.model import Decoder, ModelConfig
from ostinato.weights import Checkpoint, CheckpointError, NameMismatchError, TensorInfo, load_model, open_checkpoint
from ostinato.weights.names import EMBEDDING, HEAD, name_table

Make = Callable[..., Any]
Load = Callable[..., Decoder]
V = "model.layers.1.self_attn.v_proj.weight"


class Stored(Checkpoint):
    """A checkpoint in memory, which counts what is read of it."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self.path, self.format, self.config = Path("stored"), "memory", ModelConfig.from_hf(config)
        self.generation_config, self.reads, self._tensors = {}, 0, tensors

    def tensor_info(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(t.dtype, tuple(t.shape), t.nbytes) for name, t in self._tensors.items()}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for item in self._tensors.items():
            self.reads += 1
            yield item

    def load_tokenizer(self) -> None:
        return None


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models start with NaN in every parameter, so that whatever is not written shows."""

    def build(*args: Any, **kwargs: Any) -> Decoder:
        model = Decoder(*args, **kwargs)
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
        return model

    monkeypatch.setattr("ostinato.weights.load.Decoder", build)


def expected_parameters(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters as concatenations of what is stored, in the order of the table."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name, rows in name_table(ModelConfig.from_hf(config)).items():
        parts.setdefault(rows.parameter, []).append(tensors[name])
    return {parameter: torch.cat(tensors) for parameter, tensors in parts.items()}


BIASES = {"attention_bias": True, "mlp_bias": True}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    "changes",
    [{}, BIASES, {"tie_word_embeddings": True}, {"num_key_value_heads": 3, "head_dim": ...}],
    ids=["plain", "biases", "tied", "no-gqa"],
)
def test_every_parameter_is_written(
    tmp_path: Path, tiny_config: Make, tiny_tensors: Make, write_folder: Make, changes: dict[str, Any]
) -> None:
    """B09, B02: all biases are loaded, and nothing is left on uninitialised memory."""
    config = tiny_config(**changes)
    tensors = tiny_tensors(config)
    model, _ = load_model(open_checkpoint(write_folder(tmp_path, config, tensors)))
    torch.testing.assert_close(dict(model.named_parameters()), expected_parameters(config, tensors), rtol=0, atol=0)


@pytest.mark.usefixtures("poisoned")
def test_shards_in_any_order(tmp_path: Path, tiny_config: Make, tiny_tensors: Make, write_folder: Make) -> None:
    """The parts of a fused parameter may lie in different files."""
    config = tiny_config()
    tensors = tiny_tensors(config)
    shards: dict[str, dict[str, torch.Tensor]] = {f"{i}.safetensors": {} for i in range(3)}
    for i, (name, tensor) in enumerate(tensors.items()):
        shards[f"{i % 3}.safetensors"][name] = tensor
    model, _ = load_model(open_checkpoint(write_folder(tmp_path, config, shards)))
    torch.testing.assert_close(dict(model.named_parameters()), expected_parameters(config, tensors), rtol=0, atol=0)


def test_checkpoint_of_transformers(tmp_path: Path, tiny_config: Make) -> None:
    """B09: what `save_pretrained` writes loads into parameters equal to its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(LlamaConfig(**tiny_config(**BIASES)))
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    theirs.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    model, report = load_model(checkpoint)
    expected = expected_parameters(tiny_config(**BIASES), theirs.state_dict())
    torch.testing.assert_close(dict(model.named_parameters()), expected, rtol=0, atol=0)
    assert report.num_tensors == len(theirs.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_cast(tiny_config: Make, tiny_tensors: Make, stored: torch.dtype, dtype: torch.dtype) -> None:
    """B13: one dtype for all parameters, each value rounded once."""
    config = tiny_config()
    tensors = tiny_tensors(config, stored)
    model, report = load_model(Stored(config, tensors), dtype=dtype)
    expected = {name: tensor.to(dtype) for name, tensor in expected_parameters(config, tensors).items()}
    torch.testing.assert_close(dict(model.named_parameters()), expected, rtol=0, atol=0)
    assert report.dtype == dtype


def test_mixed_dtypes_end_in_one(tmp_path: Path, tiny_config: Make, tiny_tensors: Make, write_folder: Make) -> None:
    """B13: float16 matrices with float32 norms, and a config that names no dtype."""
    config = tiny_config()
    tensors = {n: t.float() if "norm" in n else t for n, t in tiny_tensors(config, torch.float16).items()}
    model, report = load_model(open_checkpoint(write_folder(tmp_path, config, tensors)))
    assert {parameter.dtype for parameter in model.parameters()} == {report.dtype} == {torch.float16}


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn], ids=str)
def test_dtype_that_no_model_runs_in(tiny_config: Make, tiny_tensors: Make, dtype: torch.dtype) -> None:
    checkpoint = Stored(tiny_config(), tiny_tensors(tiny_config()))
    with pytest.raises(ValueError, match=f"as {dtype}; supported: float32, float16, bfloat16"):
        load_model(checkpoint, dtype=dtype)
    assert checkpoint.reads == 0


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("head_first", [False, True], ids=["head-last", "head-first"])
def test_tied_with_an_equal_head(tiny_config: Make, tiny_tensors: Make, head_first: bool) -> None:
    """B01 (ii): the stored head is no leftover, and makes no parameter."""
    config = tiny_config(tie_word_embeddings=True)
    tensors = tiny_tensors(config)
    head = {HEAD: tensors[EMBEDDING].clone()}
    checkpoint = Stored(config, head | tensors if head_first else tensors | head)
    model, report = load_model(checkpoint, dtype=torch.bfloat16)
    assert torch.equal(model.embed_weight, tensors[EMBEDDING].bfloat16())
    assert not hasattr(model, "head_weight")
    assert checkpoint.reads == report.num_tensors == len(tensors) + 1


@pytest.mark.parametrize("head_first", [False, True], ids=["head-last", "head-first"])
def test_tied_with_another_head(tiny_config: Make, tiny_tensors: Make, head_first: bool) -> None:
    """B01 (ii): one value that differs is an error, since either could be the right one."""
    config = tiny_config(tie_word_embeddings=True)
    tensors = tiny_tensors(config)
    head = {HEAD: tensors[EMBEDDING].clone()}
    head[HEAD][-1, -1] += 1
    with pytest.raises(CheckpointError, match=f"stored: .*{HEAD} differs from {EMBEDDING}; set tie_word_embeddings"):
        load_model(Stored(config, head | tensors if head_first else tensors | head))


@pytest.mark.parametrize("tie", [False, None, ...], ids=["false", "null", "absent"])
def test_untied(tiny_config: Make, tiny_tensors: Make, tie: Any) -> None:
    """B01 (iii): a head of its own, and an error if it is not stored; null and absent are false."""
    config = tiny_config(tie_word_embeddings=tie)
    tensors = tiny_tensors(config)
    model, _ = load_model(Stored(config, tensors))
    assert torch.equal(model.head_weight, tensors[HEAD])
    del tensors[HEAD]
    with pytest.raises(NameMismatchError, match=HEAD):
        load_model(Stored(config, tensors))


def test_tied_without_head(tiny_config: Make, tiny_tensors: Make) -> None:
    """B01 (i)"""
    config = tiny_config(tie_word_embeddings=True)
    tensors = tiny_tensors(config)
    assert HEAD not in tensors
    model, _ = load_model(Stored(config, tensors))
    assert torch.equal(model.embed_weight, tensors[EMBEDDING])


def test_tied_with_the_head_alone(tiny_config: Make, tiny_tensors: Make) -> None:
    """B01: what `safetensors.torch.save_model` leaves of a shared tensor; transformers loads it."""
    config = tiny_config(tie_word_embeddings=True)
    tensors = tiny_tensors(config)
    embedding = tensors.pop(EMBEDDING)
    model, report = load_model(Stored(config, tensors | {HEAD: embedding}))
    assert torch.equal(model.embed_weight, embedding)
    assert report.num_tensors == len(tensors) + 1


def test_biases_without_a_flag_are_no_leftovers_to_drop(tiny_config: Make, tiny_tensors: Make) -> None:
    """B09: biases that the config does not announce, and announced ones that are not there."""
    with pytest.raises(NameMismatchError, match=r"unexpected: .*v_proj\.bias"):
        load_model(Stored(tiny_config(), tiny_tensors(tiny_config(**BIASES))))
    with pytest.raises(NameMismatchError, match=r"missing: .*v_proj\.bias"):
        load_model(Stored(tiny_config(**BIASES), tiny_tensors(tiny_config())))


def test_old_rotary_buffers_change_nothing(tiny_config: Make, tiny_tensors: Make) -> None:
    """B09: the one kind of tensor that is read and left aside."""
    tensors = tiny_tensors(tiny_config())
    plain, _ = load_model(Stored(tiny_config(), tensors))
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.full((3,), float("nan"))}
    model, report = load_model(Stored(tiny_config(), buffer | tensors))
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert report.num_tensors == len(tensors) + 1


@given(data=st.data())
def test_nothing_is_read_of_what_does_not_fit(tiny_config: Make, tiny_tensors: Make, data: st.DataObject) -> None:
    """Any names removed, renamed or mis-shaped: one error that names them all, and not one tensor read."""
    config = tiny_config(**BIASES)
    tensors = tiny_tensors(config)
    kinds = st.sampled_from(["dropped", "renamed", "bent"])
    fates = data.draw(st.dictionaries(st.sampled_from(sorted(tensors)), kinds, min_size=1, max_size=12))
    for name, fate in fates.items():
        tensor = tensors.pop(name)
        if fate == "renamed":
            tensors[name.replace("model.", "model.model.", 1) + ".0"] = tensor
        elif fate == "bent":
            tensors[name] = tensor[:-1]
    checkpoint = Stored(config, tensors)
    with pytest.raises(CheckpointError) as error:
        load_model(checkpoint)
    assert checkpoint.reads == 0
    assert all(name in str(error.value) for name in fates)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda items: items[:-1], "all of its tensors"),
        (lambda items: [*items, items[0]], "each of its tensors once"),
        (lambda items: [*items, ("stray", items[0][1])], "each of its tensors once"),
        (lambda items: [(name, tensor[..., :1]) for name, tensor in items], "in the shapes it promised"),
    ],
    ids=["fewer", "twice", "stray", "shape"],
)
def test_a_checkpoint_that_breaks_its_promise(
    monkeypatch: pytest.MonkeyPatch, tiny_config: Make, tiny_tensors: Make, spoil: Make, complaint: str
) -> None:
    tensors = tiny_tensors(tiny_config())
    checkpoint = Stored(tiny_config(), tensors)
    monkeypatch.setattr(checkpoint, "tensors", lambda: iter(spoil(list(tensors.items()))))
    with pytest.raises(AssertionError, match=complaint):
        load_model(checkpoint)


def test_progress_and_report(tiny_config: Make, tiny_tensors: Make) -> None:
    config = tiny_config()
    tensors = tiny_tensors(config, torch.bfloat16)
    calls: list[tuple[int, int]] = []
    model, report = load_model(
        Stored(config, tensors), dtype=torch.float32, progress=lambda done, total: calls.append((done, total))
    )
    stored = sum(tensor.nbytes for tensor in tensors.values())
    assert [total for _, total in calls] == [stored] * len(tensors)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1] == (stored, stored)
    assert report.nbytes == 2 * stored == sum(parameter.nbytes for parameter in model.parameters())
    assert (report.num_tensors, report.device) == (len(tensors), torch.device("cpu"))
    assert report.seconds > 0


@pytest.mark.gpu
def test_load_to_a_gpu(tiny_config: Make, tiny_tensors: Make) -> None:
    config = tiny_config(tie_word_embeddings=True)
    tensors = tiny_tensors(config)
    tensors[HEAD] = tensors[EMBEDDING].clone()
    model, report = load_model(Stored(config, tensors), dtype=torch.bfloat16, device="cuda")
    loaded = {name: parameter.cpu() for name, parameter in model.named_parameters()}
    expected = {name: tensor.bfloat16() for name, tensor in expected_parameters(config, tensors).items()}
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0)
    assert report.device.type == "cuda"


PEAK = """
    import pathlib, sys, torch
    from ostinato.weights import load_model, open_checkpoint

    def resident(key):
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    torch.set_num_threads(1)
    torch.ones(2**20).to(torch.bfloat16)  # what torch allocates once is not the loader's
    before = resident("VmRSS")
    _, report = load_model(open_checkpoint(pathlib.Path(sys.argv[1])), dtype=torch.bfloat16)
    print((resident("VmHWM") - before) / report.nbytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_peak_memory(tmp_path: Path, tiny_config: Make, tiny_tensors: Make, write_folder: Make) -> None:
    """The weights once, and little else: mapped pages of the file count as well."""
    config = tiny_config(
        vocab_size=4096, hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, num_attention_heads=16,
        num_key_value_heads=4, head_dim=64,
    )  # fmt: skip
    write_folder(tmp_path, config, tiny_tensors(config, torch.bfloat16))
    run = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(PEAK), str(tmp_path)], capture_output=True, text=True, check=True
    )
    # 200 MB of weights, at most 16 MiB of the file mapped (8 %), and some MB that the imports of the first load take.
    # The file held mapped throughout would give 2.
    assert float(run.stdout) < 1.3

"""The face of the engine: load a model, generate."""

import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import torch

from .model import SHAPES, ModelConfig
from .model.config import DTYPES
from .outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamDelta
from .runtime import Chunk, Engine, EngineConfig, GraphReport, HookHandle, HookRow, SamplingParams
from .runtime import Sequence as EngineSequence
from .runtime.graph_manifest import graph_manifest
from .runtime.interventions import HookFunction
from .runtime.memory import memory_for
from .sampling_defaults import FILE, SamplingDefaults
from .weights import CheckpointError, LoadReport, Tokenizer, dummy_model, load_model, open_checkpoint, resolve

logger = logging.getLogger(__name__)

DEMO_SHAPE = "smollm2-135m"

Prompt = str | Sequence[int]


class LLM:
    """A model that is loaded and ready to generate. Not for use by several threads at once.

    Args:
        model: a folder of a Hugging Face checkpoint, a `.gguf` file, a hub id, or None for the demo model. With
            `load_format="dummy"`: a named shape (`ostinato.model.SHAPES`), a ModelConfig, or None for the demo's shape.
        revision: branch, tag or commit of a hub id.
        device: "cpu", "cuda", "cuda:1" …; None: CUDA if there is one, else the CPU.
        dtype: of weights and KV cache: "auto" (what the checkpoint says), "float32", "float16", "bfloat16", or a
            torch dtype.
        load_format: "auto", or "dummy" for seeded random weights without a checkpoint.
        config: sizes of the engine; None for the defaults.
        generation_config: where sampling parameters come from that a request leaves open: "auto", the checkpoint's
            generation_config.json; "builtin" (or, as in vLLM, "vllm"), the defaults of SamplingParams; or another
            folder or file. Ids that end an output are the checkpoint's in any case.
        skip_tokenizer_init: do as if the model had no tokenizer: its files are not looked at.
        seed: of the dummy weights.
        progress: called with (bytes read, bytes in all) while a checkpoint loads.
        capture_progress: called with (buckets done, buckets in all) while graphs are captured; None: they are logged.

    Attributes:
        tokenizer: None if the model has none; then prompts are token ids and outputs have no text.
        model_config: the architecture.
        load_report: seconds and bytes of the load; None for dummy weights.
        eos_token_ids: ids that end an output: those of the config, the generation config and the tokenizer together.
        sampling_defaults: what `generation_config` stands for.

    Raises:
        ValueError, OSError: a model that cannot be found or is not supported, a device that is not there, sizes that
            do not fit. One sentence that names the value and the limit.
        NotEnoughMemoryError: weights, KV cache or buffers do not fit into memory; the message says which and how large.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig | None = None,
        *,
        revision: str | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        load_format: Literal["auto", "dummy"] = "auto",
        config: EngineConfig | None = None,
        generation_config: str | Path = "auto",
        skip_tokenizer_init: bool = False,
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
        capture_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        target, wanted = _device(device), _dtype(dtype)
        config = config or EngineConfig()
        self.tokenizer: Tokenizer | None = None
        self.load_report: LoadReport | None = None
        self.sampling_defaults = SamplingDefaults.chosen(generation_config, {}, Path())
        if load_format == "dummy":
            if revision is not None:
                raise ValueError(f"revision {revision!r} only means something for a hub id, not for a shape")
            shape = model if isinstance(model, ModelConfig) else named_shape(model)
            self.eos_token_ids = eos_token_ids(shape, {}, None, Path())
            dummy_dtype = wanted or shape.dtype or torch.float32
            with _memory_for_weights(shape, dummy_dtype, target):
                decoder = dummy_model(shape, dtype=dummy_dtype, device=target, seed=seed, context=config.max_model_len)
        elif load_format == "auto":
            if isinstance(model, ModelConfig):
                raise ValueError('a ModelConfig has no weights: pass load_format="dummy" for random ones')
            checkpoint = open_checkpoint(resolve(model, revision=revision))
            self.tokenizer = None if skip_tokenizer_init else checkpoint.load_tokenizer()
            stored, context = checkpoint.generation_config, config.max_model_len
            self.sampling_defaults = SamplingDefaults.chosen(generation_config, stored, checkpoint.path)
            self.eos_token_ids = eos_token_ids(checkpoint.config, stored, self.tokenizer, checkpoint.path)
            with _memory_for_weights(checkpoint.config, wanted or checkpoint.default_dtype, target):
                decoder, self.load_report = load_model(
                    checkpoint, dtype=wanted, device=target, context=context, progress=progress
                )
        else:
            raise ValueError(f'load_format must be "auto" or "dummy", got {load_format!r}')
        self.model_config = decoder.config
        self._model = decoder
        with memory_for(
            f"rows, buffers and graphs of {config.max_num_seqs} sequences on {target}",
            "lower max_num_seqs, gpu_memory_utilization or graph_memory_bytes",
        ):
            self._engine = Engine(
                decoder,
                config,
                tokenizer=self.tokenizer,
                eos_token_ids=self.eos_token_ids,
                capture_progress=capture_progress,
            )

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence, prompt and output together."""
        return self._engine.max_model_len

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Complete one prompt or several; the outputs come in the order of the prompts.

        All requests are checked before any is computed. A request of a list whose own code fails (a logits processor, a
        function of allowed tokens) ends with `finish_reason` "error" and `error` set, which is logged; the others go
        on. A prompt that is given alone, not in a list, raises its error.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            params: for all prompts, or one for each; taken as they are. None: `sampling_params()`, where a `max_tokens`
                of the checkpoint is lowered to what the context leaves.

        Raises:
            ValueError, TypeError: a prompt or parameter that is not valid; nothing has been computed then.
            RequestError: of a prompt that is given alone.
            HookError: a hook raised; requests that were under way have ended.
        """
        singles = _prompts(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(singles)
        if len(each) != len(singles):
            raise ValueError(f"prompts and SamplingParams must be as many, got {len(singles)} and {len(each)}")
        started = time.perf_counter()
        groups = [self._create(prompt, one) for prompt, one in zip(singles, each, strict=True)]
        for _ in self._run([sequence for group in groups for sequence in group]):
            pass
        for number, sequence in ((number, one) for number, group in enumerate(groups) for one in group):
            if sequence.error is not None:
                if singles[number] is prompts:
                    raise sequence.error
                logger.error("prompt %d, sample %d: %s", number, sequence.sample_index, sequence.error)
        return [_request_output(p, group, started) for p, group in zip(singles, groups, strict=True)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[StreamDelta]:
        """Complete one prompt, token by token. The joined texts are the text that `generate` gives.

        The request is checked here and computed as the iterator is read. Closing the iterator ends the request; several
        may be read in turns. One whose own code fails raises that `RequestError` after its last delta, as does one
        that was in a step that failed for another reader.
        """
        sequences = self._create(prompt, params)

        def deltas() -> Generator[StreamDelta]:
            shown, has_ended = [0] * len(sequences), [False] * len(sequences)
            for _ in self._run(sequences):
                for index, sequence in enumerate(sequences):
                    start, shown[index] = shown[index], len(sequence.output_ids)
                    # An interrupted step for another request ends this one, too, without a token.
                    if start < shown[index] or (sequence.is_finished and not has_ended[index]):
                        has_ended[index] = sequence.is_finished
                        text = "".join(sequence.output_texts[start:])
                        reason = sequence.finish_reason
                        yield StreamDelta(index, text, sequence.output_ids[start:], reason and reason.value)
                for error in (s.error for s, ended in zip(sequences, has_ended, strict=True) if ended):
                    if error is not None:
                        raise error

        return deltas()

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **variables: Any
    ) -> RequestOutput:
        """The reply to a conversation, `[{"role": "user", "content": "…"}, …]`, through the model's chat template.

        `variables` are for the template, such as `tools`; `template` chooses one by name.

        Raises:
            ValueError: no tokenizer, no chat template, or messages that the template refuses.
        """
        return self.generate(self.encode_chat(messages, **variables), params)[0]

    def sampling_params(self, **given: Any) -> SamplingParams:
        """SamplingParams of the given fields; the others are `sampling_defaults`, and then SamplingParams' own."""
        return self.sampling_defaults.params(given)

    def hook(self, layer: int, function: HookFunction, where: Callable[[HookRow], bool] | None = None) -> HookHandle:
        """Read or change hidden states in front of a layer, of prompts and of every decode step.

        A decode step is cut there: graphs replay up to the layer, the function runs, graphs replay the rest. Until
        `remove()` of the handle; then steps are whole again.
        Where steps run ahead (`EngineConfig.run_ahead`), one may be under way already: it is not called for that one.

        Args:
            layer: 0 … the number of layers; that number is behind the last one, in front of the final norm.
            function: called with hidden states `[num_tokens, hidden_size]` and the `HookRow`s that say whose they are.
                It may change them in place, or return others of the same shape.
            where: chooses rows; the function then sees only theirs, in a copy. It must change that in place or return.

        Raises:
            ValueError: there is no such layer.
        """
        return self._engine.hooks.add(layer, function, where)

    def explain(self, batch: Sequence[SamplingParams]) -> list[Chunk]:
        """What a decode step of requests with these parameters would run as, and why: graphs or not, which bucket.

        One chunk, or several for a batch above the largest graph. Nothing is run or counted.
        """
        if not batch:
            raise ValueError("a batch has at least 1 request, got none")
        runner = self._engine.decode_runner
        return runner.decide(runner.batch_of_params(batch))

    def graph_report(self) -> GraphReport:
        """What graphs there are, what each batch size runs as, and how often steps ran in which way until now."""
        return self._engine.graph_report()

    def batch_histogram(self) -> dict[int, int]:
        """How many decode steps had each number of sequences until now; what `ostinato bench capture-list` takes."""
        return self.graph_report().batches

    def graph_manifest(self) -> dict[str, Any]:
        """Of every captured graph its kernels, nodes, edges and static tensors, as JSON would have it; empty without
        graphs. `ostinato.runtime.graph_manifest.diff_manifests` compares two.
        """
        graphs = self._engine.decode_runner.graphs
        return {} if graphs is None else graph_manifest(graphs)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; ids are passed through as they are."""
        if not isinstance(prompt, str):
            if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes)):
                raise TypeError(f"a prompt must be a text or a list of token ids, got {prompt!r}")
            return list(prompt)
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer: give the prompt as token ids")
        return self.tokenizer.encode(prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Token ids of a conversation up to where the model's reply begins; `variables` as in `chat`."""
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer, hence no chat template")
        return self.tokenizer.encode_chat(messages, **variables)

    def _create(self, prompt: Prompt, params: SamplingParams | None) -> list[EngineSequence]:
        """The sequences of a request, checked."""
        if params is not None and not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, got {params!r}")
        prompt_ids = self.encode(prompt)
        if params is None:
            params = self.sampling_params()
            if "max_tokens" in self.sampling_defaults.values:
                room = max(1, self.max_model_len - len(prompt_ids))
                params = replace(params, max_tokens=min(params.max_tokens or room, room))
        return self._engine.create(prompt_ids, params)

    def _run(self, sequences: list[EngineSequence]) -> Iterator[None]:
        """Queue sequences and step until all have ended, yielding whenever there may be news; what is left is aborted.

        Other requests advance with them, so that requests may be read in turns.
        """
        try:
            for sequence in sequences:
                self._engine.add(sequence)
            while not all(sequence.is_finished for sequence in sequences):
                self._engine.step()
                yield
            yield  # what a step for another request has brought since
        finally:
            self._engine.abort(*sequences)


def _memory_for_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> AbstractContextManager[None]:
    size = config.num_parameters * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    return memory_for(
        f"{size} bytes of weights ({config.num_parameters} parameters in {name}) on {device}",
        "choose a smaller model, a smaller dtype (--dtype) or another device (--device)",
    )


def eos_token_ids(
    config: ModelConfig, generation_config: Mapping[str, Any], tokenizer: Tokenizer | None, path: Path
) -> frozenset[int]:
    """Ids that end an output: the union of what the config, the generation config and the tokenizer name.

    Those that the model cannot generate, since its vocabulary is smaller, are left out, with a warning. `path` is the
    checkpoint's, for messages.
    """
    named = generation_config.get("eos_token_id")
    from_generation = [] if named is None else named if isinstance(named, list) else [named]
    if not all(type(token_id) is int and token_id >= 0 for token_id in from_generation):
        raise CheckpointError(f"{path / FILE}: eos_token_id {named!r} is not a token id or a list of them")
    named_ids = [*from_generation, *config.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ())]
    beyond = sorted({token_id for token_id in named_ids if token_id >= config.vocab_size})
    if beyond:
        logger.warning(f"{path}: end ids {beyond} are above the model's {config.vocab_size} and can never be generated")
    return frozenset(named_ids) - frozenset(beyond)


def named_shape(name: str | Path | None) -> ModelConfig:
    """One of `SHAPES`; None and "demo" are the demo model's. Raises ValueError for a name that is none of them."""
    name = DEMO_SHAPE if name is None or name == "demo" else str(name)
    if name not in SHAPES:
        raise ValueError(f"{name!r} is not a named shape; named shapes: {', '.join(SHAPES)}")
    return SHAPES[name]


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if not isinstance(prompts, Sequence):
        raise TypeError(f"prompts must be a text, a list of token ids, or a list of either, got {prompts!r}")
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _request_output(prompt: Prompt, sequences: list[EngineSequence], called: float) -> RequestOutput:
    begun = [sequence for sequence in sequences if sequence.output_ids]  # an error may have come before
    first = min((sequence.first_token_time for sequence in begun), default=0.0)
    generated = sum(len(sequence.output_ids) for sequence in sequences)
    metrics = RequestMetrics(
        prompt_tokens=len(sequences[0].prompt_ids),
        generated_tokens=generated,
        num_samples=len(sequences),
        time_to_first_token=first - called if begun else 0.0,
        prefill_seconds=first - min(sequence.start_time for sequence in begun) if begun else 0.0,
        decode_seconds=max(sequence.finish_time for sequence in begun) - first if begun else 0.0,
    )
    outputs = []
    for sequence in sequences:
        assert sequence.finish_reason is not None, "outputs are made of finished sequences"
        outputs.append(
            CompletionOutput(
                index=sequence.sample_index,
                text="".join(sequence.output_texts),
                token_ids=sequence.output_ids,
                logprobs=sequence.logprobs if sequence.params.logprobs else None,
                finish_reason=sequence.finish_reason.value,
                stop_reason=sequence.stop_reason,
                error=sequence.error,
            )
        )
    return RequestOutput(prompt if isinstance(prompt, str) else None, list(sequences[0].prompt_ids), outputs, metrics)


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{device!r} is not a device; supported: cpu, cuda, cuda:N") from error
    if target.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} is not supported; supported: cpu, cuda, cuda:N")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} was asked for, but torch finds no CUDA device here")
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {device!r} was asked for, but there are only {torch.cuda.device_count()} CUDA devices"
        )
    return target


def _dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    if dtype == "auto":
        return None
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise ValueError(f"dtype {dtype!r} is not supported; supported: auto, {', '.join(DTYPES)}")
    return found

"""The loop that turns requests into tokens: schedule, run, postprocess."""

import logging
import secrets
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from numbers import Integral

from ..model import Decoder, KVCache
from .block_allocator import BlockAllocator
from .bucket_capture import Progress
from .config import EngineConfig, plan_kv_cache
from .cuda_backend import graph_backend
from .decode_runner import DecodeRunner
from .detokenizer import TokenDecoder
from .engine_parts import build_runner, kv_cache_bytes, rehearsed_memory
from .errors import RequestError, what_failed
from .graph_ledger import MemoryParts
from .graph_rehearsal import memory_parts
from .graph_report import GraphReport, coverage_lines, graph_report
from .interventions import Hooks
from .model_runner import RunningStep, StepResult
from .phases import Phases
from .sampler import MAX_BANNED_IDS
from .sampling_params import SamplingParams
from .scheduler import DecodeBatch, Scheduler
from .sequence import FinishReason, Sequence, TokenLogprobs
from .text_stream import TextStream

logger = logging.getLogger(__name__)


class Engine:
    """One model, one KV cache, and the sequences that share them.

    Args:
        model: with its parameters loaded.
        config: sizes.
        tokenizer: turns token ids into text; None: no text, and no stop strings.
        eos_token_ids: ids that end a sequence unless it ignores them.
        kv_cache: that of an engine of the same sizes, to work on it in turns; None: its own.

    Raises:
        ValueError: the KV cache does not fit, `max_model_len` does not fit into it, or an end id is outside the
            vocabulary.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        *,
        tokenizer: TokenDecoder | None,
        eos_token_ids: Collection[int],
        capture_progress: Progress | None = None,
        kv_cache: KVCache | None = None,
    ) -> None:
        self.vocab_size = model.config.vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        for token_id in self.eos_token_ids:
            self._check_token_id("end", token_id)
        self._tokenizer = tokenizer
        self._token_texts: dict[int, str] = {}  # what the streams of all sequences learn of the vocabulary
        self.hooks = Hooks(model.config.num_layers)
        plan = plan_kv_cache(config, model.config, model.dtype, kv_cache_bytes(config, model.device))
        phases, backend = Phases(), graph_backend(model.device)
        with phases.phase("rehearsal"):
            predicted = rehearsed_memory(model, config, plan, backend)
        if predicted is not None:
            rest = kv_cache_bytes(config, model.device) - predicted.total
            logger.info(
                "graphs and what they work on will take %s; the KV cache gets %.1f MiB", predicted, rest / 2**20
            )
            plan = plan_kv_cache(config, model.config, model.dtype, rest)
        self.kv_plan = plan
        before = memory_parts(backend, None) if predicted is not None else None
        with phases.phase("KV cache and buffers"):
            self._runner, kv_bytes = build_runner(model, config, plan, self.hooks, backend, kv_cache)
        self._max_num_seqs = config.max_num_seqs
        self._is_working = False
        self._is_torn = False
        self._doomed: list[Sequence] = []
        self._runs_ahead = model.device.type == "cuda" if config.run_ahead is None else config.run_ahead
        self._ahead: RunningStep | None = None
        self.decode_runner.start(capture_progress, phases, is_rehearsed=predicted is not None)
        graphs = self.decode_runner.graphs
        if graphs is not None and before is not None:
            now = memory_parts(backend, graphs.resources.pool)
            graphs.ledger.predicted, graphs.ledger.actual = predicted, now - before - MemoryParts(tensors=kv_bytes)
        if graphs is not None:
            logger.info("decode steps are ready after %s", phases)
        for line in coverage_lines(self.decode_runner, config.max_num_seqs) if graphs is not None else ():
            logger.info("batch size %s", line.strip())
        self._scheduler = Scheduler(
            BlockAllocator(plan.num_blocks),
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )

    @property
    def max_model_len(self) -> int:
        """Tokens a sequence may have, prompt and output together."""
        return self.kv_plan.max_model_len

    @property
    def decode_runner(self) -> DecodeRunner:
        return self._runner.decode_runner

    def graph_report(self) -> GraphReport:
        return graph_report(self.decode_runner, self._max_num_seqs)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def create(self, prompt_ids: SequenceOf[int], params: SamplingParams) -> list[Sequence]:
        """Check a request and make its `params.n` sequences, without queueing them.

        Raises:
            ValueError: an empty prompt, a token id outside the vocabulary, more tokens than the context holds, or
                parameters that do not fit the vocabulary. The message has the value and the limit.
            TypeError: a token id that is not an integer.
        """
        ids = self._check_prompt(prompt_ids)
        params.check_vocab(self.vocab_size)
        room = self.max_model_len - len(ids)
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if max_tokens > room or room < 1:
            raise ValueError(
                f"a prompt of {len(ids)} tokens and an output of {max(max_tokens, 1)} exceed the context of "
                f"{self.max_model_len} tokens"
            )
        if params.min_tokens > max_tokens:
            raise ValueError(f"min_tokens {params.min_tokens} is above the {max_tokens} tokens left in the context")
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        if params.min_tokens and len(stop_ids) > MAX_BANNED_IDS:
            raise ValueError(f"min_tokens can hold off at most {MAX_BANNED_IDS} stop and end ids, got {len(stop_ids)}")
        allowed = params.allowed_token_ids
        if params.min_tokens and isinstance(allowed, tuple) and stop_ids.issuperset(allowed):
            raise ValueError(
                f"min_tokens {params.min_tokens} holds off every token of allowed_token_ids {list(allowed)}: "
                "each is a stop or end id"
            )
        seed = secrets.randbits(64) if params.seed is None else params.seed
        return [
            Sequence(
                prompt_ids=ids,
                params=params,
                sample_index=index,
                seed=seed,
                stop_ids=stop_ids,
                max_tokens=max_tokens,
                text_stream=TextStream(
                    self._tokenizer,
                    stop=tuple(params.stop),
                    include_stop_str_in_output=params.include_stop_str_in_output,
                    skip_special_tokens=params.skip_special_tokens,
                    min_tokens=params.min_tokens,
                    texts=self._token_texts,
                ),
            )
            for index in range(params.n)
        ]

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that `create` made."""
        self._scheduler.add(sequence)

    def step(self) -> None:
        """Do one batch of work: part of some prompts, or one token for every sequence that is through with its own.

        A sequence whose own code fails (logits processors, a function of allowed tokens, its text) ends with `error`
        set, alone. If the step itself fails or is interrupted, the sequences that were under way are ended: their rows
        may be anywhere between two steps. Those that wait can still be served. Does nothing where no work is left.

        Raises:
            HookError: a hook raised, so that the step could not be served.
            RuntimeError: it is called out of a step, or by a second thread during one.
        """
        if self._is_working:
            raise RuntimeError(
                "an engine cannot generate out of its own step: from a hook, a logits processor or a second thread"
            )
        self._undivided(self._step)

    def abort(self, *sequences: Sequence) -> None:
        """Stop sequences wherever they stand; those that have ended are left alone.

        What is asked for in the middle of a step, by a stream that is dropped there, is done at its end.
        """
        self._doomed.extend(sequence for sequence in sequences if not sequence.is_finished)
        if self._doomed and not self._is_working:
            self._undivided(self._bury)

    def _undivided(self, work: Callable[[], None]) -> None:
        """Do work that must not stop in the middle. Where it did, all that was under way is ended, now or next time."""
        self._mend(None)
        try:
            self._is_working = self._is_torn = True
            work()
            self._is_torn = False
        except BaseException as error:
            self._mend(error)
            raise
        finally:
            self._is_working = False

    def _mend(self, error: BaseException | None) -> None:
        """End whatever was under way when something stopped in the middle. May itself stop in the middle."""
        if not self._is_torn:
            return
        try:
            self._is_working = True
            self._ahead = None
            for sequence in self._scheduler.admitted:
                if isinstance(error, Exception) and not sequence.is_finished:
                    sequence.error = RequestError(what_failed("a step that this request was in", error))
                    sequence.error.__cause__ = error
                self._end(sequence, FinishReason.ABORT)
            self._runner.clear_rows()
            self._scheduler.reset()
            self._is_torn = False
        finally:
            self._is_working = False

    def _bury(self) -> None:
        """Take out those whose abort was asked for; more may come meanwhile."""
        while self._doomed:
            sequence = self._doomed[0]
            if not sequence.is_finished:
                self._end(sequence, FinishReason.ABORT)
                self._retire(sequence)
            self._doomed.pop(0)

    def _step(self) -> None:
        self._bury()
        result = self._next_result()
        now = time.perf_counter()
        for sequence, token_id, logprobs in zip(result.sequences, result.token_ids, result.logprobs, strict=True):
            if sequence.is_finished:  # since the step was launched
                continue
            if sequence.error is None:
                self._accept(sequence, token_id, logprobs, now)
            if sequence.error is not None:
                self._end(sequence, FinishReason.ERROR)
            if sequence.is_finished:
                self._retire(sequence)
        self._bury()
        if not self._scheduler.running:
            self._wait_for_ahead()

    def _next_result(self) -> StepResult:
        """What the next batch computes.

        Where the batch after it is known, that is launched before the wait for this one, so that the device works while
        the host looks at tokens. Such a step is right whatever the host finds: the device feeds itself, rows that have
        ended by then compute tokens for nobody, and whatever changes a row or gives its blocks to others comes behind
        the step in the stream.
        """
        step, self._ahead = self._ahead, None
        if step is None:
            if not self._scheduler.has_work:
                return StepResult([], [], [])
            batch = self._scheduler.schedule()
            step = self._runner.launch(batch) if self._runs_ahead and isinstance(batch, DecodeBatch) else None
            if step is None:
                return self._runner.run(batch, again=self._runs_ahead and self._decodes_again())
        if self._decodes_again():
            self._ahead = self._runner.launch(DecodeBatch(list(self._scheduler.running)))
        return self._runner.finish(step)

    def _decodes_again(self) -> bool:
        """Whether another decode step of the same rows comes next, as far as can be known before its tokens are."""
        running = self._scheduler.running
        return self._scheduler.decodes_next and not any(len(s.output_ids) + 1 >= s.max_tokens for s in running)

    def _wait_for_ahead(self) -> None:
        step, self._ahead = self._ahead, None
        if step is not None:
            self._runner.finish(step)

    def _accept(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None, now: float) -> None:
        """Append a token, and find out whether it is the last one."""
        is_stop = token_id in sequence.stop_ids and len(sequence.output_ids) + 1 >= sequence.params.min_tokens
        is_last = not is_stop and len(sequence.output_ids) + 1 == sequence.max_tokens
        try:
            text, stop_string = sequence.text_stream.push(token_id, is_stop_token=is_stop)
            if stop_string is None and is_last:
                rest, stop_string = sequence.text_stream.finish()
                text += rest
        except Exception as error:
            sequence.error = RequestError(what_failed(f"the tokenizer, for output token {token_id},", error))
            sequence.error.__cause__ = error
            return
        sequence.output_ids.append(token_id)
        sequence.output_texts.append(text)
        if logprobs is not None:
            sequence.logprobs.append(logprobs)
        if len(sequence.output_ids) == 1:
            sequence.first_token_time = now
        if is_stop or stop_string is not None:
            sequence.finish_reason = FinishReason.STOP
            sequence.stop_reason = token_id if token_id in sequence.params.stop_token_ids else stop_string
        elif is_last:
            sequence.finish_reason = FinishReason.LENGTH
        if sequence.is_finished:
            sequence.finish_time = now

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence that has not ended, with the text that was held back."""
        if sequence.is_finished:
            return
        try:
            text, _ = sequence.text_stream.finish()
        except Exception:
            text = ""  # a tokenizer that fails has nothing more to say
        if sequence.output_texts:
            sequence.output_texts[-1] += text
        sequence.finish_reason = reason if sequence.error is None else FinishReason.ERROR
        sequence.finish_time = time.perf_counter()

    def _retire(self, sequence: Sequence) -> None:
        """Take a sequence's row off the device before its blocks can go to another."""
        move = self._scheduler.retire(sequence)
        if move is not None:
            self._runner.retire_row(move.source, move.target)
        self._scheduler.release(sequence)

    def _check_prompt(self, prompt_ids: SequenceOf[int]) -> tuple[int, ...]:
        if not prompt_ids:
            raise ValueError("the prompt is empty: it must have at least 1 token")
        for token_id in prompt_ids:
            is_int = type(token_id) is int  # nearly always, and far cheaper to find out
            if not is_int and (isinstance(token_id, bool) or not isinstance(token_id, Integral)):
                raise TypeError(f"a prompt's token ids must be integers, got {token_id!r}")
            self._check_token_id("prompt", int(token_id))
        return tuple(map(int, prompt_ids))

    def _check_token_id(self, kind: str, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"{kind} token id {token_id} is not in the vocabulary, 0 ... {self.vocab_size - 1}")

"""vLLM, its engine in this process, as its defaults are but for sizes; dummy weights."""

import os
import tempfile
import time
from typing import Any

import torch

from ..model import Decoder
from .peer_transformers import hf_config
from .peer_work import Demand, Work

SHORT = 8
"""Tokens of the generation that is subtracted: prompt and start are in both."""

LEAST_STEPS = 96
"""Fewer would be lost in how much two generations differ."""

BLOCK = 16


class VllmModel:
    """One engine for all that is asked for, with graphs of the batch sizes asked for: others would only be captured.

    Raises:
        ImportError: there is no vLLM.
    """

    def __init__(self, decoder: Decoder, demand: Demand) -> None:
        # vLLM reads these when it is imported; standard output is for tables.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        import vllm

        self.version: str = vllm.__version__
        self._steps = max(LEAST_STEPS, demand.room)
        more = SHORT + LEAST_STEPS
        free, total = torch.cuda.mem_get_info() if decoder.device.type == "cuda" else (1, 1)
        self._folder = tempfile.TemporaryDirectory()  # until the end: what vLLM reads later is not said
        hf_config(decoder.config).save_pretrained(self._folder.name)
        cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        try:
            self.llm: Any = vllm.LLM(
                model=self._folder.name,
                load_format="dummy",
                skip_tokenizer_init=True,
                generation_config="vllm",
                dtype=str(decoder.dtype).removeprefix("torch."),
                max_model_len=demand.reach(more),
                max_num_seqs=max(demand.batches),
                block_size=BLOCK,
                kv_cache_memory_bytes=demand.kv_tokens(more, BLOCK) * decoder.config.kv_bytes_per_token(decoder.dtype),
                gpu_memory_utilization=0.5 * free / total,  # beside kv_cache_memory_bytes a check at its start alone
                compilation_config={"cudagraph_capture_sizes": demand.batches},
                seed=0,
            )
        finally:  # vLLM switches it off, for the attention of other peers as well
            torch.backends.cuda.enable_cudnn_sdp(cudnn)

    def at(self, work: Work) -> "VllmPeer":
        return VllmPeer(self.llm, work)


class VllmPeer:
    """A step is the difference of two generations from the same prompts, over the tokens that they differ by.

    Prompts are computed once: vLLM finds their keys and values again in its prefix cache.
    """

    def __init__(self, llm: Any, work: Work) -> None:
        from vllm import TokensPrompt

        self._llm = llm
        vocab = work.decoder.config.vocab_size
        self._prompts = [
            TokensPrompt(prompt_token_ids=[(7 * row + place) % vocab for place in range(work.context)])
            for row in range(work.batch)
        ]
        self._seconds(1)

    def run(self, count: int) -> float:
        count = max(count, LEAST_STEPS)
        short, long = self._seconds(SHORT), self._seconds(SHORT + count)
        return 1e3 * (long - short) / count

    def first_tokens(self) -> None:
        return None

    def _seconds(self, tokens: int) -> float:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        outputs = self._llm.generate(self._prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        made = [len(output.outputs[0].token_ids) for output in outputs]
        if made != [tokens] * len(self._prompts):
            raise ValueError(f"vLLM was asked for {tokens} tokens of {len(self._prompts)} prompts, and gave {made}")
        return seconds

"""Decode speed on a CPU, beside `transformers.generate` on the same weights, prompts and threads.

    .venv/bin/python bench/cpu_generate.py            # the demo model; --model for a folder or another GGUF

Each round runs both engines once for every dtype and batch size, one right after the other, so that whatever else the
machine does falls on both. Decode tok/s comes from the difference of a long and a short generation: prefill and
start-up cancel. Reported are medians over the rounds, and that of the per-round ratio.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from environment import RESULTS, write_results
from transformers import LlamaConfig, LlamaForCausalLM

from ostinato import LLM, EngineConfig, SamplingParams
from ostinato.weights import Checkpoint, open_checkpoint, resolve

SHORT, LONG = 8, 72
PROMPT_LEN = 32
TEXT = (
    "The planets of the solar system, in their order from the sun, are the following ones, and each is described "
    "below in one paragraph of about one hundred words, so that a reader who has never heard of it will know the facts."
)


def transformers_model(checkpoint: Checkpoint, dtype: torch.dtype) -> LlamaForCausalLM:
    """The same weights in transformers' own class."""
    config = checkpoint.config
    model: LlamaForCausalLM = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.norm_eps,
            max_position_embeddings=config.max_position,
            rope_parameters={"rope_type": config.rotary.kind, "rope_theta": config.rotary.theta},
            tie_word_embeddings=config.tie_embeddings,
        )
    )
    model.load_state_dict({name: tensor.clone() for name, tensor in checkpoint.tensors()}, strict=False)
    model.tie_weights()
    model.generation_config.eos_token_id = None
    model.to(dtype)  # type: ignore[arg-type]  # its decorator loses the signature
    model.train(False)
    return model


def seconds(run: Callable[[int], list[list[int]]], num_tokens: int) -> tuple[float, list[list[int]]]:
    started = time.perf_counter()
    tokens = run(num_tokens)
    return time.perf_counter() - started, tokens


def decode_speed(run: Callable[[int], list[list[int]]]) -> tuple[float, list[list[int]]]:
    """Tokens a second over all sequences, and the tokens."""
    short, _ = seconds(run, SHORT)
    long, tokens = seconds(run, LONG)
    return len(tokens) * (LONG - SHORT) / (long - short), tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu_generate.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    checkpoint = open_checkpoint(resolve(args.model))
    cells = []
    for dtype in ("float32", "bfloat16"):
        theirs = transformers_model(checkpoint, getattr(torch, dtype))
        ours = LLM(args.model, device="cpu", dtype=dtype, config=EngineConfig(max_model_len=256))
        ids = ours.encode(TEXT)
        for batch in (1, 4):
            prompts = [ids[i : i + PROMPT_LEN] for i in range(batch)]
            stacked = torch.tensor(prompts)

            def run_ours(n: int, ours: LLM = ours, prompts: list[list[int]] = prompts) -> list[list[int]]:
                params = SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
                return [output.outputs[0].token_ids for output in ours.generate(prompts, params)]

            def run_theirs(
                n: int, model: LlamaForCausalLM = theirs, stacked: torch.Tensor = stacked
            ) -> list[list[int]]:
                mask = torch.ones_like(stacked)
                out = model.generate(stacked, attention_mask=mask, max_new_tokens=n, do_sample=False, pad_token_id=0)
                ids: list[list[int]] = out[:, PROMPT_LEN:].tolist()
                return ids

            rounds = []
            for _ in range(args.rounds):
                our_speed, our_tokens = decode_speed(run_ours)
                their_speed, their_tokens = decode_speed(run_theirs)
                rounds.append((our_speed, their_speed))
            cell = {
                "dtype": dtype,
                "batch": batch,
                "ostinato_tokens_per_second": round(median(ours for ours, _ in rounds), 2),
                "transformers_tokens_per_second": round(median(theirs for _, theirs in rounds), 2),
                "ratio": round(median(ours / theirs for ours, theirs in rounds), 3),
                "rounds": [[round(speed, 2) for speed in pair] for pair in rounds],
                "equal_tokens": our_tokens == their_tokens,
            }
            print(cell)
            cells.append(cell)
    write_results(args.out, {"model": checkpoint.path.name, "prompt_tokens": PROMPT_LEN, "cells": cells})


if __name__ == "__main__":
    main()

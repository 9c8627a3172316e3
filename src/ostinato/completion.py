"""One prompt of the command line, completed: as text that streams, or as a JSON document."""

import json
import math
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

from .llm import LLM
from .outputs import CompletionOutput, RequestMetrics
from .runtime import SamplingParams
from .terminal import StreamClock, Terminal, dtype_name, speed_line


class Completion:
    """A request that is checked and ready to be computed.

    Args:
        prompt: a text; token ids in digits if the model has no tokenizer.
        params: what to generate.
        chat: `prompt` is the message of a user, after the message `system` if there is one.
        fit: make `params.max_tokens` fit into what the context leaves.

    Raises:
        ValueError: a prompt that is not one, or no chat template.
    """

    def __init__(
        self, llm: LLM, prompt: str, params: SamplingParams, *, chat: bool, system: str | None, fit: bool
    ) -> None:
        self.prompt = prompt
        self._llm = llm
        if chat:
            roles = {"system": system, "user": prompt}
            messages = [{"role": role, "content": text} for role, text in roles.items() if text is not None]
            self._prompt_ids = llm.encode_chat(messages)
        elif llm.tokenizer is None:
            self._prompt_ids = _token_ids(prompt)
        else:
            self._prompt_ids = llm.encode(prompt)
        room = llm.max_model_len - len(self._prompt_ids)
        assert params.max_tokens is not None, "the command line has a default"
        self._params = replace(params, max_tokens=max(1, min(params.max_tokens, room))) if fit else params

    def stream(self, terminal: Terminal) -> None:
        """Write the text as it comes, several samples one after the other; a line about the speed at the end."""
        clock = StreamClock(len(self._prompt_ids), self._params.n)
        held = [""] * self._params.n
        finished = [False] * self._params.n
        shown = 0
        request = self._llm.stream(self._prompt_ids, self._params)  # refuses mistakes before anything is written
        try:
            with closing(request) as deltas:
                terminal.write(self._header(shown))
                for delta in deltas:
                    clock.saw(delta)
                    held[delta.index] += self._shown_text(delta.text, delta.token_ids)
                    finished[delta.index] = delta.finish_reason is not None
                    terminal.write(held[shown])
                    held[shown] = ""
                    while finished[shown] and shown + 1 < self._params.n:
                        shown += 1
                        terminal.write(self._header(shown) + held[shown])
                        held[shown] = ""
        finally:
            terminal.write("\n")
        terminal.note(speed_line(self._llm, clock.metrics(), clock.finish_reasons))

    def json(self, model: str) -> str:
        """The document; `model` is the name to call it by in there.

        Raises:
            RequestError: a sample could not be completed.
        """
        [result] = self._llm.generate([self._prompt_ids], self._params)
        for output in result.outputs:
            if output.error is not None:
                raise output.error
        document = {
            "model": model,
            "dtype": dtype_name(self._llm),
            "device": str(self._llm.device),
            "prompt": self.prompt,
            "prompt_token_ids": result.prompt_token_ids,
            "outputs": [self._output(output) for output in result.outputs],
            "metrics": _metrics(result.metrics),
        }
        return json.dumps(document, indent=2, allow_nan=False)

    def _header(self, index: int) -> str:
        if self._params.n == 1:
            return ""
        return ("\n\n" if index else "") + f"--- {index + 1} of {self._params.n} ---\n"

    def _shown_text(self, text: str, token_ids: list[int]) -> str:
        return text if self._llm.tokenizer is not None else "".join(f"{token_id} " for token_id in token_ids)

    def _output(self, output: CompletionOutput) -> dict[str, Any]:
        document = asdict(output)
        del document["error"]
        if output.logprobs is not None:
            document["logprobs"] = [
                {
                    **self._logprob(token_id, entry.logprob),
                    "top": [self._logprob(other, logprob) for other, logprob in entry.top],
                }
                for token_id, entry in zip(output.token_ids, output.logprobs, strict=True)
            ]
        return document

    def _logprob(self, token_id: int, logprob: float) -> dict[str, Any]:
        """JSON knows no infinities; null stands for one."""
        tokenizer = self._llm.tokenizer
        return {
            "token_id": token_id,
            "token": None if tokenizer is None else tokenizer.id_to_token(token_id),
            "logprob": logprob if math.isfinite(logprob) else None,
        }


def _metrics(metrics: RequestMetrics) -> dict[str, Any]:
    rates = "prompt_tokens_per_second", "decode_tokens_per_second"
    return {**asdict(metrics), **{name: getattr(metrics, name) for name in rates}}


def _token_ids(prompt: str) -> list[int]:
    words = prompt.replace(",", " ").split()
    for word in words:
        if not word.isascii() or not word.isdigit():
            raise ValueError(f"this model has no tokenizer, so the prompt must be token ids; {word!r} is none")
    return [int(word) for word in words]

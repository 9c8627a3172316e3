"""The choice of tokens from given logits, and log-probabilities: the kernels, and the references, in one graph each.

    python bench/sampling.py OUT.jsonl SECONDS COMMIT [WORK:BATCH,...]

The vocabulary is that of Llama 3, 128256. WORK is a kind of `sample_rows` (greedy, temperature, top_p, top_k_top_p or
everything), logprobs, with 20 alternatives, or a `token_bitmask` that leaves half of the tokens (mask) or every one
(all), as it does in rows without a mask. Eight sets of logits take turns within a graph, so that they are not in
the L2 for having been there a moment ago.
"""

import sys
from pathlib import Path

import aot
import harness
import torch

from ostinato.kernels import (
    UNUSED_BIAS,
    LogprobsWorkspace,
    SampleSteps,
    SampleWorkspace,
    SamplingRows,
    logprobs,
    logprobs_ref,
    pack_token_bitmask,
    sample_rows,
    sample_rows_ref,
    token_bitmask,
    token_bitmask_ref,
)

VOCAB, SETS, WIDTH, BANS = 128256, 8, 1024, 128
STEPS = {
    "greedy": SampleSteps(),
    "temperature": SampleSteps(random=True),
    "top_p": SampleSteps(random=True, top_p=True),
    "top_k_top_p": SampleSteps(random=True, top_k=True, top_p=True),
    "everything": SampleSteps(True, True, True, True, True, True, True),
}
CELLS = [f"{work}:{batch}" for work in (*STEPS, "logprobs", "mask", "all") for batch in (1, 8, 32)]


class Sampling:
    """What one choice reads and writes, for `batch` rows; temperature 0.8, top_k 50, top_p 0.9 where they are on."""

    def __init__(self, steps: str, batch: int, device: str, vocab: int = VOCAB) -> None:
        self.steps = STEPS[steps]
        reals = torch.tensor([0.8 * self.steps.random, 0.9, 0.01, 1.1, 0.1, 0.1])
        integers = torch.tensor([50, 42, 0, 0])
        biases = torch.full((batch, WIDTH), UNUSED_BIAS)
        self.state = SamplingRows(
            reals.repeat(batch, 1).to(device),
            integers.repeat(batch, 1).to(device),
            torch.zeros(batch, WIDTH, dtype=torch.int64, device=device),
            biases.to(device),
            torch.zeros(batch, BANS, dtype=torch.int64, device=device),
            torch.zeros(batch, BANS, dtype=torch.bool, device=device),
            torch.zeros(batch, vocab, dtype=torch.bool, device=device),
            torch.zeros(batch, vocab, dtype=torch.int32, device=device),
        )
        self.logits = [(torch.randn(batch, vocab, device=device) * 2.5).bfloat16() for _ in range(SETS)]
        self.rows, self.positions = torch.arange(batch, device=device), torch.arange(batch, device=device)
        self.workspace = SampleWorkspace(batch, vocab, device=device)
        self.out = torch.empty(SETS, batch, dtype=torch.int64, device=device)

    def run(self) -> None:
        for logits, out in zip(self.logits, self.out, strict=True):
            sample_rows(logits, self.positions, self.rows, self.state, self.steps, workspace=self.workspace, out=out)

    def run_reference(self) -> None:
        for logits, out in zip(self.logits, self.out, strict=True):
            sample_rows_ref(logits, self.positions, self.rows, self.state, self.steps, out=out)

    def differing(self) -> tuple[int, int]:
        """How many of how many tokens are not the reference's, which near-ties may make one or two."""
        if self.steps.penalties:
            return 0, 0  # each run counts its tokens, so the second sees other counts
        self.run()
        ours = self.out.clone()
        self.run_reference()
        return int((ours != self.out).sum()), ours.numel()


class Logprobs:
    """Of `batch` rows, with 20 alternatives."""

    def __init__(self, batch: int, device: str) -> None:
        self.logits = [(torch.randn(batch, VOCAB, device=device) * 2.5).bfloat16() for _ in range(SETS)]
        self.token_ids = torch.arange(batch, device=device)
        self.workspace = LogprobsWorkspace(batch, VOCAB, device=device)
        self.out = logprobs(self.logits[0], self.token_ids, 20, workspace=self.workspace)

    def run(self) -> None:
        for logits in self.logits:
            logprobs(logits, self.token_ids, 20, workspace=self.workspace, out=self.out)

    def run_reference(self) -> None:
        for logits in self.logits:
            logprobs_ref(logits, self.token_ids, 20, out=self.out)

    def differing(self) -> tuple[int, int]:
        """How many of how many ids of the last set are not the reference's."""
        self.run()
        ours = self.out[1].clone()
        self.run_reference()
        return int((ours != self.out[1]).sum()), ours.numel()


class Masks:
    """Of `batch` rows, in place: a second time over the same logits is as much work as the first."""

    def __init__(self, share: float, batch: int, device: str) -> None:
        self.logits = [(torch.randn(batch, VOCAB, device=device) * 2.5).bfloat16() for _ in range(SETS)]
        self.rows = torch.arange(batch, device=device)
        self.bitmask = pack_token_bitmask(torch.rand(batch, VOCAB) < share).to(device)

    def run(self) -> None:
        for logits in self.logits:
            token_bitmask(logits, self.rows, self.bitmask)

    def run_reference(self) -> None:
        for logits in self.logits:
            token_bitmask_ref(logits, self.rows, self.bitmask)

    def differing(self) -> tuple[int, int]:
        """How many of how many logits of the last set are not the reference's."""
        theirs = self.logits[-1].clone()
        token_bitmask_ref(theirs, self.rows, self.bitmask)
        self.run()
        return int((self.logits[-1] != theirs).sum()), theirs.numel()


def work_of(name: str, device: str) -> Sampling | Logprobs | Masks:
    work, batch = name.split(":")
    if work in ("mask", "all"):
        return Masks({"mask": 0.5, "all": 1.0}[work], int(batch), device)
    return Logprobs(int(batch), device) if work == "logprobs" else Sampling(work, int(batch), device)


def measure(names: list[str], recorder: harness.Recorder) -> None:
    for name in recorder.cells(names):
        work, batch = work_of(name, "cuda"), int(name.split(":")[1])
        differing, compared = work.differing()
        timing = harness.time_graph(harness.capture(work.run), per_sample=4)
        reference = harness.time_graph(harness.capture(work.run_reference), replays=10)
        one = harness.Timing(*(value / SETS for value in vars(timing).values()))
        facts = {"reference": reference.median / SETS, "differing": differing, "of": compared}
        recorder.record(f"sampling/{name}", one, num_bytes=2.0 * VOCAB * batch, **facts)
        print(
            f"{name:16s} {one.median:8.2f} us, reference {facts['reference']:8.1f} us, {differing} differ", flush=True
        )


def main(path: str, seconds: float, commit_id: str, names: list[str]) -> None:
    with aot.recording() as launches:
        for name in names:
            work_of(name, "meta").run()
    unique = list({launch.key: launch for launch in launches}.values())
    print(f"{len(unique)} kernels to compile", flush=True)
    aot.compile_everywhere(unique, (90,), 15)
    measure(names, harness.Recorder(Path(path), seconds, commit_id))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4].split(",") if len(sys.argv) > 4 else CELLS)

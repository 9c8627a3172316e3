"""What the host waits for in a steady decode step, as the driver sees it."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ostinato.model import Decoder
from ostinato.runtime import Engine, SamplingParams

pytestmark = pytest.mark.gpu

STEPS = 6
WAITS = ("Synchronize", "cudaMemcpy", "cuMemcpy", "cudaMemset", "cudaMalloc", "cudaFree", "StreamWait", "EventQuery")
LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch", "cudaLaunch", "cuLaunch")


def driver_calls(work: Callable[[], None]) -> list[str]:
    """Calls that launch, copy, wait, or may do so, in order."""
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        with torch.profiler.record_function("work"):
            work()
        torch.cuda.synchronize()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    (span,) = [event.time_range for event in events if event.name == "work" and event.device_type.name == "CPU"]
    return [
        event.name
        for event in events
        if span.start <= event.time_range.start <= span.end and any(word in event.name for word in LAUNCHES + WAITS)
    ]


def calls_of_steps(
    make_engine: Callable[..., Engine], tiny_decoder: Callable[..., Decoder], params: SamplingParams
) -> list[str]:
    """What the driver is asked for in some steps of three sequences; raises where torch knows of a wait."""
    engine = make_engine(tiny_decoder("cuda"), max_num_seqs=4, capture_sizes=(4,), graphs="whole", run_ahead=True)
    for prompt in range(1, 4):
        (sequence,) = engine.create([prompt] * 5, params)
        engine.add(sequence)
    for _ in range(5):
        engine.step()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return driver_calls(lambda: [engine.step() for _ in range(STEPS)] and None)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 1, "top_k": 9, "top_p": 0.9, "repetition_penalty": 1.2},
        {"temperature": 0.0, "allowed_token_ids": [3, 5, 60]},
    ],
    ids=["greedy", "sampled", "masked"],
)
def test_a_step_waits_for_tokens_of_the_one_before_and_nothing_else(
    make_engine: Callable[..., Engine], tiny_decoder: Callable[..., Decoder], params: dict[str, Any]
) -> None:
    """One launch, of the next step, and then one wait: for the event behind the step before it, which has the tokens
    that the host reads. No copy, no wait for the stream or the device."""
    calls = calls_of_steps(make_engine, tiny_decoder, SamplingParams(max_tokens=60, ignore_eos=True, **params))
    assert calls == ["cudaGraphLaunch", "cudaEventSynchronize"] * STEPS


def test_a_function_of_allowed_tokens_costs_one_copy_for_all_rows(
    make_engine: Callable[..., Engine], tiny_decoder: Callable[..., Decoder]
) -> None:
    """In front of the replay, and nobody waits for it."""
    params = SamplingParams(max_tokens=60, allowed_token_ids=lambda prompt, output: [3, 5, len(output) % 2])
    calls = Counter(calls_of_steps(make_engine, tiny_decoder, params))
    assert calls["cudaGraphLaunch"] == STEPS
    assert calls["cudaMemcpyAsync"] == STEPS
    assert not [name for name in calls if "StreamSync" in name or "DeviceSync" in name]


def test_the_driver_calls_of_a_copy_are_seen() -> None:
    x = torch.ones(4, device="cuda")
    assert any("Synchronize" in name for name in driver_calls(lambda: x.tolist() and None))

"""Ctrl-C may come anywhere: no block and no row is lost, and what comes after is served."""

import dis
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ostinato.runtime import Engine, SamplingParams

Make = Callable[..., Any]
FILES = {"engine.py", "scheduler.py", "block_allocator.py", "model_runner.py", "step_state.py", "decode_runner.py"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=3)


def interrupted(work: Callable[[], None], number: int) -> bool:
    """Run `work` and press Ctrl-C at one of the places where Python looks for it; False if it is through by then.

    It looks when a function begins, after a call, and where a loop goes back.
    """
    left = number

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if Path(frame.f_code.co_filename).name not in FILES or "runtime" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        looked = False

        def each_opcode(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal left, looked
            if event == "opcode":
                left -= looked
                if left < 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
                name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
                looked = name.startswith("CALL") or name in ("RESUME", "JUMP_BACKWARD")
            return each_opcode

        return each_opcode

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def serve(engine: Engine, *prompts: list[int]) -> list[list[int]]:
    sequences = [engine.create(prompt, GREEDY)[0] for prompt in prompts]
    for one in sequences:
        engine.add(one)
    while engine.has_work:
        engine.step()
    return [one.output_ids for one in sequences]


@pytest.mark.parametrize("stage", ["prompt", "decode", "last token", "abort", "twice"])
def test_ctrl_c_anywhere(fake_model: Make, make_engine: Make, inside: Make, counting: Any, stage: str) -> None:
    """Of a step that admits, one that decodes, one that retires, and of an abort; also again while that is mended."""
    engine = make_engine(fake_model(counting), max_num_seqs=3, max_num_batched_tokens=30)
    parts = inside(engine)
    prompts = [[5], [15, 16], [25], [35, 36]]
    step = 7 if stage == "twice" else 2
    for number in range(0, 5000, step):
        sequences = [engine.create(prompt, GREEDY)[0] for prompt in prompts]
        for one in sequences:
            engine.add(one)
        for _ in range({"prompt": 0, "decode": 1, "last token": 2}.get(stage, 1)):
            engine.step()
        work = functools.partial(engine.abort, *sequences[:2]) if stage == "abort" else engine.step
        was_interrupted = interrupted(work, number)
        if stage == "twice":
            interrupted(functools.partial(engine.abort, *sequences), number % 60)
        engine.abort(*sequences)
        parts.check_idle()
        assert all(one.is_finished and one.row is None and not one.blocks for one in sequences)
        if number % 16 == 0 or not was_interrupted:
            assert serve(engine, [5], [40, 41]) == [[6, 7, 8], [42, 43, 44]]
        if not was_interrupted:
            break
    assert not was_interrupted
    assert number > 10 * step

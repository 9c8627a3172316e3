"""Ranks keep the same graphs: two processes over gloo, one of which fails."""

import socket
import subprocess
import sys
import textwrap

import pytest
import torch

from ostinato.runtime.rank_agreement import agree_across_ranks

CPU = torch.device("cpu")

PROLOGUE = """
    import logging, sys
    import torch
    from torch import distributed
    from ostinato.runtime.rank_agreement import agree_across_ranks

    rank, port = int(sys.argv[1]), sys.argv[2]
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    cpu, group = torch.device("cpu"), distributed.group.WORLD
"""

EPILOGUE = """
    distributed.barrier()
    distributed.destroy_process_group()  # else gloo's threads may still run when the interpreter goes, which aborts
"""


def run_two_ranks(code: str, *arguments: str) -> list[str]:
    """What each of two processes prints; fails if one of them does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = textwrap.dedent(PROLOGUE) + textwrap.dedent(code) + textwrap.dedent(EPILOGUE)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", program, str(rank), str(port), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results = [rank.communicate(timeout=300) for rank in ranks]
    for rank, (_, err) in zip(ranks, results, strict=True):
        assert rank.returncode == 0, err
    return [out.strip() for out, _ in results]


def test_one_rank_agrees_with_itself() -> None:
    assert agree_across_ranks(None, [True, False], CPU) == [True, False]
    assert agree_across_ranks(None, [], CPU) == []


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without distributed")
def test_flags_are_anded_and_counts_must_match() -> None:
    outputs = run_two_ranks("""
        print(agree_across_ranks(group, [[True, True, False], [True, False, False]][rank], cpu))
        print(agree_across_ranks(group, [], cpu))
        try:
            agree_across_ranks(group, [True] * (3 + rank), cpu)
        except RuntimeError as error:
            print(error)
    """)
    said = "[True, False, False]\n[]\nranks must agree on as many graphs, but one has 3 and another 4"
    assert outputs == [said, said]


STAGES = ("warm-up", "begin", "mid-capture", "end", "instantiate")

FAILING_CAPTURES = """
    from ostinato.runtime.cuda_graph_runner import CudaGraphRunner
    from ostinato.runtime.decode_pieces import DecodeSteps
    from ostinato.runtime.dummy_rows import RowInputs
    from ostinato.runtime.graph_buckets import CudaGraphConfig
    from ostinato.runtime.static_buffers import GraphResources, StaticBuffers
    from ostinato.runtime.tape_graph import TapeBackend

    class FailingBackend(TapeBackend):
        captures = 0
        def begin(self, graph, pool):
            self.captures += 1
            self.fail("begin")
            super().begin(graph, pool)
        def end(self, graph):
            self.fail("end")
            super().end(graph)
        def instantiate(self, graph):
            self.fail("instantiate")
            super().instantiate(graph)
        def fail(self, at):
            if rank == 0 and stage == at and self.captures == 2:  # bucket 2, after bucket 4
                raise RuntimeError("forced on rank 0")

    class Forward:
        calls = 0
        def graph_configs(self): return [CudaGraphConfig("decode", (1, 2, 4))]
        def claim(self, configs): buffers.claim("x", 4)
        def static_inputs(self, key): return {"x": buffers.get("x", key.bs)}
        def prepare_inputs(self, key): pass
        def template_row(self, config, rid): return RowInputs(rid, 1, {})
        def forward(self, key, inputs):
            self.calls += 1
            # After the three calls of bucket 4: a warm-up, or the capture that follows the second one.
            if rank == 0 and self.calls == {"warm-up": 4, "mid-capture": 6}.get(stage):
                raise RuntimeError("forced on rank 0")
            return {"y": inputs["x"] + 1}

    logging.disable(logging.CRITICAL)
    for stage in sys.argv[3].split(","):
        print("#", stage)
        backend, buffers = FailingBackend(), StaticBuffers(cpu)
        resources = GraphResources(backend, backend.new_pool(), buffers)
        runner = CudaGraphRunner("toy", Forward(), resources, DecodeSteps(), cpu, None, group, 1)
        runner.prepare_for_capture()
        runner.warmup_and_capture()
        [(reason, detail)] = runner.drop_reasons.values()
        print([key.bs for key in runner.dropped_buckets], reason.name, detail)
        lease = runner.lease_slot("decode", 2, None)
        print(lease.key.bs, runner.run_forward(lease, {"x": torch.tensor([1.0, 2.0])})["y"].tolist())
        print(runner.captures_walk("decode"), [runner.has(key) for key in runner.bucket_keys()])
"""


@pytest.fixture(scope="module")
def outputs_by_stage() -> dict[str, list[str]]:
    """What the two ranks print for each stage at which the first one fails; one pair of processes for all stages."""
    outputs = [output.split("# ")[1:] for output in run_two_ranks(FAILING_CAPTURES, ",".join(STAGES))]
    return {stage: [rank[i].partition("\n")[2].strip() for rank in outputs] for i, stage in enumerate(STAGES)}


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without distributed")
@pytest.mark.parametrize("stage", STAGES)
def test_a_capture_that_fails_on_one_rank_is_dropped_on_both(
    stage: str, outputs_by_stage: dict[str, list[str]]
) -> None:
    """Both ranks drop the bucket, pass as many barriers, and serve the rest; the failing rank is not the last one."""
    outputs = outputs_by_stage[stage]
    served = "4 [2.0, 3.0, 1.0, 1.0]\nTrue"
    assert outputs[0].startswith("[2] CAPTURE_FAILED RuntimeError: forced on rank 0\n" + served)
    assert outputs[1].startswith("[2] RANK_DISAGREED another rank has no graph for it\n" + served)
    assert outputs[0].splitlines()[-1] == outputs[1].splitlines()[-1]

"""What the runtime tests share: one torch thread, two small models, and a look into an engine's device state."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.kernels import FIRST_BLOCK, SINK_BLOCK, slot_mapping
from ostinato.model import AttentionMetadata, Decoder, KVCache, ModelConfig
from ostinato.model.config import RotaryConfig
from ostinato.model.decoder import Preamble
from ostinato.runtime import Engine, EngineConfig, Sequence
from ostinato.runtime.block_allocator import BlockAllocator
from ostinato.runtime.scheduler import Scheduler
from ostinato.runtime.step_state import StepState
from ostinato.weights import dummy_model

LogitsOf = Callable[[list[int]], Tensor]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def _config(**changes: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "architecture": "llama",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "norm_eps": 1e-5,
        "rotary": RotaryConfig("default", 10000.0, changes.get("head_dim", 8)),
        "max_position": 256,
    }
    return ModelConfig(**(sizes | changes))


@pytest.fixture(scope="session")
def model_config() -> Callable[..., ModelConfig]:
    """`model_config(**changes)`: the shape of the tiny decoder, but for the changes."""
    return _config


@pytest.fixture(scope="session")
def tiny_decoder() -> Callable[..., Decoder]:
    """`tiny_decoder(device="cpu")`: random float32 weights, the same on every device."""

    def make(device: str = "cpu") -> Decoder:
        weights = dummy_model(_config(), dtype=torch.float32).state_dict()
        decoder = Decoder(_config(), dtype=torch.float32, device=device)
        decoder.load_state_dict(weights)
        return decoder

    return make


class FakeModel:
    """Stands in for a Decoder where numerics should drop out: logits are a pure function of the token ids so far.

    The ids live in the KV cache (K an id, V its position) and are read back through the block tables. So a wrong block,
    slot, length or position either fails the check of the positions here or changes the tokens.
    """

    dtype = torch.float32

    def __init__(self, logits_of: LogitsOf, device: str = "cpu", max_position: int = 256) -> None:
        self.config = _config(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2, max_position=max_position)
        self.device = torch.device(device)
        self.logits_of = logits_of
        self.num_tokens_of_steps: list[int] = []
        self._contexts: list[list[int]] = []

    def preamble(self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, block_size: int) -> Preamble:
        slots = slot_mapping(positions, metadata.block_tables, block_size, cu_seqlens_q=metadata.cu_seqlens_q)
        hidden = torch.stack((token_ids, positions), dim=1).float()
        return Preamble(hidden, hidden, hidden, slots)

    def blocks(self, hidden: Tensor, preamble: Preamble, metadata: AttentionMetadata, kv_cache: KVCache) -> Tensor:
        """`[num_tokens, 2]`: the sequence that a token belongs to, and how many ids of it the token may see."""
        self.num_tokens_of_steps.append(hidden.shape[0])
        blocks, offsets = preamble.slot_mapping // kv_cache.block_size, preamble.slot_mapping % kv_cache.block_size
        kv_cache.k[0][blocks, 0, offsets, 0], kv_cache.v[0][blocks, 0, offsets, 0] = hidden.unbind(1)
        lengths = metadata.seq_lens.tolist()
        offsets_q = range(len(lengths) + 1) if metadata.cu_seqlens_q is None else metadata.cu_seqlens_q.tolist()
        self._contexts, rows = [], []
        for seq, (table, length) in enumerate(zip(metadata.block_tables.long(), lengths, strict=True)):
            ids, positions = (
                cache[0][table, 0, :, 0].flatten()[:length].tolist() for cache in (kv_cache.k, kv_cache.v)
            )
            assert positions == list(range(length)), f"sequence {seq} does not see its own keys in order: {positions}"
            self._contexts.append([int(token_id) for token_id in ids])
            num_new = offsets_q[seq + 1] - offsets_q[seq]
            rows += [[seq, visible] for visible in range(length - num_new + 1, length + 1)]
        return torch.tensor(rows, dtype=torch.float32, device=self.device)

    def head(self, hidden: Tensor) -> Tensor:
        logits = [self.logits_of(self._contexts[int(seq)][: int(visible)]) for seq, visible in hidden.tolist()]
        return torch.stack(logits).to(self.device)


@pytest.fixture(scope="session")
def fake_model() -> Callable[..., FakeModel]:
    """`fake_model(logits_of, device="cpu", max_position=256)`."""
    return FakeModel


@pytest.fixture(scope="session")
def hashed() -> LogitsOf:
    """Logits that any change to any id so far changes altogether."""

    def logits_of(ids: list[int]) -> Tensor:
        generator = torch.Generator().manual_seed(hash(tuple(ids)) & 0xFFFFFFFF)
        return torch.randn(_config().vocab_size, generator=generator)

    return logits_of


@pytest.fixture(scope="session")
def counting() -> LogitsOf:
    """Logits that prefer the id after the last one: a prompt that ends in 7 goes on with 8, 9, 10 …"""

    def logits_of(ids: list[int]) -> Tensor:
        logits = torch.zeros(_config().vocab_size)
        logits[(ids[-1] + 1) % len(logits)] = 5.0
        return logits

    return logits_of


@dataclass(frozen=True)
class Inside:
    """The parts of an engine, and what must hold for them between any two steps."""

    engine: Engine
    scheduler: Scheduler
    allocator: BlockAllocator
    state: StepState
    kv_cache: KVCache

    def check(self) -> None:
        """Rows without gaps, device rows that say what the host thinks, and every block with one owner at most."""
        scheduler, state = self.scheduler, self.state
        for row, sequence in enumerate(scheduler.running):
            assert sequence.row == row
            assert not sequence.is_finished
        num_live = len(scheduler.running)
        assert state.seq_lens.tolist() == [
            *(sequence.num_computed + 1 for sequence in scheduler.running),
            *[0] * (len(state.seq_lens) - num_live),
        ]
        assert state.positions[:num_live].tolist() == [sequence.num_computed for sequence in scheduler.running]
        assert state.token_ids[:num_live].tolist() == [sequence.output_ids[-1] for sequence in scheduler.running]
        width = state.block_tables.shape[1]
        tables = [sequence.blocks + [SINK_BLOCK] * (width - len(sequence.blocks)) for sequence in scheduler.running]
        assert state.block_tables.tolist() == tables + [[SINK_BLOCK] * width] * (len(state.seq_lens) - num_live)
        owned = [block for sequence in (*scheduler.prefilling, *scheduler.running) for block in sequence.blocks]
        assert all(not sequence.blocks and sequence.row is None for sequence in scheduler.waiting)
        assert len(owned) == len(set(owned))
        assert all(FIRST_BLOCK <= block < self.kv_cache.num_blocks for block in owned)
        assert len(owned) + self.allocator.num_free == self.engine.kv_plan.num_usable_blocks

    def check_idle(self) -> None:
        """Nothing is left of any request."""
        assert not self.engine.has_work
        self.check()
        assert self.allocator.num_free == self.engine.kv_plan.num_usable_blocks


@pytest.fixture(scope="session")
def inside() -> Callable[[Engine], Inside]:
    def look(engine: Engine) -> Inside:
        scheduler, runner = engine._scheduler, engine._runner
        return Inside(engine, scheduler, scheduler._allocator, runner._state, runner._pieces.kv_cache)

    return look


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., Engine]:
    """`make_engine(model, eos=(), tokenizer=None, **config)`: an engine of 16-token blocks that does one step after the
    other, without graphs (of prompts in any case), on any device, unless the config differs."""

    def make(model: Any, *, eos: tuple[int, ...] = (), tokenizer: Any = None, **sizes: Any) -> Engine:
        plain = {"graphs": "off", "prompt_capture_sizes": (), "graph_self_test": False, "run_ahead": False}
        small = {"block_size": 16, "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 20}
        config = EngineConfig(**(plain | small | sizes))
        return Engine(model, config, tokenizer=tokenizer, eos_token_ids=eos)

    return make


@pytest.fixture(scope="session")
def drain(inside: Callable[[Engine], Inside]) -> Callable[..., None]:
    """Steps an engine until nothing is left, checking it after each step; fails if that takes too long."""

    def run(engine: Engine, after_step: Callable[[], None] = lambda: None, max_steps: int = 2000) -> None:
        looking = inside(engine)
        for _ in range(max_steps):
            if not engine.has_work:
                break
            engine.step()
            looking.check()
            after_step()
        looking.check_idle()

    return run


@pytest.fixture(scope="session")
def generate(drain: Callable[..., None]) -> Callable[..., list[Sequence]]:
    """`generate(engine, *requests)`: the finished sequences of (prompt ids, SamplingParams) pairs queued together."""

    def run(engine: Engine, *requests: Any) -> list[Sequence]:
        sequences = [sequence for prompt, params in requests for sequence in engine.create(prompt, params)]
        for sequence in sequences:
            engine.add(sequence)
        drain(engine)
        return sequences

    return run

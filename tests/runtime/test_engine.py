"""Requests in, tokens out: the same whatever else the engine does, and nothing left behind."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.kernels import FIRST_BLOCK, SINK_BLOCK
from ostinato.runtime import Engine, EngineConfig, FinishReason, SamplingParams, Sequence
from ostinato.runtime.engine_parts import CPU_KV_CACHE_BYTES, kv_cache_bytes

VOCAB_SIZE = 61
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SEEDED = SamplingParams(temperature=0.8, seed=42, max_tokens=20)

Make = Callable[..., Any]
Generate = Callable[..., list[Sequence]]


class Letters:
    """A tokenizer: id i is the i-th letter, or other character, from A on; id 0 is a marker."""

    special_ids = frozenset({0})

    def id_to_token(self, token_id: int, /) -> str | None:
        return chr(65 + token_id) if 0 <= token_id < VOCAB_SIZE else None

    def decode(self, ids: list[int], /, skip_special_tokens: bool = True) -> str:
        return "".join(chr(65 + i) for i in ids if not (skip_special_tokens and i in self.special_ids))


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"{length} {seed}")
    return [draw.randrange(VOCAB_SIZE) for _ in range(length)]


def text(one: Sequence) -> str:
    assert len(one.output_texts) == len(one.output_ids)
    return "".join(one.output_texts)


def prefers(*ids: int) -> Callable[[list[int]], Tensor]:
    """Logits that are highest at the first id, whatever came before, then at the second, …"""

    def logits_of(_: list[int]) -> Tensor:
        logits = torch.zeros(VOCAB_SIZE)
        for rank, token_id in enumerate(ids):
            logits[token_id] = 10.0 - rank
        return logits

    return logits_of


def greedy_ids(logits_of: Callable[[list[int]], Tensor], ids: list[int], num_tokens: int) -> list[int]:
    """The loop that an engine is an elaboration of."""
    ids = list(ids)
    for _ in range(num_tokens):
        ids.append(int(logits_of(ids).argmax()))
    return ids[len(ids) - num_tokens :]


# --- the same tokens whatever the batch


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_more_requests_than_rows_are_each_as_alone(
    tiny_decoder: Make, make_engine: Make, generate: Generate, params: SamplingParams, device: str
) -> None:
    """B60: eleven ragged prompts over three rows and small prefill steps."""
    model = tiny_decoder(device)
    prompts = [prompt(length, seed=length) for length in (16, 1, 33, 15, 2, 17, 48, 47, 5, 32, 31)]
    alone = [generate(make_engine(model), (ids, params))[0] for ids in prompts]
    together = generate(
        make_engine(model, max_num_seqs=3, max_num_batched_tokens=20), *((ids, params) for ids in prompts)
    )
    assert [one.output_ids for one in together] == [one.output_ids for one in alone]
    assert {len(one.output_ids) for one in together} == {params.max_tokens}


@pytest.mark.parametrize("budget", [1, 7, 16, 39, 2048])
def test_b60_the_prefill_budget_changes_no_token_and_is_respected(
    fake_model: Make, make_engine: Make, generate: Generate, hashed: Any, budget: int
) -> None:
    """B60"""
    model = fake_model(hashed)
    prompts = [prompt(length) for length in (40, 3, 17)]
    sequences = generate(make_engine(model, max_num_batched_tokens=budget), *((ids, GREEDY) for ids in prompts))
    assert [one.output_ids for one in sequences] == [greedy_ids(hashed, ids, 12) for ids in prompts]
    assert max(model.num_tokens_of_steps) <= max(budget, len(prompts))


request_shapes = st.tuples(
    st.integers(1, 40) | st.sampled_from([15, 16, 17, 31, 32, 33]), st.integers(1, 12), st.booleans()
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(request_shapes, min_size=1, max_size=9),
    st.fixed_dictionaries(
        {
            "max_num_seqs": st.integers(1, 6),
            "max_num_batched_tokens": st.sampled_from([1, 5, 16, 33, 500]),
            "block_size": st.sampled_from([16, 32]),
            "kv_cache_memory_bytes": st.sampled_from([6 * 512, 10 * 512, 1 << 20]),
        }
    ),
)
def test_sizes_change_no_token(
    fake_model: Make,
    make_engine: Make,
    generate: Generate,
    hashed: Any,
    shapes: list[tuple[int, int, bool]],
    sizes: dict[str, int],
) -> None:
    """B31, B60: with a pool so small that requests wait for each other, greedy and seeded ones mixed."""
    requests = []
    for index, (num_prompt, max_tokens, is_greedy) in enumerate(shapes):
        params = SamplingParams(temperature=0.0 if is_greedy else 0.9, seed=index, max_tokens=max_tokens)
        requests.append((prompt(num_prompt, seed=index), params))
    model = fake_model(hashed)
    got = generate(make_engine(model, **sizes), *requests)
    roomy = make_engine(model)
    for one, (ids, params) in zip(got, requests, strict=True):
        assert one.output_ids == generate(roomy, (ids, params))[0].output_ids
        if params.greedy:
            assert one.output_ids == greedy_ids(hashed, ids, params.max_tokens or 0)


def test_what_the_cache_held_before_changes_nothing(
    tiny_decoder: Make, make_engine: Make, generate: Generate, inside: Make, device: str
) -> None:
    """B38, B47: NaN in every block that nobody has written, reserved block 0 included, which stays as it is."""
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=14, logprobs=True, top_logprobs=3)
    requests = [(prompt(length), params) for length in (3, 16, 40, 7)]
    results = []
    for poison in (0.0, float("nan")):
        engine = make_engine(tiny_decoder(device), max_num_seqs=2, max_num_batched_tokens=24)
        caches = (*inside(engine).kv_cache.k, *inside(engine).kv_cache.v)
        for cache in caches:
            cache[:SINK_BLOCK], cache[SINK_BLOCK + 1 :] = poison, poison
        results.append([(one.output_ids, one.logprobs) for one in generate(engine, *requests)])
        for cache in caches:
            torch.testing.assert_close(cache[0], torch.full_like(cache[0], poison), rtol=0, atol=0, equal_nan=True)
            assert cache[SINK_BLOCK].eq(0.0).all()
    assert results[0] == results[1]


@pytest.mark.gpu
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_both_devices_generate_the_same_tokens(
    tiny_decoder: Make, make_engine: Make, generate: Generate, params: SamplingParams
) -> None:
    """Invariant 11: in float32, where two candidates of a random model are hardly ever as close as rounding."""
    requests = [(prompt(length), params) for length in (16, 1, 33, 15, 40)]
    results = []
    for device in ("cpu", "cuda"):
        engine = make_engine(tiny_decoder(device), max_num_seqs=3, max_num_batched_tokens=24)
        results.append([one.output_ids for one in generate(engine, *requests)])
    assert results[0] == results[1]


# --- seeds


def seeded_among(engine: Engine, drain: Callable[..., None], scene: str) -> list[int]:
    """Output of the request `SEEDED` in a scene with others."""
    unseeded = SamplingParams(temperature=1.0, max_tokens=25)
    num_before = {"alone": 0, "beside an unseeded one": 1, "in row 5 of 8": 5, "admitted late": 3}[scene]
    num_after = 2 if scene == "in row 5 of 8" else 0
    for index in range(num_before):
        engine.add(engine.create(prompt(4 + index), unseeded)[0])
    if scene == "admitted late":
        for _ in range(7):
            engine.step()
    (one,) = engine.create(prompt(21), SEEDED)
    engine.add(one)
    for index in range(num_after):
        engine.add(engine.create(prompt(9 + index), unseeded)[0])
    rows: set[int | None] = set()
    drain(engine, after_step=lambda: rows.add(one.row))
    assert rows >= {num_before}, "the scene is what it is called"
    return one.output_ids


SCENES = ["alone", "beside an unseeded one", "in row 5 of 8", "admitted late"]


@pytest.mark.parametrize("scene", SCENES)
def test_b22_a_seeded_request_is_the_same_in_any_company(
    fake_model: Make, make_engine: Make, drain: Make, hashed: Any, scene: str, device: str
) -> None:
    """B22"""
    model = fake_model(hashed, device)
    expected = seeded_among(make_engine(model), drain, "alone")
    assert len(set(expected)) > 5
    assert seeded_among(make_engine(model, max_num_batched_tokens=10), drain, scene) == expected


@pytest.mark.parametrize("scene", SCENES)
def test_b22_a_seeded_request_is_the_same_in_any_company_with_a_real_model(
    tiny_decoder: Make, make_engine: Make, drain: Make, scene: str, device: str
) -> None:
    """B22: with a model whose logits may differ in the last bit from batch to batch."""
    model = tiny_decoder(device)
    assert seeded_among(make_engine(model), drain, scene) == seeded_among(make_engine(model), drain, "alone")


@pytest.mark.parametrize("seed", [0, 42, 2**63, 2**64 - 1])
def test_b22_samples_of_a_request_differ_and_repeat(
    fake_model: Make, make_engine: Make, generate: Generate, hashed: Any, seed: int
) -> None:
    """B22: n = 4, and the first of them is what n = 1 gives."""
    params = SamplingParams(seed=seed, n=4, max_tokens=10)
    engine = make_engine(fake_model(hashed))
    first = [one.output_ids for one in generate(engine, (prompt(5), params))]
    again = [one.output_ids for one in generate(engine, (prompt(9), SEEDED), (prompt(5), params))[1:]]
    single = generate(engine, (prompt(5), SamplingParams(seed=seed, max_tokens=10)))[0].output_ids
    assert first == again
    assert len({tuple(ids) for ids in first}) == 4
    assert first[0] == single


def test_b22_seeds_matter_and_unseeded_requests_differ(
    fake_model: Make, make_engine: Make, generate: Generate, hashed: Any
) -> None:
    """B22"""
    engine = make_engine(fake_model(hashed))
    requests = [(prompt(5), SamplingParams(seed=seed, max_tokens=12)) for seed in (0, 1, 2**63, None, None)]
    assert len({tuple(one.output_ids) for one in generate(engine, *requests)}) == 5


def test_b22_global_generators_are_neither_used_nor_changed(
    tiny_decoder: Make, make_engine: Make, generate: Generate, device: str
) -> None:
    """B22"""

    def run() -> list[int]:
        engine = make_engine(tiny_decoder(device))
        unseeded = SamplingParams(max_tokens=6, top_k=5, top_p=0.9, min_p=0.01, presence_penalty=0.5)
        return generate(engine, (prompt(5), SEEDED), (prompt(6), unseeded))[0].output_ids

    torch.manual_seed(1)
    random.seed(1)
    states = torch.get_rng_state(), random.getstate()
    first = run()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    if device == "cuda":
        assert torch.cuda.initial_seed() == 1
        assert torch.equal(torch.cuda.get_rng_state(), torch.Generator("cuda").manual_seed(1).get_state())
    torch.manual_seed(2)
    random.seed(2)
    assert run() == first


# --- ends


@pytest.mark.parametrize("favourite", [7, 0, 20])
def test_b11_each_end_id_ends_a_sequence(
    fake_model: Make, make_engine: Make, generate: Generate, favourite: int
) -> None:
    """B11, B28: its id is the last token, its text is none."""
    engine = make_engine(fake_model(prefers(favourite)), eos=(7, 0, 20), tokenizer=Letters())
    (one,) = generate(engine, (prompt(9), GREEDY))
    assert (one.output_ids, text(one), one.finish_reason, one.stop_reason) == ([favourite], "", "stop", None)


@pytest.mark.parametrize("favourite", [7, 0, 20])
def test_b28_ignore_eos_ignores_every_end_id(
    fake_model: Make, make_engine: Make, generate: Generate, favourite: int
) -> None:
    """B28"""
    engine = make_engine(fake_model(prefers(favourite)), eos=(7, 0, 20))
    (one,) = generate(engine, (prompt(9), SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=5)))
    assert (one.output_ids, one.finish_reason, one.stop_reason) == ([favourite] * 5, "length", None)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_b28_a_stop_id_stops_and_is_named(
    fake_model: Make, make_engine: Make, generate: Generate, ignore_eos: bool
) -> None:
    """B28: also when it is an end id that is ignored as such."""
    engine = make_engine(fake_model(prefers(7)), eos=(7, 20))
    params = SamplingParams(temperature=0.0, ignore_eos=ignore_eos, stop_token_ids=[3, 7], max_tokens=5)
    (one,) = generate(engine, (prompt(9), params))
    assert (one.output_ids, one.finish_reason, one.stop_reason) == ([7], "stop", 7)


@pytest.mark.parametrize("temperature", [0.0, 0.05])
@pytest.mark.parametrize("min_tokens", [1, 3, 5])
def test_b28_nothing_ends_before_min_tokens(
    fake_model: Make, make_engine: Make, generate: Generate, min_tokens: int, temperature: float
) -> None:
    """B28: the stop ids are masked for so many generated tokens, and the vocabulary's last id is not."""
    last = VOCAB_SIZE - 1
    engine = make_engine(fake_model(prefers(7, 3, last)), eos=(7,))
    params = SamplingParams(
        temperature=temperature, seed=0, min_tokens=min_tokens, max_tokens=min(min_tokens + 2, 5), stop_token_ids=[3]
    )
    beside = SamplingParams(temperature=0.0, max_tokens=4)
    one, other = generate(engine, (prompt(9), params), (prompt(9), beside))
    expected = [last] * min_tokens + [7] * (min_tokens < 5)
    assert one.output_ids == expected
    assert one.finish_reason == ("stop" if min_tokens < 5 else "length")
    assert other.output_ids == [7], "a neighbour's mask is not ours"


def test_b28_under_ignore_eos_min_tokens_masks_no_end_id(
    fake_model: Make, make_engine: Make, generate: Generate
) -> None:
    """B28"""
    engine = make_engine(fake_model(prefers(7, 3, 4)), eos=(7,))
    params = SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=[3], min_tokens=2, max_tokens=3)
    assert generate(engine, (prompt(9), params))[0].output_ids == [7, 7, 7]


@pytest.mark.parametrize(
    ("changes", "num_tokens", "expected_text", "reason"),
    [
        ({}, 2, "K", "stop"),
        ({"include_stop_str_in_output": True}, 2, "KL", "stop"),
        ({"min_tokens": 2}, 2, "K", "stop"),
        ({"min_tokens": 3}, 5, "KLMNO", "length"),
        ({"max_tokens": 2}, 2, "K", "stop"),
        ({"max_tokens": 1}, 1, "K", "length"),
    ],
    ids=["plain", "included", "min 2", "min 3", "on the last token", "one token"],
)
def test_b28_a_stop_string_at_the_second_token(
    fake_model: Make,
    make_engine: Make,
    generate: Generate,
    counting: Any,
    changes: dict[str, Any],
    num_tokens: int,
    expected_text: str,
    reason: str,
) -> None:
    """B28, B54: one that the second token completes; a limit reached with it is no limit."""
    engine = make_engine(fake_model(counting), tokenizer=Letters())
    params = SamplingParams(**({"temperature": 0.0, "stop": "L", "max_tokens": 5} | changes))
    (one,) = generate(engine, ([4, 9], params))
    assert one.output_ids == [10, 11, 12, 13, 14][:num_tokens]
    assert (text(one), one.finish_reason, one.stop_reason) == (expected_text, reason, "L" if reason == "stop" else None)


def test_b19_text_held_back_is_released_at_the_limit_and_at_an_abort(
    fake_model: Make, make_engine: Make, generate: Generate, counting: Any, drain: Make
) -> None:
    """B19"""
    engine = make_engine(fake_model(counting), tokenizer=Letters())
    params = SamplingParams(temperature=0.0, stop="LMX", max_tokens=3)
    (one,) = generate(engine, ([9], params))
    assert (text(one), one.finish_reason) == ("KLM", "length")
    (one,) = engine.create([9], SamplingParams(temperature=0.0, stop="LMX", max_tokens=9))
    engine.add(one)
    for _ in range(3):
        engine.step()
    assert text(one) == "K"
    engine.abort(one)
    assert (text(one), one.finish_reason) == ("KLM", "abort")
    drain(engine)


def test_b54_an_end_id_on_the_last_token_is_a_stop(
    fake_model: Make, make_engine: Make, generate: Generate, counting: Any
) -> None:
    """B54"""
    engine = make_engine(fake_model(counting), eos=(12,))
    ends = {}
    for max_tokens in (1, 2, 3):
        (one,) = generate(engine, ([9], SamplingParams(temperature=0.0, max_tokens=max_tokens)))
        ends[max_tokens] = (one.output_ids, one.finish_reason)
    assert ends == {1: ([10], "length"), 2: ([10, 11], "length"), 3: ([10, 11, 12], "stop")}


# --- limits


def test_b33_a_sequence_fills_the_context_to_its_last_token(
    fake_model: Make, make_engine: Make, generate: Generate, hashed: Any
) -> None:
    """B33, B54: prompts of limit - 1 and less, without and with the max_tokens that is just allowed; beside others."""
    engine = make_engine(fake_model(hashed), max_model_len=50, max_num_seqs=2)
    requests = []
    for num_prompt in (49, 48, 33, 1):
        requests.append((prompt(num_prompt), SamplingParams(temperature=0.0, max_tokens=None)))
        requests.append((prompt(num_prompt), SamplingParams(temperature=0.0, max_tokens=50 - num_prompt)))
    for one, (ids, _) in zip(generate(engine, *requests), requests, strict=True):
        assert one.output_ids == greedy_ids(hashed, ids, 50 - len(ids))
        assert one.finish_reason == "length"


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "numbers"),
    [
        (50, None, (50, 1, 50)),
        (50, 1, (50, 1, 50)),
        (49, 2, (49, 2, 50)),
        (51, 16, (51, 16, 50)),
        (600, None, (600, 50)),
    ],
)
def test_b33_what_can_never_fit_is_refused_with_the_numbers(
    fake_model: Make, make_engine: Make, hashed: Any, num_prompt: int, max_tokens: int | None, numbers: tuple[int, ...]
) -> None:
    """B33, B56"""
    engine = make_engine(fake_model(hashed), max_model_len=50)
    with pytest.raises(ValueError, match=r"\b" + r"\b.*\b".join(map(str, numbers)) + r"\b"):
        engine.create(prompt(num_prompt), SamplingParams(max_tokens=max_tokens))
    assert not engine.has_work


def test_b33_a_prompt_longer_than_the_pool_is_refused_and_a_short_one_behind_it_served(
    fake_model: Make, make_engine: Make, generate: Generate, hashed: Any
) -> None:
    """B33: a model for 1024 tokens, a pool of 32 blocks of 16, of which 2 are reserved."""
    model = fake_model(hashed, max_position=1024)
    pool = 32 * 16 * model.config.kv_bytes_per_token(model.dtype)
    with pytest.raises(ValueError, match=r"\b1024\b.*\b480\b"):
        make_engine(model, max_model_len=1024, kv_cache_memory_bytes=pool)
    engine = make_engine(model, kv_cache_memory_bytes=pool)
    assert engine.max_model_len == 480
    with pytest.raises(ValueError, match=r"\b600\b.*\b480\b"):
        engine.create(prompt(600), GREEDY)
    long, short = generate(engine, (prompt(468), GREEDY), (prompt(5), GREEDY))
    assert long.output_ids == greedy_ids(hashed, prompt(468), 12)
    assert short.output_ids == greedy_ids(hashed, prompt(5), 12)


def test_b33_full_size_requests_in_a_pool_for_one(
    fake_model: Make, make_engine: Make, generate: Generate, hashed: Any
) -> None:
    """B33: they wait for each other and all come to their end."""
    model = fake_model(hashed)
    pool = (FIRST_BLOCK + 3) * 16 * model.config.kv_bytes_per_token(model.dtype)
    engine = make_engine(model, kv_cache_memory_bytes=pool)
    requests = [(prompt(n), SamplingParams(temperature=0.0, max_tokens=None)) for n in (47, 30, 1, 46)]
    for one, (ids, _) in zip(generate(engine, *requests), requests, strict=True):
        assert one.output_ids == greedy_ids(hashed, ids, 48 - len(ids))


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([], ValueError, "empty"),
        ([5, -1], ValueError, r"-1\b.*\b60\b"),
        ([5, 61], ValueError, r"\b61\b.*\b60\b"),
        ([5, 10**30], ValueError, r"\b1000000000000000000000000000000\b.*\b60\b"),
        ([5, 1.0], TypeError, r"1\.0"),
        ([5, True], TypeError, "True"),
        ([5, None], TypeError, "None"),
        ([[5]], TypeError, r"\[5\]"),
        ("Hi", TypeError, "'H'"),
    ],
    ids=str,
)
def test_b53_a_prompt_with_a_bad_id_is_refused(
    fake_model: Make, make_engine: Make, generate: Generate, hashed: Any, ids: Any, error: type, message: str
) -> None:
    """B53: naming the id and the limit; the next request is served."""
    engine = make_engine(fake_model(hashed))
    with pytest.raises(error, match=message):
        engine.create(ids, GREEDY)
    assert generate(engine, ([60, 0], GREEDY))[0].output_ids == greedy_ids(hashed, [60, 0], 12)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_token_ids": [61]}, r"stop_token_ids.*\b61\b.*\b60\b"),
        ({"logit_bias": {99: 1.0}}, r"logit_bias.*\b99\b.*\b60\b"),
        ({"max_tokens": None, "min_tokens": 253}, r"min_tokens 253\b.*\b252\b"),
        ({"stop": "x"}, "tokenizer"),
    ],
    ids=str,
)
def test_b26_parameters_that_do_not_fit_the_model_are_refused(
    fake_model: Make, make_engine: Make, hashed: Any, params: dict[str, Any], message: str
) -> None:
    """B26, B53: before anything is queued."""
    engine = make_engine(fake_model(hashed))
    with pytest.raises(ValueError, match=message):
        engine.create(prompt(4), SamplingParams(**params))
    assert not engine.has_work


def test_more_stop_ids_than_min_tokens_can_mask_are_refused_before_the_step(
    fake_model: Make, make_engine: Make, generate: Generate, hashed: Any
) -> None:
    """Invariant 16: not in the middle of a batch. Without min_tokens any number is fine."""
    model = fake_model(lambda ids: torch.nn.functional.pad(hashed(ids), (0, 139), value=-5.0))
    object.__setattr__(model.config, "vocab_size", 200)
    engine = make_engine(model, eos=tuple(range(61, 190)))
    with pytest.raises(ValueError, match=r"\b128\b.*\b129\b"):
        engine.create(prompt(4), SamplingParams(min_tokens=1))
    assert generate(engine, (prompt(4), GREEDY))[0].output_ids == greedy_ids(hashed, prompt(4), 12)


@pytest.mark.parametrize("token_id", [-1, 61])
def test_b28_an_end_id_outside_the_vocabulary_is_refused(
    fake_model: Make, make_engine: Make, hashed: Any, token_id: int
) -> None:
    """B28: -1 must not come to mean the last id."""
    with pytest.raises(ValueError, match=rf"{token_id}\b.*\b60\b"):
        make_engine(fake_model(hashed), eos=(5, token_id))


# --- ends of all kinds, and what they leave behind


def test_b52_aborts_wherever_a_sequence_stands(
    fake_model: Make, make_engine: Make, drain: Make, inside: Make, hashed: Any
) -> None:
    """B52: the others go on as if alone; a second abort, and one after the end, change nothing."""
    engine = make_engine(fake_model(hashed), max_num_seqs=3, max_num_batched_tokens=16)
    prompts = [prompt(length, seed=length) for length in (5, 6, 40, 7, 8)]
    decoding, stays, in_prefill, waiting, comes = (engine.create(ids, GREEDY)[0] for ids in prompts)
    for one in (decoding, stays, in_prefill, waiting, comes):
        engine.add(one)
    scheduler = inside(engine).scheduler
    engine.step()
    assert [decoding.row, stays.row, in_prefill.row] == [0, 1, None]
    assert scheduler.prefilling == [in_prefill]
    assert 0 < in_prefill.num_computed < 40
    assert list(scheduler.waiting) == [waiting, comes]
    for one in (decoding, in_prefill, waiting):
        for _ in range(2):
            engine.abort(one)
            inside(engine).check()
        assert one.finish_reason is FinishReason.ABORT
        assert one.blocks == []
    assert stays.row == 0
    drain(engine)
    assert stays.output_ids == greedy_ids(hashed, prompts[1], 12)
    assert comes.output_ids == greedy_ids(hashed, prompts[4], 12)
    engine.abort(stays)
    assert stays.finish_reason is FinishReason.LENGTH
    assert decoding.output_ids == greedy_ids(hashed, prompts[0], 1)
    assert waiting.output_ids == []


def test_an_abort_of_the_only_sequence_leaves_an_idle_engine(
    fake_model: Make, make_engine: Make, generate: Generate, inside: Make, hashed: Any
) -> None:
    """B52"""
    engine = make_engine(fake_model(hashed))
    for num_steps in range(4):
        (one,) = engine.create(prompt(20), GREEDY)
        engine.add(one)
        for _ in range(num_steps):
            engine.step()
        engine.abort(one)
        inside(engine).check_idle()
    assert generate(engine, (prompt(20), GREEDY))[0].output_ids == greedy_ids(hashed, prompt(20), 12)


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch, inside: Make) -> Callable[[Engine], None]:
    """Makes an engine's allocator check, whenever blocks change hands, that no row of the device still names them."""

    def guard(engine: Engine) -> None:
        parts = inside(engine)

        def check(blocks: list[int]) -> None:
            named = set(parts.state.block_tables.flatten().tolist())
            assert named.isdisjoint(blocks), "blocks changed hands while a row still named them"

        def free(blocks: list[int], original: Callable[[list[int]], None] = parts.allocator.free) -> None:
            check(blocks)
            original(blocks)

        def allocate(count: int, original: Callable[[int], list[int]] = parts.allocator.allocate) -> list[int]:
            blocks = original(count)
            check(blocks)
            return blocks

        monkeypatch.setattr(parts.allocator, "free", free)
        monkeypatch.setattr(parts.allocator, "allocate", allocate)

    return guard


FATES = ["eos", "length", "stop id", "stop string", "abort waiting", "abort in prefill", "abort in decode", "rejected"]
EOS, STOP_ID, STOP_STRING = 50, 40, "^"  # "^" is id 29


def request_of(fate: str, draw: random.Random) -> tuple[list[int], SamplingParams]:
    """A prompt whose counting ends after a few tokens, as its fate wants it."""
    last = {"eos": EOS, "stop id": STOP_ID, "stop string": ord(STOP_STRING) - 65}.get(fate, 10) - draw.randint(1, 5)
    num_prompt = draw.choice([31, 32, 33] if fate == "abort in prefill" else [1, 15, 16, 17, 31, 32, 33])
    num_prompt = 300 if fate == "rejected" else num_prompt
    params = SamplingParams(
        temperature=draw.choice([0.0, 0.01]),
        max_tokens=draw.randint(1, 4) if fate == "length" else 8,
        stop=STOP_STRING,
        stop_token_ids=[STOP_ID],
        logprobs=draw.random() < 0.3,
        frequency_penalty=draw.choice([0.0, 0.1]),
    )
    return [*prompt(num_prompt - 1, draw.randrange(100)), last], params


def live_through(engine: Engine, parts: Any, fates: list[str], draw: random.Random) -> Counter[tuple[str, str]]:
    """Queues a few requests a step, aborts those whose fate it is, and counts (fate, finish reason)."""
    coming, fate_of, sequences = list(fates), {}, []
    while coming or engine.has_work:
        for fate in [coming.pop() for _ in range(min(len(coming), draw.randint(0, 3)))]:
            ids, params = request_of(fate, draw)
            if fate == "rejected":
                with pytest.raises(ValueError, match="context"):
                    engine.create(ids, params)
                continue
            (one,) = engine.create(ids, params)
            engine.add(one)
            fate_of[one] = fate
            sequences.append(one)
        scheduler = parts.scheduler
        doomed = [one for one in scheduler.waiting if fate_of[one] == "abort waiting"]
        doomed += [one for one in scheduler.prefilling if fate_of[one] == "abort in prefill" and one.num_computed]
        doomed += [o for o in scheduler.running if fate_of[o] == "abort in decode" and len(o.output_ids) > 1]
        for one in doomed:
            engine.abort(one)
        if engine.has_work:
            engine.step()
        parts.check()
    parts.check_idle()
    for one in sequences:
        assert one.output_ids == [one.prompt_ids[-1] + 1 + index for index in range(len(one.output_ids))]
        assert len(one.logprobs) == (len(one.output_ids) if one.params.logprobs else 0)
    return Counter((fate_of[one], str(one.finish_reason)) for one in sequences)


def test_b32_300_requests_of_all_fates_leave_nothing_behind(
    fake_model: Make, make_engine: Make, inside: Make, guarded: Callable[[Engine], None], counting: Any
) -> None:
    """B32, B38, invariant 7: and three further rounds of 24 find every block and row where it was."""
    draw = random.Random(0)
    model = fake_model(counting)
    pool = (FIRST_BLOCK + 11) * 16 * model.config.kv_bytes_per_token(model.dtype)
    engine = make_engine(
        model,
        eos=(EOS,),
        tokenizer=Letters(),
        max_num_seqs=5,
        max_num_batched_tokens=25,
        max_model_len=64,
        kv_cache_memory_bytes=pool,
    )
    guarded(engine)
    fates = [FATES[index % len(FATES)] for index in range(300)]
    draw.shuffle(fates)
    counts = live_through(engine, inside(engine), fates, draw)
    expected = {"eos": "stop", "length": "length", "stop id": "stop", "stop string": "stop"}
    for fate in FATES[:-1]:
        assert counts[fate, expected.get(fate, "abort")] >= 15, f"too few requests met their fate: {fate}"
    for _ in range(3):
        live_through(engine, inside(engine), FATES * 3, draw)


@pytest.mark.parametrize("stage", ["prefill", "chunk", "decode"])
def test_a_step_that_fails_ends_its_requests_and_the_engine_serves_on(
    fake_model: Make, make_engine: Make, generate: Generate, inside: Make, hashed: Any, stage: str
) -> None:
    """Invariant 16: those that were being computed are aborted, not continued from a state that nobody knows."""
    failing = False

    def logits_of(ids: list[int]) -> Tensor:
        if failing:
            raise KeyboardInterrupt
        return hashed(ids)

    engine = make_engine(fake_model(logits_of), max_num_seqs=3, max_num_batched_tokens=30)
    parts = inside(engine)
    lengths = {"prefill": (5, 6, 7, 8), "chunk": (5, 40, 7, 8), "decode": (5, 6, 7, 8)}[stage]
    sequences = [engine.create(prompt(n), GREEDY)[0] for n in lengths]
    engine.add(sequences[0])
    if stage != "prefill":
        engine.step()
    for one in sequences[1:]:
        engine.add(one)
    if stage != "prefill":
        engine.step()
    failing = True
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    failing = False
    parts.check()
    assert [one.finish_reason for one in sequences] == ["abort"] * 3 + [None]
    for one in sequences:
        assert one.output_ids == greedy_ids(hashed, one.prompt_ids, len(one.output_ids))
        engine.abort(one)
    parts.check_idle()
    requests = [(prompt(n), GREEDY) for n in (5, 20, 33)]
    for one in generate(engine, *requests):
        assert one.output_ids == greedy_ids(hashed, one.prompt_ids, 12)


# --- what is told


def test_logprobs_are_kept_for_those_that_asked(
    tiny_decoder: Make, make_engine: Make, generate: Generate, device: str
) -> None:
    """One for each token, whoever else is in the batch; a longer list of a neighbour does not lengthen ours."""
    asks = [SamplingParams(temperature=0.0, max_tokens=8, logprobs=k > 0, top_logprobs=max(k - 1, 0)) for k in range(5)]
    sequences = generate(make_engine(tiny_decoder(device), max_num_seqs=4), *((prompt(9), params) for params in asks))
    for one in sequences:
        assert one.output_ids == sequences[0].output_ids
        assert len(one.logprobs) == (8 if one.params.logprobs else 0)
        for token_id, logprob in zip(one.output_ids, one.logprobs, strict=one.params.logprobs):
            assert len(logprob.top) == one.params.top_logprobs
            assert logprob.top[:1] in ([], [(token_id, logprob.logprob)])


def test_times_are_in_order(fake_model: Make, make_engine: Make, generate: Generate, hashed: Any) -> None:
    engine = make_engine(fake_model(hashed), max_num_seqs=2)
    sequences = generate(engine, *((prompt(9), GREEDY) for _ in range(4)))
    for one in sequences:
        assert 0.0 < one.start_time < one.first_token_time < one.finish_time
    assert sequences[2].start_time >= sequences[0].finish_time


def test_a_request_becomes_n_sequences_that_own_nothing_yet(fake_model: Make, make_engine: Make, hashed: Any) -> None:
    engine = make_engine(fake_model(hashed), eos=(9,))
    sequences = engine.create(prompt(4), SamplingParams(n=3, stop_token_ids=[8], max_tokens=None))
    assert [one.sample_index for one in sequences] == [0, 1, 2]
    assert len({one.seed for one in sequences}) == 1
    assert {one.stop_ids for one in sequences} == {frozenset({8, 9})}
    assert {one.max_tokens for one in sequences} == {252}
    assert not engine.has_work


def test_kv_cache_bytes_on_a_cpu(model_config: Make, make_engine: Make, fake_model: Make, hashed: Any) -> None:
    """What the config says, else 4 GiB, of which no more is taken than the rows can use."""
    engine = make_engine(fake_model(hashed), kv_cache_memory_bytes=None, max_num_seqs=3)
    assert engine.kv_plan.num_usable_blocks == 3 * 256 // 16
    cpu = torch.device("cpu")
    assert kv_cache_bytes(EngineConfig(), cpu) == CPU_KV_CACHE_BYTES
    assert kv_cache_bytes(EngineConfig(kv_cache_memory_bytes=77), cpu) == 77


def test_kv_cache_bytes_on_a_gpu_leave_the_rest_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    free, total = 99 << 30, 141 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    for share, rest in ((0.01, 0), (0.5, free - total // 2), (1.0, free)):
        assert kv_cache_bytes(EngineConfig(gpu_memory_utilization=share), torch.device("cuda")) == rest

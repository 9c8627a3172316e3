"""What the graph of each batch size takes by itself, full and with one live row: prices for lists of capture sizes.

    python bench/bucket_times.py FOLDER COMMIT MODEL[,MODEL] [DEVICE]

Writes FOLDER/h200-replays-MODEL.json for `ostinato bench capture-list --replay-ms`. Whole steps, greedy, random weights
and 1,024 keys a row, replayed back to back from one engine that has all these graphs. `replay_ms` has every row live;
`padding_ms` one: the others are padding, which is computed but reads no keys beyond the sink's.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from decode_kernels import compile_decode

from ostinato.bench.subject import Subject
from ostinato.bench.timing import read_ceiling, time_graph
from ostinato.model import SHAPES, Decoder
from ostinato.runtime import EngineConfig, SamplingParams
from ostinato.weights import dummy_model

SIZES = (1, 2, 3, 4, 6, 8, 9, 12, 16, 17, *range(20, 33, 4), 33, *range(36, 65, 4), 65, *range(72, 129, 8))
"""The default list's, and those just above where a launch plan ends."""

KEYS, REPLAYS = 1024, 8
ROOM = 2 * REPLAYS + 8
BLOCK = 16
GREEDY = SamplingParams(temperature=0.0)


def config(decoder_config: Any, sizes: tuple[int, ...], keys: int) -> EngineConfig:
    length, rows = keys + ROOM + 1, sizes[-1]
    blocks = rows * -(-length // BLOCK) + 4
    return EngineConfig(
        max_num_seqs=rows,
        max_model_len=length,
        block_size=BLOCK,
        kv_cache_memory_bytes=blocks * BLOCK * decoder_config.kv_bytes_per_token(torch.bfloat16),
        capture_sizes=sizes,
        graphs="whole",
        graph_self_test=False,
    )


def measure(decoder: Decoder, sizes: tuple[int, ...], keys: int) -> dict[str, Any]:
    subject = Subject(decoder, config(decoder.config, sizes, keys), 1, keys, ROOM)
    graphs = subject.engine.decode_runner.graphs
    assert graphs is not None, "steps are recorded"
    times: dict[str, dict[str, float]] = {"replay_ms": {}, "padding_ms": {}}
    for key in graphs.configs[0].bucket_keys():
        [slot] = graphs.whole.slots(key)
        for name, live in (("replay_ms", key.bs), ("padding_ms", 1)):
            subject.restart([GREEDY] * live, ROOM)
            timing = time_graph(slot.graph, decoder.device, replays=REPLAYS)
            times[name][str(key.bs)] = round(timing.median / 1e3, 5)
    return {name: dict(sorted(found.items(), key=lambda one: int(one[0]))) for name, found in times.items()}


def main(folder: str, commit: str, models: str, device: str = "cuda") -> None:
    target, keys, sizes = torch.device(device), KEYS, SIZES
    if target.type == "cuda":
        print(
            compile_decode([(model, config(SHAPES[model], sizes, keys), sizes) for model in models.split(",")]),
            flush=True,
        )
    else:  # a test of the script
        keys, sizes = 8, (1, 2, 4)
    for model in models.split(","):
        decoder = dummy_model(SHAPES[model], dtype=torch.bfloat16, device=target)
        document = {
            "model": model,
            "device": torch.cuda.get_device_name() if target.type == "cuda" else "tape on a CPU",
            "torch": torch.__version__,
            "commit": commit,
            "read_ceiling": read_ceiling(target),
            "context": keys,
            **measure(decoder, sizes, keys),
        }
        Path(folder, f"h200-replays-{model}.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        print(json.dumps(document), flush=True)
        del decoder
        gc.collect()
        if target.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])

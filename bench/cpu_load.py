"""Memory that a load takes: the peak of resident bytes above those before it, against the weights' bytes.

    .venv/bin/python bench/cpu_load.py FOLDER [--dtype float32]

Run it once a dtype: the peak is that of the process. Linux only (it reads /proc/self/status).
"""

import argparse
from pathlib import Path

import torch
from environment import RESULTS, write_results

from ostinato.model.config import DTYPES
from ostinato.weights import load_model, open_checkpoint, resolve


def resident_bytes(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (the highest so far) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    checkpoint = open_checkpoint(resolve(args.model))
    torch.zeros(1) + 1
    before = resident_bytes("VmRSS")
    _, report = load_model(checkpoint, dtype=DTYPES[args.dtype])
    growth = resident_bytes("VmHWM") - before
    results = {
        "model": checkpoint.path.name,
        "stored_dtype": str(checkpoint.default_dtype).removeprefix("torch."),
        "dtype": args.dtype,
        "weight_bytes": report.nbytes,
        "peak_growth_bytes": growth,
        "ratio": round(growth / report.nbytes, 3),
        "seconds": round(report.seconds, 2),
    }
    print(results)
    write_results(args.out or RESULTS / f"cpu_load_{args.dtype}.json", results)


if __name__ == "__main__":
    main()

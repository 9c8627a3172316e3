"""docs/models.md out of the table of families that the code uses: `ostinato report` writes what this prints."""

from collections.abc import Iterable, Iterator

from ostinato.model.families import FAMILIES, GUARDS, NULL_IS_A_VALUE, ROTARY_KINDS, Family

INTRODUCTION = """\
# Models

One decoder computes all families. How each differs from Llama is one entry of `model/families.py`; the config
reader, the loader's table of names and this page are made from it. `CONTRIBUTING.md` says how to add one.

Tested against transformers on small random checkpoints that transformers wrote: float32 logits and greedy tokens,
bfloat16 no further from a float64 run than 1.5 times transformers' own distance, one prefill against chunks and
single tokens (`tests/model/test_parity.py`); with graphs against without (`tests/test_llm_families.py`).
"""

ROTARY = {
    "default": "`theta ** (-2 i / d)` for pair `i` of `d / 2`",
    "linear": "every frequency divided by `factor`",
    "dynamic": "as default: the base would grow for sequences longer than `max_position_embeddings`, and none gets "
    "longer here",
    "llama3": "low frequencies divided by `factor`, high ones kept, those between blended by wavelength",
    "yarn": "the same, blended by the index of the pair; cos and sin times `attention_factor`, or times "
    "0.1 ln `factor` + 1 if there is none",
    "longrope": "each frequency divided by its own number: of `long_factor` if the engine's context (`max_model_len`, "
    "or the model's) is longer than `original_max_position_embeddings`, else of `short_factor`; cos and sin times "
    "`attention_factor`, or a factor that follows from both lengths",
}

AFTER_ROTARY = """\
The parameters may stand in `rope_parameters` or in `rope_scaling`, the kind as `rope_type` or as `type`, theta
inside or at the top; inside wins. Two blocks that contradict each other are refused, and so is a block for each
layer type.

transformers turns to the long factors of longrope in the middle of a sequence, and computes its keys again. Here
the context decides once, for all sequences: prefill, chunks and decode steps agree, and no cached key is ever
wrong. To have the short factors, say `max_model_len` (at most `original_max_position_embeddings`).
"""

KEYS = """\
A key that is absent has the value that the family's class in transformers assumes. A null counts as absent, but for
{nulls}, where it is an answer.
What no table names is 1e-6 for `rms_norm_eps`, 2048 for `max_position_embeddings`, 10000 for theta, as many key/value
heads as query heads, a separate output head, no biases. Keys that are only notes are passed over. Every family reads
the sizes, `rms_norm_eps`, the rotary keys, `tie_word_embeddings`, `dtype` and the token ids, and besides:
"""

REFUSED = """\
## What is refused

Any other class in `architectures`. For a family that does not read the key, each of these, unless it has one of the
values:
"""

ALSO = """\
Also refused:

- a rotary kind that the family's class does not have, numbers that are missing or make no sense, an odd rotary
  dimension;
- `layer_types` that name another kind of attention, or a window that is not there;
- sizes that are not positive whole numbers, heads that do not divide, more than 4096 layers;
- tensors that are missing, unexpected or of another shape than the config implies: biases that no key or family
  announces, packed or scaled weights, experts;
- GGUF files of other architectures, of mixtures of experts, adapters, and parts of split files.

The reason is the same each time: what is not computed must not be passed over, since a wrong text looks like a
text.
"""


def table(head: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def code(values: Iterable[object]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def rotary_kinds(family: Family) -> str:
    return "all" if family.rotary_kinds == ROTARY_KINDS else ", ".join(family.rotary_kinds)


def json_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def page() -> Iterator[str]:
    yield INTRODUCTION
    families = FAMILIES.values()
    rows = [
        [f"`{family.hf_class}`", family.difference, rotary_kinds(family), f"`{family.gguf}`" if family.gguf else "no"]
        for family in families
    ]
    yield from table(["class", "how it differs", "rotary", "GGUF architecture"], rows)
    yield "\nA Mistral in a GGUF file is a `llama` there, without a window.\n"
    yield "## Rotary embedding\n"
    yield from table(["kind", "frequencies"], [[kind, ROTARY[kind]] for kind in ROTARY_KINDS])
    yield f"\n{AFTER_ROTARY}"
    yield "## Config keys\n"
    yield KEYS.format(nulls=code(NULL_IS_A_VALUE))
    rows = [
        [
            f"`{family.hf_class}`",
            code(sorted(family.keys)) or "none",
            ", ".join(f"`{key}` {json_value(value)}" for key, value in family.absent.items()) or "none",
        ]
        for family in families
    ]
    yield from table(["class", "keys it reads besides", "values for absent keys"], rows)
    yield f"\n{REFUSED}"
    rows = [[f"`{key}`", code([*map(json_value, guard.neutral), "null"]), guard.why] for key, guard in GUARDS.items()]
    yield from table(["key", "passed over if", "why else refused"], rows)
    yield f"\n{ALSO}"


if __name__ == "__main__":
    print("\n".join(page()), end="")

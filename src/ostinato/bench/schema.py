"""What the JSON of each command looks like: JSON Schema, as much of it as these documents need, and a check."""

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

NUMBER, INTEGER, STRING, BOOLEAN = ({"type": name} for name in ("number", "integer", "string", "boolean"))
MAYBE_NUMBER, MAYBE_INTEGER, MAYBE_STRING = ({"type": [name, "null"]} for name in ("number", "integer", "string"))


def obj(**properties: Schema) -> Schema:
    """An object that has exactly these keys."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def table(values: Schema) -> Schema:
    """An object with keys that are data."""
    return {"type": "object", "additionalProperties": values}


CAPTURE_LIST = obj(
    command={"const": "capture-list"},
    version={"const": 1},
    source=STRING,
    timed=MAYBE_STRING,
    minimised=STRING,
    batches=table(NUMBER),
    lists=array(
        obj(
            name=STRING,
            sizes=array(INTEGER),
            token_waste=NUMBER,
            per_batch_waste=NUMBER,
            milliseconds=MAYBE_NUMBER,
            wasted_milliseconds=MAYBE_NUMBER,
            graph_bytes=MAYBE_NUMBER,
            capture_seconds=MAYBE_NUMBER,
        )
    ),
)

WHERE = obj(device=STRING, graphs=STRING, torch=STRING, model=STRING, dtype=STRING)

LEFT_OUT = array(obj(batch=INTEGER, context=INTEGER, why=STRING))

MODES = obj(
    command={"const": "modes"},
    version={"const": 2},
    where=WHERE,
    read_ceiling=NUMBER,
    cells=array(
        obj(
            batch=INTEGER,
            context=INTEGER,
            mode=STRING,
            median_ms=NUMBER,
            p10_ms=NUMBER,
            p90_ms=NUMBER,
            tokens_per_second=NUMBER,
            step_bytes=INTEGER,
            ceiling_share=NUMBER,
            speedup_over_eager=MAYBE_NUMBER,
            graphs_per_step=INTEGER,
            graph_bytes=INTEGER,
            capture_seconds=NUMBER,
            start_seconds=NUMBER,
            prefill_ms=MAYBE_NUMBER,
        )
    ),
    left_out=LEFT_OUT,
)

BREAK = obj(
    command={"const": "break"},
    version={"const": 2},
    where=WHERE,
    batch=INTEGER,
    context=INTEGER,
    cells=array(
        obj(
            name=STRING,
            path=STRING,
            reason=STRING,
            graphs_per_step=INTEGER,
            padding_rows=INTEGER,
            runs_ahead=BOOLEAN,
            median_ms=MAYBE_NUMBER,
            cost=MAYBE_NUMBER,
        )
    ),
    refused=table(STRING),
)

PROFILE = obj(
    command={"const": "profile"},
    version={"const": 2},
    where=WHERE,
    cells=array(
        obj(
            batch=INTEGER,
            context=INTEGER,
            mode=STRING,
            median_ms=NUMBER,
            graph_launches=NUMBER,
            kernel_launches=NUMBER,
            copies=NUMBER,
            kernels=NUMBER,
            layer=array(STRING),
            busy_us=NUMBER,
            idle_us=NUMBER,
            between_us=NUMBER,
            largest_gap_us=NUMBER,
            largest_gap_after=STRING,
            largest_gap_before=STRING,
            gaps=array(obj(after=STRING, before=STRING, count=NUMBER, us=NUMBER)),
            by_kernel=array(obj(name=STRING, count=NUMBER, us=NUMBER)),
        )
    ),
    left_out=LEFT_OUT,
)

COST = obj(
    command={"const": "cost"},
    version={"const": 1},
    where=WHERE,
    context=INTEGER,
    max_num_seqs=INTEGER,
    first_seconds=MAYBE_NUMBER,
    cells=array(
        obj(
            mode=STRING,
            start_seconds=NUMBER,
            captures_seconds=NUMBER,
            graph_bytes=INTEGER,
            buffer_bytes=INTEGER,
            ledger_tokens=INTEGER,
            kv_tokens=INTEGER,
            sequences=INTEGER,
            fewer_tokens=INTEGER,
            fewer_sequences=INTEGER,
            buckets=array(
                obj(
                    batch_size=INTEGER,
                    graphs=INTEGER,
                    nodes=MAYBE_INTEGER,
                    pool_bytes=INTEGER,
                    driver_bytes=INTEGER,
                    output_bytes=INTEGER,
                    warm_up_seconds=NUMBER,
                    capture_seconds=NUMBER,
                )
            ),
        )
    ),
)

PEERS = obj(
    command={"const": "peers"},
    version={"const": 1},
    where=WHERE,
    read_ceiling=NUMBER,
    cells=array(
        obj(
            batch=INTEGER,
            context=INTEGER,
            peer=STRING,
            version=MAYBE_STRING,
            median_ms=MAYBE_NUMBER,
            least_ms=MAYBE_NUMBER,
            most_ms=MAYBE_NUMBER,
            tokens_per_second=MAYBE_NUMBER,
            ceiling_share=MAYBE_NUMBER,
            times_ours=MAYBE_NUMBER,
            same_first_tokens=MAYBE_INTEGER,
            error=MAYBE_STRING,
        )
    ),
)

KERNELS = obj(
    command={"const": "kernels"},
    version={"const": 1},
    where=WHERE,
    batch=INTEGER,
    context=INTEGER,
    read_ceiling=NUMBER,
    cells=array(
        obj(
            name=STRING,
            calls=INTEGER,
            us=NUMBER,
            p10_us=NUMBER,
            p90_us=NUMBER,
            step_us=NUMBER,
            num_bytes=INTEGER,
            bytes_per_second=MAYBE_NUMBER,
            ceiling_share=MAYBE_NUMBER,
        )
    ),
)

SCHEMAS: dict[str, Schema] = {
    "break": BREAK,
    "capture-list": CAPTURE_LIST,
    "cost": COST,
    "kernels": KERNELS,
    "modes": MODES,
    "peers": PEERS,
    "profile": PROFILE,
}

_TYPES: dict[str, tuple[type, ...]] = {
    "number": (int, float),
    "integer": (int,),
    "string": (str,),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


def check(document: Any, schema: Schema, at: str = "$") -> None:
    """Raises ValueError with the place where a document differs from its schema."""
    if "const" in schema:
        if document != schema["const"]:
            raise ValueError(f"{at} must be {schema['const']!r}, got {document!r}")
        return
    names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    is_right = isinstance(document, tuple(kind for name in names for kind in _TYPES[name]))
    if not is_right or (isinstance(document, bool) and "boolean" not in names):
        raise ValueError(f"{at} must be {' or '.join(names)}, got {document!r}")
    if isinstance(document, list):
        for index, item in enumerate(document):
            check(item, schema["items"], f"{at}[{index}]")
    if isinstance(document, dict):
        properties, others = schema.get("properties", {}), schema["additionalProperties"]
        for name in schema.get("required", ()):
            if name not in document:
                raise ValueError(f"{at}.{name} is missing")
        for name, value in document.items():
            if name not in properties and others is False:
                raise ValueError(f"{at}.{name} is not in the schema")
            check(value, properties.get(name, others), f"{at}.{name}")

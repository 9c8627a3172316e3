"""Which layers of a model are rotated, and which see a sliding window."""

from .config_reader import ConfigReader, UnsupportedModelError
from .families import Family

LAYER_TYPES = ("full_attention", "sliding_attention")


def unrotated_layers(reader: ConfigReader, family: Family, num_layers: int) -> tuple[int, ...]:
    """Layers without rotary embedding: zeros of `no_rope_layers`, else every `no_rope_layer_interval`-th."""
    if "no_rope_layers" not in family.keys:
        return ()
    rotated = reader.config.get("no_rope_layers")
    if rotated is None:
        interval = reader.size("no_rope_layer_interval")
        return tuple(range(interval - 1, num_layers, interval))
    if not isinstance(rotated, list) or len(rotated) < num_layers or any(flag not in (0, 1) for flag in rotated):
        raise UnsupportedModelError(
            f"config key no_rope_layers = {rotated!r} is not a list of a 0 or 1 for each of {num_layers} layers"
        )
    return tuple(index for index in range(num_layers) if not rotated[index])


def sliding_window(
    reader: ConfigReader, family: Family, num_layers: int, unrotated: tuple[int, ...]
) -> tuple[int | None, tuple[int, ...]]:
    """The window, and the layers that see all keys in spite of it.

    `layer_types` decides where the family reads it, and elsewhere must agree with what the family does.
    """
    window = reader.size("sliding_window") if family.window and "sliding_window" in reader.config else None
    if "use_sliding_window" in family.keys:
        window = window if reader.flag("use_sliding_window") else None
    elif window is not None and reader.config.get("use_sliding_window") is False:
        raise UnsupportedModelError(
            f"config key use_sliding_window = False contradicts sliding_window = {window}, which {family.hf_class} "
            "always applies; supported: sliding_window null"
        )
    windowed: tuple[int, ...] = ()
    if window is not None and family.window == "upper":
        windowed = tuple(range(reader.size("max_window_layers", least=0), num_layers))
    elif window is not None:
        windowed = unrotated if family.window == "unrotated" else tuple(range(num_layers))
    types = reader.config.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != num_layers or any(kind not in LAYER_TYPES for kind in types):
            raise UnsupportedModelError(
                f"config key layer_types = {types!r} is not supported; supported: {' or '.join(LAYER_TYPES)} for each "
                f"of {num_layers} layers"
            )
        named = tuple(index for index, kind in enumerate(types) if kind == "sliding_attention")
        if window is None and named:
            raise UnsupportedModelError(
                f"config key layer_types names sliding_attention for layer {named[0]}, but there is no sliding window"
            )
        if "layer_types" not in family.keys and named != windowed:
            raise UnsupportedModelError(
                f"config key layer_types names full_attention for some layers, but {family.hf_class} has its window of "
                f"{window} in all"
            )
        windowed = named
    if not windowed:
        return None, ()
    return window, tuple(index for index in range(num_layers) if index not in set(windowed))

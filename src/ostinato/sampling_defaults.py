"""Sampling defaults that a checkpoint brings along, in its generation_config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .runtime import SamplingParams
from .weights.files import CheckpointError, read_json_object

FILE = "generation_config.json"

FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Keys of the file that are read, as in vLLM, and the field of SamplingParams of each."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "min_new_tokens": (0,),
    "min_length": (0,),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "sequence_bias": ([], {}),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "stop_strings": ([],),
}
"""Keys of the file that would change what is generated and are not read, and the values with which they would not."""


@dataclass(frozen=True)
class SamplingDefaults:
    """What stands in for sampling parameters that a request leaves open.

    Attributes:
        values: by field of SamplingParams; checked.
        unused: keys of the file that would change what is generated, and are not read.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()

    @classmethod
    def chosen(cls, choice: str | Path, of_checkpoint: Mapping[str, Any], path: Path) -> "SamplingDefaults":
        """The defaults that a user chose.

        Args:
            choice: "auto", the checkpoint's own; "builtin" (or, as in vLLM, "vllm"), none; or a folder with a
                generation_config.json, or such a file.
            of_checkpoint: contents of the checkpoint's generation_config.json.
            path: of the checkpoint, for errors.

        Raises:
            CheckpointError: a file that cannot be read, or a value in it that SamplingParams refuses.
        """
        if choice == "auto":
            return cls.from_config(of_checkpoint, path / FILE)
        if choice in ("builtin", "vllm"):
            return cls()
        file = Path(choice).expanduser()
        file = file / FILE if file.is_dir() else file
        return cls.from_config(read_json_object(file), file)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: Path) -> "SamplingDefaults":
        """Read the contents of a generation_config.json; null counts as absent.

        `"do_sample": false` means greedy, whatever the temperature beside it is.

        Raises:
            CheckpointError: a value that SamplingParams refuses; the message begins with `source`.
        """
        given = {key: value for key, value in config.items() if value is not None}
        values = {name: given[key] for key, name in FIELDS.items() if key in given}
        do_sample = given.get("do_sample", True)
        if not isinstance(do_sample, bool):
            raise CheckpointError(f"{source}: do_sample must be true or false, not {do_sample!r}")
        if not do_sample:
            values["temperature"] = 0.0
        try:
            SamplingParams(**values)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{source}: {error}") from error
        unused = tuple(sorted(key for key, neutral in NEUTRAL.items() if key in given and given[key] not in neutral))
        return cls(values, unused)

    def params(self, given: Mapping[str, Any], built_in: Mapping[str, Any] | None = None) -> SamplingParams:
        """Parameters in which each field is what is given, else what the file says, else what is built in."""
        return SamplingParams(**{**(built_in or {}), **self.values, **given})

    def text(self) -> str:
        """The values, as `temperature 0.7, top_p 0.8`; "none" if there are none."""
        return ", ".join(f"{name} {value:g}" for name, value in self.values.items()) or "none"

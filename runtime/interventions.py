"""What users run between the pieces of a step: hooks on hidden states, logits processors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import HookError, RequestError, name_of, own_code, what_failed
from .sequence import Sequence as EngineSequence


@dataclass(frozen=True)
class HookRow:
    """One sequence of a step, as a hook sees it.

    Attributes:
        start, stop: its tokens are the rows `start .. stop - 1` of the hidden states.
        position: of the first of them.
        prompt_ids, output_ids: the ids so far; not to be changed.
    """

    start: int
    stop: int
    position: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    sample_index: int


HookFunction = Callable[[Tensor, tuple[HookRow, ...]], Tensor | None]


class HookHandle:
    """A hook that is in place until `remove` is called."""

    def __init__(self, hooks: "Hooks", layer: int) -> None:
        self._hooks = hooks
        self.layer = layer

    def remove(self) -> None:
        """Take the hook away; a second time does nothing."""
        self._hooks.remove(self)


@dataclass(frozen=True)
class _Hook:
    function: HookFunction
    where: Callable[[HookRow], bool] | None


class Hooks:
    """Functions that read or change the hidden states in front of a layer, in the order they were added.

    Attributes:
        layers: where they are, each layer once, in order.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._hooks: dict[HookHandle, _Hook] = {}
        self.layers: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def add(self, layer: int, function: HookFunction, where: Callable[[HookRow], bool] | None = None) -> HookHandle:
        """See `LLM.hook`."""
        if type(layer) is not int or not 0 <= layer <= self._num_layers:
            raise ValueError(f"a hook's layer must be in 0 ... {self._num_layers}, got {layer!r}")
        handle = HookHandle(self, layer)
        self._hooks[handle] = _Hook(function, where)
        self._list_layers()
        return handle

    def remove(self, handle: HookHandle) -> None:
        self._hooks.pop(handle, None)
        self._list_layers()

    def _list_layers(self) -> None:
        self.layers = tuple(sorted({handle.layer for handle in self._hooks}))

    def apply(self, layer: int, hidden: Tensor, rows: Sequence[HookRow]) -> None:
        """Run the hooks of a layer; what they return is written to `hidden`.

        Args:
            hidden: `[num_tokens, hidden_size]`, real tokens only.

        Raises:
            HookError: a hook raised, or returned what is no hidden states.
        """
        for handle, hook in list(self._hooks.items()):
            if handle.layer == layer:
                try:
                    _apply(hook, hidden, rows)
                except Exception as error:
                    raise HookError(
                        what_failed(f"the hook {name_of(hook.function)} at layer {layer}", error)
                    ) from error


def _apply(hook: _Hook, hidden: Tensor, rows: Sequence[HookRow]) -> None:
    if hook.where is None:
        changed = hook.function(hidden, tuple(rows))
        _check(changed, hidden, "a hook must return None or hidden states")
        if changed is not None and changed is not hidden:
            hidden.copy_(changed)
        return
    chosen: list[HookRow] = []
    tokens: list[int] = []
    end = 0
    for row in rows:
        if hook.where(row):
            span = row.stop - row.start
            tokens += range(row.start, row.stop)
            chosen.append(HookRow(end, end + span, row.position, row.prompt_ids, row.output_ids, row.sample_index))
            end += span
    if chosen:
        index = torch.tensor(tokens, device=hidden.device)
        part = hidden.index_select(0, index)
        changed = hook.function(part, tuple(chosen))
        _check(changed, part, "a hook must return None or hidden states")
        hidden.index_copy_(0, index, part if changed is None else changed.to(hidden.dtype))


def _check(changed: Tensor | None, given: Tensor, rule: str) -> None:
    if changed is not None and (not isinstance(changed, Tensor) or changed.shape != given.shape):
        got = tuple(changed.shape) if isinstance(changed, Tensor) else repr(changed)
        raise ValueError(f"{rule} of shape {tuple(given.shape)}, got {got}")


def edit_logits(logits: Tensor, sequences: Sequence[EngineSequence]) -> None:
    """Run each sequence's logits processors; in place.

    A sequence whose own code fails gets an `error`, and logits of zero; the others do not notice.

    Args:
        logits: `[num_rows, vocab_size]`, one row for each sequence.
    """
    for row, sequence in zip(logits, sequences, strict=True):
        if sequence.error is not None:  # its function of allowed tokens has failed
            continue
        try:
            _edit_row(row, sequence)
        except RequestError as error:
            sequence.error = error
            row.zero_()


def _edit_row(row: Tensor, sequence: EngineSequence) -> None:
    output_ids = tuple(sequence.output_ids)
    for processor in sequence.params.logits_processors:
        with own_code(f"the logits processor {name_of(processor)}, for output token {len(output_ids)},"):
            changed = processor(sequence.prompt_ids, output_ids, row)
            _check(changed, row, "a logits processor must return None or logits")
            if changed is not None and changed is not row:
                row.copy_(changed)


def has_logits_processor(sequences: Sequence[EngineSequence]) -> bool:
    return any(sequence.params.logits_processors for sequence in sequences)

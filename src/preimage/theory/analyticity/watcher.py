"""One pass of the very module that was given, followed operation by operation from the parameters on.

Two modes of torch watch a pass: hooks, replaced forwards, foreign attention functions and subclasses run
through the same operations as everything else, so nothing has to be recognised by its name. Each tensor
carries a mark: whether it depends on a parameter, which values it may then take, and what on the way to it
was not analytic. Only what reaches a state counts. A floor of positions depends on no parameter and is a
constant; what leaves torch's sight is an open question.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from preimage.theory.analyticity.marks import Event, Mark, Shift, Trace, is_broken
from preimage.theory.analyticity.operations import FRESH, UNWRITTEN, is_random, judge, names_in
from preimage.theory.analyticity.ranges import ANY, Range, of_number, of_values, union
from preimage.theory.analyticity.rules import DROPOUT, OTHER, QUANTISED, Break, Call

# Methods that take values out of torch's sight; item, bool and the like are operations and are seen there.
_EXITS = names_in(
    "tolist numpy data_ptr untyped_storage storage apply_ map_ map2_ __array__ __dlpack__ __deepcopy__ "
    "__reduce_ex__ __cuda_array_interface__"
)
# These do not read what they write into, or leave alone what they do not write.
_OVERWRITES = names_in("copy fill zero index_put index_copy scatter masked_scatter")
_PLAIN = Tensor.__torch_dispatch__
_MODULE_CALL = nn.Module._call_impl.__code__
_NOT_NAMED = ("/torch/", "/jaxtyping/", "<@beartype", __file__)  # code that only passes calls on


@contextmanager
def watching(module: nn.Module, trace: Trace, inputs: Iterable[Tensor]) -> Iterator[Callable[[Tensor], None]]:
    """Follow what runs inside; gives back the function that states are handed to."""
    watcher = _Watcher(module, trace)
    for tensor in inputs:
        watcher.marks[_key(tensor)] = Mark()

    def reach(state: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            trace.reached |= watcher.mark(state).events

    compiles = "torch._dynamo" in sys.modules  # importing it takes seconds; without it nothing is compiled
    stance = torch.compiler.set_stance("force_eager") if compiles else nullcontext()
    with stance, torch.inference_mode(False), torch.no_grad(), _Exits(watcher), watcher:
        yield reach
    trace.reached |= watcher.always


class _Exits(TorchFunctionMode):
    """Sees the methods that are no operations."""

    def __init__(self, watcher: _Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of a property
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _EXITS and args and isinstance(args[0], Tensor):
            with torch._C.DisableTorchFunction():
                mark = self._watcher.mark(args[0])
                self._watcher.leaves(mark, f"{name} takes a value that depends on parameters out of torch")
        return func(*args, **(kwargs or {}))


class _Watcher(TorchDispatchMode):
    """Carries the marks from the arguments of every operation to its results."""

    def __init__(self, module: nn.Module, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.trace = trace
        self.always: set[Event] = set()  # what every later value may depend on
        self.marks: dict[Any, Mark] = {}
        self._kept: list[Tensor] = []  # tensors without a storage, whose id is their key
        self._names = {part: path for path, part in module.named_modules()}
        for buffer in module.buffers():
            self.marks[self.key(buffer)] = Mark()
        for parameter in module.parameters():
            self.marks[self.key(parameter)] = Mark(ANY, stepped=not _is_real(parameter))

    def key(self, tensor: Tensor) -> Any:
        try:
            return _key(tensor)
        except (NotImplementedError, RuntimeError):
            self._kept.append(tensor)
            return id(tensor)

    def mark(self, tensor: Tensor) -> Mark:
        """What is known of a tensor; one that was not seen being made is of unknown origin."""
        key = self.key(tensor)
        if key not in self.marks:
            unseen = Break(OTHER, None, "reads a tensor that is neither a parameter nor a buffer")
            known = isinstance(tensor, nn.Parameter)
            self.marks[key] = Mark(ANY, frozenset() if known else self._event(unseen))
        return self.marks[key]

    def leaves(self, mark: Mark, reason: str) -> None:
        """A value is read by Python: everything after it may depend on it."""
        self.always |= mark.events
        if mark.values is not None and not is_broken(mark.events):
            self.always |= self._event(Break(OTHER, None, reason))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self._follow(func, args, kwargs or {})

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._place()  # every line that ran is kept
        call = Call(_name(func), _bound(func, args, kwargs), self._range)
        written = _written(func, call.given)
        if call.name in ("lift_fresh", "lift"):  # numbers of Python, made a tensor
            self.marks.setdefault(self.key(call.given["self"]), Mark())
        read = call.tensors()
        if call.name in _OVERWRITES or "out" in call.given or torch.Tag.nondeterministic_seeded in func.tags:
            new = [one for one in written if self.mark(one).unwritten]
            read = [one for one in read if not any(one is other for other in new)]
        mark = self._result(func, call, read)
        result = func(*args, **kwargs)
        for tensor in written:
            self._write(tensor, mark)
        inside = {self.key(one) for one in (*call.tensors(), *written)}
        plain = [leaf for leaf in tree_leaves(result) if leaf is not None]
        for leaf in plain:
            if isinstance(leaf, Tensor):
                made = mark if _is_real(leaf) else self._integers(mark, leaf)
                if made.shift is not None:
                    made = replace(made, shift=made.shift.of(leaf))
                key = self.key(leaf)
                if key not in inside:
                    self.marks[key] = made
                elif not made.events <= self.marks[key].events:  # a view that is read as something else
                    self.marks[key] = Mark(ANY, self.marks[key].events | made.events)
            elif mark.values is not None:
                self.leaves(mark, f"{call.name}: Python reads a value that depends on parameters")
        return result

    def _result(self, func: Any, call: Call, read: Sequence[Tensor]) -> Mark:
        """The mark of what a call gives."""
        if call.name in UNWRITTEN and func.namespace == "aten":
            return Mark(unwritten=True)
        marks = [self.mark(tensor) for tensor in read]
        if call.name in FRESH and func.namespace == "aten":
            return Mark()
        events = frozenset[Event]().union(*(one.events for one in marks))
        depends = any(one.values is not None for one in marks)
        if is_random(func.tags, call.given):
            drawn = Break(DROPOUT, False, f"{call.name} draws random numbers: every pass is another map")
            return Mark(ANY if depends else None, events | self._event(drawn))
        if any(one.unwritten for one in marks) and not func.is_view:
            unseen = Break(OTHER, None, f"{call.name} reads memory that nothing seen has written")
            return Mark(ANY, events | self._event(unseen))
        strange = self._strange(func, read)
        if strange is not None:
            return Mark(ANY, events if is_broken(events) else events | self._event(strange))
        if not depends:
            return Mark(None, events, unwritten=any(one.unwritten for one in marks))
        self._ran(call.name)
        if all(one.stepped or one.values is None for one in marks):
            return Mark(ANY, events, stepped=True)  # what made the jumps was a break, and was named
        try:
            judged = judge(call)
        except KeyError:
            judged = Break(OTHER, None, f"{func} is an operation that is not known")
        if not isinstance(judged, Break):
            plain = not any(one.is_complex() for one in read)
            return self._shifted(call, Mark(judged if plain else ANY, events))
        if judged.analytic is None and is_broken(events):
            return Mark(judged.values, events)  # open, of what is not analytic already
        here = self._event(judged)
        mark = Mark(judged.values, events | here, stepped=judged.stepped)
        if call.name in ("max", "amax") and call.given.get("keepdim"):
            dims = call.given["dim"]
            (dim,) = dims if isinstance(dims, list) and len(dims) == 1 else [dims]
            if isinstance(dim, int):
                from_end = dim - (dim >= 0) * call.given["self"].ndim
                return replace(mark, shift=Shift(here - events, from_end))
        return mark

    def _shifted(self, call: Call, mark: Mark) -> Mark:
        """x minus its largest entry, as softmax is often given: the kinks of the largest entry cancel."""
        one, other = call.given.get("self"), call.given.get("other")
        if not isinstance(one, Tensor):
            return mark
        shift = self.mark(one).shift
        if call.name in ("clone", "_to_copy") and shift is not None and shift.holds_for(one):
            return replace(mark, shift=shift)
        if call.name == "sub" and isinstance(other, Tensor) and call.given.get("alpha") == 1:
            largest = self.mark(other).shift
            if largest is not None and largest.holds_for(other) and one.ndim == other.ndim:
                return replace(mark, shift=Shift(largest.events - self.mark(one).events, largest.dim))
        if call.name in ("_softmax", "_log_softmax", "_safe_softmax") and shift is not None:
            along = call.given["dim"] in (shift.dim, shift.dim + one.ndim)
            if along and shift.holds_for(one):
                return replace(mark, events=mark.events - shift.events)
        return mark

    def _strange(self, func: Any, read: Sequence[Tensor]) -> Break | None:
        """What does not compute by torch's own kernels."""
        if func.namespace != "aten":
            return Break(OTHER, None, f"{func} is no operation of torch itself")
        for tensor in read:
            if type(tensor).__torch_dispatch__ is not _PLAIN:
                return Break(OTHER, None, f"a {type(tensor).__name__} computes by rules of its own")
        return None

    def _integers(self, mark: Mark, tensor: Tensor) -> Mark:
        """Integers that depend on a parameter are steps, whatever made them."""
        if mark.values is None:
            return mark
        if mark.events:
            return Mark(ANY, mark.events, stepped=True)
        step = Break(QUANTISED, False, f"a result of type {tensor.dtype}: a step function")
        return Mark(ANY, self._event(step), stepped=True)

    def _write(self, tensor: Tensor, mark: Mark) -> None:
        """A whole storage is overwritten, or part of it and the rest stays."""
        key = self.key(tensor)
        before = self.marks.get(key)
        covers = tensor.layout == torch.strided and (
            tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()
        )
        if before is None or before.unwritten or covers:
            self.marks[key] = replace(mark, unwritten=False)
            return
        events = before.events | mark.events
        depending = [one for one in (before, mark) if one.values is not None]
        values = [one.values for one in depending if one.values is not None]
        if len(values) == 1:
            values = [ANY]  # and constants beside them
        stepped = bool(depending) and all(one.stepped for one in depending)
        self.marks[key] = Mark(union(values) if values else None, events, stepped)

    def _range(self, value: Any) -> Range:
        if isinstance(value, bool | int | float):
            return of_number(float(value))
        if not isinstance(value, Tensor):
            return ANY
        mark = self.mark(value)
        if mark.values is None:
            return ANY if mark.unwritten else of_values(value)
        return mark.values

    def _event(self, broken: Break) -> frozenset[Event]:
        path, owner, codes = self._place()
        where = f" (in {codes[0].co_qualname})" if codes else ""
        named = Break(broken.kind, broken.analytic, broken.reason + where)
        return frozenset({Event(path, owner, named)})

    def _ran(self, name: str) -> None:
        path, owner, codes = self._place()
        self.trace.operations.setdefault(path, set()).add(name)
        self.trace.owners[path] = owner
        for code in codes:
            self.trace.places.setdefault(code, (path, owner))

    def _place(self) -> tuple[str, str, list[CodeType]]:
        """The innermost module that is being called, hooks included, and the code in it that called torch."""
        frame: FrameType | None = sys._getframe(1)
        codes: list[CodeType] = []
        while frame is not None:
            if frame.f_code is _MODULE_CALL:
                module = frame.f_locals["self"]
                if module in self._names:
                    return self._names[module], type(module).__name__, codes
            elif not any(part in frame.f_code.co_filename for part in _NOT_NAMED):
                codes.append(frame.f_code)
                self.trace.lines.setdefault(frame.f_code, set()).add(frame.f_lineno)
            frame = frame.f_back
        return "", "", codes


def _key(tensor: Tensor) -> Any:
    """A storage, not its data: views share it, and its address is not used again while the key is held."""
    return StorageWeakRef(tensor.untyped_storage())


def _name(func: Any) -> str:
    """An operation by its name, in place or not."""
    name: str = func.overloadpacket.__name__
    return name[:-1] if name.endswith("_") and not name.startswith("__") else name


def _bound(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    given = {argument.name: argument.default_value for argument in func._schema.arguments}
    given |= dict(zip(given, args, strict=False))
    return given | dict(kwargs)


def _written(func: Any, given: Mapping[str, Any]) -> list[Tensor]:
    names = [one.name for one in func._schema.arguments if one.alias_info and one.alias_info.is_write]
    return [leaf for name in names for leaf in tree_leaves(given[name]) if isinstance(leaf, Tensor)]


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()

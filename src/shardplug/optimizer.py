"""A wrapper around any torch optimizer whose step says whether it really happened.

The laws kept here: the inner optimizer is never patched; no device is waited for beyond what torch
waits for itself, until somebody asks; and gradients are divided by the very scale that they were
multiplied with, in whatever order the optimizers of one scaler step and clear.
"""

from __future__ import annotations

import inspect
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol, cast, final, runtime_checkable

import torch
from torch.amp.grad_scaler import GradScaler, OptState
from torch.utils.hooks import RemovableHandle

from shardplug.errors import PlanError
from shardplug.kinds import check_flag
from shardplug.plan.window import StepKind, StepOutcome, Window


@runtime_checkable
class _HasModes(Protocol):
    """An optimizer that keeps other weights for training than for evaluation."""

    def train(self) -> object: ...

    def eval(self) -> object: ...


@final
class ScalerAwareOptimizer(torch.optim.Optimizer):
    """An optimizer that works a gradient scaler and knows what became of each step.

    It shares ``param_groups``, ``state`` and ``defaults`` with the optimizer inside by identity,
    is a ``torch.optim.Optimizer`` (schedulers may be built on it), and passes everything else on:
    methods and attributes of the inner optimizer can be read, written and called here. The inner
    optimizer itself is the attribute ``optimizer``.

    With a scaler, call ``step()`` only: ``scaler.step`` and ``scaler.update`` are called for you.
    Optimizers on one scaler find each other. The scale is updated once per training step: when all
    of them that hold new gradients have stepped, else at the next ``zero_grad()`` of one of them,
    the next `before_backward`, or the next ``step()`` of one that has stepped already. Gradients
    that are still held then are brought to the new scale, so none is divided by a scale that it
    was not multiplied with. Without a scaler, a wrapper may be handed to ``scaler.step``.

    Step hooks run when the inner step runs: not on inner micro-batches, not when the scaler skips,
    and either way for a fused optimizer, as in torch. Hooks are given the wrapper.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = ScalerAwareOptimizer(torch.optim.SGD([weight], lr=0.5))
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.item(), optimizer.step_was_skipped, optimizer.outcome.num_steps
        (0.5, False, 1)
    """

    optimizer: torch.optim.Optimizer
    scaler: GradScaler | None
    device_placement: bool
    _log: _Log
    _member: _Member | None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: GradScaler | None = None,
    ) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: Any torch optimizer that is not wrapped yet.
            device_placement: Whether a state that is loaded is put on the devices of the
                parameters also where the optimizer's own ``load_state_dict`` leaves it elsewhere.
            scaler: What scales the loss. None, or a scaler that is disabled: steps are taken as
                they are.

        Raises:
            PlanError: If ``optimizer`` is wrapped already or is no torch optimizer, or another
                argument is of the wrong kind.
        """
        if isinstance(optimizer, ScalerAwareOptimizer):
            raise PlanError(
                "`optimizer` must be a torch optimizer that is not wrapped yet, got a "
                "ScalerAwareOptimizer. Prepare each optimizer once."
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise PlanError(
                f"`optimizer` must be a torch.optim.Optimizer, got {type(optimizer).__name__}."
            )
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise PlanError(
                f"`scaler` must be a torch.amp.GradScaler or None, got {type(scaler).__name__}."
            )
        self._take(optimizer, check_flag("device_placement", device_placement), scaler)

    def _take(
        self, optimizer: torch.optim.Optimizer, device_placement: bool, scaler: GradScaler | None
    ) -> None:
        # The constructor of torch's Optimizer is not called: it would make groups and a state of
        # its own, and wrap `step` in a second profiler scope and a second round of hooks.
        self.optimizer = optimizer
        self.device_placement = device_placement
        self.scaler = scaler
        self._log = _Log()
        self._member = None
        if scaler is not None and scaler.is_enabled():
            self._member = _Member(self, scaler)

    # What became of the steps.

    @property
    def outcome(self) -> StepOutcome:
        """What the last ``step()`` did, and how many there were; a value that stays as it is.

        Asking may wait for the device, when the scaler leaves it to a fused optimizer to skip.
        """
        log = self._log
        return log.read() if log.num_unread else log.last

    @property
    def closed_at(self) -> int:
        """When the last window was closed, in ns of the monotonic clock; 0 before the first.

        A step that the scaler skipped closes its window as well.
        """
        return self._log.closed_at

    @property
    def step_was_skipped(self) -> bool:
        """Whether the scaler found inf or NaN in the gradients of the last complete window.

        An inner micro-batch does not change it. Asking may wait for the device, when the scaler
        leaves it to a fused optimizer to skip.
        """
        return self._log.was_skipped()

    @property
    def window(self) -> Window | None:
        """The place of the current micro-batch in its window. None: each ``step()`` steps.

        To be set at the start of each micro-batch, by whoever accumulates gradients. On one that
        does not close its window, ``step()`` and ``zero_grad()`` do nothing.
        """
        return self._log.window

    @window.setter
    def window(self, window: Window | None) -> None:
        log = self._log
        log.window = window
        if window is not None and window.closes and window.micro_batches > 1:
            log.num_writes = _count_writes(self.optimizer)

    def before_backward(self) -> None:
        """Settle what an earlier step left open; to be called before a loss is scaled.

        Updates the scale if that is still owed. Whoever calls ``backward`` for the user calls this
        first.
        """
        if self._member is not None:
            self._member.round.settle()

    def unscale_gradients(self) -> None:
        """Divide the gradients by the scale, to clip or to read them before ``step()``.

        The scaler then does not divide them again. Does nothing without a scaler, when it has been
        done already for this step, and on inner micro-batches, where more is to be added.
        """
        window = self._log.window
        if self._member is not None and (window is None or window.closes):
            self._member.unscale()

    # Stepping.

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Take a step, if this micro-batch closes its window and the scaler finds no inf or NaN.

        Args:
            closure: Computes the loss and its gradients again. With a scaler it is called once,
                and has to scale its loss.
            **kwargs: Passed on to the inner optimizer.

        Returns:
            What the inner optimizer returns; None when it was not called. With a closure and a
            scaler, the loss.

        Raises:
            PlanError: If the inner optimizer calls its closure several times in a step (LBFGS) and
                there is a scaler. Nothing has been computed or changed then.
        """
        log, inner = self._log, self.optimizer
        if log.is_inside:
            log.found_inf = getattr(inner, "found_inf", False)
            return inner.step(**kwargs)
        window = log.window
        if window is not None and not window.closes:
            log.accumulate()
            return None
        # Set by a scaler at work on a fused optimizer: one that was not given to the wrapper.
        found_inf = getattr(inner, "found_inf", None)
        if self._member is not None and found_inf is None:
            return self._step_scaled(self._member, closure, kwargs)
        result = inner.step(**kwargs) if closure is None else inner.step(closure, **kwargs)
        log.close(found_inf)
        return result

    def _step_scaled(
        self, member: _Member, closure: Callable[[], Any] | None, kwargs: dict[str, Any]
    ) -> Any:
        log, loss = self._log, None
        if closure is not None:
            _check_called_once(self.optimizer)
            with torch.enable_grad():
                loss = closure()
        counted = member.begin_step()
        # The scaler is handed the wrapper. It calls `step` again unless it skips, and so tells what
        # it did without a look into it; and what users unscale by hand is the wrapper too.
        log.found_inf, log.is_inside = True, True
        try:
            result = member.scaler.step(self, **kwargs)
        finally:
            log.is_inside = False
        log.close(log.found_inf)
        member.end_step(counted=counted)
        return result if closure is None else loss

    def drop_window(self) -> None:
        """Let the next ``zero_grad()`` clear what is held of a window that is not to be completed.

        To be called by whoever accumulates gradients, when a pass was left inside a window.
        """
        self._log.is_applied = True

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, unless they are those of a window that is not complete yet.

        At the end of the loop's body, after ``step()``, or at its beginning: both are right.

        Args:
            set_to_none: As in torch. None: the inner optimizer's default.
        """
        if not self._may_clear():
            return
        if set_to_none is None:
            self.optimizer.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=set_to_none)
        self._log.is_applied = False
        if self._member is not None:
            self._member.drop()

    def _may_clear(self) -> bool:
        log, window = self._log, self._log.window
        if window is None or window.micro_batches == 1 or log.is_applied:
            return True
        # Before the closing micro-batch's own backward pass, what is held is the sum of the earlier
        # ones; after it, the user means to drop the window.
        return window.closes and log.num_writes != _count_writes(self.optimizer)

    def train(self) -> None:
        """Tell a schedule-free optimizer that training goes on; others have no modes."""
        if isinstance(self.optimizer, _HasModes):
            self.optimizer.train()

    def eval(self) -> None:
        """Tell a schedule-free optimizer that the model is evaluated; others have no modes."""
        if isinstance(self.optimizer, _HasModes):
            self.optimizer.eval()

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer, which is all there is to save."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the inner optimizer.

        Args:
            state_dict: What ``state_dict()`` returned, of the wrapper or of the inner optimizer.
        """
        self.optimizer.load_state_dict(state_dict)
        if not self.device_placement:
            return
        state = cast("dict[Any, Any]", self.optimizer.state)
        for parameter, entries in state.items():
            if isinstance(parameter, torch.Tensor) and isinstance(entries, dict):
                for name, value in entries.items():
                    # Where a step count lives is the inner optimizer's choice, and it has made it.
                    if name != "step":
                        entries[name] = _moved(value, parameter.device)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters to the inner optimizer.

        Args:
            param_group: The parameters, under ``"params"``, and their options.
        """
        self.optimizer.add_param_group(param_group)

    # Hooks: kept where they are run, and given the wrapper, on which they were registered.

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register ``hook(wrapper, args, kwargs)``, run before each inner step."""
        return self.optimizer.register_step_pre_hook(self._relay(hook))

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register ``hook(wrapper, args, kwargs)``, run after each inner step."""
        return self.optimizer.register_step_post_hook(self._relay(hook))

    def register_state_dict_pre_hook(
        self, hook: Callable[..., Any], prepend: bool = False
    ) -> RemovableHandle:
        """Register ``hook(wrapper)``, run before a state is made."""
        return self.optimizer.register_state_dict_pre_hook(self._relay(hook), prepend)

    def register_state_dict_post_hook(
        self, hook: Callable[..., Any], prepend: bool = False
    ) -> RemovableHandle:
        """Register ``hook(wrapper, state_dict)``, run on each state that is made."""
        return self.optimizer.register_state_dict_post_hook(self._relay(hook), prepend)

    def register_load_state_dict_pre_hook(
        self, hook: Callable[..., Any], prepend: bool = False
    ) -> RemovableHandle:
        """Register ``hook(wrapper, state_dict)``, run before a state is loaded."""
        return self.optimizer.register_load_state_dict_pre_hook(self._relay(hook), prepend)

    def register_load_state_dict_post_hook(
        self, hook: Callable[..., Any], prepend: bool = False
    ) -> RemovableHandle:
        """Register ``hook(wrapper)``, run after a state has been loaded."""
        return self.optimizer.register_load_state_dict_post_hook(self._relay(hook), prepend)

    def _relay(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        # Weak, or the inner optimizer would keep its wrapper alive in a cycle.
        wrapper = weakref.ref(self)

        def relay(inner: torch.optim.Optimizer, *args: Any) -> Any:
            alive = wrapper()
            return hook(inner if alive is None else alive, *args)

        return relay

    # Everything else is the inner optimizer's.

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by the scaler: whether the inner step unscales by itself.

        Not through the wrapper if it wants the scaler as an argument, as torch had it once: then
        the scaler unscales, as for any other.
        """
        supported = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        return supported and "grad_scaler" not in inspect.signature(self.optimizer.step).parameters

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "optimizer" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # `step` is one of ours: schedulers that are built on the wrapper put a counter in its
        # place. What a scaler leaves for a fused step, `grad_scale` and `found_inf`, has to reach
        # the optimizer that reads it.
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.optimizer, name, value)

    def __delattr__(self, name: str) -> None:
        if name in _OWN:
            super().__delattr__(name)
        else:
            delattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer,
            "device_placement": self.device_placement,
            "scaler": self.scaler,
            "outcome": self.outcome,
            "skipped": self.step_was_skipped,
            "window": self.window,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._take(state["optimizer"], state["device_placement"], state["scaler"])
        self._log.restore(state["outcome"], skipped=state["skipped"])
        self.window = state["window"]


_OWN = frozenset({"optimizer", "scaler", "device_placement", "step", "window", "_log", "_member"})


class _Log:
    """What one wrapper knows of its steps.

    Apart from the wrapper, because plain slots are cheap to write, and these are written each step.
    """

    __slots__ = (
        "_num_skipped",
        "_skipped",
        "closed_at",
        "found_inf",
        "is_applied",
        "is_inside",
        "last",
        "num_unread",
        "num_writes",
        "window",
    )

    def __init__(self) -> None:
        self.window: Window | None = None
        self.closed_at = 0  # when the last window was closed
        self.is_inside = False  # the scaler is calling the wrapper back
        self.found_inf: Any = None  # what it left for that step; True if it does not call
        self.is_applied = False  # the held gradients have been stepped with
        self.num_writes = 0  # to the gradients, when the closing micro-batch began
        self.last = StepOutcome(StepKind.ACCUMULATING)
        self._skipped: torch.Tensor | bool = False  # the last verdict; a bool when it is known
        # Where a kernel decides on the device: how many steps nobody has asked about yet, and how
        # many of those it skipped. Until somebody asks, the last outcome takes none for real.
        self.num_unread = 0
        self._num_skipped: torch.Tensor | int = 0

    def accumulate(self) -> None:
        self.is_applied = False
        if self.last.kind is not StepKind.ACCUMULATING:
            self.last = self.last._replace(kind=StepKind.ACCUMULATING)

    def close(self, found_inf: Any) -> None:
        """Note the end of a window: nothing or zero where a step was taken, else what was found."""
        self.is_applied = True
        self.closed_at = time.monotonic_ns()
        window = self.window
        micro_batches = 1 if window is None else window.micro_batches
        _, _, num_windows, num_steps = self.last
        kind = StepKind.STEPPED
        if isinstance(found_inf, torch.Tensor):
            self._skipped = found_inf
            self.num_unread += 1
            self._num_skipped = self._num_skipped + found_inf.ne(0).int()
        elif found_inf:
            self._skipped, kind = True, StepKind.SKIPPED
        else:
            self._skipped = False
            num_steps += 1
        self.last = StepOutcome(kind, micro_batches, num_windows + 1, num_steps)

    def read(self) -> StepOutcome:
        kind, micro_batches, num_windows, num_steps = self.last
        if self.was_skipped() and kind is StepKind.STEPPED:
            kind = StepKind.SKIPPED
        num_steps += self.num_unread - int(self._num_skipped)
        self.num_unread, self._num_skipped = 0, 0
        self.last = StepOutcome(kind, micro_batches, num_windows, num_steps)
        return self.last

    def was_skipped(self) -> bool:
        if not isinstance(self._skipped, bool):
            self._skipped = bool(self._skipped.item())
        return self._skipped

    def restore(self, outcome: StepOutcome, *, skipped: bool) -> None:
        self.last, self._skipped = outcome, skipped


class _Member:
    """One optimizer among those of its scaler.

    An optimizer takes part in a training step when it holds gradients that it has not stepped with.
    That is read off the gradients, since a backward pass or a model's ``zero_grad`` does not come
    by here. It keeps no reference to the wrapper, which is its owner.
    """

    __slots__ = (
        "__weakref__",
        "_consumed",
        "_counted",
        "_wrapper",
        "has_stepped",
        "is_absent",
        "optimizer",
        "round",
        "scaler",
    )

    def __init__(self, wrapper: ScalerAwareOptimizer, scaler: GradScaler) -> None:
        self._wrapper = weakref.ref(wrapper)
        self.optimizer = wrapper.optimizer
        self.scaler = scaler
        self.has_stepped = False  # since the scale's last update
        self.is_absent = False  # it held gradients at an update, and has not stepped since
        self._consumed: _Mark | None = None  # the gradients of the last step
        self._counted: _Mark | str | None = None  # gradients that an update has checked already
        self.round = _ROUNDS.setdefault(scaler, _Round())
        self.round.join(self)

    def begin_step(self) -> bool:
        """Get ready for ``scaler.step``; whether an update has counted these gradients already."""
        if self.has_stepped:
            # No update since this one's last step: this is the next training step.
            self.round.settle()
        self.is_unscaled()
        if isinstance(self._counted, str):
            return True
        return _is_marked(self.gradient(), self._counted)

    def end_step(self, *, counted: bool) -> None:
        """Take note of a step, and update the scale if it was the last of its training step."""
        self.is_absent, self._counted, self._consumed = False, None, _mark(self.gradient())
        if counted:
            # The last update has seen what there was to see.
            del _notes(self.scaler)[id(self._wrapper())]
        elif self.keep_checks():
            self.has_stepped = True
            self.round.end_if_complete()

    def unscale(self) -> None:
        """Unscale the gradients, unless that has been done for this step."""
        counted = self.begin_step()
        self.is_absent = False
        if self.is_unscaled() or self.gradient() is None:
            return
        if counted:
            # What follows writes to the gradients, so no mark can tell that they are the same.
            self._counted = _WHATEVER_IS_HELD
        self.scaler.unscale_(self._wrapped())

    def drop(self) -> None:
        """Take note that the gradients have been cleared."""
        self._counted = None
        if self.is_unscaled():
            # They are not stepped with, but what the scaler found in them counts.
            self.has_stepped = self.keep_checks()
        self.round.settle()

    def keep_checks(self) -> bool:
        """Whether there are inf checks for the next update; without gradients, there are none."""
        notes = _notes(self.scaler)
        key = id(self._wrapper())
        if not notes[key]["found_inf_per_device"]:
            del notes[key]
        return key in notes

    def is_unscaled(self) -> bool:
        """Whether the gradients have been unscaled since the last update, also by hand."""
        notes = _notes(self.scaler)
        key = id(self._wrapper())
        by_hand = notes.pop(id(self.optimizer), None)
        if by_hand is not None:
            # The user unscaled the inner optimizer; the scaler is to know it of the wrapper.
            notes[key] = by_hand
        return key in notes and notes[key]["stage"] is OptState.UNSCALED

    def gradient(self) -> torch.Tensor | None:
        """The first gradient that is held, which stands for all of them."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    return cast("torch.Tensor", parameter.grad)
        return None

    def holds_new_gradients(self) -> bool:
        gradient = self.gradient()
        return gradient is not None and not _is_marked(gradient, self._consumed)

    def is_awaited(self) -> bool:
        """Whether the training step is not over without a step of this one.

        Not if it was waited for in vain the last time: one that is left aside for a while keeps
        gathering gradients of others' losses, and overflow in them is not to wear the scale down.
        """
        return not (self.has_stepped or self.is_absent) and self.holds_new_gradients()

    def rescale(self, factor: torch.Tensor, *, counted: bool) -> None:
        """Multiply the gradients by what has become of the scale."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor.to(parameter.grad.device))
        self._counted = _mark(self.gradient()) if counted else None
        self.is_absent = self.is_absent or counted

    def _wrapped(self) -> ScalerAwareOptimizer:
        wrapper = self._wrapper()
        assert wrapper is not None
        return wrapper


class _Round:
    """The optimizers of one scaler, from one update of its scale to the next."""

    __slots__ = ("_members",)

    def __init__(self) -> None:
        # In the order of joining, which is the same on all ranks: unscaling may be a collective.
        self._members: list[weakref.ref[_Member]] = []

    def join(self, member: _Member) -> None:
        self._members = [other for other in self._members if other() is not None]
        self._members.append(weakref.ref(member))

    def end_if_complete(self) -> None:
        """Update the scale if no step is missing."""
        if not any(member.is_awaited() for member in self._alive()):
            self.settle()

    def settle(self) -> None:
        """Update the scale if that is owed, and keep the gradients that are held in step with it.

        Those that are still to be stepped with count for this update already. They, and those that
        came after a step, are multiplied by what has become of the scale.
        """
        members = self._alive()
        if not any(member.has_stepped for member in members):
            return
        for member in members:
            if member.is_awaited():
                member.unscale()
        holding = [member for member in members if member.holds_new_gradients()]
        if not holding:
            _update(members)
            return
        checked = [member for member in holding if member.is_unscaled()]
        one = torch.ones((), device=holding[0].optimizer.param_groups[0]["params"][0].device)
        # The scale as a tensor: nothing waits for the device.
        before = members[0].scaler.scale(one)
        _update(members)
        after = members[0].scaler.scale(one)
        for member in holding:
            is_checked = member in checked
            member.rescale(after if is_checked else after / before, counted=is_checked)

    def _alive(self) -> list[_Member]:
        references = (reference() for reference in self._members)
        return [member for member in references if member is not None]


# The one board there is: optimizers on one scaler have to agree on when its scale is updated. Weak,
# so that an entry ends with its scaler.
_ROUNDS: weakref.WeakKeyDictionary[GradScaler, _Round] = weakref.WeakKeyDictionary()

# A gradient, and how often it had been written to.
_Mark = tuple["weakref.ref[torch.Tensor]", int]
_WHATEVER_IS_HELD = "whatever is held"


def _mark(gradient: torch.Tensor | None) -> _Mark | None:
    if gradient is None:
        return None
    return weakref.ref(gradient), gradient._version  # noqa: SLF001 (autograd's counter of writes)


def _count_writes(optimizer: torch.optim.Optimizer) -> int:
    """Count what has been written to the gradients; it tells whether a backward pass came by."""
    held = (each.grad for group in optimizer.param_groups for each in group["params"])
    return sum([1 + grad._version for grad in held if grad is not None])  # noqa: SLF001 (as above)


def _is_marked(gradient: torch.Tensor | None, mark: _Mark | None) -> bool:
    if gradient is None or mark is None:
        return False
    return mark[0]() is gradient and mark[1] == gradient._version  # noqa: SLF001 (as above)


def _notes(scaler: GradScaler) -> dict[int, dict[str, Any]]:
    """The scaler's notes on each optimizer since the last update: torch has no question for them.

    Needed to see what has been unscaled by hand, and to let one step go without an update.
    """
    notes: dict[int, dict[str, Any]] | None = getattr(scaler, "_per_optimizer_states", None)
    if notes is None:
        raise RuntimeError(
            "`scaler` must keep its notes in `_per_optimizer_states`, as torch's GradScaler does, "
            f"got a {type(scaler).__name__} of torch {torch.__version__} without. Use a version of "
            "torch that this shardplug knows."
        )
    return notes


def _update(members: list[_Member]) -> None:
    members[0].scaler.update()
    for member in members:
        member.has_stepped = False


def _check_called_once(optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PlanError(
            "`closure` must be None where a scaler is at work and the optimizer calls it several "
            f"times in a step, got one for {type(optimizer).__name__}: gradients can be unscaled "
            "once. Train it without a scaler (bfloat16 needs none)."
        )


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, device) for item in value)
    return value

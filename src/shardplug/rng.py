"""The random number generators of this process: the only module that touches the global ones."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from typing import Any

import torch

from shardplug.comm import Comm
from shardplug.errors import PlanError, StateError

try:
    import numpy as np
except ImportError:  # numpy is the user's choice
    np = None  # type: ignore[assignment]

RNG_TYPES = ("torch", "cuda", "xla", "generator", "numpy", "python")


def draw_seed() -> int:
    """Draw a seed in [0, 2^62) from torch's global CPU generator, which moves by one draw."""
    return int(torch.randint(2**62, (), dtype=torch.int64).item())


def signed_seed(seed: int) -> int:
    """Give the signed 64-bit number that torch takes for the same seed."""
    return (seed + 2**63) % 2**64 - 2**63


def seed_cpu(seed: int) -> None:
    """Seed the CPU generators of torch, numpy (if installed) and python.

    As ``random.seed``, ``torch.default_generator.manual_seed`` and ``np.random.seed`` do.

    Args:
        seed: In [0, 2^63); numpy, which takes 32 bits, gets the low ones.
    """
    _seed_python(seed)
    _PYTHON.gauss_next = None
    torch.default_generator.manual_seed(seed)
    if np is not None:
        np.random.seed(seed & 0xFFFFFFFF)  # the global one is what users draw from


# Asked before each sample, so without what random.seed does to take strings and the like.
_PYTHON: Any = random.seed.__self__  # type: ignore[attr-defined]  # a bound method
_seed_python = super(random.Random, _PYTHON).seed


class PreservedCpu:
    """Gives the CPU generators of torch, numpy and python their states back after a block.

    For many blocks one after the other. numpy takes long to hand its state over; where nobody has
    drawn since it was handed over last, which its words in memory tell, it is not asked again.
    """

    def __init__(self) -> None:
        self._python: Any = None
        self._torch: Any = None
        self._numpy: Any = None
        self._words = b""

    def __enter__(self) -> None:
        """Note the states."""
        self._python, self._torch = random.getstate(), torch.get_rng_state()
        if np is None:
            return
        words = _numpy_words()
        # A normal number may be held in store, which is none of the words.
        if not words or words != self._words or self._numpy[3]:
            self._numpy, self._words = np.random.get_state(), words

    def __exit__(self, *error: object) -> None:
        """Put them back."""
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if np is None:
            return
        if not self._words or self._numpy[3]:
            np.random.set_state(self._numpy)
            return
        np.random.seed(0)  # drops what is held in store
        ctypes.memmove(_numpy_address(), self._words, len(self._words))


_NUMPY_BYTES = 4 * 624 + 4  # key and position of MT19937


def _numpy_words() -> bytes:
    """Read the state of numpy's global generator; empty if it is none whose layout is known."""
    address = _numpy_address()
    return ctypes.string_at(address, _NUMPY_BYTES) if address else b""


def _numpy_address() -> int:
    find = getattr(np.random, "get_bit_generator", None)  # from numpy 1.24 on
    generator = find() if find else None
    return generator.ctypes.state_address if type(generator) is np.random.MT19937 else 0


def _cpu_kinds() -> list[str]:
    kinds = ["python", "torch"]
    if np is not None:
        kinds.append("numpy")
    return kinds


def seed_all(seed: int) -> None:
    """Seed the generators of python, numpy (if installed) and torch, on every device.

    Args:
        seed: In [0, 2^63); numpy, which takes 32 bits, gets the low ones.
    """
    seed_cpu(seed)
    torch.manual_seed(seed)


def check_rng_types(rng_types: Sequence[str] | None) -> tuple[str, ...]:
    """Check the names of generators to synchronise, and that their devices are there.

    Returns:
        The names; the caller's sequence is not kept.

    Raises:
        PlanError: If a name is unknown or names a device that is not there.
    """
    for name in rng_types or ():
        if name not in RNG_TYPES:
            known = ", ".join(map(repr, RNG_TYPES))
            raise PlanError(f"`rng_types` must be among {known}, got {name!r}.")
        if name == "cuda" and not torch.cuda.is_available():
            raise PlanError(
                "`rng_types` must name generators of devices that are there, got 'cuda' without a "
                "CUDA device. Leave it out."
            )
        if name == "numpy" and np is None:
            raise PlanError("`rng_types` must be usable, got 'numpy' but numpy is not installed.")
        if name == "xla":
            _xla()
    return tuple(dict.fromkeys(rng_types or ()))


def _xla() -> Any:
    try:
        from torch_xla.core import xla_model  # type: ignore[import-not-found]
    except ImportError as error:
        raise PlanError(
            "`rng_types` must name generators of devices that are there, got 'xla' but torch_xla "
            "is not installed. Leave it out."
        ) from error
    return xla_model


def capture(rng_types: Sequence[str], generator: torch.Generator | None = None) -> dict[str, Any]:
    """Read the states of the named generators, ``"generator"`` being the one given, if any."""
    states: dict[str, Any] = {}
    for name in rng_types:
        if name == "torch":
            states[name] = torch.get_rng_state()
        elif name == "cuda":
            # Of the current device: each rank has one of its own.
            states[name] = torch.cuda.get_rng_state()
        elif name == "xla":
            states[name] = _xla().get_rng_state()
        elif name == "numpy":
            states[name] = np.random.get_state()
        elif name == "python":
            states[name] = random.getstate()
        elif generator is not None:
            states[name] = generator.get_state()
    return states


def restore(states: dict[str, Any], generator: torch.Generator | None = None) -> None:
    """Put states from `capture` back in place."""
    for name, state in states.items():
        if name == "torch":
            torch.set_rng_state(state)
        elif name == "cuda":
            torch.cuda.set_rng_state(state)
        elif name == "xla":
            _xla().set_rng_state(state)
        elif name == "numpy":
            np.random.set_state(state)
        elif name == "python":
            random.setstate(state)
        elif generator is not None:
            generator.set_state(state)


def capture_process() -> dict[str, Any]:
    """Read the states of all global generators of this process.

    Those of python, numpy (if installed), torch's CPU, and every device of the accelerator that
    torch finds (CUDA, XPU, MPS, ...).

    Returns:
        What `restore_process` puts back.
    """
    states = capture(_cpu_kinds())
    module = _accelerator_module()
    if module is not None:
        read_all = getattr(module, "get_rng_state_all", None)
        states["accelerator"] = read_all() if read_all else [module.get_rng_state()]
    return states


def restore_process(states: dict[str, Any]) -> None:
    """Put the states from `capture_process` back in place.

    Raises:
        StateError: If this process has another number of accelerator devices, or its generators do
            not take the states; they are then as they were.
    """
    before = capture_process()
    try:
        _put_back(states)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        _put_back(before)
        if isinstance(error, StateError):
            raise
        raise StateError(
            f"`states` must be those of this process's generators, got some that they do not take: "
            f"{error}. Leave them out."
        ) from error


def _put_back(states: dict[str, Any]) -> None:
    kept = dict(states)
    devices = kept.pop("accelerator", [])
    module = _accelerator_module()
    present = 0 if module is None else torch.accelerator.device_count()
    if len(devices) != present:
        raise StateError(
            f"`states` must be of a process with the {present} accelerator devices that are here, "
            f"got {len(devices)}. Leave them out."
        )
    restore(kept)
    if module is not None:
        write_all = getattr(module, "set_rng_state_all", None)
        if write_all:
            write_all(devices)
        else:
            module.set_rng_state(devices[0])


def _accelerator_module() -> Any:
    """Return torch's module for the accelerator of this machine, None if there is none."""
    if not torch.accelerator.is_available():
        return None
    return torch.get_device_module(torch.accelerator.current_accelerator())


def synchronize(
    rng_types: Sequence[str], comm: Comm, *, generator: torch.Generator | None = None
) -> None:
    """Make the named generators equal to rank 0's, in one message.

    Collective: every rank must call it.
    """
    if comm.world_size > 1 and rng_types:
        restore(comm.broadcast_object(capture(rng_types, generator)), generator)

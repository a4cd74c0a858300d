"""The kinds of faults that `shardplug check` finds; apart, for the help needs no torch."""

from __future__ import annotations

KINDS = {
    "unsharded": "every rank reads all of the data",
    "twice": "samples come more than once in an epoch",
    "never": "samples never come",
    "different-order": "ranks shuffle each in an order of its own",
    "different-data": "ranks have other data or settings",
    "equal-epochs": "two epochs have the same shuffled order",
    "wrong-length": "len(loader) is not the number of batches",
    "uneven-steps": "ranks take different numbers of steps",
    "same-augmentation": "ranks or samples draw the same random numbers",
    "worker-repeats": "workers of a rank make the same samples or draw the same random numbers",
    "equal-augmentation": "epochs draw the same random numbers",
    "raises": "the loader raises an error",
}

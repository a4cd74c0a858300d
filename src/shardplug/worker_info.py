"""Who divides a stream among a loader's workers: watch what is read of the worker's info."""

from __future__ import annotations

import logging
from typing import Any, Literal, cast, final

import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import get_worker_info

from shardplug.errors import PlanError

WorkerSplit = Literal["auto", "shardplug", "dataset"]
_WORKER_SPLITS = ("auto", "shardplug", "dataset")

_log = logging.getLogger("shardplug")


def check_worker_split(worker_split: Any) -> WorkerSplit:
    """Check the name of a way to divide a stream among workers.

    Raises:
        PlanError: If it is none of the three.
    """
    if not isinstance(worker_split, str) or worker_split not in _WORKER_SPLITS:
        names = ", ".join(map(repr, _WORKER_SPLITS))
        raise PlanError(f"`worker_split` must be one of {names}, got {worker_split!r:.80}.")
    return cast(WorkerSplit, worker_split)


def worker_place() -> tuple[int, int]:
    """Return this worker's number and how many there are; (0, 1) outside of workers."""
    info: Any = get_worker_info()
    if info is None:
        return 0, 1
    return info.place if isinstance(info, WatchedInfo) else (info.id, info.num_workers)


@final
class WatchedInfo:
    """A worker's info that notes what is read of it: whoever reads its share divides the data.

    A data set that reads both ``id`` and ``num_workers`` splits itself, and so does one that the
    ``worker_init_fn`` reaches for. Reading ``id`` alone, to seed, is not splitting.
    """

    def __init__(self, info: Any, *, hides_split: bool) -> None:
        self._info = info
        self._hides_split = hides_split
        self._read: set[str] = set()
        self._splits: bool | None = None
        self.place: tuple[int, int] = (info.id, info.num_workers)

    @staticmethod
    def install(worker_split: WorkerSplit) -> None:
        """Let `torch.utils.data.get_worker_info` return a watched info in this worker.

        Does nothing outside of workers, where one is watched already, or where there is nothing to
        find out.

        Raises:
            PlanError: If this version of torch keeps the info elsewhere.
        """
        info: Any = get_worker_info()
        if info is None or isinstance(info, WatchedInfo) or worker_split == "dataset":
            return
        if getattr(torch_worker, "_worker_info", None) is not info:
            raise PlanError(
                '`worker_split` must say who divides the stream among workers, got "auto" with a '
                'version of torch whose workers cannot be watched. Pass worker_split="dataset" if '
                "the data set splits by get_worker_info(), else num_workers=0."
            )
        watched: Any = WatchedInfo(info, hides_split=worker_split == "shardplug")
        torch_worker._worker_info = watched  # noqa: SLF001  # torch has no public way

    @property
    def id(self) -> int:
        """The worker's number."""
        if self._hides_split:
            return 0
        self._note("id")
        return self.place[0]

    @property
    def num_workers(self) -> int:
        """How many workers the loader has."""
        if self._hides_split:
            return 1
        self._note("num_workers")
        return self.place[1]

    @property
    def dataset(self) -> Any:
        """The worker's copy of the user's data set."""
        self._read.add("dataset")
        return self._info.dataset

    def is_of_another(self, dataset: Any) -> bool:
        """Tell, without noting a read, whether the loader reads another data set than this one."""
        return self._info.dataset is not dataset

    def __getattr__(self, name: str) -> Any:
        """Look anything else up in the info that torch made."""
        return getattr(self._info, name)

    def decide(self) -> bool:
        """Tell, once the first item has been made, whether the data set splits itself."""
        is_reached = "dataset" in self._read
        if self._hides_split and is_reached:
            raise PlanError(
                '`worker_init_fn` must leave the data set whole with worker_split="shardplug", got '
                'one that reads worker_info.dataset. Pass worker_split="dataset" if it cuts the '
                "data set."
            )
        splits = is_reached or {"id", "num_workers"} <= self._read
        if splits and self._splits is None and self.place[0] == 0:
            _log.info(
                "%s splits itself among workers by get_worker_info(); it is left to it, as with "
                'worker_split="dataset".',
                type(self._info.dataset).__name__,
            )
        self._splits = splits
        return splits

    def _note(self, name: str) -> None:
        self._read.add(name)
        if self._splits is False and {"id", "num_workers"} <= self._read:
            raise PlanError(
                "`worker_split` must say who divides the stream among workers, got "
                f'"auto" with {type(self._info.dataset).__name__}, which reads its worker info '
                'only after its first item. Pass worker_split="dataset" if it splits itself, else '
                '"shardplug".'
            )

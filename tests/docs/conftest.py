"""Pages are about Lightning too, which edits the warning filters when it is first imported."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("lightning") is not None:
    import lightning.pytorch  # noqa: F401

"""Docstrings as the documentation shows them: examples as code, and public names as links."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
_NAME = re.compile(r"(?<!`)`(\w+)`(?!`)")


class Docstrings(griffe.Extension):
    """Changes docstrings on their way into the documentation."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Change all docstrings of a package, once its public names are known.

        Args:
            pkg: The package.
            kwargs: What else griffe tells.
        """
        self._change(pkg, {str(name) for name in pkg.exports or ()}, pkg.path)

    def _change(self, of: griffe.Object, names: set[str], package: str) -> None:
        if of.docstring is not None:
            text = _EXAMPLE.sub("Examples:", of.docstring.value)
            of.docstring.value = _NAME.sub(
                lambda found: (
                    f"[`{found[1]}`][{package}.{found[1]}]" if found[1] in names else found[0]
                ),
                text,
            )
        for member in of.members.values():
            if isinstance(member, griffe.Object):
                self._change(member, names, package)

"""Pictures of plans, drawn while the documentation is built.

A page that shows the command ``shardplug plan ... --plot NAME.svg`` has NAME.svg beside it: what a
reader gets who types that.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from shardplug.cli import main

COMMAND = re.compile(r"^ *\$ shardplug (plan .*--plot (\S+\.svg).*)$", re.MULTILINE)


def on_files(files: Files, *, config: Any) -> Files:
    """Draw what the pages ask for.

    Args:
        files: All files of the site.
        config: The configuration.

    Returns:
        The same, with the pictures.

    Raises:
        PluginError: If a command fails.
    """
    for page in list(files.documentation_pages()):
        for command, name in COMMAND.findall(page.content_string):
            uri = str(Path(page.src_uri).with_name(name))
            if files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, content=draw(command, name)))
    return files


def draw(command: str, name: str) -> bytes:
    """Run a command that draws a picture.

    Args:
        command: What stands behind ``shardplug``.
        name: The picture's file.

    Returns:
        The picture.

    Raises:
        PluginError: If the command fails.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        path = Path(folder, name)
        status = main([str(path) if word == name else word for word in shlex.split(command)])
        if status != 0:
            raise PluginError(f"`shardplug {command}` ended with status {status}.")
        return path.read_bytes()

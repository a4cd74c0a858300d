"""`python -m shardplug.cli` is `shardplug`, where scripts are not on the path."""

from __future__ import annotations

from shardplug.cli import exit_with_status

if __name__ == "__main__":
    exit_with_status()

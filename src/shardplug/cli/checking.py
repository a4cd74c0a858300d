"""Try a loader out and tell what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from shardplug.cli.findings import Finding, find_faults
from shardplug.cli.kinds import KINDS
from shardplug.cli.targets import Factory, find_factory
from shardplug.cli.trial import Conditions, Trial, expected_tags, try_out


@dataclass(frozen=True, slots=True)
class Plea:
    """What is to be checked.

    Attributes:
        target: MODULE:FACTORY.
        loader_name: Which loader of a LightningDataModule.
        conditions: How it is run.
        allowed: Kinds of faults that are meant so.
    """

    target: str
    loader_name: str
    conditions: Conditions
    allowed: frozenset[str] = frozenset()


def check(plea: Plea) -> bool:
    """Check a loader and print what was found.

    Args:
        plea: What to check.

    Returns:
        Whether no fault was found that is not allowed.

    Raises:
        Refusal: If there is nothing that can be checked.
        PlanError: If the loader cannot be prepared with these options.
    """
    factory = find_factory(plea.target, plea.loader_name)
    trial = _run(factory, plea.conditions)
    found = find_faults(trial, plea.conditions, lambda: expected_tags(factory, plea.conditions))
    console = Console(highlight=False)
    title = f"{plea.target} on {_ranks(plea.conditions)}"
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(_summary(plea, trial))
    for warning in trial.warned[:5]:
        console.print(Text(f"warned  {warning}"), style="yellow")
    for finding in found:
        _print_finding(console, finding, is_allowed=finding.kind in plea.allowed)
    faults = [finding for finding in found if finding.kind not in plea.allowed]
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        console.print(Text(f"{count} found.", style="bold red"))
    elif not any(log.num_steps for logs in trial.logs for log in logs):
        words = "nothing to check: no rank has read a batch; no fault found."
        console.print(Text(words, style="bold yellow"))
    else:
        console.print(Text("ok: no fault found.", style="bold green"))
    return not faults


def _ranks(conditions: Conditions) -> str:
    return "1 rank" if conditions.world_size == 1 else f"{conditions.world_size} ranks"


def _run(factory: Factory, conditions: Conditions) -> Trial:
    """Run the trial below a progress bar, where someone is there to see it."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("batches"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(_ranks(conditions), total=None)

        def tell(done: int, total: int | None) -> None:
            progress.update(task, completed=done, total=total)

        return try_out(factory, conditions, tell)


def _summary(plea: Plea, trial: Trial) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("loader", _how(plea, trial))
    for epoch in range(min(len(logs) for logs in trial.logs)):
        logs = [by_epoch[epoch] for by_epoch in trial.logs]
        steps = sorted({log.num_steps for log in logs})
        real = sum(len(log.tags) for log in logs)
        parts = [f"{'-'.join(map(str, steps[:: max(1, len(steps) - 1)]))} steps per rank"]
        parts.append(f"{real} real rows")
        padding = sum(log.num_rows for log in logs) - real
        if padding:
            parts.append(f"{padding} padding")
        if any(log.is_cut for log in logs):
            parts.append("left early, by --max-batches")
        if not all(log.is_done for log in logs):
            parts.append("not finished")
        table.add_row(f"epoch {epoch}", ", ".join(parts))
    return table


def _how(plea: Plea, trial: Trial) -> str:
    if plea.conditions.options is None:
        return "as it is"
    if trial.is_dispatched:
        return "prepared by prepare_data_loader; rank 0 reads for all"
    return "prepared by prepare_data_loader"


def _print_finding(console: Console, finding: Finding, *, is_allowed: bool) -> None:
    mark, style = ("allowed", "dim") if is_allowed else ("FAULT", "bold red")
    head = f"{mark}  {finding.kind}: {KINDS[finding.kind]}"
    console.print(Text(head, style=style))
    for name, text in (("seen", finding.reason), ("do", finding.remedy)):
        grid = Table.grid(padding=(0, 1))
        grid.add_column(width=6, justify="right")
        grid.add_column(overflow="fold")
        grid.add_row(name, Text(text))
        console.print(grid)

"""Lightning's own command line builds the strategies from config files, and runs with them."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardplug import Comm, slice_tensors
from shardplug_lightning import ShardOptions
from tests.integrations.lightning.ranks import Trainee, run_alone, values

pytest.importorskip("jsonargparse", reason="LightningCLI needs it")

CHANGED: dict[str, Any] = {
    "split_batches": True,
    "even_batches": False,
    "tail": "drop",
    "evaluation_tail": "pad",
    "use_seedable_sampler": True,
    "data_seed": 7,
    "rng_types": ["numpy"],
    "dispatch_batches": False,
    "slice_fn_for_dispatch": "shardplug.slice_tensors",
    "use_stateful_dataloader": True,
    "already_sharded": False,
    "sync_order": "broadcast",
    "worker_split": "dataset",
    "batches_per_message": 3,
    "seed_samples": True,
}

OF_THEIR_OWN: dict[str, dict[str, Any]] = {
    "ShardStrategy": {"find_unused_parameters": True, "start_method": "fork", "timeout": "0:01:30"},
    "ShardSingleDeviceStrategy": {"device": "cpu"},
    "ShardFSDPStrategy": {"sharding_strategy": "SHARD_GRAD_OP", "state_dict_type": "sharded"},
    "ShardModelParallelStrategy": {"data_parallel_size": 1, "tensor_parallel_size": 1},
}

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def config_of(strategy: Any, **trainer: Any) -> dict[str, Any]:
    return {"seed_everything": 3, "trainer": {**QUIET, **trainer, "strategy": strategy}}


def of_class(name: str, **options: Any) -> dict[str, Any]:
    return {"class_path": f"shardplug_lightning.{name}", "init_args": options}


class Tidy(Trainee):
    """Has a loader of its own, as a config file cannot tell of one."""

    def train_dataloader(self) -> Any:
        return values(9, 2, shuffle=True)


def command_line(*arguments: str, runs: bool) -> Any:
    os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"  # of the way Lightning uses it
    from lightning.pytorch.cli import LightningCLI

    sys.argv = ["train.py", *arguments]
    return LightningCLI(Tidy, save_config_callback=None, run=runs)


def written(config: dict[str, Any], file: Path) -> str:
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return str(file)


def printed(file: str, *subcommand: str) -> str:
    arguments = (*subcommand, "--config", file, "--print_config")
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit, match="0"):
        command_line(*arguments, runs=bool(subcommand))
    return out.getvalue()


def go_round(comm: Comm, name: str, folder: Path) -> tuple[ShardOptions, dict[str, Any], bool]:
    """Print a config, build what it says, and print that again."""
    config = config_of(of_class(name, **CHANGED, **OF_THEIR_OWN[name]))
    first = printed(written(config, folder / "config.yaml"))
    again = folder / "again.yaml"
    again.write_text(first, encoding="utf-8")
    strategy = command_line("--config", str(again), runs=False).trainer.strategy
    assert type(strategy).__name__ == name
    init_args = yaml.safe_load(first)["trainer"]["strategy"]["init_args"]
    return strategy.shard_options, init_args, printed(str(again)) == first


def test_what_is_changed_is_every_option() -> None:
    assert tuple(CHANGED) == ShardOptions.names()
    unchanged = asdict(ShardOptions())
    assert not [name for name, value in CHANGED.items() if value == unchanged[name]]


@pytest.mark.parametrize("name", OF_THEIR_OWN)
def test_every_option_of_every_strategy_goes_through_a_config_file(
    tmp_path: Path, name: str
) -> None:
    options, init_args, is_same = run_alone(go_round, name, tmp_path)
    assert options == ShardOptions(**{**CHANGED, "slice_fn_for_dispatch": slice_tensors})
    given = {**CHANGED, **OF_THEIR_OWN[name]}
    assert {option: init_args[option] for option in given} == given
    assert is_same


def refused(comm: Comm, options: dict[str, Any], folder: Path) -> str:
    file = written(config_of(of_class("ShardStrategy", **options)), folder / "config.yaml")
    err = io.StringIO()
    with contextlib.redirect_stderr(err), pytest.raises((SystemExit, ValueError)) as caught:
        command_line("--config", file, runs=False)
    return err.getvalue() or str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_sed": 3}, "'data_sed' is not accepted"),
        ({"data_seed": "three"}, 'key "data_seed"'),
        ({"tail": "uneven"}, "Expected a typing.Literal['pad', 'drop', 'exact']"),
        ({"evaluation_tail": "all"}, 'key "evaluation_tail"'),
        ({"split_batches": 2}, 'key "split_batches"'),
        # What types do not tell, the strategy does.
        (
            {"batches_per_message": 0},
            "`batches_per_message` must be at least 1, got 0.",
        ),
        (
            {"data_seed": 3, "use_seedable_sampler": False},
            "`data_seed` must be left out with use_seedable_sampler=False, got 3.",
        ),
    ],
)
def test_what_is_wrong_in_a_config_file_is_an_error_that_names_it(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    assert message in run_alone(refused, options, tmp_path)


def fit_by_command(comm: Comm, strategy: Any, folder: Path) -> tuple[str, int, Any]:
    config = config_of(strategy, max_epochs=2)
    complete = folder / "complete.yaml"
    complete.write_text(printed(written(config, folder / "config.yaml"), "fit"), encoding="utf-8")
    made = command_line("fit", "--config", str(complete), runs=True)
    return type(made.trainer.strategy).__name__, made.trainer.global_step, dict(made.model.seen)


@pytest.mark.parametrize(
    "strategy",
    ["shard", "shard_spawn", of_class("ShardStrategy", data_seed=3)],
    ids=["by name", "by another name", "by class"],
)
def test_a_run_of_the_command_line_trains(tmp_path: Path, strategy: Any) -> None:
    # A complete config file, as Lightning saves one, with every default of DDP written out.
    name, steps, seen = run_alone(fit_by_command, strategy, tmp_path)
    assert (name, steps) == ("ShardStrategy", 10)
    assert [sorted(chain(*batches)) for batches in seen.values()] == [list(range(9))] * 2
    # The seed of the whole run is that of the order, if there is no other: here they are the same.
    _, _, by_seed = run_alone(fit_by_command, of_class("ShardStrategy", data_seed=3), tmp_path)
    assert seen == by_seed
    assert seen["train 0"] != seen["train 1"]

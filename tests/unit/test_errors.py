"""Every error has the parent that lets a caller catch it without knowing shardplug."""

from __future__ import annotations

import inspect
import warnings

import pytest

from shardplug import errors

BUILT_IN = {
    errors.PlanError: ValueError,
    errors.BatchError: ValueError,
    errors.StateError: ValueError,
    errors.CommError: RuntimeError,
}


@pytest.mark.parametrize(("own", "built_in"), BUILT_IN.items())
def test_an_error_is_caught_as_ours_and_as_the_built_in(
    own: type[errors.ShardplugError], built_in: type[Exception]
) -> None:
    for expected in (errors.ShardplugError, built_in):
        with pytest.raises(expected, match="`index` must be in"):
            raise own("`index` must be in [0, 4), got 4.")


def test_the_table_above_names_every_error() -> None:
    defined = {
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, errors.ShardplugError)
    }
    assert defined == {errors.ShardplugError, *BUILT_IN}


def test_no_error_of_one_kind_is_caught_as_another() -> None:
    for own in BUILT_IN:
        others = tuple(other for other in BUILT_IN if other is not own)
        assert not issubclass(own, others)


def test_the_warning_can_be_filtered_as_a_user_warning() -> None:
    with pytest.warns(UserWarning, match="has no effect"):
        warnings.warn("`data_seed` has no effect.", errors.ShardplugWarning, stacklevel=1)
    assert not issubclass(errors.ShardplugWarning, errors.ShardplugError)

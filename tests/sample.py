"""What ``pytest`` alone runs: every quick test, and some of each slow kind."""

from collections.abc import Sequence
from pathlib import Path

import pytest

#: A folder → the beginnings of the names of its slow tests that stand for all of them.
_KINDS = {
    "crash": (
        "test_append.py",
        "test_errors.py::test_whatever_call_fails_nothing_is_lost_and_work_goes_on[publish-",
        "test_kill.py::test_whatever_call_is_the_last_one_a_restart_converges[merge and publish",
        "test_kill.py::test_whatever_call_is_the_last_one_a_restart_converges[prune",
        "test_power_loss.py::test_whatever_call_is_the_last_before_a_power_loss_a_restart_converges[save]",
    ),
    "engines": ("test_conformance.py",),
    "model": ("test_explore.py", "test_lease_model.py"),
    "multiprocess": (
        "test_explorer_processes.py::test_a_follower_moves_a_link_ends_at_sigterm",
        "test_fault_views.py::test_every_view_shows_a_fault_while_it_lasts[daemon hung",
        "test_mirror.py::test_every_save_arrives_bit_for_bit_by_few_bytes[True-True-True",
        "test_readers.py::test_a_save_that_is_written_again_while_it_is_merged",
        "test_take_over.py::test_after_kill_9_in_a_merge",
        "test_trainer_ranks.py::test_a_killed_rank_costs_its_save_alone",
    ),
    "property": (
        "test_decide_property.py",
        "test_deltas_property.py",
        "test_delta_files_property.py",
        "test_merge_property.py",
        "test_plan_property.py",
        "test_records_property.py",
    ),
    "systemd": ("test_unit_files.py",),
    "unit": (
        "test_alerts.py::test_alerts_last_as_long_as_their_fault[none, no version-a_refused_save",
        "test_leases.py",  # the same on storage that lags
    ),
}
SAMPLE = tuple(f"tests/{folder}/{name}" for folder, names in _KINDS.items() for name in names)
SAMPLE_FILES = tuple({name.partition("::")[0] for name in SAMPLE})


def sampled(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The quick tests and the sample, in their order."""
    return [item for item in items if item.nodeid.startswith(SAMPLE) or not _is_slow(item)]


def _is_slow(item: pytest.Item) -> bool:
    lags = "lagging" in item.name.partition("[")[2]
    return lags or item.get_closest_marker("slow") is not None


def left_out(root: Path) -> str:
    """What ``pytest`` alone leaves out, and how to run it."""
    kinds = []
    for folder in sorted((root / "tests").glob("*/")):
        files = {f"tests/{folder.name}/{path.name}" for path in folder.glob("test_*.py")}
        if files and folder.name != "unit":
            kinds.append(f"{len(files.difference(SAMPLE_FILES))} of {len(files)} {folder.name}")
    return (
        f"left out: of the files in tests/ {', '.join(kinds)}; in tests/unit what is marked as "
        "slow, or lagging. `pytest --all` runs everything, `pytest FOLDER` all of a folder"
    )

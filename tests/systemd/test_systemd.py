"""The unit under real systemd, in a container that the lab boots.

``SYNCD_LAB`` names a folder with ``systemd.sh FOLDER COMMAND...``, which boots systemd as PID 1
with a copy of FOLDER at /opt/work, runs COMMAND there as root and ends with its status; and with
``setup.sh PACKAGE...``, which makes the container. ``.ci/run`` sets it where it finds one.
"""

import importlib.metadata
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.programs import completed

ROOT = Path(__file__).parents[2]
LAB = os.environ.get("SYNCD_LAB", "")
#: What ``guest.py`` imports.
NEEDED = (
    "syncd",
    "explorer_hooks",
    "tests/__init__.py",
    "tests/systemd",
    "docs/systemd.md",
)

Steps = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """What was found in one boot; workers that run side by side share it."""
    if not LAB:
        pytest.skip("SYNCD_LAB names no folder with systemd.sh")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with FileLock(shared / "systemd.lock"):
        found = shared / "systemd.json"
        if not found.exists():
            found.write_text(json.dumps(_boot(tmp_path_factory.mktemp("guest"))))
        return json.loads(found.read_text())


def _boot(folder: Path) -> Steps:
    folder.chmod(0o755)  # the service's user reads it
    for name in NEEDED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (folder / name).parent.mkdir(exist_ok=True)
        copy(ROOT / name, folder / name)
    # By its metadata an installed syncd knows the hooks' commands.
    metadata = folder / "syncd-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: syncd\nVersion: 0\n")
    said = importlib.metadata.distribution("syncd").read_text("entry_points.txt")
    (metadata / "entry_points.txt").write_text(said or "")
    command = [f"{LAB}/systemd.sh", folder, "python3", "-m", "tests.systemd.guest"]
    done = completed(command, timeout=240)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stdout + done.stderr
    return {found.pop("step"): found for found in map(json.loads, lines)}


def test_start_waits_until_the_job_was_looked_at(steps: Steps) -> None:
    assert steps["start"] == {
        "code": 0,
        "has_taken_over": True,
        "Type": "notify",
        "ActiveState": "active",
        "SubState": "running",
        "user": "trainer",
    }


def test_a_reload_changes_the_configuration_and_an_impossible_one_is_refused(steps: Steps) -> None:
    found = steps["reload"]
    assert (found["code"], found["before"], found["same"]) == (0, 3, True)
    assert found["refused"] != 0


def test_an_explorer_beside_a_server_follows_and_leaves_what_it_staged(steps: Steps) -> None:
    found = steps["follow"]
    assert (found["code"], found["staged"], found["user"]) == (0, True, 52001)
    assert found["whole"]
    found = steps["follow stopped"]
    assert (found["code"], found["Result"], found["ActiveState"]) == (0, "success", "inactive")
    assert found["served"]


def test_nothing_outside_the_job_can_be_written_by_the_service(steps: Steps) -> None:
    found = steps["sandbox"]
    assert found["job"]
    assert found["outside"] == []
    assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")
    assert int(found["CapEff"], 16) == int(found["CapBnd"], 16) == 0


def test_killed_in_the_middle_of_a_merge_it_is_started_again_and_converges(steps: Steps) -> None:
    found = steps["kill"]
    assert found["half"]
    assert found["other"]
    assert found["NRestarts"] == "1"


def test_a_hang_is_ended_by_the_watchdog_and_idling_is_none(steps: Steps) -> None:
    assert steps["hang"] == {"watchdog": True, "stacks": True, "NRestarts": "2"}
    assert steps["idle"]["same"]


def test_a_stop_in_the_middle_of_a_merge_leaves_nothing_behind(steps: Steps) -> None:
    assert steps["stop"] == {
        "code": 0,
        "shared_memory": True,  # RemoveIPC= would empty /dev/shm of all that is the trainers'
        "half": True,
        "published": False,
        "leftovers": [],
        "lock": False,
        "Result": "success",
        "ActiveState": "inactive",
    }


def test_what_the_page_says_first_makes_a_service(steps: Steps) -> None:
    found = steps["page"]
    assert found["code"] == 0, found["said"]
    assert found["state"] == ["ActiveState=active", "UnitFileState=enabled", "User=trainer"]


def test_settings_that_cannot_be_are_not_tried_again(steps: Steps) -> None:
    found = steps["settings"]
    assert found["code"] != 0
    assert not found["again"]
    assert (found["ActiveState"], found["ExecMainStatus"]) == ("failed", "2")

"""What real ranks save with torch.distributed.checkpoint comes out as it was before they cut it."""

import shutil
from pathlib import Path

import pytest

from syncd.protocol.errors import SaveNotReadyError
from tests.dcp_ranks import NAMES
from tests.merging import assert_equal, build, loaded, truth
from tests.rank_programs import written_by
from tests.refusals import uncovered


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_by(tmp_path_factory, "tests.dcp_ranks")


@pytest.mark.parametrize("name", NAMES)
def test_a_merge_of_real_ranks_is_the_model_before_wrapping(
    saved: Path, tmp_path: Path, name: str
) -> None:
    # Some in one file, some in one for each tensor.
    manifest = build(saved / name, tmp_path / "out", max_file_size=len(name) % 2 * 10**9 or 200)
    assert manifest.checked == ("stillness" if name.endswith("-hf") else "crc32")
    assert_equal(loaded(tmp_path / "out"), truth(saved / name))


def test_a_file_of_a_rank_that_is_missing_is_an_error_that_names_it(
    saved: Path, tmp_path: Path
) -> None:
    actor = tmp_path / "actor"
    shutil.copytree(saved / "fsdp2-2", actor)
    (actor / "__1_0.distcp").unlink()
    with uncovered(r"__1_0\.distcp is not there, but \.metadata says"):
        build(actor, tmp_path / "out")


def test_a_gap_in_the_numbers_of_hugging_face_files_is_waited_for(
    saved: Path, tmp_path: Path
) -> None:
    # Half of the ranks have nothing, and write nothing: that cannot be told from a missing file.
    for name in ("half_of_the_ranks-4-hf", "fsdp2-4-hf"):
        actor = tmp_path / name
        shutil.copytree(saved / name, actor)
        for path in actor.glob("shard-00001-*"):
            path.unlink()
        with pytest.raises(SaveNotReadyError, match="has no data of rank 1 of 4 yet"):
            build(actor, tmp_path / f"{name}-out")

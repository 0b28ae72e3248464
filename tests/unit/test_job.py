"""The folders that can be a job."""

import shutil
from pathlib import Path

import pytest

from syncd.protocol.errors import JobUnavailableError, RecordError
from syncd.storage.job import Job


def test_a_file_is_no_job(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(JobUnavailableError, match=f"^{file} is not a folder"):
        Job.at(file).open()


@pytest.mark.parametrize(
    "part", ["published", "published/v000001", ".syncd", "global_step_3", "global_step_3/actor"]
)
def test_a_part_of_a_job_is_no_job(tmp_path: Path, part: str) -> None:
    outer = tmp_path / "outer"
    folder = outer / part
    folder.mkdir(parents=True)
    Job.at(outer).open()
    with pytest.raises(JobUnavailableError, match=f"^{folder} is a part of the job {outer}"):
        Job.at(folder).open()
    assert not (folder / ".syncd").exists()
    # Elsewhere the same name is a job's own.
    shutil.rmtree(outer / ".syncd")
    folder.mkdir(parents=True, exist_ok=True)
    Job.at(folder).open()


def test_a_job_in_a_folder_of_jobs_or_of_another_job_is_one(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    Job.at(inner.parent).open()
    Job.at(inner).open()


@pytest.mark.parametrize("content", ["", "{}", '{"protocol": 1}', '{"lease_time": 0}'])
def test_a_format_without_a_lease_time_names_its_file_and_its_remedy(
    tmp_path: Path, content: str
) -> None:
    job = Job.at(tmp_path)
    job.open(lease_time=3)
    job.layout.format.write_text(content)
    said = f"^{job.layout.format} is not a valid format record: .* Copy this file from another job"
    for read in (job.open, job.lease_time):
        with pytest.raises(RecordError, match=said):
            read()

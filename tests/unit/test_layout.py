from collections.abc import Callable
from pathlib import Path

import pytest

from syncd.protocol import layout, names
from tests.refusals import invalid

OTHERS: dict[Callable[[str], object], list[str]] = {
    names.parse_step_folder: [
        "global_step_", "global_step_-1", "global_step_01", "global_step_1 ", "global_step_1\n",
        "global_step_\uff11", "Global_step_1", "global_step_1.tmp", "global_step_" + "9" * 19,
    ],
    names.parse_version_folder: [
        "v1", "v0000001", "v-00001", "000001", "v000001.tmp", "v00001x",
    ],
    names.parse_shard_name: [
        "model_world_size_0_rank_0.pt", "model_world_size_2_rank_01.pt",
        "optim_world_size_2_rank_1.pt", "model_world_size_2_rank_1.pt.tmp", ".model_world_size_2",
    ],
    names.parse_lease_marker: ["", "a", ".s", "a.", "a.b.c", "a/b.c", ".nfs0001"],
    names.parse_delta_folder: ["d1", "v000001", "d0000001", "d00001x", "d-00001", "D000001"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("parse", "name"), [(parse, name) for parse, others in OTHERS.items() for name in others]
)
def test_each_kind_of_name_has_one_form(parse: Callable[[str], object], name: str) -> None:
    assert parse(name) is None


def test_version_folders_sort_as_their_sequences_do() -> None:
    folders = [names.version_folder(sequence) for sequence in (2, 10, 999, 12345)]
    assert folders == sorted(folders)


def test_a_shard_names_its_world_size_and_rank() -> None:
    assert names.parse_shard_name(names.shard_name(64, 63)) == (64, 63)


def test_optimizer_and_extra_state_make_a_step_resumable_and_weights_do_not() -> None:
    assert names.is_resumable_state(names.optimizer_name(2, 1))
    assert names.is_resumable_state(names.extra_state_name(2, 1))
    assert names.is_resumable_state("optim_of\nanother trainer")
    assert not names.is_resumable_state(names.shard_name(2, 1))


@pytest.mark.parametrize(
    ("content", "step"),
    [(b"7", 7), (b"7\n", 7), (b"  7\r\n", 7), (b"-1", -1), (b"0", 0), (b"", None), (b"\n", None),
     (b"7 8", None), (b"7.0", None), (b"+7", None), (b"\x00\x00", None), (b"7\x00", None),
     ("\uff17".encode(), None), (b"9" * 19, None)],
)  # fmt: skip
def test_a_pointer_is_a_bare_number_or_nothing_yet(content: bytes, step: int | None) -> None:
    assert names.parse_pointer(content) == step


@pytest.mark.parametrize("name", ["a", "node-3_rank-0", "_x", "A" * 64])
def test_a_plain_name_is_kept_as_it_is(name: str) -> None:
    assert names.checked_name(name, "the name") == name


@pytest.mark.parametrize("name", ["", "-a", "a.b", "a/b", "..", "é", "a b", "a\n", "A" * 65])
def test_a_name_that_could_not_stand_in_a_path_is_refused_and_named(name: str) -> None:
    with invalid("the explorer's name"):
        names.checked_name(name, "the explorer's name")


def test_all_of_ours_is_below_dot_syncd_published_or_deltas() -> None:
    job = layout.JobLayout(Path("/job"))
    ours = [
        getattr(job, name)
        for name, value in vars(layout.JobLayout).items()
        if isinstance(value, layout.Below) and name not in {"state_pointer", "checkpoint_pointer"}
    ]
    ours += [job.version(1), job.delta(1), job.lease_folder(1), job.session("s"), job.explorer("e")]
    assert len(ours) > 15
    for path in ours:
        assert path.parts[2] in {".syncd", "published", "deltas"}
    assert len(set(ours)) == len(ours)


def test_trainers_find_their_files_where_verl_writes_them() -> None:
    job = layout.JobLayout(Path("/job"))
    assert job.actor(3) == Path("/job/global_step_3/actor")
    assert job.state_pointer == Path("/job/latest_state_dict_iteration.txt")
    assert job.checkpoint_pointer == Path("/job/latest_checkpointed_iteration.txt")

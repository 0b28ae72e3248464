import os
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn

from explorer_hooks.engines.torch_module import TorchModule
from explorer_hooks.reader import LeasedVersion, Reader
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.protocol.errors import SyncdError
from tests.jobs import SmallJob
from tests.merging import assert_equal, full
from tests.refusals import unfit
from trainer_hooks import TrainerHook


class Net(nn.Module):
    """Two layers, tied weights, a buffer that is a number, one that is empty."""

    def __init__(self, *, width: int = 4, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, width, dtype=dtype)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 6, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(12345678901))
        self.register_buffer("none", torch.empty(0, 3))


def filled(seed: int) -> Net:
    torch.manual_seed(seed)
    net = Net()
    with torch.no_grad():
        for value in net.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape))
    return net


def copies(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


@pytest.fixture
def truth() -> Net:
    return filled(1)


@pytest.fixture
def version(job: SmallJob, truth: Net) -> Iterator[LeasedVersion]:
    with TrainerHook(job.root, truth) as hook:
        hook.after_step(1)
    job.run()
    with Reader(job.root, "explorer") as reader:
        yield reader.next_version(0, 0)


def test_a_module_gets_the_trainers_weights_bit_by_bit(version: LeasedVersion, truth: Net) -> None:
    net = filled(2)
    engine = TorchModule(net)
    engine.check(version)
    engine.load(version)
    assert_equal(copies(net), copies(truth))
    assert net.head.weight is net.embed.weight


def test_a_tied_tensor_is_filled_by_the_one_that_is_there(job: SmallJob, truth: Net) -> None:
    state = truth.state_dict()
    del state["head.weight"]
    full(job, state)
    job.point(1)
    with job.daemon() as loop, Reader(job.root, "explorer") as reader:
        loop.run_once()
        version = reader.next_version(0, 0)
        net, untied = filled(2), filled(2)
        TorchModule(net).check(version)
        TorchModule(net).load(version)
        assert_equal(copies(net), copies(truth))
        untied.head.weight = nn.Parameter(untied.embed.weight.clone())
        with unfit(r"head\.weight is not in the version"):
            TorchModule(untied).check(version)


def test_data_pointers_and_parameters_stay(version: LeasedVersion) -> None:
    net = filled(2)
    before = {name: (id(p), p.data_ptr()) for name, p in net.named_parameters()}
    TorchModule(net).load(version)
    assert {name: (id(p), p.data_ptr()) for name, p in net.named_parameters()} == before
    assert all(p.requires_grad for p in net.parameters())


class MoreNames(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2)


class FewerNames(Net):
    def __init__(self) -> None:
        super().__init__()
        del self.norm


@pytest.mark.parametrize(
    ("kind", "said"),
    [(partial(Net, width=5), r"embed.weight is \[6, 4\], but the module has \[6, 5\]"),
     (partial(Net, dtype=torch.float16),
      r"embed.weight is BF16, but the module has torch.float16.*cast=True.*--dtype"),
     (MoreNames, "more.bias is not in the version.*Build the module with .* TorchModule with ren"),
     (FewerNames, "norm.bias is not in the module.*unchanged$")],
)  # fmt: skip
def test_what_does_not_fit_is_said_by_name_and_changes_nothing(
    version: LeasedVersion, kind: Callable[[], Net], said: str
) -> None:
    net = kind()
    before = copies(net)
    with unfit(said):
        TorchModule(net).check(version)
    assert_equal(copies(net), before)


def test_many_differences_are_counted_and_not_all_listed(version: LeasedVersion) -> None:
    with unfit("and 9 more") as raised:
        TorchModule(nn.Sequential(*(nn.Linear(1, 1) for _ in range(4)))).check(version)
    assert str(raised.value).count(";") == 5


def test_a_module_without_memory_is_refused(version: LeasedVersion) -> None:
    with torch.device("meta"):
        net = Net()
    with unfit("meta device"):
        TorchModule(net).check(version)


@pytest.mark.parametrize("size", [-1, -30, 9])
def test_an_error_in_the_middle_of_loading_leaves_the_module_as_it_was(
    version: LeasedVersion, size: int
) -> None:
    net = filled(2)
    before = copies(net)
    path = version.folder / "model.safetensors"
    os.truncate(path, size if size > 0 else path.stat().st_size + size)
    with pytest.raises(SyncdError, match=r"model\.safetensors"):
        TorchModule(net).load(version)
    assert_equal(copies(net), before)


def test_a_file_that_shrinks_after_its_header_was_read_leaves_the_module_as_it_was(
    version: LeasedVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = filled(2)
    before = copies(net)
    path = version.folder / "model.safetensors"
    open_file = version.open_file

    def shrinking(name: str) -> SafetensorsFile:
        """Storage loses the file's end between open and read."""
        file = open_file(name)
        os.truncate(path, file.entries[0].end - 1)  # of tied tensors one is read
        return file

    monkeypatch.setattr(version, "open_file", shrinking)
    with pytest.raises(SyncdError, match="shorter than its header says"):
        TorchModule(net).load(version)
    assert_equal(copies(net), before)


def test_a_module_that_cannot_take_a_copy_is_refused_before_any_is_made(
    job: SmallJob, truth: Net, version: LeasedVersion
) -> None:
    del job, truth
    net = filled(2)
    net.register_buffer("steps", torch.tensor(1))
    net.none = torch.empty(0, 3)
    net.norm.weight = nn.Parameter(torch.zeros(1).expand(4))
    before = copies(net)
    with unfit("share memory"):
        TorchModule(net).check(version)
    assert_equal(copies(net), before)

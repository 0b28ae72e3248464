"""The code that pages tell users to paste: where it is, and which test runs it."""

import re
from collections import Counter
from typing import NamedTuple

from tests.places import ROOT

#: The languages of blocks that someone could paste, and that have to be on the list.
PASTED = frozenset({"sh", "bash", "python", "toml", "yaml", "ini", "json"})
#: All pages whose blocks are on the list.
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        page: below the root of the repository.
        language: as the fence names it.
        number: among those of this language on the page, from 0.
        text: what is in it.
    """

    page: str
    language: str
    number: int
    text: str


def text_of(page: str) -> str:
    """A page, below the root of the repository."""
    return (ROOT / page).read_text(encoding="utf-8")


def fenced(page: str) -> list[Block]:
    """All fenced blocks of a page, in their order."""
    seen: Counter[str] = Counter()
    found = []
    for language, text in _FENCED.findall(text_of(page)):
        found.append(Block(page, language, seen[language], text))
        seen[language] += 1
    return found


def blocks(page: str, language: str = "python") -> list[str]:
    """The blocks of a page in ``docs/``, or of ``../README.md``, in their order."""
    name = page.removeprefix("../") if page.startswith("../") else f"docs/{page}"
    found = [block.text for block in fenced(name) if block.language == language]
    assert found, f"{page} has no {language} blocks"
    return found


# -- the list --------------------------------------------------------------------------------------

#: What is not run, and why. Every ``syncd …`` line of every page is parsed besides.
INSTALLS = "not run: it needs a package index; .ci/run does the same at its beginning"
README = "not run: its paths are somebody's cluster's; .ci/readme runs it with others"
SERVES = "not run: its paths are somebody's cluster's, and it serves for ever"
_ENGINES = "tests/engines/test_page.py"
_STARTED = "tests/multiprocess/test_getting_started.py"
_EXPLORER = "tests/multiprocess/test_explorer_page.py"
_OPERATED = "tests/multiprocess/test_operations_page.py"
_PASTED = "tests/multiprocess/page_ranks.py"
_EXAMPLES = "tests/multiprocess/test_examples.py"

#: Page → language → for each block the test that runs it, a path; or why none does.
BLOCKS: dict[str, dict[str, tuple[str, ...]]] = {
    "README.md": {
        "sh": (INSTALLS, INSTALLS, README, README),
        "python": (_PASTED, "tests/multiprocess/test_pages.py"),
    },
    "docs/broadcast.md": {
        "python": ("tests/multiprocess/test_broadcast_page.py",) * 4,
    },
    "docs/cli.md": {"bash": ("tests/unit/test_cli_commands.py",)},
    "docs/configuration.md": {
        "toml": ("tests/unit/test_configuration.py",),
        "sh": ("tests/unit/test_configuration.py",),
    },
    "docs/dcp.md": {"python": ("tests/multiprocess/dcp_trainer.py",) * 3},
    "docs/doctor.md": {"sh": ("tests/multiprocess/test_doctor.py",) * 2},
    "docs/engines.md": {"python": (*(_ENGINES,) * 3, _EXAMPLES, _ENGINES)},
    "docs/explorer.md": {
        "python": (_EXPLORER,) * 6,
        "sh": ("not run: its paths are a host's; tests/unit/test_explorer_follow.py has others",),
    },
    "docs/faq.md": {"python": ("tests/multiprocess/test_pages.py",)},
    "docs/getting-started.md": {
        "sh": (INSTALLS, *(_STARTED,) * 9),
        "python": (_STARTED,) * 3,
    },
    "docs/kubernetes.md": {
        "sh": (
            "not run: it needs a cluster",
            "not run: it needs a registry; .ci/image builds the same",
            "not run: it needs a cluster",
            "tests/engines/test_ready.py",
        )
    },
    "docs/mirror.md": {
        "sh": ("not run: its bucket is somebody's; tests/multiprocess/test_mirror.py has others",)
        * 2,
    },
    "docs/named-tensors.md": {
        "python": (
            "not run: its paths are somebody's; the last block has others",
            "not run: Megatron-Bridge needs GPUs",
            "not run: DeepSpeed ZeRO-3 needs GPUs",
            "tests/multiprocess/test_stream.py",
        )
    },
    "docs/names.md": {
        "sh": ("not run: its paths are a job's; tests/unit/test_hub_names.py has others",)
    },
    "docs/operations.md": {
        "sh": (_OPERATED,) * 6,
        "yaml": ("tests/unit/test_metrics.py",),
        "python": (_OPERATED,),
    },
    "docs/peft.md": {"python": ("tests/multiprocess/test_trainer_lora_docs.py",) * 2},
    "docs/release.md": {"bash": ("not run: it publishes a release",)},
    "docs/reliability.md": {"bash": ("not run: it needs two mounts of a share; .ci/nfs runs it",)},
    "docs/sglang.md": {
        "sh": ("not run: on a CPU it needs other options; tests/engines/test_sglang.py follows",),
        "python": ("tests/engines/pages.py",),
    },
    "docs/slurm.md": {
        "bash": (
            "not run: it needs Lustre",
            "not run: it needs Slurm",
            *("tests/multiprocess/test_slurm_page.py",) * 2,
        ),
        "python": ("tests/multiprocess/test_slurm_page.py",),
    },
    "docs/synchronizer.md": {"python": ("tests/multiprocess/test_pages.py",)},
    "docs/systemd.md": {
        "sh": (
            "tests/systemd/guest.py",
            "not run: its paths are a user's; tests/systemd/guest.py does the same with others",
        ),
        "toml": ("tests/unit/test_many_jobs.py",),
    },
    "docs/trainer.md": {"python": (_EXAMPLES, _PASTED)},
    "docs/transformers.md": {
        "python": (
            *(_EXAMPLES,) * 2,
            "tests/multiprocess/trl_ranks.py",
            *("tests/multiprocess/loop_ranks.py",) * 2,
        )
    },
    "docs/trinity.md": {"python": ("tests/multiprocess/trinity_ranks.py",) * 3},
    "docs/troubleshooting.md": {
        "sh": ("not run: what it shows depends on what is wrong",),
    },
    "docs/verl.md": {
        "sh": ("tests/multiprocess/test_verl.py",) * 2,
        "python": ("tests/multiprocess/trinity_ranks.py",),
    },
    "docs/vllm.md": {
        "python": (
            "tests/engines/test_vllm.py",
            "tests/engines/test_vllm_adapters.py",
            "tests/engines/pages.py",
        ),
        "sh": (
            *("not run: its ports are a user's; tests/engines/test_whole_loop.py starts the same",)
            * 3,
            "not run: its paths are a user's; tests/systemd/test_unit_files.py prints the same",
        ),
    },
    "docs/web.md": {"sh": (SERVES,)},
}

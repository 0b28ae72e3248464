"""The shape of the product: a name leads to one place, and a module can be read in one sitting."""

import ast
import re
from collections import Counter
from pathlib import Path

from tests.places import ROOT

#: First words of a docstring that say a question instead of naming a thing.
_QUESTIONS = re.compile(r"(?:What|Who|Whether|Which|Where|How|When)")
_PRODUCT = [
    path
    for top in ("syncd", "trainer_hooks", "explorer_hooks")
    for path in (ROOT / top).rglob("*.py")
]
_CLASSES = [
    node
    for path in _PRODUCT
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.ClassDef)
]


def module_docstring(path: Path) -> str:
    """The docstring of a module; empty if it has none."""
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def repeated(names: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [name for name, times in Counter(names).items() if times > 1]


def parameters(node: ast.ClassDef) -> int:
    """The parameters of a class's constructor; 0 for data, which has the fields of its format."""
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    for method in methods:
        if method.name == "__init__":
            return len(method.args.args + method.args.kwonlyargs) - 1
    if not methods or not re.search("dataclass(?!.*frozen)", ast.unparse(node.decorator_list)):
        return 0
    fields = [ast.unparse(each) for each in node.body if isinstance(each, ast.AnnAssign)]
    return sum(not re.search("ClassVar|KW_ONLY|init=False", field) for field in fields)


def test_a_public_class_name_is_defined_once() -> None:
    classes = [("class", node.name) for node in _CLASSES if not node.name.startswith("_")]
    assert classes
    assert repeated(classes) == []


def test_no_constructor_takes_more_than_ten_parameters() -> None:
    assert {node.name: parameters(node) for node in _CLASSES if parameters(node) > 10} == {}


def test_a_module_name_occurs_once_in_a_package() -> None:
    """Commands are named as users type."""
    commands = ROOT / "syncd" / "cli"
    names = [
        (path.relative_to(ROOT).parts[0], path.stem)
        for path in _PRODUCT
        if not path.stem.startswith("__") and path.parent != commands
    ]
    assert repeated(names) == []


def test_no_module_is_longer_than_five_hundred_lines() -> None:
    assert [path for path in _PRODUCT if path.read_text().count("\n") > 500] == []


def test_each_package_says_what_is_in_it() -> None:
    packages = [path for path in _PRODUCT if path.name == "__init__.py"]
    assert [path for path in packages if not module_docstring(path)] == []


def test_a_module_says_first_what_it_is() -> None:
    modules = [*_PRODUCT, *(ROOT / "benchmarks").glob("*.py")]
    asked = {path.name for path in modules if _QUESTIONS.match(module_docstring(path))}
    assert asked == set(), "start with a noun or a verb: 'Exclusive names: …', not 'What …'"

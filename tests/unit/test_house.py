"""The shape of the product: a name leads to one place, and a module can be read in one sitting."""

from __future__ import annotations

import pytest

from tests.english import QUESTIONS, module_docstring, modules
from tests.house import House, traced_merge


@pytest.fixture(scope="module")
def house() -> House:
    return House()


def test_a_public_class_name_is_defined_once(house: House) -> None:
    assert house.repeated_classes() == {}


def test_a_module_name_occurs_once_in_a_package(house: House) -> None:
    assert house.repeated_modules() == {}


def test_no_module_is_longer_than_five_hundred_lines(house: House) -> None:
    assert {name: count for name, count in house.lines.items() if count > 500} == {}


def test_each_package_says_what_is_in_it(house: House) -> None:
    assert [name for name in house.packages if house.docstring(name) is None] == []


def test_a_merge_can_be_traced() -> None:
    merge = traced_merge()
    assert 0 < merge.frames < merge.modules < merge.functions


def test_a_module_says_first_what_it_is() -> None:
    asked = {path.name for path in modules() if QUESTIONS.match(module_docstring(path))}
    assert asked == set(), "start with a noun or a verb: 'Exclusive names: …', not 'What …'"

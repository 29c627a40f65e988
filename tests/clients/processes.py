"""DDP and FSDP2, whose tests start processes and stand elsewhere: which of them there are."""

import ast
from pathlib import Path

from tests.clients.client import Outcome

TESTS = Path(__file__).parents[1]


def linked(works: dict[str, str], refused: dict[str, str]) -> Outcome:
    """Outcome that the tests named `file::test` show; each of them has to exist."""
    for place in (works | refused).values():
        file, test = place.split("::")
        functions = {node.name for node in ast.walk(ast.parse((TESTS / file).read_text())) if hasattr(node, "name")}
        assert test in functions, f"{place} is not there any more"
    cells = [[f"{what} (`tests/{place}`)" for what, place in shown.items()] for shown in (works, refused)]
    return Outcome(*cells)


def ddp() -> Outcome:
    return linked(
        {
            "invertible blocks have the gradients of one process": (
                "test_sharded_modules.py::test_gradients_are_those_of_one_process"
            ),
            "`functional` takes the module apart": "test_sharded_modules.py::test_it_is_that_of_the_plain_module",
        },
        {},
    )


def fsdp2() -> Outcome:
    return linked(
        {
            "invertible blocks in memory that does not grow with depth": (
                "test_sharded_modules.py::test_memory_does_not_grow_with_depth"
            ),
            "the gradients of one process, by parts that are gathered for each call, too": (
                "test_sharded_modules.py::test_gradients_are_those_of_one_process"
            ),
            "statistics of the plain module": "test_sharded_modules.py::test_it_is_that_of_the_plain_module",
        },
        {},
    )

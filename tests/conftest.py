"""The short suite and `--all`, `--device` and `--dtype` for the laws, and examples that are the same on every run."""

import gc
import sys
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import settings

from invfunc.operations.forms import weight_norm
from tests.invertible_cases import assert_same
from tests.mutants.planted import FAULTS

FEW = 4
"""Largest number of examples that a law draws in the short suite."""
FINDERS = {f"tests/{fault.tests.split()[0].partition('[')[0]}" for fault in FAULTS}
"""Tests that find planted faults: what is no file or class of them is taken whole."""
settings.register_profile("all", derandomize=True, deadline=None, max_examples=12, database=None)
settings.register_profile("few", settings.get_profile("all"), max_examples=FEW)
torch.set_num_threads(1)  # there is a process for each core


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="slow tests, pairs of parameters and more examples, too")
    parser.addoption("--rest", action="store_true", help="what --all takes and the short suite does not")
    parser.addoption("--device", default="cpu", help="where the laws are tested, such as cuda")
    parser.addoption("--dtype", default="float64", choices=["float64", "float32"], help="of the laws' numbers")


def pytest_configure(config):
    settings.load_profile("all" if whole(config) or config.getoption("--rest") else "few")
    if torch.device(config.getoption("--device")).type == "cuda":
        torch.backends.cudnn.allow_tf32 = False  # torch's default has three digits in float32


def pytest_collectstart(collector):
    """Modules that a file makes when it is imported have the same numbers, whatever was imported before."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


def pytest_collection_modifyitems(config, items):
    """The examples of the docstrings are quick: one for each public function. Lessons, the longest, come first."""
    items.sort(key=lambda item: item.path.stem != "test_notebooks")
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            item.add_marker("quick")
    if whole(config):
        return
    taken = short_suite(items)
    with_more = {item for item in taken if examples(item) > FEW and not finds_a_fault(item)}
    if config.getoption("--rest"):
        taken = {*items} - taken | with_more
    config.hook.pytest_deselected(items=[item for item in items if item not in taken])
    items[:] = [item for item in items if item in taken]
    for item in with_more if not config.getoption("--rest") else ():
        law = item.function
        law._hypothesis_internal_use_settings = settings(law._hypothesis_internal_use_settings, max_examples=FEW)


def whole(config):
    """Tells whether nothing is left out: with `--all`, and of files and tests that are named."""
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    return config.getoption("--all") or (named and not config.getoption("--rest"))


def short_suite(items):
    """The items of tests that are not slow: all that may find a planted fault, and those in which each value is new."""
    quick = [item for item in items if not item.get_closest_marker("slow")]
    taken, seen = {item for item in quick if finds_a_fault(item)}, defaultdict(set)
    for are_new in (all, any):  # first those of which each value is new
        for item in quick:
            values = {(name, id(value)) for name, value in parameters(item).items()} or {()}
            test = seen[base(item)]
            if are_new(value not in test for value in values):
                test |= values
                taken.add(item)
    return taken


def finds_a_fault(item):
    """True if a planted fault names its test as the one that finds it."""
    return base(item) in FINDERS


def base(item):
    """The name of an item without its parameters."""
    return item.nodeid.partition("[")[0]


def parameters(item):
    """The parameters of an item by their names."""
    return item.callspec.params if hasattr(item, "callspec") else {}


def examples(item):
    """Number of examples that an item draws; 0 if it draws none."""
    own = getattr(getattr(item, "function", None), "_hypothesis_internal_use_settings", None)
    return own.max_examples if own is not None else 0


def pytest_collection_finish():
    """Freezes the objects from before the first test: `gc.collect()` in the laws of memory need not look at them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def settled():
    """Freezes the objects that a file of tests leaves behind, mostly modules of torch that it imported."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def unsaid():
    """Lets a warning that comes once a process come once a test."""
    if (eager := sys.modules.get("invfunc._torch.eager")) is not None:
        eager._said.cache_clear()


@pytest.fixture(scope="session")
def device(request) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(scope="session", autouse=True)
def exact_weight_norm(request):
    """The kernel of torch for CUDA has eight digits in float64, which no law is about."""
    on_a_device = torch.device(request.config.getoption("--device")).type == "cuda"
    with mock.patch("torch._weight_norm", weight_norm) if on_a_device else nullcontext():
        yield


@pytest.fixture(scope="session")
def dtype(request) -> torch.dtype:
    return getattr(torch, request.config.getoption("--dtype"))


@pytest.fixture
def same(dtype, device):
    """`assert_same`, of an invertible block and its function, where the laws are tested."""
    return partial(assert_same, dtype, device)

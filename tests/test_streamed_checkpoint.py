"""streamed: nothing is lost that was done before an error, Ctrl-C or the end of the process."""

import os
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

import invfunc
from invfunc import ArgumentError, ArgumentTypeError, streamed, tree
from invfunc.evaluation import checkpoint as module
from invfunc.testing import assert_trees_close
from invfunc.testing.laws.rows import BOTH, LOSS, ROWS
from tests.strategies import Numbers, seeded
from tests.test_streamed import AT_ONCE, batches, data, linear, losses  # noqa: F401

CASES = [
    (name, form)
    for name, row in ROWS.items()
    if "ekfac" not in name and "gram" not in name and name not in AT_ONCE
    for form in row.forms
]
KILLS = 50


class Lost(Exception):
    pass


def breaking(parts, at, error=Lost):
    """Batches up to one in whose place comes an error."""
    yield from parts[:at]
    raise error


@pytest.fixture
def file(tmp_path):
    return tmp_path / "state.pt"


def gone_on(make, params, parts, file, at, error=Lost):
    """The result of a call that goes on where another one was broken off."""
    with pytest.raises(error):
        streamed(make(), checkpoint=file)(params, breaking(parts, at, error))
    assert file.exists()
    found = streamed(make(), checkpoint=str(file))(params, parts)
    assert not list(file.parent.iterdir())
    return found


def same(found, wanted):
    for x, y in zip(tree.tensors((found,)), tree.tensors((wanted,)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name, form", CASES)
def test_every_statistic_goes_on_as_if_nothing_had_happened(name, form, data, file):  # noqa: F811
    params, x, y = data
    functions = {LOSS: (losses,), BOTH: (linear, F.cross_entropy)}.get(form, (linear,))
    args = (x, y) if len(functions) == 2 or form == LOSS else (x,)
    parts = batches([0, 2, 3, 5, 5], *args)
    make = partial(ROWS[name].make, *functions)
    wanted = streamed(make())(params, parts)
    for at in (2, 5, 6):
        same(gone_on(make, params, parts, file, at), wanted)


class TestBrokenOff:
    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, Lost])
    @pytest.mark.parametrize("where", ["loader", "function", "result"])
    def test_by_what(self, data, file, error, where):  # noqa: F811
        params, x, y = data
        parts, seen = batches(range(1, 9), x, y), []

        def f(params, x, y):
            seen.append(x)
            if where == "function" and len(seen) == 5:
                raise error
            return losses(params, x, y)

        def last(path, g):
            if where == "result" and not file.exists():
                raise error
            return g

        t = invfunc.reduced(invfunc.batch_grad(f), last)
        broken = breaking(parts, 4, error) if where == "loader" else parts
        with pytest.raises(error):
            streamed(t, checkpoint=file)(params, broken)
        before = len(seen)
        assert_trees_close(streamed(t, checkpoint=file)(params, parts), invfunc.batch_grad(losses)(params, x, y), 1e-12)
        assert len(seen) - before == (0 if where == "result" else 5)

    def test_behind_a_batch_before_it_is_noted(self, data, file, monkeypatch):  # noqa: F811
        """As Ctrl-C may come there: that batch is done again, and no other is forgotten."""
        params, *rest = data
        t, parts = invfunc.variance(losses), batches([2, 4, 6], *rest)

        @contextmanager
        def told(title, batches):
            def tell(done, samples):
                if done == 3:
                    raise KeyboardInterrupt

            yield tell

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr("invfunc.evaluation.batches.told_of_parts", told)
            streamed(t, checkpoint=file)(params, parts)
        same(streamed(t, checkpoint=file)(params, parts), streamed(t)(params, parts))

    @pytest.mark.parametrize("at", ["save", "fsync"])
    def test_while_the_file_is_written(self, data, file, monkeypatch, at):  # noqa: F811
        """It is written once more then, as the batches before are done."""
        params, *rest = data
        t, parts = invfunc.variance(losses), batches([2, 4, 6], *rest)
        where, seen = {"save": module.torch, "fsync": module.os}[at], []
        real = getattr(where, at)

        def broken(*args):
            seen.append(args)
            if len(seen) == 3:
                raise KeyboardInterrupt
            return real(*args)

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(where, at, broken)
            streamed(t, checkpoint=file, every=0)(params, parts)
        done = len(torch.load(file)["prints"])
        assert done == (3 if at == "save" else 2)  # of either the file and its folder are synchronised
        same(streamed(t, checkpoint=file)(params, parts), streamed(t)(params, parts))

    def test_several_times(self, data, file):  # noqa: F811
        params, *rest = data
        t, parts = invfunc.kflr(linear, F.cross_entropy), batches(range(1, 9), *rest)
        for at in (3, 4, 9, 2):
            with pytest.raises(Lost):
                streamed(t, checkpoint=file)(params, breaking(parts, at))
        assert_trees_close(streamed(t, checkpoint=file)(params, parts), t(*data), 1e-12)

    def test_before_the_first_batch_there_is_nothing_to_keep(self, data, file):  # noqa: F811
        with pytest.raises(Lost):
            streamed(invfunc.variance(losses), checkpoint=file)(data[0], breaking([], 0))
        assert not file.exists()

    def test_every_so_many_seconds_it_is_written(self, data, file, monkeypatch):  # noqa: F811
        clock, count = iter(range(0, 1000, 2)), []
        monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
        monkeypatch.setattr(module.Checkpoint, "write", lambda self, record: count.append(len(record["prints"])))
        streamed(invfunc.variance(losses), checkpoint=file, every=5)(data[0], batches(range(1, 9), *data[1:]))
        assert count == [3, 6, 9]

    def test_aux_comes_back(self, data, file):  # noqa: F811
        params, *rest = data
        make = partial(invfunc.variance, lambda *args: (losses(*args), {"n": len(args[1]), "x": args[1]}), has_aux=True)
        parts = batches([2, 4, 5], *rest)
        found, aux = gone_on(make, params, parts, file, 3)
        same((found, aux), streamed(make())(params, parts))
        assert [one["n"] for one in aux] == [2, 2, 1, 4]

    def test_aux_that_cannot_be_kept(self, data, file):  # noqa: F811
        t = invfunc.variance(lambda *args: (losses(*args), object()), has_aux=True)
        with pytest.raises(ArgumentError, match="aux is kept in the checkpoint"):
            streamed(t, checkpoint=file)(data[0], batches([2], *data[1:]))

    def test_outputs_in_classes_of_the_callers(self, data, file):  # noqa: F811
        """They are not written, but computed again."""
        params, *rest = data

        class Both(NamedTuple):
            z: torch.Tensor

        make = partial(
            invfunc.diag_ggn, lambda params, x: Both(linear(params, x)), lambda z, y: F.cross_entropy(z.z, y)
        )
        parts = batches([2, 4], *rest)
        assert_trees_close(gone_on(make, params, parts, file, 2), make()(*data), 1e-12)

    def test_the_generator_is_drawn_from_once_a_call(self, data, file):  # noqa: F811
        generators = seeded(), seeded()
        parts = batches([2, 4], *data[1:])
        for g, broken in zip(generators, (parts, breaking(parts, 2)), strict=True):
            t = streamed(invfunc.diag_ggn(linear, F.cross_entropy, mc_samples=1, generator=g), checkpoint=file)
            with pytest.raises(Lost) if broken is not parts else open(os.devnull):
                t(data[0], broken)
        assert torch.equal(*(g.get_state() for g in generators))


class TestAnotherOne:
    """What does not go on from the file of something else says what it is."""

    @pytest.fixture
    def broken(self, data, file):  # noqa: F811
        params, *rest = data
        with pytest.raises(Lost):
            streamed(invfunc.variance(losses, correction=1), checkpoint=file)(
                params, breaking(batches([2, 4], *rest), 2)
            )
        return file

    @pytest.mark.parametrize(
        "t",
        [
            invfunc.sum_grad_squared(losses),
            invfunc.variance(losses, correction=0),
            invfunc.chunked(invfunc.variance(losses, correction=1), 2),
            invfunc.variance(lambda *args: losses(*args), correction=1),
        ],
        ids=["statistic", "option", "chunks", "function"],
    )
    def test_statistic(self, data, broken, t):  # noqa: F811
        with pytest.raises(ArgumentError, match=r"^streamed.*state\.pt'.* another value of the statistic: .*Remove it"):
            streamed(t, checkpoint=broken)(data[0], batches([2, 4], *data[1:]))
        assert broken.exists()

    def test_parameter(self, data, broken):  # noqa: F811
        params, *rest = data
        others = {**params, "w": params["w"].index_fill(0, torch.tensor([1], device=params["w"].device), 0.0)}
        t = streamed(invfunc.variance(losses, correction=1), checkpoint=broken)
        with pytest.raises(ArgumentError, match=r"another value of params\['w'\]"):
            t(others, batches([2, 4], *rest))
        with pytest.raises(ArgumentError, match=r"another value of params\['b'\]: .*, and not none"):
            t({"w": params["w"]}, batches([2, 4], *rest))

    def test_keyword_argument(self, data, broken):  # noqa: F811
        with pytest.raises(ArgumentError, match="another value of keyword arguments"):
            streamed(invfunc.variance(losses, correction=1), checkpoint=broken)(data[0], [data[1:]], scale=2)

    @pytest.mark.parametrize("number", [0, 1])
    def test_batch(self, data, broken, number):  # noqa: F811
        params, x, y = data
        t = streamed(invfunc.variance(losses, correction=1), checkpoint=broken)
        other = x.clone()
        other[2 * number] += 1e-9
        for parts in (batches([2, 4], other, y), batches([2 - (number == 0), 3], x, y)):
            with pytest.raises(ArgumentError, match=rf"batch {number} was another one .*shuffles"):
                t(params, parts)
        with pytest.raises(ArgumentError, match="at least 2 batches, and not 1"):
            t(params, batches([2, 4], x, y)[:1])
        assert_trees_close(t(params, batches([2, 4], x, y)), invfunc.variance(losses, correction=1)(*data), 1e-12)

    def test_file(self, data, file):  # noqa: F811
        t = streamed(invfunc.variance(losses), checkpoint=file)
        for content in (b"", b"something else"):
            file.write_bytes(content)
            with pytest.raises(ArgumentError, match="cannot be read"):
                t(data[0], [data[1:]])
            assert file.read_bytes() == content
        torch.save({"w": torch.ones(2)}, file)
        with pytest.raises(ArgumentError, match="something else than a state"):
            t(data[0], [data[1:]])

    def test_folder(self, data, tmp_path):  # noqa: F811
        with pytest.raises(ArgumentError, match="there is no folder"):
            streamed(invfunc.variance(losses), checkpoint=tmp_path / "a" / "b")(data[0], [data[1:]])

    def test_what_takes_none(self):
        for t in (invfunc.hvp(losses), invfunc.ekfac(linear, F.cross_entropy, generator=seeded())):
            with pytest.raises(ArgumentError, match="more than once, of which no file"):
                streamed(t, checkpoint="state")
        with pytest.raises(ArgumentTypeError, match="has to be a file name"):
            streamed(invfunc.variance(losses), checkpoint=True)
        for every in (-1, float("nan"), "1"):
            with pytest.raises(ArgumentError, match="number of seconds"):
                streamed(invfunc.variance(losses), checkpoint="state", every=every)


class TestFingerprint:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.bool, torch.int8])
    def test_knows_every_entry(self, dtype):
        x = Numbers()(5, 3).to(dtype)
        for i in range(15):
            y = x.clone()
            y.view(-1)[i] = 1 - y.view(-1)[i].to(torch.int64 if dtype == torch.bool else dtype)
            assert module.fingerprint(x) != module.fingerprint(y)

    def test_is_of_numbers_not_of_how_they_lie(self):
        x = Numbers()(5, 3)
        mark = module.fingerprint({"x": x})
        assert mark == module.fingerprint({"x": x.mT.contiguous().mT}) == module.fingerprint({"x": x.clone()})
        others = [{"y": x}, {"x": x.mT}, {"x": x[:4]}, {"x": x.float()}, [x], {"x": x, "n": 1}, {"x": x.view(3, 5)}]
        assert len({mark, *map(module.fingerprint, others)}) == len(others) + 1
        assert module.fingerprint([x[:0], "a", None, object()]) == module.fingerprint([x[:0], "a", None, object()])
        assert module.fingerprint(torch.eye(3).to_sparse()) != module.fingerprint(torch.ones(3, 3).to_sparse())


def test_killed_at_any_moment(tmp_path):
    """A process ends at a random moment, and the next goes on, until the result is there, again and again."""
    memory = Path("/dev/shm")  # where disks do not wait
    with TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        command = [sys.executable, "-m", "tests.streamed_killed", folder, str(KILLS)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[1])
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) >= 2

"""streamed: nothing is lost that was done before an error, Ctrl-C or the end of the process."""

import os
from contextlib import contextmanager
from functools import partial
from io import BytesIO

import pytest
import torch
import torch.nn.functional as F

import invfunc
from invfunc import streamed, tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.evaluation import batches as loaders
from invfunc.evaluation.processes import fingerprint
from invfunc.testing import assert_trees_close
from tests.data_sets.test_streamed import AT_ONCE, batches, data, linear, losses  # noqa: F401
from tests.rows import BOTH, LOSS, ROWS
from tests.strategies import Numbers, seeded

CASES = [
    (name, form)
    for name, row in ROWS.items()
    if name not in AT_ONCE and "gram" not in name  # which has tiles
    for form in row.forms
]


class Lost(Exception):
    pass


def breaking(parts, at, error=Lost):
    """Batches up to one in whose place comes an error."""
    yield from parts[:at]
    raise error


@pytest.fixture
def file(tmp_path):
    return tmp_path / "state.pt"


def sweeps(parts, at, sweep=0, seen=None):
    """A loader that breaks off in one of its sweeps; `seen` counts the batches that each gives."""
    counted = [] if seen is None else seen

    def loader():
        counted.append(0)
        for part in breaking(parts, at) if len(counted) == sweep + 1 else parts:
            counted[-1] += 1
            yield part

    return loader


def gone_on(make, params, parts, file, at, sweep=0):
    """The result of a call that goes on where another one was broken off."""
    with pytest.raises(Lost):
        streamed(make(), checkpoint=file)(params, sweeps(parts, at, sweep))
    assert file.exists()
    seen, safe = [], {*torch.serialization.get_safe_globals()}
    found = streamed(make(), checkpoint=str(file))(params, sweeps(parts, at, -1, seen))
    assert len(seen) == make().sweeps - sweep
    assert {*torch.serialization.get_safe_globals()} == safe  # so that factors can be loaded afterwards, too
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
    for sweep in range(make().sweeps):
        for at in (0, 2, 5, 6)[sweep == 0 :]:
            same(gone_on(make, params, parts, file, at, sweep), wanted)


class TestBrokenOff:
    @pytest.mark.parametrize(
        ("where", "error"), [("loader", SystemExit), ("function", KeyboardInterrupt), ("result", Lost)]
    )
    def test_by_what(self, data, file, where, error):  # noqa: F811
        params, x, y = data
        parts, seen, gone = batches(range(1, 9), x, y), [], []

        def f(params, x, y):
            seen.append(x)
            if where == "function" and len(seen) >= 5 and not gone:
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
        gone.append(error)
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
        where, seen = {"save": loaders.torch, "fsync": loaders.os}[at], []
        real = getattr(where, at)

        def broken(*args):
            if not isinstance(args[-1], BytesIO):  # in which it is tried what can be read again
                seen.append(args)
            if len(seen) == 3:
                raise KeyboardInterrupt
            return real(*args)

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(where, at, broken)
            streamed(t, checkpoint=file, every=0)(params, parts)
        assert len(torch.load(file)["prints"]) == 3  # of the last time
        assert not [path for path in file.parent.iterdir() if path != file]
        same(streamed(t, checkpoint=file)(params, parts), streamed(t)(params, parts))

    def test_aux_comes_back(self, data, file):  # noqa: F811
        params, *rest = data
        make = partial(invfunc.variance, lambda *args: (losses(*args), {"n": len(args[1]), "x": args[1]}), has_aux=True)
        parts = batches([2, 4, 5], *rest)
        found, aux = gone_on(make, params, parts, file, 3)
        same((found, aux), streamed(make())(params, parts))
        assert [one["n"] for one in aux] == [2, 2, 1, 4]

    def test_the_generator_is_drawn_from_once_a_call(self, data, file):  # noqa: F811
        generators = seeded(), seeded()
        parts = batches([2, 4], *data[1:])
        for g, broken in zip(generators, (parts, breaking(parts, 2)), strict=True):
            t = streamed(invfunc.diag_ggn(linear, F.cross_entropy, mc_samples=1, generator=g), checkpoint=file)
            with pytest.raises(Lost) if broken is not parts else open(os.devnull):
                t(data[0], broken)
        assert torch.equal(*(g.get_state() for g in generators))


class TestProducts:
    MADE = (
        lambda: invfunc.hvp(losses),
        lambda: invfunc.ggnvp(linear, F.cross_entropy),
        lambda: invfunc.ggnvp(linear, F.cross_entropy, mc_samples=2, generator=seeded(), fisher="mc"),
        lambda: invfunc.ggnvp(linear, F.cross_entropy, fisher="empirical"),
        lambda: invfunc.ggnvp(linear, F.cross_entropy, blocks=True),
    )

    @pytest.mark.parametrize("make", MADE, ids=lambda make: repr(make()))
    def test_go_on_as_if_nothing_had_happened(self, data, file, make):  # noqa: F811
        params, *rest = data
        parts = batches([0, 2, 3, 5, 5], *rest)
        v = tree.map_tensors(lambda p: Numbers(3)(*[2] * make().lead, *p.shape).to(p), params)
        wanted = streamed(make())(params, v, parts)
        for at in (2, 5, 6):
            with pytest.raises(Lost):
                streamed(make(), checkpoint=file)(params, v, breaking(parts, at))
            same(streamed(make(), checkpoint=file)(params, v, iter(parts)), wanted)
            assert not file.exists()

    def test_another_vector(self, data, file):  # noqa: F811
        params, *rest = data
        t, parts = streamed(invfunc.hvp(losses), checkpoint=file), batches([2, 4], *rest)
        v = tree.map_tensors(torch.ones_like, params)
        with pytest.raises(Lost):
            t(params, v, breaking(parts, 2))
        with pytest.raises(ArgumentError, match=r"^streamed\(hvp.*another value of v\['b'\]"):
            t(params, {**v, "b": 2 * v["b"]}, parts)
        with pytest.raises(ArgumentError, match=r"another value of the product"):
            streamed(invfunc.ggnvp(losses), checkpoint=file)(params, v, parts)
        with pytest.raises(ArgumentError, match=r"another value of the product: hvp.* and not none"):
            streamed(invfunc.variance(losses), checkpoint=file)(params, parts)
        same(t(params, v, parts), streamed(invfunc.hvp(losses))(params, v, parts))


class TestTwoSweeps:
    make = staticmethod(
        lambda: invfunc.together(
            invfunc.batch_grad(losses), invfunc.ekfac(losses, generator=seeded()), invfunc.variance(losses)
        )
    )

    def test_what_needs_one_is_done_in_the_second(self, data, file):  # noqa: F811
        params, *rest = data
        parts = batches([2, 4], *rest)
        wanted = streamed(self.make())(params, parts)
        for at in (0, 1, 3):
            same(gone_on(self.make, params, parts, file, at, sweep=1), wanted)

    @pytest.mark.parametrize("sweep", [0, 1])
    def test_the_batches_are_the_same_in_both(self, data, file, sweep):  # noqa: F811
        params, *rest = data
        parts = batches([2, 4], *rest)
        t = streamed(self.make(), checkpoint=file)
        if sweep:
            with pytest.raises(Lost):
                t(params, sweeps(parts, 1, 1))
        for wrong, text in ((parts[::-1], "batch 0 was another one"), (parts[:2], "at least 3 batches, and not 2")):
            each = iter([parts, wrong][sweep:])
            with pytest.raises(ArgumentError, match=text):
                t(params, lambda each=each: next(each))
            assert file.exists()
            if not sweep:
                file.unlink()
        each = iter([parts, [*parts, parts[0]]][sweep:])
        with pytest.raises(ArgumentError, match="gave 11 samples the second time, and 9 the first time"):
            t(params, lambda: next(each))


class TestAnotherOne:
    """A call that cannot resume from another statistic's file says whose file it is."""

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

    def test_what_takes_none(self, data):  # noqa: F811
        params, *rest = data
        estimate = partial(invfunc.estimate_trace, probes=1, generator=seeded())
        for around in (lambda t: t.linearize, invfunc.linear_operator, estimate):
            for t in (streamed, lambda *args, **kw: invfunc.distributed(streamed(*args, **kw))):
                with pytest.raises(ArgumentError, match="one product, but a linearisation gives many"):
                    around(t(invfunc.hvp(losses), checkpoint="state"))(params, [rest])
        with pytest.raises(ArgumentTypeError, match="has to be a file name"):
            streamed(invfunc.variance(losses), checkpoint=True)
        for every in (-1, float("nan"), "1"):
            with pytest.raises(ArgumentError, match="number of seconds"):
                streamed(invfunc.variance(losses), checkpoint="state", every=every)
        with pytest.raises(ArgumentError, match="Give checkpoint="):
            streamed(invfunc.variance(losses), every=5)


class TestFingerprint:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.bool, torch.int8])
    def test_knows_every_entry(self, dtype):
        x = Numbers()(5, 3).to(dtype)
        for i in range(15):
            y = x.clone()
            y.view(-1)[i] = 1 - y.view(-1)[i].to(torch.int64 if dtype == torch.bool else dtype)
            assert fingerprint(x) != fingerprint(y)

    def test_is_of_numbers_not_of_how_they_lie(self):
        x = Numbers()(5, 3)
        mark = fingerprint({"x": x})
        assert mark == fingerprint({"x": x.mT.contiguous().mT}) == fingerprint({"x": x.clone()})
        others = [{"y": x}, {"x": x.mT}, {"x": x[:4]}, {"x": x.float()}, [x], {"x": x, "n": 1}, {"x": x.view(3, 5)}]
        assert len({mark, *map(fingerprint, others)}) == len(others) + 1
        assert fingerprint([x[:0], "a", None, object()]) == fingerprint([x[:0], "a", None, object()])
        assert fingerprint(torch.eye(3).to_sparse()) != fingerprint(torch.ones(3, 3).to_sparse())

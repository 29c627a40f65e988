"""What the transforms leave as it was: arguments, modes, random numbers, and the module that `functional` takes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad

import invfunc
from invfunc import functional, tree
from invfunc.testing.oracles import assert_trees_close, dense_diag_ggn, loop_batch_grad
from tests.networks import LOSSES, NETWORKS, STATISTICS, chunkings, network, plain, total
from tests.strategies import Numbers

EXACT = 1e-10
statistics = pytest.mark.parametrize("statistic", STATISTICS)


@statistics
class TestLeavesAsTheyWere:
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
    def test_arguments_modes_and_the_generator(self, statistic, mode):
        for called in NETWORKS:
            net, y = network(called, 4), Numbers(1).below(3, 4)
            params = tree.map_leaves(lambda p: p.clone().requires_grad_(), net.params)
            given = tree.tensors((params, net.x, y))
            before = [(x.clone(), x._version, x.requires_grad, x.grad) for x in given]
            for make in chunkings(statistic):
                with mode():
                    modes = self.modes(), rng()
                    make(net.f, LOSSES[0])(params, net.x, y)
                    assert (self.modes(), rng()) == modes
            for x, (value, version, requires_grad, slope) in zip(given, before, strict=True):
                assert torch.equal(x, value) and x._version == version
                assert x.requires_grad == requires_grad and x.grad is slope is None

    def test_also_where_f_fails(self, statistic):
        net, y, modes = network("affine", 4), Numbers(1).below(3, 4), self.modes()

        def f(p, x):
            torch.rand(())
            net.f(p, x)
            torch.set_grad_enabled(False)  # and leaves it so
            raise KeyError("the user's own")

        for make in chunkings(statistic):
            with pytest.raises((KeyError, invfunc.errors.RandomnessError)):
                make(f, LOSSES[0])(net.params, net.x, y)
            assert self.modes() == modes

    @staticmethod
    def modes():
        depth = torch._C._len_torch_function_stack()
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), depth, torch.get_default_dtype()


def rng():
    return torch.get_rng_state().numpy().tobytes()


def rows(x, rate):
    return x * (torch.rand(len(x), 1, dtype=x.dtype) > rate)


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout by position": lambda x: torch.dropout(x, 0.4, True),
    "rand": lambda x: rows(x, 0.4),
    "randn_like": lambda x: x + 0.1 * torch.randn_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x.detach(), 0.6)),
    "in place": lambda x: x * torch.empty(x.shape, dtype=x.dtype).bernoulli_(0.6),
    "uniform_": lambda x: x + torch.zeros(x.shape, dtype=x.dtype).uniform_(-0.1, 0.1),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.9, training=True),
    "dropout1d": lambda x: F.dropout1d(x.unsqueeze(-1), 0.4).squeeze(-1),
    "module": torch.nn.Dropout(0.4),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=1),
    "Normal": lambda x: x + torch.distributions.Normal(torch.zeros_like(x.detach()), 0.1).rsample(),
    "nothing": lambda x: F.dropout(x, 0.4, training=False),
}


def shaken(noise):
    """A network that draws twice."""
    rand = Numbers()
    params = {"a": rand(3, 5), "b": rand(5, 4), "c": rand(4, 3)}

    def f(p, x):
        return noise(noise(x @ p["a"]).tanh() @ p["b"]).tanh() @ p["c"]

    return f, params, rand(6, 3), rand.below(3, 6)


@statistics
class TestRandomNumbers:
    @pytest.mark.parametrize("noise", DRAWS.values(), ids=DRAWS)
    def test_are_those_of_one_call_of_f(self, statistic, noise):
        f, params, x, y = shaken(noise)
        wanted = self.seeded(plain_once(statistic), f, params, x, y)
        torch.manual_seed(3)
        f(params, x)
        after = rng()
        for make in chunkings(statistic):
            if noise is not DRAWS["nothing"] and "over='samples'" in repr(make(f, LOSSES[0])):
                continue  # each chunk draws its own numbers
            assert_trees_close(self.seeded(make, f, params, x, y), wanted, EXACT)
            assert rng() == after

    def test_are_replayed_under_transforms(self, statistic):
        f, params, x, y = shaken(DRAWS["dropout"])

        def composed(make):
            return self.seeded(lambda f, loss: grad(lambda *args: total(make(f, loss)(*args))), f, params, x, y)

        assert_trees_close(composed(STATISTICS[statistic]), composed(plain_once(statistic)), EXACT)

    def test_of_a_generator_are_replayed(self, statistic):
        generator = torch.Generator()

        def noise(x):
            return x + 0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype)

        f, params, x, y = shaken(noise)
        generator.manual_seed(3)
        wanted = plain_once(statistic, generator)(f, LOSSES[0])(params, x, y)
        after = generator.get_state()
        for make in chunkings(statistic):
            t = make(f, LOSSES[0])
            if "over='samples'" not in repr(t):
                generator.manual_seed(3)
                assert_trees_close(t(params, x, y), wanted, EXACT)
                assert torch.equal(generator.get_state(), after)

    @staticmethod
    def seeded(make, f, *args):
        torch.manual_seed(3)
        return make(f, LOSSES[0])(*args)


def plain_once(statistic, generator=torch.default_generator):
    """`plain(statistic)` of a function that may be called once only: it draws."""

    def make(f, loss):
        def formula(p, x, y):
            draws = generator.get_state()

            def again(p, x):
                generator.set_state(draws)
                return f(p, x)

            return plain(statistic)(again, loss)(p, x, y)

        return formula

    return make


class Tied(nn.Module):
    """A decoder that shares the encoder's weight, with a frozen part and a buffer that it reads."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 2), nn.Linear(3, 2)
        self.decoder.weight = self.encoder.weight
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("offset", torch.ones(2))

    def forward(self, x, shift=None, *, scale=1.0):
        h = self.frozen(self.encoder(x).tanh()) + self.offset + self.decoder.bias
        return scale * (h @ self.decoder.weight) + (0 if shift is None else shift)


class TestFunctional:
    @staticmethod
    def state(model):
        return {
            name: (id(x), x._version, x.clone(), x.grad)
            for name, x in [*model.named_parameters(), *model.named_buffers()]
        }

    def assert_untouched(self, model, before):
        after = self.state(model)
        assert after.keys() == before.keys()
        for name, (identity, version, value, slope) in before.items():
            now = after[name]
            assert (identity, version) == now[:2] and torch.equal(value, now[2]) and slope is now[3] is None

    def test_calls_the_module_with_other_parameters(self):
        model, x, shift = Tied().double(), Numbers()(4, 3), Numbers(1)(4, 3)
        before = self.state(model)
        f, params = functional(model)
        assert torch.equal(f(params, x, shift, scale=2.0), model(x, shift, scale=2.0))
        assert torch.equal(f(params, x, shift=shift), model(x, shift))
        doubled = {name: 2 * p for name, p in params.items()}
        assert not torch.equal(f(doubled, x), model(x))
        self.assert_untouched(model, before)

    def test_params_are_detached_aliases_of_what_requires_grad(self):
        model = Tied().double()
        f, params = functional(model)
        assert list(params) == ["encoder.weight", "encoder.bias", "decoder.bias"]  # tied once, frozen not at all
        for name, p in params.items():
            own = model.get_parameter(name)
            assert p.data_ptr() == own.data_ptr() and not p.requires_grad and type(p) is torch.Tensor

    def test_statistics_of_a_module_with_everything(self):
        model, x, y = Tied().double(), Numbers()(4, 3), Numbers(1)(4, 3)
        before = self.state(model)
        f, params = functional(model)

        def loss(p, x, shift, y):
            return F.mse_loss(f(p, x, shift, scale=0.5), y, reduction="none").sum(1)

        args = (params, x, Numbers(2)(4, 3), y)
        assert_trees_close(invfunc.batch_grad(loss)(*args), loop_batch_grad(loss)(*args), EXACT)
        found = invfunc.diag_ggn(f, F.mse_loss)(*args, scale=0.5)
        assert_trees_close(found, dense_diag_ggn(f, F.mse_loss)(*args, scale=0.5), EXACT)
        self.assert_untouched(model, before)

    def test_running_statistics_stay_as_they_were(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
        x, y = Numbers()(5, 3), Numbers(1).below(3, 5)
        f, params = functional(model)
        assert torch.equal(f(params, x), model(x))  # this call of the module itself writes
        before = self.state(model)
        f(params, x)
        grad(lambda p: F.cross_entropy(f(p, x), y))(params)
        for make in chunkings("diag_ggn of f and loss") + chunkings("batch_grad"):
            with pytest.raises(invfunc.errors.SampleAxisError, match="batch_norm|a part of the batch"):
                make(f, LOSSES[0])(params, x, y)
        self.assert_untouched(model, before)
        model.eval()
        for statistic in STATISTICS:
            found = STATISTICS[statistic](f, LOSSES[0])(params, x, y)
            assert_trees_close(found, plain(statistic)(f, LOSSES[0])(params, x, y), EXACT)
        self.assert_untouched(model, before)

    def test_mode_is_that_of_the_module_at_the_call(self):
        model, x = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), torch.ones(2, 3)
        f, params = functional(model)
        torch.manual_seed(0)
        dropped = f(params, x)
        torch.manual_seed(0)
        assert torch.equal(dropped, model(x)) and not torch.equal(dropped, model.eval()(x))
        assert torch.equal(f(params, x), model(x))

    def test_outputs_and_inputs_may_be_trees(self):
        class Heads(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 1)

            def forward(self, batch):
                return {"a": self.a(batch["x"]), "b": (self.b(batch["x"]),)}

        model, batch = Heads().double(), {"x": Numbers()(4, 3), "name": "batch"}
        f, params = functional(model)

        def loss(z, y):
            return F.cross_entropy(z["a"], y) + z["b"][0].square().mean()

        args = (params, batch, Numbers(1).below(2, 4))
        assert_trees_close(invfunc.diag_ggn(f, loss)(*args), dense_diag_ggn(f, loss)(*args), EXACT)

    def test_says_what_it_is(self):
        f, _ = functional(nn.Linear(2, 2))
        assert repr(invfunc.diag_ggn(f, F.mse_loss)) == "diag_ggn(Linear, mse_loss)"

    def test_a_module_without_parameters_has_none(self):
        f, params = functional(nn.Tanh())
        assert params == {} and torch.equal(f(params, torch.ones(2)), torch.ones(2).tanh())

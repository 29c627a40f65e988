"""Eleven architectures of the transformers library, made from small configs without a download, against plain loops."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import invfunc
from invfunc import InvFuncError
from tests.clients.client import Outcome, assert_near

TOKENS = {"vocab_size": 30, "max_position_embeddings": 12}
WIDTHS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
GPT2 = {"vocab_size": 30, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
ELEVEN = ("BERT", "RoBERTa", "DistilBERT", "ALBERT", "GPT-2", "Llama", "T5", "ViT", "ConvNeXt", "Swin", "CLIP")


@dataclass
class Case:
    """A model of one tensor, its inputs and labels, and a loss for each sample."""

    model: nn.Module
    x: torch.Tensor
    y: torch.Tensor
    loss: Callable = staticmethod(lambda z, y: F.cross_entropy(z, y, reduction="none"))


class Logits(nn.Module):
    """Returns the outputs of a library's model as one tensor."""

    def __init__(self, model, pick=lambda out: out.logits, call=lambda model, x: model(x)):
        super().__init__()
        self.model, self.pick, self.call = model, pick, call

    def forward(self, x):
        return self.pick(self.call(self.model, x))


def of_next_token(z, y):
    """The mean over the positions, of each sample."""
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)


def case(name: str) -> Case:
    import transformers as hf

    torch.manual_seed(0)
    tokens, image = torch.randint(3, 30, (3, 6)), torch.randn(3, 3, 8, 8, dtype=torch.float64)
    y, labels = torch.tensor([0, 2, 1]), {"num_labels": 3}
    match name:
        case "BERT":
            model = hf.BertForSequenceClassification(hf.BertConfig(**TOKENS, **WIDTHS, **labels))
        case "RoBERTa":
            model = hf.RobertaForSequenceClassification(hf.RobertaConfig(**TOKENS, **WIDTHS, **labels))
        case "DistilBERT":
            sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
            model = hf.DistilBertForSequenceClassification(hf.DistilBertConfig(**TOKENS, **sizes, **labels))
        case "ALBERT":
            model = hf.AlbertForSequenceClassification(hf.AlbertConfig(**TOKENS, **WIDTHS, **labels, embedding_size=8))
        case "GPT-2":
            model = hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2))
            return Case(Logits(model).double().eval(), tokens, tokens.roll(-1, 1), of_next_token)
        case "Llama":
            model = hf.LlamaForCausalLM(hf.LlamaConfig(**TOKENS, **WIDTHS, num_key_value_heads=1))
            return Case(Logits(model).double().eval(), tokens, tokens.roll(-1, 1), of_next_token)
        case "T5":
            config = hf.T5Config(vocab_size=30, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
            model = hf.T5ForConditionalGeneration(config)
            read = Logits(model, call=lambda model, x: model(input_ids=x, decoder_input_ids=x))
            return Case(read.double().eval(), tokens, tokens.roll(-1, 1), of_next_token)
        case "ViT":
            config = hf.ViTConfig(**WIDTHS, image_size=8, patch_size=4, **labels)
            model, tokens = hf.ViTForImageClassification(config), image
        case "ConvNeXt":
            config = hf.ConvNextConfig(patch_size=2, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, **labels)
            model, tokens = hf.ConvNextForImageClassification(config), image
        case "Swin":
            config = hf.SwinConfig(
                image_size=8, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=2, **labels
            )
            model, tokens = hf.SwinForImageClassification(config), image
        case "CLIP":
            text = {**TOKENS, **WIDTHS, "projection_dim": 8, "bos_token_id": 0, "eos_token_id": 29}
            vision = {**WIDTHS, "image_size": 8, "patch_size": 4, "projection_dim": 8}
            model = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
            tokens[:, -1] = 29
            read = Logits(model, lambda out: out.logits_per_image, lambda model, x: model(*x))
            return Case(read.double().eval(), (tokens, image), torch.arange(3))
    return Case(Logits(model).double().eval(), tokens, y)


def loop(case: Case) -> dict[str, torch.Tensor]:
    """The gradient of each sample: one after the other, by plain autograd."""
    names, leaves = zip(*case.model.named_parameters(), strict=True)
    rows = []
    for n in range(len(case.x)):
        (value,) = case.loss(case.model(case.x[n : n + 1]), case.y[n : n + 1])
        rows.append(torch.autograd.grad(value, leaves, materialize_grads=True))
    return {name: torch.stack(of_leaf) for name, of_leaf in zip(names, zip(*rows, strict=True), strict=True)}


def factors_by_hooks(case: Case) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """B and A of each linear layer: what it reads, and the gradients at what it gives, at all positions and uses."""
    from transformers.pytorch_utils import Conv1D

    linear = {name: m for name, m in case.model.named_modules() if isinstance(m, (nn.Linear, Conv1D))}
    uses: dict[str, list] = {name: [] for name in linear}
    handles = [
        layer.register_forward_hook(lambda layer, args, out, name=name: uses[name].append((args[0].detach(), out)))
        for name, layer in linear.items()
    ]
    total = case.loss(case.model(case.x), case.y).sum()
    for handle in handles:
        handle.remove()
    found = {}
    for name, of_layer in uses.items():
        if of_layer:
            slopes = torch.autograd.grad(total, [out for _, out in of_layer], retain_graph=True, materialize_grads=True)
            a, s = (torch.cat([t.flatten(0, -2) for t in ts]) for ts in ([a for a, _ in of_layer], slopes))
            pair = s.T @ s, a.T @ a / len(a)
            found[f"{name}.weight"] = pair[::-1] if isinstance(linear[name], Conv1D) else pair
    return found


def check(name: str) -> Outcome:
    """Norms, variance and K-factors of an architecture, each right or refused."""
    of = case(name)
    f, params = invfunc.functional(of.model)

    def losses(params, x, y):
        return of.loss(f(params, x), y)

    outcome = Outcome()
    args = params, of.x, of.y
    try:
        norms, variance = invfunc.batch_l2_grad(losses)(*args), invfunc.variance(losses)(*args)
    except InvFuncError as error:
        outcome.refuse("norms, variance", error)
    else:
        each = loop(of)
        assert_near(norms, {name: g.reshape(len(g), -1).square().sum(1) for name, g in each.items()})
        assert_near(variance, {name: g.var(0, correction=0) for name, g in each.items()})
        outcome.works.append("norms, variance")
    for options in ({}, {"unsupported": "diagonal"}):
        try:
            factors = invfunc.kfac(losses, fisher="empirical", **options)(*args)
        except InvFuncError as error:
            outcome.refuse("kfac", error)
            continue
        wanted = factors_by_hooks(of)
        compared = wanted.keys() & factors.keys()  # a head that is tied is in its embedding's place
        for name in compared:
            assert_near(dict(enumerate(factors[name].factors)), dict(enumerate(wanted[name])))
        assert len(compared) >= 2
        outcome.works.append("kfac" + "".join(f"({k}={v!r})" for k, v in options.items()))
        break
    return outcome

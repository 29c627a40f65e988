"""Models of the transformers library, made from small configs without a download, against plain loops."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import invfunc
from invfunc import InvFuncError
from tests.clients.client import Outcome, assert_near

SIZES = {
    30: "vocab_size",
    24: "intermediate_size n_inner ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff hidden_dim d_inner",
    16: "hidden_size n_embd d_model embed_dim dim word_embed_proj_dim embedding_size",
    12: "max_position_embeddings n_positions",
    8: "d_kv head_dim d_head q_lora_rank kv_lora_rank v_head_dim moe_intermediate_size sliding_window image_size",
    4: "rotary_dim qk_rope_head_dim qk_nope_head_dim patch_size num_experts num_local_experts state_size "
    "n_routed_experts",
    2: "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_attention_heads num_heads "
    "n_head n_heads encoder_attention_heads decoder_attention_heads num_experts_per_tok time_step_rank eos_token_id",
    1: "num_key_value_heads n_group topk_group n_groups first_k_dense_replace bos_token_id",
    0: "pad_token_id",
}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8, "patch_size": 2, "num_stages": 2}
SWIN = {"patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2}
OWN = {"deepseek_v2": {"num_key_value_heads": 2}, "deepseek_v3": {"num_key_value_heads": 2, "head_dim": 4}}
OWN |= {"mamba2": {"num_heads": 4}, "funnel": {"block_sizes": [1, 1]}, "resnet": STAGES, "convnext": STAGES}
OWN |= {"convnextv2": STAGES, "swin": SWIN, "swinv2": SWIN}


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


def config(kind: str):
    """A small config: of what it has, the sizes from above; experts are run one by one, as in float64."""
    import transformers as hf

    made = hf.CONFIG_MAPPING[kind]
    alias, known = made.attribute_map, made().to_dict()
    sizes = {alias.get(name, name): size for size, names in SIZES.items() for name in names.split()}
    own = {alias.get(name, name): value for name, value in OWN.get(kind, {}).items()}
    sizes = {name: size for name, size in sizes.items() if name in known} | own
    return made(**sizes, num_labels=3, experts_implementation="eager")


def case(task: str, kind: str) -> Case:
    import transformers as hf

    torch.manual_seed(0)
    tokens, y = torch.randint(3, 30, (3, 6)), torch.tensor([0, 2, 1])
    image = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    if kind == "clip":
        config_of = hf.CLIPConfig(text_config=config("clip_text_model"), vision_config=config("clip_vision_model"))
        read = Logits(hf.CLIPModel(config_of), lambda out: out.logits_per_image, lambda model, x: model(*x))
        return Case(read.double().eval(), (tokens, image), y)
    model = Logits(getattr(hf, f"AutoModelFor{task}").from_config(config(kind)))
    if task == "Seq2SeqLM":
        model.call = lambda model, x: model(input_ids=x, decoder_input_ids=x)
    model.double().eval().requires_grad_(True)
    if task.endswith("LM"):
        return Case(model, tokens, tokens.roll(-1, 1), of_next_token)
    return Case(model, image if task == "ImageClassification" else tokens, y)


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


def check(task: str, kind: str) -> Outcome:
    """Norms, variance and K-factors of a kind of model, each right or refused."""
    of = case(task, kind)
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
        there = {name: K.factors for name, K in factors.items() if K.origin.reached and len(K.factors) == 2}
        compared = wanted.keys() & there.keys()  # a head that is tied is in its embedding's place
        for name in compared:
            assert_near(dict(enumerate(there[name])), dict(enumerate(wanted[name])))
        assert compared
        outcome.works.append("kfac" + "".join(f"({k}={v!r})" for k, v in options.items()))
        break
    return outcome

"""``nn.MultiheadAttention`` with a linear for each of its products: a walk sees them called, and surgery can replace them."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flysurgery.walker.linears import has_own_forward, is_hooked


class SeparateAttention(nn.Module):
    """Computes what an ``nn.MultiheadAttention`` computes, by calling its linears ``q``, ``k``, ``v`` and ``out_proj``.

    It takes the same arguments, but no nested tensors, and gives the same results. The weights of ``q``, ``k`` and ``v`` are views of
    those of ``attention``; all else is shared with it. ``in_proj_weight`` and ``in_proj_bias`` are joined at each read.
    """

    _qkv_same_embed_dim = False  # nn.TransformerEncoderLayer then calls the module, where else it would read the weights

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.embed_dim, self.kdim, self.vdim = attention.embed_dim, attention.kdim, attention.vdim
        self.num_heads, self.head_dim = attention.num_heads, attention.head_dim
        self.dropout, self.batch_first = attention.dropout, attention.batch_first
        size, together, bias = self.embed_dim, attention.in_proj_weight, attention.in_proj_bias
        apart = (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
        for index, name in enumerate("qkv"):
            rows = slice(index * size, (index + 1) * size)
            weight = _view(apart[index], slice(None)) if together is None else _view(together, rows)
            linear = nn.Linear(weight.shape[1], size, bias=bias is not None, device="meta")
            linear.weight = weight
            if bias is not None:
                linear.bias = _view(bias, rows)
            self.add_module(name, linear)
        self.out_proj = attention.out_proj
        self.train(attention.training)

    def forward(
        self,
        query: Tensor,  # shape: (batch, queries, embed_dim) if batch_first, (queries, batch, embed_dim), or (queries, embed_dim)
        key: Tensor,  # shape: as query, with keys in place of queries and kdim of embed_dim
        value: Tensor,  # shape: as key, with vdim
        key_padding_mask: Tensor | None = None,  # shape: (batch, keys) or (keys,); True or -inf for keys to leave out
        need_weights: bool = True,
        attn_mask: Tensor | None = None,  # shape: (queries, keys) or (batch * num_heads, queries, keys)
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # the result, of the shape of query; shape: (batch, queries, keys), or a matrix for each head
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal says what attn_mask is; give the mask too")
        batched = query.dim() == 3
        q, k, v = (self._heads(linear(x), batched) for linear, x in zip(self._linears(), (query, key, value), strict=True))
        mask = self._mask(attn_mask, key_padding_mask, q)
        dropout, weights = self.dropout if self.training else 0.0, None
        if need_weights:
            scores = (q * self.head_dim**-0.5) @ k.mT
            weights = functional.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            result = weights @ v
        else:
            causal = is_causal and key_padding_mask is None
            result = functional.scaled_dot_product_attention(q, k, v, None if causal else mask, dropout, causal)
        result = self.out_proj(result.transpose(1, 2).flatten(2))
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
        if not batched:
            return result[0], None if weights is None else weights[0]
        return result if self.batch_first else result.transpose(0, 1), weights

    def _heads(self, x: Tensor, batched: bool) -> Tensor:  # shape: (batch, num_heads, tokens, head_dim)
        x = x.unflatten(-1, (self.num_heads, -1))
        if not batched:
            return x.transpose(0, 1)[None]
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, like: Tensor) -> Tensor | None:
        """What is added to the scores; its shape fits theirs."""
        masks = []
        if attn_mask is not None:
            masks.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (-1, self.num_heads)))
        if key_padding_mask is not None:
            masks.append(key_padding_mask.view(-1, 1, 1, key_padding_mask.shape[-1]))
        added = [like.new_zeros(mask.shape).masked_fill(mask, float("-inf")) if mask.dtype == torch.bool else mask for mask in masks]
        return sum(added[1:], added[0]) if added else None

    @property
    def in_proj_weight(self) -> Tensor | None:  # shape: (3 * embed_dim, embed_dim)
        """The matrices of query, key and value, one below the other; None where keys or values have another size. Writes are lost."""
        return torch.cat([linear.weight for linear in self._linears()]) if self.kdim == self.vdim == self.embed_dim else None

    @property
    def in_proj_bias(self) -> Tensor | None:  # shape: (3 * embed_dim,)
        """The biases of query, key and value, joined; None where there are none. Writes are lost."""
        biases = [linear.bias for linear in self._linears() if linear.bias is not None]
        return torch.cat(biases) if biases else None

    def _linears(self) -> list[Any]:
        return [self.get_submodule(name) for name in "qkv"]

    def copy_views(self) -> None:
        """Give the linears that are still dense memory of their own, so that the attention that they came from can be freed."""
        for linear in self._linears():
            for name, parameter in linear.named_parameters() if type(linear) is nn.Linear else ():
                setattr(linear, name, nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad))

    def joined(self) -> nn.MultiheadAttention:
        """The ``nn.MultiheadAttention`` that computes the same, where all four are linears again."""
        linears, together, bias = self._linears(), self.in_proj_weight, self.in_proj_bias
        sizes: dict[str, Any] = {"kdim": self.kdim, "vdim": self.vdim, "batch_first": self.batch_first}
        new = nn.MultiheadAttention(self.embed_dim, self.num_heads, self.dropout, bias is not None, device="meta", **sizes)
        if together is not None:
            is_trained = any(linear.weight.requires_grad for linear in linears)
            new.in_proj_weight = nn.Parameter(together.detach(), requires_grad=is_trained)
        else:
            new.q_proj_weight, new.k_proj_weight, new.v_proj_weight = (linear.weight for linear in linears)
        if bias is not None:
            new.in_proj_bias = nn.Parameter(bias.detach(), requires_grad=any(linear.bias.requires_grad for linear in linears))
        if type(self.out_proj) is nn.Linear:  # in the place of one that was replaced; torch's own is of another class
            new.out_proj.weight, new.out_proj.bias = self.out_proj.weight, self.out_proj.bias
        else:
            new.out_proj = self.out_proj
        return new.train(self.training)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"


def _view(parameter: nn.Parameter, rows: slice) -> nn.Parameter:
    return nn.Parameter(parameter.detach()[rows], requires_grad=parameter.requires_grad)


def separated(model: nn.Module, linears: Iterable[str] | None = None) -> dict[str, SeparateAttention]:
    """New modules for the attentions of ``model``, under all names that these have; the model stays as it is.

    With ``linears`` for those that must be separate so that these are there, and called: an attention's own, and those beside it in an
    ``nn.TransformerEncoderLayer``, which reads their weights otherwise. Attentions stay together that have hooks, parametrizations or a
    forward of their own, that add keys and values, that share a parameter with another module, or are the model.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    owners = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    parents = modules if linears is None else {fqn.rpartition(".")[0] for fqn in linears} & modules.keys()
    beside = [getattr(modules[fqn], "self_attn", None) for fqn in parents if isinstance(modules[fqn], nn.TransformerEncoderLayer)]
    wanted = {*beside, *(modules[fqn] for fqn in parents)} - {model}
    new = {
        module: SeparateAttention(module)
        for module in wanted
        if type(module) is nn.MultiheadAttention
        and not (has_own_forward(module) or is_hooked(module) or hasattr(module, "parametrizations"))
        and module.bias_k is None
        and not module.add_zero_attn
        and all(owners[id(parameter)] == 1 for parameter in module.parameters(recurse=False))
    }
    return {fqn: new[module] for fqn, module in modules.items() if isinstance(module, nn.MultiheadAttention) and module in new}


def modules_with_separated(model: nn.Module, linears: Iterable[str] | None = None) -> dict[str, nn.Module]:
    """All modules of ``model`` under all their names, and those of the attentions that ``separated`` gives."""
    found = dict(model.named_modules(remove_duplicate=False))
    for fqn, attention in separated(model, linears).items():
        found |= {f"{fqn}.{name}": linear for name, linear in attention.named_children()}
    return found


def separating(model: nn.Module) -> Callable[[nn.Module], None]:
    """What makes those attentions of a ``shadow`` of ``model`` separate that can be so in ``model``: a shadow has no hooks."""

    def separate(double: nn.Module) -> None:
        names = separated(model).keys()
        for fqn, new in separated(double).items():
            if fqn in names:
                parent, _, name = fqn.rpartition(".")
                double.get_submodule(parent)._modules[name] = new

    return separate

"""Multi-head attention as torch.nn has it, on attnkit's kernels.

out = concat_h(softmax(q_h k_h^T / sqrt(d) + mask) v_h) W_o^T + b_o,  q = x W_q^T + b_q and so on.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnkit import masks
from attnkit._checks import seed_tensor
from attnkit.functional import attention, attention_weights


class MultiheadAttention(nn.MultiheadAttention):
    """Drop-in for `torch.nn.MultiheadAttention`, with its constructor, parameters and state_dict.

    Every mode (training, eval, no gradients, padding, dropout, weights) takes one path, through
    `attnkit.attention`; the output never comes from the returned weights.  Where torch gives NaN
    there is a number: a query that sees no key attends to nothing, so that its row of the output
    is ``out_proj.bias``, and its weights are 0.

    Masks are those of torch.nn: boolean ``True`` = hidden (the reverse of `attnkit.attention`),
    floats are added to the scores.  The two masks may differ in dtype.  Prefer a boolean
    ``key_padding_mask``: hidden keys are then skipped, whereas a float one costs a dense bias.

    Other than torch's, the module calls ``out_proj``, so that hooks on it run.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from ``query`` to ``key`` and ``value``.

        Args:
            query: ``[L, N, E]``, with ``batch_first`` ``[N, L, E]``, or unbatched ``[L, E]``.
            key, value: ``[S, N, kdim]`` and ``[S, N, vdim]``, laid out as the query.
            key_padding_mask: ``[N, S]`` or unbatched ``[S]``; bool (``True`` = hidden) or float
                (added).
            need_weights: return the weights, too; they are computed apart and take O(L S) memory.
            attn_mask: ``[L, S]`` or ``[N * num_heads, L, S]`` (unbatched ``[num_heads, L, S]``);
                bool or float as above.  A float mask that requires a gradient gets one.
            average_attn_weights: average the returned weights over the heads.
            is_causal: the promise that ``attn_mask``, which has to be given, is the causal mask.
                Key j is then hidden from query i < j in any case; the mask itself is read only with
                ``need_weights``, when it requires a gradient, or when ``add_bias_kv`` or
                ``add_zero_attn`` append keys.

        Returns:
            The output, laid out as the query, and the weights after dropout, None if not needed:
            ``[N, L, S]`` averaged, ``[N, num_heads, L, S]`` per head, unbatched without N.
            ``add_bias_kv`` and ``add_zero_attn`` make this S one greater each.

        Raises:
            AssertionError: ranks, widths or mask dtypes that torch.nn does not take.
            RuntimeError: a mask or a batch of the wrong size; ``is_causal`` without ``attn_mask``.
            NotImplementedError: nested tensors.
        """
        batched, q, k, v, mask, bias = self._prepare(
            query, key, value, key_padding_mask, need_weights, attn_mask, is_causal
        )
        dropout_p = self.dropout if self.training else 0.0
        seed = None
        if need_weights and dropout_p > 0.0:
            # output and weights have to agree on what was dropped
            seed = seed_tensor(None, q)

        out = attention(q, k, v, mask=mask, bias=bias, dropout_p=dropout_p, seed=seed)
        weights = None
        if need_weights:
            weights = attention_weights(q, k, mask=mask, bias=bias, dropout_p=dropout_p, seed=seed)
            if average_attn_weights:
                weights = weights.mean(dim=1)
            weights = weights if batched else weights.squeeze(0)
        return self._merge_heads(out, batched), weights

    def attention_inputs(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> dict[str, Any]:
        """For :mod:`attnkit.recording`: what ``forward`` would give `attnkit.attention_weights`."""
        _, q, k, _, mask, bias = self._prepare(
            query, key, value, key_padding_mask, True, attn_mask, is_causal
        )
        kind = "self" if query is key else "cross"
        return {"kind": kind, "query": q, "key": k, "mask": mask, "bias": bias}

    def _prepare(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> tuple[bool, Tensor, Tensor, Tensor, masks.Mask | None, Tensor | None]:
        """Whether the input is batched; q [N, H, L, D], k, v [N, H, S, D] (views); mask, bias."""
        batched = self._check(query, key, value, key_padding_mask, attn_mask)
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "Need attn_mask if specifying the is_causal hint: attn_mask is None, expected the "
                "causal mask, as Transformer.generate_square_subsequent_mask(L) makes it"
            )
        q, k, v = self._project(query, key, value)
        k, v = self._append_keys(k, v)
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        mask, bias = self._canonical_masks(
            q, k, attn_mask, key_padding_mask, is_causal, need_weights
        )
        return batched, q, k, v, mask, bias

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
    ) -> bool:
        """Whether the input is batched; raise if the arguments do not fit each other."""
        for name, x in (("query", query), ("key", key), ("value", value)):
            refuse_nested(name, x)
        check_mask_dtype("key_padding_mask", key_padding_mask)
        check_mask_dtype("attn_mask", attn_mask)

        rank = query.dim()
        if rank not in (2, 3):
            raise AssertionError(f"query should be unbatched 2D or batched 3D, found {rank}-D")
        batched = rank == 3
        for name, x, width in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            if x.dim() != rank:
                raise AssertionError(f"{name} is {x.dim()}-D, expected {rank}-D as the query is")
            if x.shape[-1] != width:
                raise AssertionError(
                    f"was expecting embedding dimension of {width} for {name}, found {x.shape[-1]}"
                )
        if key.shape[:-1] != value.shape[:-1]:
            raise AssertionError(
                f"key has sequence and batch dims {tuple(key.shape[:-1])}, "
                f"value has {tuple(value.shape[:-1])}: expected the same"
            )
        length_dim = 1 if batched and self.batch_first else 0
        batch = query.shape[1 - length_dim] if batched else 1
        if batched and key.shape[1 - length_dim] != batch:
            raise RuntimeError(
                f"key has batch size {key.shape[1 - length_dim]}, query has {batch}: expected the "
                f"same (batch_first is {self.batch_first})"
            )
        lq, lk = query.shape[length_dim], key.shape[length_dim]

        if key_padding_mask is not None:
            padding_shape = (batch, lk) if batched else (lk,)
            if tuple(key_padding_mask.shape) != padding_shape:
                raise AssertionError(
                    f"Expected key_padding_mask of shape {padding_shape} (batch, keys), "
                    f"found {tuple(key_padding_mask.shape)}"
                )
        if attn_mask is not None:
            if attn_mask.dim() not in (2, 3):
                raise AssertionError(
                    f"Expected attn_mask to be 2-D or 3-D, found {attn_mask.dim()}-D"
                )
            expected = (lq, lk) if attn_mask.dim() == 2 else (batch * self.num_heads, lq, lk)
            if tuple(attn_mask.shape) != expected:
                # torch's own types: an unbatched 3-D mask is asserted, all others are RuntimeErrors
                error = RuntimeError if batched or attn_mask.dim() == 2 else AssertionError
                raise error(
                    f"The shape of the {attn_mask.dim()}D attn_mask is {attn_mask.shape}, "
                    f"but should be {expected}."
                )
        return batched

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[N, H, L, D]`` and k, v ``[N, H, S, D]``, by as few products as the inputs allow."""
        if self.in_proj_weight is not None:
            weight, bias, e = self.in_proj_weight, self.in_proj_bias, self.embed_dim
            if query is key and key is value:
                q, k, v = self._split_heads(F.linear(query, weight, bias), 3)
                return q, k, v
            if key is value:
                w_q, w_kv = weight.split([e, 2 * e])
                b_q, b_kv = (None, None) if bias is None else bias.split([e, 2 * e])
                (q,) = self._split_heads(F.linear(query, w_q, b_q), 1)
                k, v = self._split_heads(F.linear(key, w_kv, b_kv), 2)
                return q, k, v
            weights = weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (
            self._split_heads(F.linear(x, w, b), 1)[0]
            for x, w, b in zip((query, key, value), weights, biases, strict=True)
        )
        return q, k, v

    def _split_heads(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """``parts`` views ``[N, H, L, D]`` of a projection of width ``parts * E``."""
        x = x.unflatten(-1, (parts, self.num_heads, self.head_dim))
        if x.dim() == 4:  # unbatched
            x = x.unsqueeze(0)
            order = (0, 2, 1, 3)
        else:
            order = (0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3)
        # parted before the heads move, so that the gradient is put together by one copy
        return tuple(part.permute(order) for part in x.unbind(2))

    def _merge_heads(self, out: Tensor, batched: bool) -> Tensor:
        """The output projection of ``[N, H, L, D]``, laid out as the query was."""
        if not batched:
            out = out.squeeze(0).transpose(0, 1)  # [L, H, D]
        elif self.batch_first:
            out = out.transpose(1, 2)
        else:
            out = out.permute(2, 0, 1, 3)
        return self.out_proj(out.flatten(-2))

    def _append_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v ``[N, H, S, D]``, then the keys of ``add_bias_kv`` and ``add_zero_attn``."""
        if self.bias_k is not None and self.bias_v is not None:
            shape = (k.shape[0], self.num_heads, 1, self.head_dim)
            rows = (x.to(k.dtype).view(shape[1:]).expand(shape) for x in (self.bias_k, self.bias_v))
            k, v = (torch.cat(pair, dim=2) for pair in zip((k, v), rows, strict=True))
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return k, v

    def _canonical_masks(
        self,
        q: Tensor,
        k: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
        need_weights: bool,
    ) -> tuple[masks.Mask | None, Tensor | None]:
        """The masks as `attnkit.attention` takes them: what is visible, and what is added."""
        extra = int(self.bias_k is not None) + int(self.add_zero_attn)  # keys that all queries see
        visible: list[masks.Mask] = []
        added: list[Tensor] = []

        if is_causal:
            if extra:
                lq, lk = q.shape[2], k.shape[2] - extra
                band = torch.ones(lq, lk, dtype=torch.bool, device=q.device).tril()
                visible.append(masks.from_dense(_append(band, extra, True)))
            else:
                visible.append(masks.causal())
            if not (need_weights or extra or (attn_mask is not None and attn_mask.requires_grad)):
                attn_mask = None
        if attn_mask is not None:
            if attn_mask.dim() == 3:  # the batch is outermost
                attn_mask = attn_mask.unflatten(0, (q.shape[0], self.num_heads))
            if attn_mask.dtype == torch.bool:
                visible.append(masks.from_dense(_append(~attn_mask, extra, True)))
            else:
                added.append(_append(attn_mask, extra, 0.0))
        if key_padding_mask is not None:
            if key_padding_mask.dtype == torch.bool:
                visible.append(masks.key_padding(_append(~key_padding_mask, extra, True)))
            else:
                added.append(_append(key_padding_mask, extra, 0.0)[:, None, None])

        mask = functools.reduce(operator.and_, visible) if visible else None
        bias = functools.reduce(operator.add, added) if added else None
        return mask, bias


def _append(mask: Tensor, columns: int, value: float) -> Tensor:
    return F.pad(mask, (0, columns), value=value) if columns else mask


def check_mask_dtype(name: str, mask: Tensor | None) -> None:
    """Raise AssertionError, as torch.nn does, unless the mask is boolean or floating."""
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise AssertionError(
            f"only bool and floating types of {name} are supported, found {mask.dtype}"
        )


def refuse_nested(name: str, x: Tensor) -> None:
    """Raise NotImplementedError for a nested tensor."""
    if x.is_nested:
        raise NotImplementedError(
            f"{name} is a nested tensor; attnkit.nn takes a padded tensor and a key padding mask"
        )

"""PyTorch's own samples (OpInfo and ModuleInfo, from its wheel) on attnkit's functions and modules.

    pytest -s tests/test_torch_samples.py

prints how many samples every check ran.  What is left out stands in SKIPPED, with its reason.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attnkit
from attnkit.integrations.torch import override_sdpa
from attnkit.nn import replace_modules

pytest.importorskip("expecttest", reason="PyTorch's test library needs it: attnkit[test]")
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

SKIPPED = {
    "memory_format": "no channels_last for sequences; PyTorch skips it for torch.nn's, too",
    "dropout values": "attnkit drops other weights than PyTorch; those samples are compared with "
    "themselves under one seed, and by gradcheck",
    "jit": "TorchScript does not compile attnkit's Python",
    "out=": "neither function has it",
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NEAR = {
    torch.float64: {"rtol": 1e-7, "atol": 1e-7},
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
}
OURS = attnkit.scaled_dot_product_attention
INFOS = {
    info.module_cls.__name__: info
    for info in module_db
    if info.module_cls is nn.MultiheadAttention
    or info.module_cls.__name__.startswith("Transformer")
}
SDPA_INFO = next(op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
MHA_INFO = next(op for op in op_db if op.name == "nn.functional.multi_head_attention_forward")

counts: Counter[str] = Counter()

pytestmark = [
    pytest.mark.filterwarnings("ignore:Support for mismatched"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


@pytest.fixture(scope="module", autouse=True)
def _printed():
    yield
    print()
    for check, count in counts.items():
        print(f"{check:55} {count:5} samples")
    print(f"{sum(counts.values())} in all; left out:")
    for what, reason in SKIPPED.items():
        print(f"  {what}: {reason}")


def test_few_are_left_out():
    assert len(SKIPPED) <= 8
    assert set(INFOS) == {
        "MultiheadAttention",
        "Transformer",
        "TransformerDecoderLayer",
        "TransformerEncoder",
        "TransformerEncoderLayer",
    }


def seeded(f):
    """f from the same state of the generator every time."""

    def call(*args, **options):
        torch.manual_seed(11)
        return f(*args, **options)

    return call


def wanting(tree):
    """The float tensors of some arguments that want a gradient, in order."""
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]


def first(out):
    return out[0] if isinstance(out, tuple) else out


def results(f, args, kwargs, parameters=()):
    """The output of f, and its gradients by the arguments and the parameters."""
    out = first(f(*args, **kwargs))
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype)
    leaves = [*wanting((args, kwargs)), *parameters]
    return [out, *torch.autograd.grad(out, leaves, up, allow_unused=True)]


def doubled(tree):
    """The same arguments in float64."""
    return torch.utils._pytree.tree_map_only(
        torch.Tensor,
        lambda t: (
            t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        ),
        tree,
    )


def naive(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Attention step by step in the dtype of its inputs: what halves are measured by."""
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        s = s.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        s = s + attn_mask
    return s.softmax(-1) @ v


def compare(got, want, dtype):
    """Each of `got` near `want`."""
    for x, y in zip(got, want, strict=True):
        if y is None:
            assert x is None
            continue
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        torch.testing.assert_close(x, y, **NEAR[dtype])


class Errors:
    """How far halves are from float64, beside attention step by step in the same dtype.

    One small tensor says little (roundings may happen to cancel), so it is summed over the samples.
    """

    def __init__(self):
        self.squares = [0.0, 0.0]

    def add(self, ours, theirs, truth):
        for x, y, exact in zip(ours, theirs, truth, strict=True):
            if exact is None or not exact.numel():
                continue
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            scale = exact.abs().max().clamp(min=1e-3)
            for i, t in enumerate((x, y)):
                assert t.isfinite().all()
                self.squares[i] += float(((t.double() - exact) / scale).square().mean())

    def check(self):
        ours, theirs = self.squares
        assert 0 < ours <= 4 * theirs, (ours, theirs)  # twice the error


# ------------------------------------------------------------- the function


def samples(info, dtype, requires_grad=True):
    torch.manual_seed(3)
    found = list(info.sample_inputs("cpu", dtype, requires_grad=requires_grad))
    return [(s, {"args": (s.input, *s.args), "kwargs": s.kwargs}) for s in found]


@pytest.mark.parametrize("noncontiguous", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sdpa_as_torchs(dtype, noncontiguous, monkeypatch):
    if dtype not in NEAR:
        monkeypatch.setattr(F, "scaled_dot_product_attention", naive)
    errors = Errors()
    for sample, _ in samples(SDPA_INFO, dtype):
        s = sample.noncontiguous() if noncontiguous else sample
        args, kwargs = (s.input, *s.args), s.kwargs
        if kwargs.get("dropout_p"):
            once, again = seeded(OURS)(*args, **kwargs), seeded(OURS)(*args, **kwargs)
            assert torch.equal(once, again)
            assert not torch.equal(once, OURS(*args, **kwargs))
        else:
            theirs = F.scaled_dot_product_attention
            got, want = results(OURS, args, kwargs), results(theirs, args, kwargs)
            if dtype in NEAR:
                compare(got, want, dtype)
            else:
                errors.add(got, want, results(theirs, *doubled((args, kwargs))))
        counts[f"SDPA {'non-contiguous' if noncontiguous else 'forward, backward'} {dtype}"] += 1
    if dtype not in NEAR:
        errors.check()


def sdpa_gradients(check, stride=1, **options):
    name = f"SDPA {check.__name__}{' slow mode' if not options['fast_mode'] else ''}"
    for _, call in samples(SDPA_INFO, torch.float64)[::stride]:
        tensors = [t.detach().requires_grad_() for t in call["args"]]
        mask = call["kwargs"].get("attn_mask")
        rest = {k: v for k, v in call["kwargs"].items() if k != "attn_mask"}
        tensors += [] if mask is None else [mask]
        assert check(seeded(partial(OURS, **rest)), tensors, **options)
        counts[name] += 1


def test_sdpa_gradcheck():
    options = {"check_batched_grad": True, "check_forward_ad": True}
    sdpa_gradients(torch.autograd.gradcheck, fast_mode=True, **options)


def test_sdpa_gradgradcheck():
    sdpa_gradients(torch.autograd.gradgradcheck, fast_mode=True)


@pytest.mark.slow
def test_sdpa_gradcheck_slow_mode():
    sdpa_gradients(torch.autograd.gradcheck, fast_mode=False)


@pytest.mark.slow
def test_sdpa_gradgradcheck_slow_mode():
    sdpa_gradients(torch.autograd.gradgradcheck, stride=6, fast_mode=False)


def test_sdpa_on_meta_and_fake_tensors():
    from torch._subclasses import FakeTensorMode

    for _, call in samples(SDPA_INFO, torch.float32, requires_grad=False):
        want = F.scaled_dot_product_attention(*call["args"], **call["kwargs"])
        given = (call["args"], call["kwargs"])
        args, kwargs = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: t.to("meta"), given
        )
        assert OURS(*args, **kwargs).shape == want.shape
        with FakeTensorMode() as mode:
            args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, given)
            out = OURS(*args, **kwargs)
        assert (out.shape, out.dtype) == (want.shape, want.dtype)
        counts["SDPA meta and fake tensors"] += 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_multi_head_attention_forward_overridden(dtype):
    """F.multi_head_attention_forward without weights, which calls SDPA, in override_sdpa."""
    for _, call in samples(MHA_INFO, dtype, requires_grad=False):
        args, kwargs = list(call["args"]), {**call["kwargs"], "need_weights": False}
        args[10] = 0.0  # dropout
        want, _ = F.multi_head_attention_forward(*args, **kwargs)
        with override_sdpa() as calls:
            got, _ = F.multi_head_attention_forward(*args, **kwargs)
        assert (calls.served, calls.fallbacks) == (1, {})
        compare([got], [want], dtype)
        counts[f"F.multi_head_attention_forward, overridden {dtype}"] += 1


# ------------------------------------------------------------- the modules


def module_samples(name, dtype, training, requires_grad=True):
    """(ours, torch's, positional and keyword arguments, the sample), with the same parameters."""
    info = INFOS[name]
    torch.manual_seed(3)
    found = info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=requires_grad, training=training
    )
    for sample in found:
        made = sample.constructor_input
        kwargs = dict(made.kwargs)
        if name != "TransformerEncoder":  # a container, which takes no dtype
            kwargs["dtype"] = dtype
        theirs = info.module_cls(*made.args, **kwargs).train(training)
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        if name == "TransformerEncoder":
            layer = copy.deepcopy(made.args[0])
            replace_modules(layer)
            ours = attnkit.nn.TransformerEncoder(layer, *made.args[1:], **kwargs)
        else:
            ours = getattr(attnkit.nn, name)(*made.args, **kwargs)
        ours.train(training)
        ours.load_state_dict(theirs.state_dict(), strict=True)
        attentions = [m for m in ours.modules() if isinstance(m, nn.MultiheadAttention)]
        assert attentions
        assert all(type(m) is attnkit.nn.MultiheadAttention for m in attentions)
        given = sample.forward_input
        yield SimpleNamespace(
            ours=ours, theirs=theirs, args=given.args, kwargs=given.kwargs, sample=sample
        )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", INFOS)
def test_module_as_torchs(name, dtype, training, monkeypatch):
    if dtype not in NEAR:
        monkeypatch.setattr(F, "scaled_dot_product_attention", naive)
    errors = Errors()
    for s in module_samples(name, dtype, training):
        got, want = (results(m, s.args, s.kwargs, m.parameters()) for m in (s.ours, s.theirs))
        if dtype not in NEAR:
            exact = copy.deepcopy(s.theirs).double()
            truth = results(exact, *doubled((s.args, s.kwargs)), exact.parameters())
            errors.add(got, want, truth)
            counts[f"{name} forward, backward {dtype}"] += 1
            continue
        compare(got, want, dtype)
        with torch.no_grad():
            out = s.ours(*s.args, **s.kwargs)
            compare([first(out)], [got[0].detach()], dtype)
            if isinstance(out, tuple):
                compare([out[1]], [s.theirs(*s.args, **s.kwargs)[1]], dtype)
            elif name != "Transformer":  # torch's decoder sees padding in another way without grad
                compare([out], [s.theirs(*s.args, **s.kwargs)], dtype)
        reference = s.sample.reference_fn
        if reference is not None:
            got = s.ours(*s.args, **s.kwargs)
            want = reference(s.ours, *s.args, **s.kwargs)
            torch.testing.assert_close(got, want, **NEAR[dtype])
            counts[f"{name} reference function"] += 1
        counts[f"{name} forward, backward {dtype}"] += 1
    if dtype not in NEAR:
        errors.check()


@pytest.mark.parametrize("name", INFOS)
def test_module_non_contiguous_pickled_copied(name):
    for s in module_samples(name, torch.float64, training=False, requires_grad=False):
        want = s.ours(*s.args, **s.kwargs)
        spread = torch.utils._pytree.tree_map_only(
            torch.Tensor,
            lambda t: t.repeat_interleave(2, -1)[..., ::2] if t.is_floating_point() else t,
            s.args,
        )
        torch.testing.assert_close(s.ours(*spread, **s.kwargs), want)
        for again in (copy.deepcopy(s.ours), pickle.loads(pickle.dumps(s.ours))):
            torch.testing.assert_close(again(*s.args, **s.kwargs), want)
        assert repr(s.ours) == repr(s.theirs)
        counts[f"{name} non-contiguous, copies, repr"] += 1


def module_gradients(name, check, stride, **options):
    label = f"{name} {check.__name__}{' slow mode' if not options['fast_mode'] else ''}"
    for training in (True, False):
        for s in list(module_samples(name, torch.float64, training))[::stride]:
            names, parameters = zip(*s.ours.named_parameters(), strict=True)
            inputs = [t.detach().requires_grad_() for t in s.args]
            parameters = [p.detach().clone().requires_grad_() for p in parameters]

            def call(*tensors, s=s, names=names):
                given = tensors[: len(s.args)]
                held = dict(zip(names, tensors[len(s.args) :], strict=True))
                out = torch.func.functional_call(s.ours, held, given, s.kwargs)
                return tuple(t for t in out if t is not None) if isinstance(out, tuple) else out

            assert check(call, (*inputs, *parameters), **options)
            counts[label] += 1


@pytest.mark.parametrize("name", INFOS)
def test_module_gradcheck(name):
    module_gradients(name, torch.autograd.gradcheck, 8, fast_mode=True)


@pytest.mark.parametrize("name", INFOS)
def test_module_gradgradcheck(name):
    module_gradients(name, torch.autograd.gradgradcheck, 32, fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", INFOS)
def test_module_gradcheck_of_every_sample(name):
    module_gradients(name, torch.autograd.gradcheck, 1, fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", INFOS)
def test_module_gradgradcheck_of_every_sample(name):
    module_gradients(name, torch.autograd.gradgradcheck, 1, fast_mode=True)

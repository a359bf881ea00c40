"""torch.compile, export, functorch, forward mode, higher derivatives, checkpoint: as in eager."""

from __future__ import annotations

import math

import pytest
import torch
import torch.autograd.forward_ad as fwad
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import attnkit
from attnkit import masks
from attnkit.backends import reference
from attnkit.spec import AttentionSpec, TensorArgs

SDPA = attnkit.scaled_dot_product_attention


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(*shapes, dtype=torch.float32):
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]


def plain(q, k, v, mask=None, scale=None):
    """The definition, for finite masks, in the dtype of its inputs."""
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    return s.softmax(-1) @ v


def grads(out, tensors):
    """Gradients of a fixed random projection of out."""
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype)
    return torch.autograd.grad(out, tensors, up, materialize_grads=True)


def operators(graphs):
    """Names of attnkit's operators in compiled graphs, nested ones included."""
    modules = [m for graph in graphs for m in graph.modules() if hasattr(m, "graph")]
    names = [str(node.target) for m in modules for node in m.graph.nodes]
    return [name for name in names if name.startswith("attnkit.")]


# ------------------------------------------------------------- torch.compile


CALLS = {
    "plain": lambda q, k, v, b: SDPA(q, k, v),
    "same tensor thrice": lambda q, k, v, b: SDPA(q, q, q) + b.sum(),
    "causal": lambda q, k, v, b: SDPA(q, k, v, is_causal=True),
    "bias": lambda q, k, v, b: SDPA(q, k, v, attn_mask=b),
    "bool mask": lambda q, k, v, b: SDPA(q, k, v, attn_mask=b > 0),
    "everything": lambda q, k, v, b: attnkit.attention(
        q, k[:, :1], v[:, :1], mask=masks.sliding_window(4, 0) & masks.from_dense(b), softcap=3.0,
        alibi=b[0, :2].detach(), sinks=b[1, :2], return_lse=True)[0],
    "lse": lambda q, k, v, b: attnkit.attention(q, k, v, bias=b, return_lse=True)[1],
    "3-d": lambda q, k, v, b: SDPA(q[0], k[0], v[0], attn_mask=b),
}  # fmt: skip


# the graph of the reference is large, and compiled in the same way for every call
COMPILED = [("cpu", name) for name in CALLS]
COMPILED += [("reference", name) for name in ("same tensor thrice", "everything")]


@pytest.mark.parametrize(("backend", "name"), COMPILED, indirect=["backend"])
def test_compiled_to_one_graph(backend, fresh_dynamo, name):
    f = CALLS[name]
    q, k, v, b = inputs((2, 2, 5, 8), (2, 2, 5, 8), (2, 2, 5, 6), (5, 5))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f, fullgraph=True, backend=counter)
    want = f(q, k, v, b)
    got = compiled(q, k, v, b)
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride()
    for x, y in zip(grads(got, (q, k, v, b)), grads(want, (q, k, v, b)), strict=True):
        torch.testing.assert_close(x, y)
    assert counter.frame_count == 1
    with torch.no_grad():
        torch.testing.assert_close(compiled(q, k, v, b), want)
    assert ("attnkit.cpu_forward.default" in operators(counter.graphs)) == (backend == "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu"], indirect=True)
def test_compiled_by_inductor(backend, fresh_dynamo):
    def f(q, k, v, b):
        x = torch.nn.functional.relu(q * 1.5)
        return SDPA(x, k, v, attn_mask=b).square().mean()

    given = inputs((2, 2, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8), (9, 9))
    compiled = torch.compile(f, fullgraph=True)
    got, want = compiled(*given), f(*given)
    torch.testing.assert_close(got, want)
    for x, y in zip(torch.autograd.grad(got, given), torch.autograd.grad(want, given), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("backend", ["cpu"], indirect=True)
def test_one_graph_serves_all_lengths(backend, fresh_dynamo):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v: SDPA(q, k, v, is_causal=True), fullgraph=True, dynamic=True, backend=counter
    )
    for batch, length in ((3, 5), (4, 9), (6, 33)):
        given = inputs(*[(batch, 2, length, 8)] * 3)
        got, want = compiled(*given), SDPA(*given, is_causal=True)
        torch.testing.assert_close(got, want)
        for x, y in zip(grads(got, given), grads(want, given), strict=True):
            torch.testing.assert_close(x, y)
    assert sum(len(graph.graph.nodes) > 0 for graph in counter.graphs) == 1


@pytest.mark.parametrize("backend", ["cpu"], indirect=True)
def test_compiled_with_numbers_that_change(backend, fresh_dynamo):
    def f(q, scale, left):
        return attnkit.attention(q, q, q, mask=masks.sliding_window(left, 0), scale=scale)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    (q,) = inputs((1, 2, 9, 8))
    for scale, left in ((0.3, 1), (0.4, 2), (0.5, 3)):
        got, want = compiled(q, scale, left), f(q, scale, left)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(grads(got, (q,)), grads(want, (q,)))


def test_compiled_dropout_draws_from_the_generator(backend, fresh_dynamo):
    compiled = torch.compile(
        lambda q, k, v: SDPA(q, k, v, dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    q, k, v = inputs(*[(1, 2, 30, 8)] * 3)
    v = torch.eye(30).expand(1, 2, 30, 30).clone().requires_grad_()
    torch.manual_seed(5)
    first = compiled(q, k, v)
    second = compiled(q, k, v)
    torch.manual_seed(5)
    assert torch.equal(compiled(q, k, v), first)
    assert not torch.equal(first, second)
    assert 0.4 < (first == 0).float().mean() < 0.6
    # backward drops what forward dropped: out is the weights, and dv their transpose times dout
    (dv,) = torch.autograd.grad(first, v, torch.eye(30).expand(1, 2, 30, 30))
    torch.testing.assert_close(dv, first.mT)


def test_compiled_function_follows_use_backend(fresh_dynamo):
    if "cpu" not in attnkit.available_backends():
        pytest.skip("there is one backend only")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(SDPA, fullgraph=True, backend=counter)
    q = torch.randn(1, 2, 5, 8)
    with attnkit.use_backend("reference"):
        compiled(q, q, q)
        assert operators(counter.graphs) == []
    with attnkit.use_backend("cpu"):
        compiled(q, q, q)
    assert operators(counter.graphs) == ["attnkit.cpu_forward.default"]

    compiled(q, q, q)  # outside: nothing is forced any more, which is a third graph
    assert counter.frame_count == 3
    assert operators(counter.graphs) == ["attnkit.cpu_forward.default"] * 2

    def inside(q):
        with attnkit.use_backend("reference"):
            return SDPA(q, q, q)

    counter = CompileCounterWithBackend("aot_eager")
    torch.testing.assert_close(
        torch.compile(inside, fullgraph=True, backend=counter)(q), SDPA(q, q, q)
    )
    assert operators(counter.graphs) == []


def test_compiled_varlen_decode_and_weights(backend, fresh_dynamo):
    def f(p, cu, q, cache, lengths):
        a = attnkit.varlen_attention(p, p, p, cu, cu, causal=True)
        b = attnkit.decode_attention(q, cache, cache, lengths)
        c = attnkit.attention_weights(q, cache, rows=[0], heads=torch.tensor([1]))
        return a, b, c

    given = (
        torch.randn(9, 2, 8),
        torch.tensor([0, 4, 9]),
        torch.randn(2, 2, 1, 8),
        torch.randn(2, 2, 12, 8),
        torch.tensor([3, 12], dtype=torch.int32),
    )
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(*given), f(*given), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("backend", "strict"),
    [("cpu", False), ("cpu", True), ("reference", False)],
    indirect=["backend"],
)
def test_export(backend, strict):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, keep):
            return SDPA(q, k, v, attn_mask=keep)

    def made(length):
        q, k, v = (torch.randn(2, 2, length, 8) for _ in range(3))
        return q, k, v, torch.rand(2, 1, 1, length) > 0.3

    length = torch.export.Dim("length", min=2, max=64)
    dims = {2: length}
    shapes = {"q": dims, "k": dims, "v": dims, "keep": {3: length}}
    program = torch.export.export(Layer(), made(7), dynamic_shapes=shapes, strict=strict)
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert ("attnkit.cpu_forward.default" in called) == (backend == "cpu")
    for n in (7, 12):
        given = made(n)
        torch.testing.assert_close(program.module()(*given), SDPA(*given[:3], given[3]))


def test_fake_tensors(backend):
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        q = mode.from_tensor(torch.randn(2, 3, 5, 8, dtype=torch.bfloat16).transpose(1, 2))
        out, lse = attnkit.attention(q, q, q, return_lse=True)
    assert (out.shape, out.dtype) == (q.shape, torch.bfloat16)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)


# ------------------------------------------------------------- functorch and forward mode


def test_vmap_is_the_loop(backend):
    q, k, v = torch.randn(3, 2, 2, 5, 8), torch.randn(3, 2, 2, 7, 8), torch.randn(3, 2, 2, 7, 6)
    bias, keep = torch.randn(3, 5, 7), torch.rand(2, 1, 1, 7) > 0.3
    torch.testing.assert_close(vmap(SDPA)(q, k, v), SDPA(q, k, v))
    torch.testing.assert_close(vmap(SDPA, (0, None, None))(q, k[0], v[0]), SDPA(q, k[:1], v[:1]))
    got = vmap(lambda q, k, v, b: SDPA(q, k, v, b))(q, k, v, bias)
    torch.testing.assert_close(got, SDPA(q, k, v, bias[:, None, None]))
    got = vmap(lambda q, k, v: SDPA(q, k, v, keep))(q, k, v)
    torch.testing.assert_close(got, SDPA(q, k, v, keep))
    got = vmap(lambda q, k, v: SDPA(q, k, v, is_causal=True))(q[:, 0], k[:, 0], v[:, 0])
    torch.testing.assert_close(got, SDPA(q[:, 0], k[:, 0], v[:, 0], is_causal=True))
    lengths = torch.tensor([[7, 2], [1, 3], [0, 5]])
    got = vmap(lambda q, k, v, n: attnkit.attention(q, k, v, mask=masks.padding(n)))(
        q, k, v, lengths
    )
    for i in range(3):
        want = attnkit.attention(q[i], k[i], v[i], mask=masks.padding(lengths[i]))
        torch.testing.assert_close(got[i], want)


def test_vmap_over_dropout_needs_a_randomness(backend):
    q = torch.randn(3, 2, 2, 5, 8)
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(lambda q: SDPA(q, q, q, dropout_p=0.5))(q)
    same = torch.randn(2, 2, 5, 8).expand(3, 2, 2, 5, 8)
    out = vmap(lambda q: SDPA(q, q, q, dropout_p=0.5), randomness="same")(same)
    assert torch.equal(out[0], out[1])
    out = vmap(lambda q: SDPA(q, q, q, dropout_p=0.5), randomness="different")(same)
    assert not torch.equal(out[0], out[1])


def test_functorch_gradients(backend):
    q, k, v, b = (
        torch.randn(s, dtype=torch.float64)
        for s in ((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 2), (3, 5))
    )

    def loss(f):
        return lambda *t: f(*t).square().sum()

    for argnum in range(4):
        args = (q, k, v, b)
        for transform in (grad, jacrev, jacfwd, hessian):
            got = transform(loss(SDPA), argnum)(*args)
            torch.testing.assert_close(got, transform(loss(plain), argnum)(*args))
    tangents = tuple(torch.randn_like(t) for t in (q, k, v, b))
    for got, want in zip(
        jvp(SDPA, (q, k, v, b), tangents), jvp(plain, (q, k, v, b), tangents), strict=True
    ):
        torch.testing.assert_close(got, want)
    out, pull = vjp(SDPA, q, k, v, b)
    for x, y in zip(pull(out), vjp(plain, q, k, v, b)[1](out), strict=True):
        torch.testing.assert_close(x, y)


def test_per_sample_gradients(backend):
    weight, x = torch.randn(8, 8), torch.randn(4, 1, 2, 5, 8)

    def loss(weight, x, f):
        return f(x @ weight, x, x).square().sum()

    got = vmap(grad(lambda w, x: loss(w, x, SDPA)), (None, 0))(weight, x)
    want = torch.stack([grad(loss)(weight, sample, plain) for sample in x])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_gradients_batched_by_vmap(backend):
    q, k, v = inputs((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 2), dtype=torch.float64)
    want = torch.autograd.functional.jacobian(plain, (q, k, v))
    for vectorize in (False, True):
        got = torch.autograd.functional.jacobian(SDPA, (q, k, v), vectorize=vectorize)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y)

    out = SDPA(q, k, v)
    basis = torch.eye(out.numel(), dtype=out.dtype).view(-1, *out.shape)
    got = vmap(lambda up: torch.autograd.grad(out, (q, k, v), up, retain_graph=True))(basis)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y.flatten(0, 3))

    def through_the_jacobian(f):
        jacobian = torch.autograd.functional.jacobian(
            f, (q, k, v), create_graph=True, vectorize=f is SDPA
        )
        return torch.autograd.grad(sum(j.square().sum() for j in jacobian), (q, k, v))

    for x, y in zip(through_the_jacobian(SDPA), through_the_jacobian(plain), strict=True):
        torch.testing.assert_close(x, y)


def test_forward_mode_has_the_right_tangent(backend):
    q, k, v = (torch.randn(1, 2, 5, 8, dtype=torch.float64) for _ in range(3))
    tangents = [torch.randn_like(t) for t in (q, k, v)]
    _, want = jvp(plain, (q, k, v), tuple(tangents))
    with fwad.dual_level():
        duals = [fwad.make_dual(t, d) for t, d in zip((q, k, v), tangents, strict=True)]
        out = fwad.unpack_dual(SDPA(*duals))
        half = fwad.unpack_dual(attnkit.attention(duals[0], k, v))
    torch.testing.assert_close(out.tangent, want)
    assert half.tangent.abs().max() > 0.01


def test_vmap_and_grad_inside_a_compiled_graph(backend, fresh_dynamo):
    q, k, v = (torch.randn(3, 2, 2, 5, 8) for _ in range(3))
    compiled = torch.compile(
        lambda q, k, v: vmap(SDPA)(q, k, v), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(q, k, v), SDPA(q, k, v))

    def f(q):
        return grad(lambda q: SDPA(q, k[0], v[0]).square().sum())(q)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q[0]), f(q[0]))


# ------------------------------------------------------------- higher derivatives


FULL = {
    "plain": (lambda q, k, v: SDPA(q, k, v), 3),
    "one tensor": (lambda q: SDPA(q, q, q), 1),
    "causal 3-d": (lambda q, k, v: SDPA(q[0], k[0], v[0], is_causal=True), 3),
    "bias": (lambda q, k, v, b: SDPA(q, k, v, b), 4),
    "bool mask": (lambda q, k, v: SDPA(q, k, v, torch.ones(3, 5, dtype=torch.bool).tril(1)), 3),
    "row bias": (lambda q, k, v, b: SDPA(q, k, v, b[:1]), 4),
    "everything": (
        lambda q, k, v, b, s: attnkit.attention(
            q, k[:, :1], v[:, :1], bias=b, sinks=s, softcap=2.0, alibi=torch.tensor([0.5, 0.1]),
            mask=masks.sliding_window(2, 1) & masks.padding(torch.tensor([4])), dropout_p=0.3,
            seed=7, return_lse=True), 5),
    "packed": (
        lambda q, k, v: attnkit.varlen_attention(
            *(t[0].transpose(0, 1) for t in (q, k, v)), torch.tensor([0, 1, 3]),
            torch.tensor([0, 3, 5]), causal=True), 3),
}  # fmt: skip


@pytest.mark.parametrize("name", FULL)
def test_first_and_second_derivatives(backend, ran, name):
    f, count = FULL[name]
    given = inputs((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 2), (3, 5), (2,), dtype=torch.float64)
    assert torch.autograd.gradcheck(f, given[:count], fast_mode=True)
    assert torch.autograd.gradgradcheck(f, given[:count], fast_mode=True)
    assert {f"{backend}.forward", f"{backend}.backward"} == set(ran)


def test_second_derivatives_tile_by_tile(backend, monkeypatch):
    """However the rows are cut, the sum over the tiles is the same."""
    q, k, v, b = inputs((2, 2, 9, 4), (2, 2, 5, 4), (2, 2, 5, 2), (9, 5), dtype=torch.float64)

    def penalty(f):
        out, lse = f()
        first = torch.autograd.grad(
            out.square().sum() + lse.square().sum(), (q, k, v, b), create_graph=True
        )
        return torch.autograd.grad(sum(g.square().sum() for g in first), (q, k, v, b))

    def attention():
        return attnkit.attention(q, k, v, bias=b, dropout_p=0.2, seed=1, return_lse=True)

    def definition():
        spec = AttentionSpec(0.5, dropout_p=0.2)
        return reference.attend(
            q, k, v, TensorArgs(b.expand(2, 2, 9, 5), seed=torch.tensor(1)), spec
        )

    truth = penalty(definition)
    for tile in (1, 2 * 2 * 5 * 4, 1 << 20):
        monkeypatch.setattr("attnkit._autograd._TILE", tile)
        for x, y in zip(penalty(attention), truth, strict=True):
            torch.testing.assert_close(x, y)


def test_second_derivatives_under_autocast_are_those_without(backend):
    q, k, v = inputs(*[(1, 2, 5, 8)] * 3)

    def second(autocast):
        out = SDPA(q, k, v).square().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            first = torch.autograd.grad(out, (q, k, v), create_graph=True)
            return torch.autograd.grad([g.sum() for g in first], (q, k, v))

    for x, y in zip(second(True), second(False), strict=True):
        assert torch.equal(x, y)


def test_third_derivatives(backend):
    q, k, v = inputs((1, 1, 3, 4), (1, 1, 4, 4), (1, 1, 4, 2), dtype=torch.float64)

    def third(f):
        y = f(q, k, v).square().sum()
        for _ in range(2):
            y = sum(g.square().sum() for g in torch.autograd.grad(y, (q, k, v), create_graph=True))
        return torch.autograd.grad(y, (q, k, v))

    for x, y in zip(third(SDPA), third(plain), strict=True):
        torch.testing.assert_close(x, y)


def test_gradient_penalty_in_low_precision(backend):
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))

    def penalty(f, dtype):
        t = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        first = torch.autograd.grad(f(*t).square().sum(), t, create_graph=True)
        return torch.autograd.grad(sum(g.double().square().sum() for g in first), t)

    for x, y in zip(penalty(SDPA, torch.bfloat16), penalty(plain, torch.float64), strict=True):
        assert x.dtype == torch.bfloat16
        torch.testing.assert_close(x.double(), y, rtol=0.05, atol=0.05 * float(y.abs().max()))


# ------------------------------------------------------------- the rest of autograd


def test_only_what_is_wanted_is_computed(backend, ran):
    for wanted in range(3):
        t = [torch.randn(1, 2, 5, 8, requires_grad=i == wanted) for i in range(3)]
        SDPA(*t).sum().backward()
        assert [x.grad is not None for x in t] == [i == wanted for i in range(3)]
    assert ran == [f"{backend}.forward", f"{backend}.backward"] * 3
    with torch.no_grad():
        assert not SDPA(*inputs(*[(1, 2, 5, 8)] * 3)).requires_grad
    with torch.inference_mode():
        SDPA(*(torch.randn(1, 2, 5, 8) for _ in range(3)))
    assert ran.count(f"{backend}.backward") == 3


def test_incoming_gradients_of_any_layout(backend):
    q, k, v = inputs(*[(2, 3, 5, 8)] * 3)
    out, want = SDPA(q, k, v), plain(q, k, v)
    for up in (
        torch.ones(()).expand(2, 3, 5, 8),
        torch.randn(2, 3, 8, 5).mT,
        torch.randn(2, 3, 5, 16)[..., ::2],
        torch.randn(2, 1, 1, 8).expand(2, 3, 5, 8),
    ):
        got = torch.autograd.grad(out, (q, k, v), up, retain_graph=True)
        truth = torch.autograd.grad(want, (q, k, v), up, retain_graph=True)
        for x, y in zip(got, truth, strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_replays_dropout(backend, reentrant):
    q, k, v = inputs(*[(1, 2, 20, 8)] * 3)

    def f(q, k, v):
        return SDPA(q, k, v, dropout_p=0.5)

    torch.manual_seed(4)
    want = grads(f(q, k, v), (q, k, v))
    torch.manual_seed(4)
    out = checkpoint(f, q, k, v, use_reentrant=reentrant)
    torch.rand(100)  # the generator moves on before backward
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    out.backward(up)
    for t, y in zip((q, k, v), want, strict=True):
        assert torch.equal(t.grad, y)


def test_backward_under_autocast_is_that_without(backend):
    q, k, v = inputs(*[(1, 2, 5, 8)] * 3)
    want = grads(SDPA(q, k, v), (q, k, v))
    out = SDPA(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = grads(out, (q, k, v))
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


def test_lse_alone_has_a_gradient(backend):
    q, k, v = inputs(*[(1, 2, 5, 8)] * 3)
    _, lse = attnkit.attention(q, k, v, return_lse=True)
    got = torch.autograd.grad(lse.sum(), (q, k, v))
    want = torch.autograd.grad((q @ k.mT / math.sqrt(8)).logsumexp(-1).sum(), (q, k))
    torch.testing.assert_close(got[:2], want)
    assert not got[2].any()


def test_tensors_left_over_from_a_transform(backend):
    """A wrapper that outlived its transform is the tensor it wraps."""
    kept = []
    q, k, v = inputs(*[(1, 2, 5, 8)] * 3)
    bias = torch.randn(5, 5, requires_grad=True)
    grad(lambda *t: (kept.extend(t), t[0].sum())[1])(q, k, v, bias)
    for options in ({}, {"attn_mask": kept[3]}):
        got = grads(SDPA(*kept[:3], **options), (q, k, v))
        want = grads(plain(q, k, v, bias if options else None), (q, k, v))
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y)

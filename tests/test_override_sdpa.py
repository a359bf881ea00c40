"""override_sdpa: models that call F.scaled_dot_product_attention run on attnkit, unchanged."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import attnkit
from attnkit.integrations.torch import Calls, override_sdpa

TORCH = torch._C._nn.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _torchs_own_afterwards():
    yield
    assert F.scaled_dot_product_attention is TORCH
    assert torch.backends.mha.get_fastpath_enabled()


def qkv(length=6, keys=None, **options):
    keys = length if keys is None else keys
    return [torch.randn(2, 2, n, 8, requires_grad=True, **options) for n in (length, keys, keys)]


def test_calls_reach_attnkit_and_gradients_come_back(ran):
    q, k, v = qkv()
    mask = torch.randn(6, 6, requires_grad=True)
    want = torch.autograd.grad(TORCH(q, k, v, mask).square().sum(), (q, k, v, mask))
    with override_sdpa() as calls:
        out = F.scaled_dot_product_attention(q, k, v, mask)
    got = torch.autograd.grad(out.square().sum(), (q, k, v, mask))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    assert len(ran) == 2
    assert calls == Calls(served=1)
    assert str(calls) == "1 served by attnkit"
    torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert len(ran) == 2


def test_every_argument_arrives():
    q, k, v = (torch.randn(1, h, 6, 8) for h in (4, 2, 2))
    given = [
        ((q, k, v), {"enable_gqa": True, "scale": 0.3}),
        ((q, k, v), {"enable_gqa": True, "is_causal": True}),
        ((q, q, q, None, 0.0, True), {}),
        ((q[0], q[0], q[0], torch.ones(6, 6, dtype=torch.bool).tril()), {}),
    ]
    for args, options in given:
        with override_sdpa() as calls:
            got = F.scaled_dot_product_attention(*args, **options)
        torch.testing.assert_close(got, TORCH(*args, **options))
        assert calls.served == 1
    with override_sdpa(), pytest.raises(TypeError):
        F.scaled_dot_product_attention(q, q, q, None, 0.0, False, 0.3)


def test_as_a_decorator_and_nested(ran):
    q, k, v = qkv()

    @override_sdpa()
    def f():
        with override_sdpa() as inner:
            F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v)
        return inner.served

    assert [f(), f()] == [1, 1]
    assert len(ran) == 4
    assert F.scaled_dot_product_attention is TORCH
    with pytest.raises(ZeroDivisionError), override_sdpa():
        raise ZeroDivisionError
    with override_sdpa() as outer, override_sdpa():
        F.scaled_dot_product_attention(q, k, v)
    assert outer.served == 1


def test_the_fast_way_stays_fast(monkeypatch):
    """A call in the block takes the same short way through the checks as outside."""
    q, k, v = (t.detach() for t in qkv())
    with override_sdpa():
        monkeypatch.setattr(attnkit._checks, "settle", None)
        F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_causal_bias(bias, ran):
    q, k, v = qkv(4, 7)
    want = TORCH(q, k, v, bias(4, 7)._materialize("cpu"))
    with override_sdpa() as calls:
        got = F.scaled_dot_product_attention(q, k, v, bias(4, 7))
        with pytest.raises(ValueError, match="CausalBias should not be used"):
            F.scaled_dot_product_attention(q, k, v, bias(4, 7), is_causal=True)
    torch.testing.assert_close(got, want)
    assert calls == Calls(served=1)
    assert len(ran) == 1


def test_what_attnkit_cannot_serve_goes_to_torch_with_one_reason(caplog, ran):
    q, k, v = qkv()
    mask = torch.ones(6, 6, dtype=torch.bool)
    nested = torch.nested.nested_tensor(
        [torch.randn(2, n, 8) for n in (3, 5)], layout=torch.strided
    )

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            assert func is TORCH
            return "its own"

    with override_sdpa() as calls, caplog.at_level(logging.WARNING):
        for _ in range(2):
            both = F.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
            F.scaled_dot_product_attention(nested, nested, nested)
            own = F.scaled_dot_product_attention(q.detach().as_subclass(Own), k, v)
    torch.testing.assert_close(both, TORCH(q, k, v, is_causal=True))
    assert own == "its own"
    assert ran == []
    assert list(calls.fallbacks.values()) == [2, 2, 2]
    assert calls.served == 0
    reasons = [record.getMessage() for record in caplog.records]
    assert len(reasons) == 3
    for reason, part in zip(reasons, ("together", "nested tensor", "query is a Own"), strict=True):
        assert reason.startswith("scaled_dot_product_attention is left to torch: ")
        assert part in reason
    assert str(calls).count("2 by torch") == 3


def test_complex_numbers_go_to_torch():
    q = torch.randn(1, 2, 4, 8, dtype=torch.complex64)
    with override_sdpa() as calls, pytest.raises((RuntimeError, NotImplementedError)):
        F.scaled_dot_product_attention(q, q, q)
    assert "complex64" in next(iter(calls.fallbacks))


def test_wrong_calls_raise():
    q, k, v = qkv()
    with override_sdpa() as calls, pytest.raises(RuntimeError, match="value has length 5"):
        F.scaled_dot_product_attention(q, k, v[:, :, :5])
    assert calls == Calls()


def test_context_parallel_is_refused():
    from torch.distributed.tensor.experimental._context_parallel import _attention

    q, k, v = qkv()

    def distribute():
        _attention._distribute_function(F.scaled_dot_product_attention, F, None, None, None)

    def restore():
        _attention._restore_function(F.scaled_dot_product_attention, F)

    distribute()
    try:
        with pytest.raises(RuntimeError, match="context_parallel"), override_sdpa():
            pass
    finally:
        restore()
    with override_sdpa():
        ours = F.scaled_dot_product_attention
        distribute()
        try:
            with pytest.raises(RuntimeError, match="context_parallel"):
                ours(q, k, v)
        finally:
            restore()
        assert F.scaled_dot_product_attention is ours


def test_under_a_torch_function_mode():
    q, k, v = (t.detach() for t in qkv())
    with torch.device("cpu"), override_sdpa() as calls:  # a mode, to torch
        got = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(got, TORCH(q, k, v))
    assert calls.served == 1


def test_compiled_inside_and_outside():
    q, k, v = (t.detach() for t in qkv())
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2,
        fullgraph=True,
        backend="aot_eager",
    )
    want = TORCH(q, k, v, is_causal=True) * 2
    torch.testing.assert_close(compiled(q, k, v), want)
    with override_sdpa():
        torch.testing.assert_close(compiled(q, k, v), want)
    torch.testing.assert_close(compiled(q, k, v), want)
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    with override_sdpa():
        fresh = torch.compile(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v), backend=backend, fullgraph=True
        )
        torch.testing.assert_close(fresh(q, k, v), TORCH(q, k, v))
    names = [str(node.target) for node in graphs[0].graph.nodes]
    assert ("attnkit.cpu_forward.default" in names) == (attnkit.available_backends()[0] == "cpu")
    torch._dynamo.reset()


# ------------------------------------------------------------- whole models


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_torchs_transformer(training, grad, ran):
    torch.manual_seed(1)
    model = torch.nn.Transformer(16, 4, 2, 2, 32, dropout=0.0, batch_first=True).train(training)
    src, tgt = torch.randn(2, 7, 16, requires_grad=True), torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 7, [False] * 5 + [True] * 2])
    causal = torch.nn.Transformer.generate_square_subsequent_mask(5)

    def passed():
        out = model(
            src, tgt, tgt_mask=causal, src_key_padding_mask=padding,
            memory_key_padding_mask=padding, tgt_is_causal=True,
        )  # fmt: skip
        if not grad:
            return [out]
        return [out, *torch.autograd.grad(out.square().sum(), [src, *model.parameters()])]

    with torch.set_grad_enabled(grad):
        want = passed()
        assert ran == []
        with override_sdpa() as calls:
            got = passed()
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    assert calls == Calls(served=6)
    assert len(ran) == (12 if grad else 6)


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "falcon"])
def test_hugging_face_models_with_sdpa(name, ran):
    transformers = pytest.importorskip(
        "transformers", reason="pip install 'attnkit[hf]'", exc_type=ImportError
    )
    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(
        name, vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, pad_token_id=0, d_model=32, d_ff=48, d_kv=8, num_layers=2,
        num_heads=4, new_decoder_architecture=False,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.AutoModel.from_config(config, attn_implementation="sdpa").eval()
    given = {"input_ids": torch.randint(1, 50, (2, 7)), "attention_mask": torch.ones(2, 7).long()}
    given["attention_mask"][0, :2] = 0
    if name == "t5":
        given["decoder_input_ids"] = given["input_ids"][:, :4]

    def passed():
        out = model(**given, use_cache=False).last_hidden_state
        if name != "t5":
            out = out[given["attention_mask"].bool()]
        parameters = [p for p in model.parameters() if p.requires_grad]
        return [out, *torch.autograd.grad(out.square().mean(), parameters, allow_unused=True)]

    want = passed()
    assert ran == []
    with override_sdpa() as calls:
        got = passed()
    for x, y in zip(got, want, strict=True):
        if y is not None:
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    attentions = 6 if name == "t5" else 2
    assert calls == Calls(served=attentions)
    assert ran == [n for kind in ("forward", "backward") for n in [f"cpu.{kind}"] * attentions] or (
        attnkit.available_backends()[0] != "cpu"
    )
